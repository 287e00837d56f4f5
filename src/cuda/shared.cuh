// Shared memory by address. In the loops that decide, addresses are plain numbers: from a pointer the compiler makes the address
// anew for every access, and asks a special register for the window's place.
#pragma once

#include <cstdint>

namespace snack::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

template <class X>
__device__ __forceinline__ X read_shared(uint32_t address) {
  X x;
  if constexpr (sizeof(X) == 16) asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  else if constexpr (sizeof(X) == 8) asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  else if constexpr (sizeof(X) == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
  else asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}

/// Four floats, only where `is_new`: without a branch, into the registers that hold the old numbers.
__device__ __forceinline__ void read_shared_if(bool is_new, uint32_t address, float* of) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p ld.shared.v4.f32 {%0, %1, %2, %3}, [%5];\n}\n"
               : "+f"(of[0]), "+f"(of[1]), "+f"(of[2]), "+f"(of[3])
               : "r"(uint32_t(is_new)), "r"(address));
}

/// W floats: 1, 2 or 4.
template <int W>
__device__ __forceinline__ void read_shared(uint32_t address, float (&x)[W]) {
  if constexpr (W == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(address));
  else if constexpr (W == 2) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address));
  else asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address));
}
template <int W>
__device__ __forceinline__ void write_shared(uint32_t address, const float (&x)[W]) {
  if constexpr (W == 1) asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x[0]));
  else if constexpr (W == 2) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x[0]), "f"(x[1]));
  else asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
}

__device__ __forceinline__ void write_shared(uint32_t address, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x)); }
__device__ __forceinline__ void write_shared(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y));
}
__device__ __forceinline__ void or_shared(uint32_t address, uint32_t bits) { asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits)); }

}  // namespace snack::cuda
