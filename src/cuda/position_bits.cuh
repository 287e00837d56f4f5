// A bit a position of a matrix, panel by panel and row by row, as slots are ordered. Words of the last panel leave out columns that are not there.
#pragma once

#include "launch.hpp"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {

inline constexpr int kPanelWords = kPanelCols / 32;

/// A bit a position.
struct PositionBits {
  uint32_t* words;
  int64_t out, panels;
  int last_width;  // words of a row in the last panel

  PositionBits(const Geometry& g, uint32_t* words)
      : words(words), out(g.out), panels(g.panels()), last_width(int(ceil_div(g.in - (g.panels() - 1) * kPanelCols, 32))) {}
  static int64_t count(const Geometry& g) {
    const PositionBits bits(g, nullptr);
    return g.out * ((bits.panels - 1) * kPanelWords + bits.last_width);
  }
  __device__ __forceinline__ int width(int64_t panel) const { return panel + 1 == panels ? last_width : kPanelWords; }
  /// First word of a row of a panel.
  __device__ __forceinline__ uint32_t* row(int64_t panel, int64_t row) const { return words + panel * out * kPanelWords + row * width(panel); }
  __device__ __forceinline__ uint32_t* word(int64_t at_row, int64_t col) const {
    return row(col >> kTileColBits, at_row) + ((col & (kPanelCols - 1)) >> 5);
  }
};

}  // namespace snack::cuda
