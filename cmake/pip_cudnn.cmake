# The engine cudnn is built where the headers of cudnn-frontend and of cuDNN are: on the compiler's path, of
# the Python packages nvidia-cudnn-frontend and nvidia-cudnn-cu13, if they are installed for the Python
# that is found, or in the folders of TE_ATTENTION_CUDNN_HEADERS. Nothing of cuDNN is linked.
set(TE_ATTENTION_CUDNN_HEADERS "" CACHE STRING "Folders of cudnn_frontend.h and cudnn.h")
set(packages "")
if(Python3_Interpreter_FOUND)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import site, sys; print(';'.join([*site.getsitepackages(), sys.prefix]))"
    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
set(places ${TE_ATTENTION_CUDNN_HEADERS})
foreach(package ${packages})
  list(APPEND places ${package}/include ${package}/nvidia/cudnn/include)
endforeach()
find_path(TE_ATTENTION_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${places})
find_path(TE_ATTENTION_CUDNN_INCLUDE cudnn_graph.h HINTS ${places})
set(TE_ATTENTION_CUDNN OFF)
if(TE_ATTENTION_CUDNN_FRONTEND_INCLUDE AND TE_ATTENTION_CUDNN_INCLUDE)
  set(TE_ATTENTION_CUDNN ON)
  message(STATUS "Engine cudnn: with ${TE_ATTENTION_CUDNN_FRONTEND_INCLUDE}, ${TE_ATTENTION_CUDNN_INCLUDE}")
else()
  message(STATUS "Engine cudnn: not built, no headers (pip install nvidia-cudnn-frontend nvidia-cudnn-cu13)")
endif()
