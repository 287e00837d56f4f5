// Element types on the device, and how strided operands and runs of eight slots are read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "launch.hpp"
#include "snack/core/error.hpp"
#include "snack/core/types.hpp"

namespace snack::cuda {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (sizeof(T) == 4) return v;
  else return T(v);  // rounds to nearest even
}

template <class T>
struct ElementOf;
template <>
struct ElementOf<float> {
  static constexpr DType dtype = DType::kFloat32;
};
template <>
struct ElementOf<__half> {
  static constexpr DType dtype = DType::kFloat16;
};
template <>
struct ElementOf<__nv_bfloat16> {
  static constexpr DType dtype = DType::kBFloat16;
};

/// Calls f with a value of the device type of `dtype`.
template <class F>
void with_device_type(const char* operation, DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(float{});
    case DType::kFloat16: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    case DType::kFloat64: break;
  }
  fail(operation, ": float64 has no CUDA kernel; use float32, float16 or bfloat16, or the CPU.");
}

/// A dense operand with any strides, in elements.
template <class T>
struct Strided {
  const T* data;
  int64_t row_stride, col_stride;

  Strided() = default;
  explicit Strided(const MatrixView& m) : data(static_cast<const T*>(m.data)), row_stride(m.row_stride), col_stride(m.col_stride) {}
  __device__ __forceinline__ float operator()(int64_t row, int64_t col) const {
    return to_float(data[row * row_stride + col * col_stride]);
  }
};

// The bits of an element, and back.
__device__ __forceinline__ uint32_t bits_of(uint16_t v) { return v; }
__device__ __forceinline__ uint32_t bits_of(float v) { return __float_as_uint(v); }
__device__ __forceinline__ uint32_t bits_of(__half v) { return __half_as_ushort(v); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }
template <class T>
__device__ __forceinline__ T from_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(bits);
  else if constexpr (std::is_same_v<T, __half>) return __ushort_as_half(uint16_t(bits));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __ushort_as_bfloat16(uint16_t(bits));
  else return T(bits);
}

/// Eight consecutive elements in registers.
template <class T>
struct Eight {
  static constexpr int kAWord = 4 / int(sizeof(T));  // elements a word
  uint32_t word[8 / kAWord];

  /// Elements from `limit` on do not exist and are not read. `aligned`: p lies on 16 bytes.
  __device__ __forceinline__ void load(const T* p, int limit, bool aligned) {
    if (aligned && limit >= 8) {
#pragma unroll
      for (int i = 0; i < 8 / kAWord; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(p)[i / 4];
        word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = i < limit ? bits_of(p[i]) : 0u;
      if (i % kAWord == 0) word[i / kAWord] = bits;
      else word[i / kAWord] |= bits << 16;
    }
  }
  __device__ __forceinline__ T operator[](int i) const { return from_bits<T>(kAWord == 1 ? word[i] : (word[i / 2] >> (16 * (i % 2))) & 0xffffu); }
};

inline bool is_aligned_16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace snack::cuda
