// What every kernel of spmm_t takes where tiles are narrow.
#pragma once

#include "../element.cuh"

namespace snack::cuda {

/// Grid: panels * splits * ceil(batch / columns of a block), panels first.
template <class T>
struct SpmmTNarrow {
  const uint16_t* index;
  const int64_t* tile_ptr;
  const T* values;
  Strided<T> dy;
  T* dx;
  float* partials;             // (splits, batch, in), for finish(); null: dx is written
  int64_t out, in, batch, b0;  // of this launch: batch columns [b0, b0 + batch)
  int64_t strips;
  uint32_t panels, splits;
};

}  // namespace snack::cuda
