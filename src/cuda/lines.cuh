// Lines: the numbers of a chunk of the batch for one feature, side by side, so that lanes read vectors of the batch.
#pragma once

#include "element.cuh"
#include "plan/cuda_layout.hpp"
#include "shared.cuh"

namespace snack::cuda {

/// A chunk of the batch: kLanes * kPieces * 16 bytes a line, kPieces times 16 bytes a lane.
template <class T, int kLanes, int kPieces = 1>
struct Lines {
  static constexpr int kVector = 16 / int(sizeof(T)), kCols = kLanes * kPieces * kVector, kBytes = kLanes * kPieces * 16;
  static constexpr int64_t kPanelBytes = panel_bytes(kBytes);
};

/// Two 16-bit elements of one word as floats.
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(__halves2half2(__ushort_as_half(uint16_t(pair)), __ushort_as_half(uint16_t(pair >> 16))));
  else return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// The numbers of 16 bytes.
template <class T>
__device__ __forceinline__ void unpack(const uint4& x, float (&of)[16 / sizeof(T)]) {
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      of[i] = __uint_as_float(word[i]);
    } else {
      const float2 two = unpack_pair<T>(word[i]);
      of[2 * i] = two.x, of[2 * i + 1] = two.y;
    }
  }
}

/// sum += value * the vector x.
template <class T>
__device__ __forceinline__ void add_product(float* sum, float value, const uint4& x) {
  float of[16 / sizeof(T)];
  unpack<T>(x, of);
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(T)); ++i) sum[i] = fmaf(value, of[i], sum[i]);
}

/// Lines of a dense operand in shared memory, straight from the operand. The vectors of a line are swapped by its number, so that
/// writing one vector of eight neighbouring lines touches every bank once; reading a whole line does anyhow.
template <class T, int kLanes>
struct StagedLines {
  using L = Lines<T, kLanes>;

  /// Where a line begins, in vectors, with its swap in the lowest bits: vector v lies at (place ^ v) * 16.
  __device__ static __forceinline__ uint32_t place(uint32_t line) { return line * kLanes | (line * kLanes / 8 & (kLanes - 1)); }

  /// All threads of the block: lines [0, count), count a multiple of 64, are features [first, first + count) for batch rows
  /// [b0, b0 + kCols); what lies beyond `features` or `batch` is zero. Ends without a barrier. From: T, or 16-bit where T is float.
  template <class From>
  __device__ static __forceinline__ void stage(char* to, const Strided<From>& m, int64_t first, int count, int64_t features, int64_t b0, int64_t batch) {
    const int present = int(min(int64_t(L::kCols), batch - b0)), existing = int(min(int64_t(count), features - first));
    const From* from = m.data + b0 * m.row_stride + first * m.col_stride;
#pragma unroll 4
    for (int i = threadIdx.x; i < count * kLanes; i += blockDim.x) {
      const int line = i / (64 * kLanes) * 64 + i % 64, vector = i / 64 % kLanes;
      const From* at = from + line * m.col_stride + vector * L::kVector * m.row_stride;
      uint32_t word[4] = {};
#pragma unroll
      for (int j = 0; j < L::kVector; ++j) {
        const int byte = j * int(sizeof(T));
        const bool exists = line < existing && vector * L::kVector + j < present;
        uint32_t bits = 0;
        if constexpr (sizeof(T) == sizeof(From)) bits = exists ? bits_of(at[j * m.row_stride]) : 0u;
        else bits = exists ? bits_of(to_float(at[j * m.row_stride])) : 0u;
        word[byte / 4] |= bits << (8 * (byte % 4));
      }
      reinterpret_cast<uint4*>(to)[place(line) ^ vector] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

}  // namespace snack::cuda
