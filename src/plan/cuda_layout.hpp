// Sizes that the CUDA plan and the CUDA kernels must agree on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "snack/formats/pattern.hpp"

namespace snack::cuda {

inline constexpr int kStripRows = 64;         // rows of a narrow tile
inline constexpr int kPanelCols = 1024;       // columns of a tile
inline constexpr int64_t kLeastShared = 99 << 10;     // of a block: every card of compute capability 8.0 and later has it
inline constexpr int64_t kWorkspaceBytes = 32 << 20;  // partial sums are kept below this where a smaller batch chunk allows it
inline constexpr int kMaxStrips = 8;          // spmm, sddmm: strips a block may take at a time
inline constexpr int kStagedStrips = 16;      // spmm_t: strips whose dy lies in shared memory at a time
inline constexpr int kThreads = 256;
inline constexpr int64_t kFewestSlots = 4096;  // spmm_t: of a panel, for a block: more blocks cost more in partial sums
inline constexpr int kFinishAtOnce = 16;      // partial sums of an element that finish() has under way
inline constexpr int kWidestWindow = 8;       // spmm, sddmm: batch columns that lie in shared memory at a time

// Of the L2 cache. Values and pattern of more than kL2Whole push themselves out, and of what was read last hardly anything is found again
// (docs/decisions/0006); kL2Rewritten: of more, values that are written come back to memory whatever is left first.
inline constexpr double kL2Whole = 0.7, kL2Rewritten = 1.5;

// spmm_rows
inline constexpr int kRowsThreads = 640;      // the most a block may have
constexpr int rows_resident(int width) { return width == 1 ? 2 : 1; }  // blocks that registers must leave room for
// Chunks of eight slots, a segment, from which on two blocks share a multiprocessor: values of 32 bits, of 16, or from memory.
inline constexpr int64_t kManyChunks = 12, kManyHalfChunks = 6, kManyFarChunks = 3;
inline constexpr int kLongSegments = 4;       // a row is left to the whole block if it has a segment so many times the mean
inline constexpr int64_t kTableBytes = 32 << 10;  // kept free for the tables of segments of a multiprocessor
inline constexpr int64_t kMaxRowsSlots = (int64_t{1} << 32) - 16;  // slots that its 32-bit numbers reach

/// log2 of the bytes of a column of W numbers.
constexpr int log2_column(int64_t element_bytes, int width) {
  int log = element_bytes == 4 ? 2 : 1;
  for (; width > 1; width /= 2) ++log;
  return log;
}
/// Shared memory of spmm_rows: x, one panel more so that panels can begin at multiples of their size, and the table.
constexpr int64_t rows_shared(int64_t element_bytes, int width, int64_t panels, int64_t rows) {
  return (panels + 1) * (int64_t{kPanelCols} << log2_column(element_bytes, width)) + 8 * panels * rows;
}

// spmm_t_rows
inline constexpr int kStagedRows = 1024;      // rows whose dy lies in shared memory at a time
constexpr int rows_t_threads(int64_t width) { return width == 1 ? 1024 : width == 2 ? 832 : 384; }  // the most a block may have
constexpr int64_t rows_t_shared(int64_t width, int threads) { return 4 * width * (kStagedRows + int64_t{threads} / 32 * kPanelCols); }

// spmm_batch
inline constexpr int kBatchThreads = 640;     // the most a block may have
inline constexpr int kBatchStep = 16;         // slots of a row, or fewer are not worth a team
inline constexpr int kListPanels = 16;        // whose segments are walked as one list, where a line has eight vectors
inline constexpr int kBatchGroups = 4;        // the most that share the panels of the same rows
inline constexpr int kPanelTiles = 16;        // blocks that transpose a panel of x
/// Bytes of a panel of transposed x: a line a column, and the zero line.
constexpr int64_t panel_bytes(int64_t line_bytes) { return (kPanelCols + 1) * line_bytes; }
/// Shared memory: windows of x; at the end sums of the rows, of the warps' parts of a long row, and which rows are long.
constexpr int64_t batch_shared(int64_t line_bytes, int64_t columns, int64_t teams, int64_t threads, int64_t windows) {
  return std::max(windows * panel_bytes(line_bytes), 4 * columns * (teams + 1 + threads / 32) + 4 * teams);
}

// spmm_t_batch
inline constexpr int kBatchStrips = 8;        // the most whose slots are sorted at a time
constexpr int batch_t_threads(int64_t columns) { return int(16 * columns); }  // 64 sums a thread
constexpr int batch_t_resident(int64_t columns) { return columns > 16 ? 1 : 2; }  // blocks that registers must leave room for
constexpr int64_t batch_t_columns(int64_t element_bytes) { return kPanelCols / element_bytes; }  // of the panel, that are written at a time
constexpr int64_t sorted_bytes(int64_t element_bytes) { return element_bytes == 4 ? 8 : 4; }      // of a slot
/// Shared memory of a round: lines, masks, counts, and sorted slots with one more for every column and two at the end.
constexpr int64_t batch_t_round(int64_t columns, int64_t element_bytes, int64_t strips, int64_t slots) {
  const int64_t lines = (strips * kStripRows + 1) * columns * element_bytes, tables = (strips * (8 + 2) + 4) * kPanelCols;
  return lines + tables + (slots + kPanelCols + 2) * sorted_bytes(element_bytes);
}
/// Of the kernel: after the rounds, sums to write lie there.
constexpr int64_t batch_t_shared(int64_t columns, int64_t element_bytes, int64_t strips, int64_t slots) {
  return std::max(batch_t_round(columns, element_bytes, strips, slots), columns * (batch_t_columns(element_bytes) + 1) * 4);
}

// sddmm_batch
inline constexpr int kSddmmBatchThreads = 512;
inline constexpr int kSddmmBatchStrips = 4;   // whose dy lies in shared memory at a time
/// Shared memory: the window of x, rows of dy as floats, and sums.
constexpr int64_t sddmm_batch_shared(int64_t columns, int64_t element_bytes, int64_t sums) {
  return columns * (kPanelCols * element_bytes + kSddmmBatchStrips * kStripRows * 4) + 4 * sums;
}

// sddmm_chunks
inline constexpr int kChunkThreads = 512;
constexpr int64_t chunks_shared(int64_t element_bytes, int width) {
  return 4 * width * kStagedStrips * kStripRows + (int64_t{kPanelCols} << log2_column(element_bytes, width));
}

inline constexpr int kLongSegment = 24;       // spmm_t: mean slots of a row in a tile from which on rows are added four chunks at a time

// Blocks of kThreads that a multiprocessor is to hold at once: the kernels' registers are limited to that.
constexpr int spmm_resident(int64_t width) { return width == 1 ? 6 : width == 4 ? 4 : 3; }
constexpr int sddmm_resident(int64_t width) { return width == 1 ? 6 : 5; }

constexpr int64_t aligned_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// Batch columns that one pass over the pattern serves.
constexpr int stream_width(int64_t batch, int widest) { return batch <= 1 ? 1 : batch <= 4 || widest == 4 ? 4 : 8; }

// Shared memory of the stream kernels, bytes.
constexpr int64_t spmm_shared(int64_t strips, int64_t width, int threads) {
  return 4 * width * (kPanelCols + strips * kStripRows + threads / 32);
}
constexpr int64_t spmm_t_shared(int64_t width, int threads) {
  return 4 * width * (int64_t{kStagedStrips} * kStripRows + int64_t{threads} / 32 * kPanelCols);
}
constexpr int64_t sddmm_shared(int64_t strips, int64_t width) { return 4 * width * (kPanelCols + strips * kStripRows); }

// The fixed-point sums of tall patterns: an int64, a float and an int an output.
constexpr int64_t fixed_workspace(int64_t outputs) { return aligned_256(8 * outputs) + 2 * aligned_256(4 * outputs); }

}  // namespace snack::cuda
