# Which of our architectures an nvcc can compile the kernels for: tried with the source itself, because an nvcc may be
# too old for one, or for the host's compiler. enable_language(CUDA) would end the whole build with the first that fails.
#
# By itself: cmake -DNVCC=/path/to/nvcc -P csrc/cuda_architectures.cmake

# The architectures in `result`, the newest with PTX for those that come after it; empty when none can be compiled.
function(usable_cuda_architectures nvcc result)
  set(usable "")
  foreach(architecture 80 90 100)
    execute_process(
      COMMAND ${nvcc} -std=c++17 -gencode=arch=compute_${architecture},code=sm_${architecture}
              -c ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/layer_signal.cu -o /dev/null
      RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120)
    if(status EQUAL 0)
      list(APPEND usable ${architecture}-real)
    else()
      message(STATUS "${nvcc} does not compile the kernels for sm_${architecture}: ${output}")
    endif()
  endforeach()
  if(usable)
    list(TRANSFORM usable REPLACE "-real$" "" AT -1)
  endif()
  set(${result} "${usable}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  usable_cuda_architectures("${NVCC}" found)
  message("architectures: ${found}")
endif()
