// One thread a slot: how the kernels that look at slots one by one find their rows and columns.
#pragma once

#include <cstdint>

#include "plan/cuda_layout.hpp"

namespace snack::cuda {

// Calls f(slot, row, column) for this block's piece of its tile.
template <class Word, class F>
__device__ __forceinline__ void for_slots_of_piece(const Word* index, const int64_t* tile_ptr, int64_t strips,
                                                   int64_t pieces, int64_t block, F&& f) {
  constexpr int kRowBits = sizeof(Word) == 2 ? 6 : 22;
  const int64_t tile = block / pieces, piece = block % pieces, begin = tile_ptr[tile], slots = tile_ptr[tile + 1] - begin;
  const int64_t row0 = (tile % strips) << kRowBits, col0 = tile / strips * kPanelCols;
  for (int64_t i = slots * piece / pieces + threadIdx.x; i < slots * (piece + 1) / pieces; i += blockDim.x) {
    const uint32_t word = index[begin + i];
    f(begin + i, row0 + (word >> kTileColBits), col0 + (word & (kPanelCols - 1)));
  }
}

}  // namespace snack::cuda
