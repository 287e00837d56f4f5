# Warnings for our own targets, and the sanitizers of the cpu-debug preset.
function(snack_set_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-missing-field-initializers -Werror -fvisibility=hidden -fvisibility-inlines-hidden)
  if(SNACK_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()
