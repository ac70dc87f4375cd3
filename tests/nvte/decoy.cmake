# Writes DECOY: a C file that defines each function that LIBRARY exports and only counts its calls.
execute_process(COMMAND ${NM} -D --defined-only ${LIBRARY} OUTPUT_VARIABLE table
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " T [A-Za-z0-9_]+" exports "${table}")
set(source "int decoy_calls;\n")
foreach(export ${exports})
  string(SUBSTRING ${export} 3 -1 name)
  string(APPEND source "void ${name}(void);\nvoid ${name}(void) { ++decoy_calls; }\n")
endforeach()
file(WRITE ${DECOY} "${source}")
