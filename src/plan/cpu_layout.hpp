// Sizes that the CPU plan and the CPU kernels must agree on: batch blocks, panels and the cutting of the workspace.
#pragma once

#include <cstdint>

#include "snack/formats/pattern.hpp"

namespace snack::cpu {

inline constexpr int64_t kAlign = 64;
inline constexpr int64_t kPanelBytes = 1 << 20;  // panel regime: decoded rows of W held at a time
inline constexpr int kMaxWidth = 64;             // stream regime: batch columns in one pass over the pattern
inline constexpr int kMaxWindowWidth = 32;       // the same for spmm_t, whose windows are written as well as read

constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Smallest width (1, 4, 8, 16, 32, 64) that holds `count` batch columns, at most kMaxWidth.
constexpr int block_width(int64_t count) {
  if (count <= 1) return 1;
  int width = 4;
  while (width < count && width < kMaxWidth) width *= 2;
  return width;
}

/// spmm: rows whose sums one task holds: a strip, or all rows where tiles are too tall to be walked strip by strip.
constexpr int64_t spmm_rows_at_once(const Geometry& g) { return g.packing == Packing::kNarrow ? tile_rows(g.packing) : g.out; }
/// spmm: rows of sums that all tasks hold together.
constexpr int64_t spmm_sum_rows(const Geometry& g, int tasks) {
  return g.packing == Packing::kNarrow ? tasks * tile_rows(g.packing) : g.out;
}

/// spmm_t: column panels are cut into this many accumulation windows at most.
constexpr int64_t max_windows(const Geometry& g, int threads) { return g.panels() + 2 * int64_t(threads); }

}  // namespace snack::cpu
