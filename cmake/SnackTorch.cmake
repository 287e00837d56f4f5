# Headers and libraries of the installed PyTorch, asked from the interpreter. find_package(Torch) is avoided: with a CUDA
# torch it drags in its own CUDA settings, and the stable ABI needs none of them.
find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import torch, pathlib; print(pathlib.Path(torch.__path__[0]).as_posix())"
  OUTPUT_VARIABLE SNACK_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_VARIABLE why)
if(failed)
  message(FATAL_ERROR "PyTorch was not found by ${Python_EXECUTABLE}. Install it (pip install 'torch>=2.11') and build with "
                      "--no-build-isolation, or configure with -DSNACK_TORCH=OFF.\n${why}")
endif()

add_library(snack_torch INTERFACE)
target_include_directories(snack_torch SYSTEM INTERFACE "${SNACK_TORCH_ROOT}/include")
target_link_directories(snack_torch INTERFACE "${SNACK_TORCH_ROOT}/lib")
target_link_libraries(snack_torch INTERFACE torch torch_cpu)
# Built against any later headers, the library runs with every PyTorch from 2.11 on.
target_compile_definitions(snack_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_link_options(snack_torch INTERFACE -Wl,--no-as-needed)
