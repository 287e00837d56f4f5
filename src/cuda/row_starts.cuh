// The row starts of a packed pattern whose index and tile pointers are there.
#pragma once

#include "layout.hpp"
#include "pattern.cuh"

namespace snack::cuda {

// A thread a row and panel, and one a word that only fills up the array. Nothing is done where *error is not 0.
static __global__ void find_row_starts(DevicePattern pattern, uint16_t* starts, int64_t words, const int64_t* error) {
  await_stream();
  const int64_t i = thread_number(), segments = pattern.geometry.segments();
  if (i >= words || (error != nullptr && *error != 0)) return;
  uint16_t start = 0;
  if (i < segments) {
    const int64_t row = i % pattern.geometry.out, panel = i / pattern.geometry.out;
    bool found;
    start = uint16_t(pattern.lower_bound(row, panel << kTileColBits, &found) - pattern.tile_ptr[pattern.tile_of(row, panel)]);
  }
  starts[i] = start;
}

/// Writes the row starts behind the tile pointers, where the geometry has them.
inline void find_row_starts_of(const char* operation, const Geometry& g, const void* index, int64_t* tile_ptr, const int64_t* error, Stream stream) {
  if (!g.has_row_starts()) return;
  const int64_t words = 4 * (g.pointer_words() - g.tiles() - 1);
  launch<find_row_starts>(operation, blocks_for(words), kThreads, 0, stream, DevicePattern{g, index, tile_ptr}, reinterpret_cast<uint16_t*>(tile_ptr + g.tiles() + 1),
                          words, error);
}

}  // namespace snack::cuda
