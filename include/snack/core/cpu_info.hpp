// What the CPU backend chose to run on.
#pragma once

namespace snack::cpu {

/// "base" (x86-64 with SSE4.2), "avx2" or "avx512".
const char* isa_name();

}  // namespace snack::cpu
