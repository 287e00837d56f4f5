# Warnings for our own targets, and the sanitizers of the cpu-debug preset.
function(snack_set_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-missing-field-initializers
    $<$<BOOL:${SNACK_WERROR}>:-Werror> -fvisibility=hidden -fvisibility-inlines-hidden)
  if(SNACK_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()

function(snack_set_cuda_options target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_compile_definitions(${target} PRIVATE "SNACK_CUDA_ARCHITECTURES=\"${SNACK_CUDA_TITLES}\"")
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-fvisibility=hidden;--Werror=all-warnings>")
endfunction()
