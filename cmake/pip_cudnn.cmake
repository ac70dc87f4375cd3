# The engine cudnn is built where the headers of cudnn-frontend and of cuDNN are: in the folders of
# TE_ATTENTION_CUDNN_HEADERS, of the Python packages nvidia-cudnn-frontend and nvidia-cudnn-cu13 if they
# are installed for the Python that is found or for that of the tests, or where the compiler looks.
# Nothing of cuDNN is linked.
set(TE_ATTENTION_CUDNN_HEADERS "" CACHE STRING "Folders of cudnn_frontend.h and cudnn.h")
execute_process(COMMAND ${PROJECT_SOURCE_DIR}/tools/python_env --path OUTPUT_VARIABLE test_python
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(packages "")
foreach(python ${Python3_EXECUTABLE} ${test_python})
  if(EXISTS ${python})
    execute_process(COMMAND ${python} -c "import site, sys; print(';'.join([*site.getsitepackages(), sys.prefix]))"
                    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND packages ${found})
  endif()
endforeach()
set(places ${TE_ATTENTION_CUDNN_HEADERS})
foreach(package ${packages})
  list(APPEND places ${package}/include ${package}/nvidia/cudnn/include)
endforeach()
foreach(found TE_ATTENTION_CUDNN_FRONTEND_INCLUDE TE_ATTENTION_CUDNN_INCLUDE)
  if(NOT EXISTS "${${found}}")  # an environment of before
    unset(${found} CACHE)
  endif()
endforeach()
find_path(TE_ATTENTION_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${places})
find_path(TE_ATTENTION_CUDNN_INCLUDE cudnn_graph.h HINTS ${places})
option(TE_ATTENTION_CUDNN_ENGINE "Build the engine cudnn where its headers are" ON)
set(TE_ATTENTION_CUDNN OFF)
set(frontend 0)
if(TE_ATTENTION_CUDNN_FRONTEND_INCLUDE)
  file(STRINGS ${TE_ATTENTION_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h lines REGEX "M[AI][JN]OR_VERSION [0-9]")
  string(REGEX MATCHALL "VERSION [0-9]+" lines "${lines}")
  string(REGEX REPLACE "VERSION ([0-9]+);VERSION ([0-9]+)" "\\1.\\2" frontend "${lines}")
endif()
if(NOT TE_ATTENTION_CUDNN_ENGINE)
  message(STATUS "Engine cudnn: switched off")
elseif(frontend VERSION_LESS 1.32 OR NOT TE_ATTENTION_CUDNN_INCLUDE)
  message(STATUS "Engine cudnn: not built, needs headers of cudnn-frontend 1.32 or later (found ${frontend}) and cuDNN "
                 "(pip install nvidia-cudnn-frontend nvidia-cudnn-cu13)")
else()
  set(TE_ATTENTION_CUDNN ON)
  message(STATUS "Engine cudnn: with cudnn-frontend ${frontend}, ${TE_ATTENTION_CUDNN_INCLUDE}")
endif()
