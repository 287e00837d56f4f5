// A packed pattern on the device, either packing, and searches in sorted arrays.
#pragma once

#include "launch.hpp"
#include "snack/formats/pattern.hpp"

namespace snack::cuda {

__device__ __forceinline__ int64_t thread_number() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

/// Entries of an ascending list that are below `wanted`.
template <class T>
__device__ __forceinline__ int64_t lower_bound(const T* sorted, int64_t count, T wanted) {
  int64_t begin = 0;
  while (begin < count) {
    const int64_t middle = (begin + count) / 2;
    if (sorted[middle] < wanted) begin = middle + 1;
    else count = middle;
  }
  return begin;
}

/// A packed pattern on the device, either packing.
struct DevicePattern {
  Geometry geometry;
  const void* index;
  const int64_t* tile_ptr;

  __device__ int bits() const { return row_bits(geometry.packing); }
  __device__ uint32_t word(int64_t slot) const {
    return geometry.packing == Packing::kNarrow ? static_cast<const uint16_t*>(index)[slot] : static_cast<const uint32_t*>(index)[slot];
  }
  __device__ int64_t tile_of(int64_t row, int64_t panel) const { return panel * geometry.strips() + (row >> bits()); }
  __device__ static uint32_t pack(int64_t row, int64_t col, int bits) {
    return (uint32_t(row & ((int64_t{1} << bits) - 1)) << kTileColBits) | uint32_t(col & (kTileCols - 1));
  }
  /// The position behind a word of a tile.
  __device__ SlotKey key_of(int64_t tile, uint32_t word) const {
    return (SlotKey(tile / geometry.strips()) << 41) | ((SlotKey(tile % geometry.strips()) << (bits() + kTileColBits)) + word);
  }
  /// First slot whose position is not before (row, col), and whether it is that position.
  __device__ int64_t lower_bound(int64_t row, int64_t col, bool* found) const {
    const int64_t tile = tile_of(row, col >> kTileColBits);
    const uint32_t wanted = pack(row, col, bits());
    int64_t begin = tile_ptr[tile], end = tile_ptr[tile + 1];
    const int64_t stop = end;
    while (begin < end) {
      const int64_t middle = (begin + end) / 2;
      if (word(middle) < wanted) begin = middle + 1;
      else end = middle;
    }
    *found = begin < stop && word(begin) == wanted;
    return begin;
  }
};

}  // namespace snack::cuda
