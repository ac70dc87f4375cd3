# Where the system has no nvcc: the one of the Python packages nvidia-cuda-nvcc, -nvvm, -crt, -cccl and
# -runtime, if they are installed for the Python that is found (PATH, or Python3_ROOT_DIR).
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND Python3_Interpreter_FOUND)
  find_program(system_nvcc nvcc PATHS /usr/local/cuda/bin NO_CACHE)
  if(NOT system_nvcc)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import site, sys; print(';'.join(site.getsitepackages()))"
      OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(TRANSFORM packages APPEND "/nvidia/cu*/bin/nvcc")
    file(GLOB found ${packages})
    if(found)
      list(GET found -1 CMAKE_CUDA_COMPILER)  # the newest
      message(STATUS "nvcc of the Python packages: ${CMAKE_CUDA_COMPILER}")
    endif()
  endif()
endif()
