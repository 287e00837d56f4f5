// Sizes that the CPU plan and the CPU kernels must agree on: batch blocks, panels and the cutting of the workspace.
#pragma once

#include <cstdint>

#include "snack/formats/pattern.hpp"
#include "snack/plan/plan.hpp"

namespace snack::cpu {

inline constexpr int64_t kAlign = 64;
inline constexpr int64_t kPanelBytes = 1 << 20;  // panel regime: decoded rows of W held at a time
inline constexpr int kMaxWidth = 64;             // stream regime: batch columns in one pass over the pattern

constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Smallest width (1, 4, 8, 16, 32, 64) that holds `count` batch columns, at most kMaxWidth.
constexpr int block_width(int64_t count) {
  if (count <= 1) return 1;
  int width = 4;
  while (width < count && width < kMaxWidth) width *= 2;
  return width;
}

/// What the kernels cut from their workspace when they follow `plan` with that many threads.
int64_t workspace_bytes(const Problem& problem, const Plan& plan, int threads);

inline constexpr int64_t kPrivateBytes = 64 << 20;

/// Whether every worker transposes its own batch blocks: no barrier, and no cache line travels between cores. Otherwise
/// (operands too long to have one copy a worker) all workers share one block at a time.
constexpr bool has_private_blocks(int64_t features, int64_t block, int64_t element, int workers) {
  return features * block * element * workers <= kPrivateBytes;
}

/// spmm: rows whose sums one worker holds: a strip, or all rows where tiles are too tall to be walked strip by strip.
constexpr int64_t spmm_rows_at_once(const Geometry& g) { return g.packing == Packing::kNarrow ? tile_rows(g.packing) : g.out; }

/// spmm with shared blocks: rows of sums that all workers hold together.
constexpr int64_t spmm_sum_rows(const Geometry& g, int workers) {
  return g.packing == Packing::kNarrow ? workers * tile_rows(g.packing) : g.out;
}

inline constexpr int64_t kUpdateSlots = 4096;    // sddmm_update: slots whose gradients a worker holds at a time

/// spmm_t: column panels are cut into this many pieces at most, each with an accumulation window of its own.
constexpr int64_t max_windows(const Geometry& g, int threads) { return g.panels() + 2 * int64_t(threads); }

}  // namespace snack::cpu
