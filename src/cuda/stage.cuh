// Windows of an operand in shared memory, and the tile pointers of the cell a block works on.
#pragma once

#include "element.cuh"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {

/// A window of `extent` features x W batch columns as floats, in planes of at most 16 bytes a feature, so that one vector load of a
/// feature touches one group of banks. Feature f, columns of plane p: window + (p * extent + f) * kPlane.
template <int W>
struct Window {
  static constexpr int kPlane = W < 4 ? W : 4;
  static constexpr int kPlanes = W / kPlane;

  __device__ static __forceinline__ void read(const float* window, int extent, int feature, float (&out)[W]) {
    if constexpr (W == 1) {
      out[0] = window[feature];
    } else {
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        const float4 v = *reinterpret_cast<const float4*>(window + (p * extent + feature) * kPlane);
        out[4 * p] = v.x, out[4 * p + 1] = v.y, out[4 * p + 2] = v.z, out[4 * p + 3] = v.w;
      }
    }
  }

  /// All threads: features [first, first + extent) of batch columns [b0, b0 + count); zero beyond `features` and `count`.
  template <class T>
  __device__ static void stage(float* window, int extent, const Strided<T>& x, int64_t first, int64_t features, int64_t b0, int64_t count) {
#pragma unroll 1  // W loads in flight are enough, and more cost registers
    for (int f = threadIdx.x; f < extent; f += blockDim.x)
#pragma unroll
      for (int b = 0; b < W; ++b)
        window[((b / kPlane) * extent + f) * kPlane + b % kPlane] = first + f < features && b < count ? x(b0 + b, first + f) : 0.f;
  }
};

/// Offsets of strips [s0, s0 + strips] of a panel from its first slot there; returns that slot. All threads; ends without a barrier.
__device__ __forceinline__ int64_t stage_pointers(int* offsets, const int64_t* tile_ptr, int strips) {
  const int64_t first = *tile_ptr;
  for (int i = threadIdx.x; i <= strips; i += blockDim.x) offsets[i] = int(tile_ptr[i] - first);
  return first;
}

}  // namespace snack::cuda
