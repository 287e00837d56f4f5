#include <cstdlib>
#include <cstring>

#include "isa.hpp"
#include "snack/core/cpu_info.hpp"
#include "snack/core/error.hpp"

namespace snack::cpu {
namespace {

const Isa& choose() {
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512cd");
  SNACK_CHECK(__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes"),
              "snack: this processor has no SSE4.2 and AES instructions, which the oldest compiled kernels need.");
  const char* limit = std::getenv("SNACK_ISA");
  const auto limited_to = [&](const char* isa) { return limit != nullptr && std::strcmp(limit, isa) == 0; };
  if (!has_avx2 || limited_to("base")) return kIsaBase;
  if (!has_avx512 || limited_to("avx2")) return kIsaAvx2;
  return kIsaAvx512;
}

}  // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

const char* isa_name() { return isa().name; }

}  // namespace snack::cpu
