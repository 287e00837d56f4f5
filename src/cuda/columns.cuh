// Columns of a dense operand in shared memory, as products of batch W read them: [column][W] in the operand's own type, so that
// one vector load brings the W numbers of a column.
#pragma once

#include <cuda_pipeline.h>

#include "lines.cuh"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {

template <class T, int W>
struct Columns {
  static constexpr int kLogBytes = log2_column(sizeof(T), W);  // of a column
  static constexpr uint32_t kPanelBytes = uint32_t(kPanelCols) << kLogBytes;
  static constexpr int kWords = sizeof(T) * W / 4;
  static constexpr int kStored = kWords > 0 ? kWords : 1;

  /// The W numbers at `address` of shared memory.
  __device__ static __forceinline__ void read(uint32_t address, float (&x)[W]) {
    if constexpr (sizeof(T) * W == 2) {
      x[0] = to_float(from_bits<T>(read_shared<uint16_t>(address)));
    } else {
      uint32_t word[kWords];
      if constexpr (kWords == 1) {
        word[0] = read_shared<uint32_t>(address);
      } else if constexpr (kWords == 2) {
        const uint2 two = read_shared<uint2>(address);
        word[0] = two.x, word[1] = two.y;
      } else {
        const uint4 four = read_shared<uint4>(address);
        word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (sizeof(T) == 4) x[i] = __uint_as_float(word[i]);
        else {
          const float2 two = unpack_pair<T>(word[i]);
          x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
      }
    }
  }

  /// All threads: columns [first, first + count) of batch rows [b0, b0 + present); rows that are not present are zero. The copy
  /// may still be under way: arrived() and a barrier end it. kInFlight: loads that a thread may have under way.
  template <int kInFlight = 32>
  __device__ static __forceinline__ void stage(unsigned char* to, const Strided<T>& x, int64_t first, int count, int64_t b0, int present) {
    const T* from = x.data + b0 * x.row_stride + first * x.col_stride;
    constexpr int kAtOnce = 16 / sizeof(T), kAWord = 4 / sizeof(T);
    int done = 0;  // columns that are loaded as words
    if (W == 1 && present > 0 && x.col_stride == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      done = count / kAtOnce * kAtOnce;
      for (int i = threadIdx.x * kAtOnce; i < done; i += blockDim.x * kAtOnce)
        __pipeline_memcpy_async(reinterpret_cast<T*>(to) + i, from + i, 16);
      __pipeline_commit();
    } else if (W > 1 && x.col_stride == 1 && reinterpret_cast<uintptr_t>(from) % 4 == 0 && x.row_stride % kAWord == 0) {
      done = count / kAWord * kAWord;
      stage_words<kInFlight>(to, from, x.row_stride, count / kAWord, present);
    }
    for (int i = done + threadIdx.x; i < count; i += blockDim.x) stage_column(to, from, x, i, present);
  }

  __device__ static __forceinline__ void arrived() {
    if constexpr (W == 1) __pipeline_wait_prior(0);
  }

 private:
  __device__ static __forceinline__ void stage_column(unsigned char* to, const T* from, const Strided<T>& x, int column, int present) {
    union {
      T element[W];
      uint32_t word[kStored];
    } all;
#pragma unroll
    for (int b = 0; b < W; ++b) all.element[b] = b < present ? from[b * x.row_stride + column * x.col_stride] : from_float<T>(0.f);
    if constexpr (kWords == 0) reinterpret_cast<T*>(to)[column] = all.element[0];
    else store(to, column, all.word);
  }

  __device__ static __forceinline__ void store(unsigned char* to, int column, const uint32_t (&word)[kStored]) {
    unsigned char* at = to + (size_t(column) << kLogBytes);
    if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(at) = word[0];
    else if constexpr (kWords == 2) *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
    else if constexpr (kWords == 4) *reinterpret_cast<uint4*>(at) = make_uint4(word[0], word[1], word[2], word[3]);
  }

  // A word of every batch row at a time: one column, or two of a 16-bit type.
  template <int kInFlight>
  __device__ static __forceinline__ void stage_words(unsigned char* to, const T* from, int64_t row_stride, int words, int present) {
    constexpr int kAhead = kInFlight / W;
    for (int i0 = threadIdx.x; i0 < words; i0 += blockDim.x * kAhead) {
      uint32_t word[kAhead][W];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
#pragma unroll
        for (int b = 0; b < W; ++b) {
          const int i = i0 + u * blockDim.x;
          word[u][b] = i < words && b < present ? reinterpret_cast<const uint32_t*>(from + b * row_stride)[i] : 0u;
        }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int i = i0 + u * blockDim.x;
        if (i >= words) break;
        if constexpr (sizeof(T) == 4) {
          store(to, i, word[u]);
        } else {
          uint32_t low[kStored], high[kStored];
#pragma unroll
          for (int q = 0; q < kWords; ++q)
            low[q] = __byte_perm(word[u][2 * q], word[u][2 * q + 1], 0x5410), high[q] = __byte_perm(word[u][2 * q], word[u][2 * q + 1], 0x7632);
          store(to, 2 * i, low), store(to, 2 * i + 1, high);
        }
      }
    }
  }
};

}  // namespace snack::cuda
