// Pieces of the panel regime: rows of W decoded to a dense panel of at most 1 MiB, which the injected gemm multiplies.
// The product is computed in the accumulator type A, so 16-bit operands are converted once for the call.
#pragma once

#include "isa.hpp"
#include "snack/core/parallel.hpp"
#include "snack/kernels/spmm.hpp"
#include "workspace.hpp"

namespace snack::cpu {

/// How many workers a product of the stream regime keeps busy: one for small problems, else the number of threads.
int64_t stream_workers(const Geometry& g, int64_t width, int64_t batch, int threads);

template <class A>
struct DenseOperand {
  const A* data;
  int64_t row_stride, col_stride;
};

/// The batch block of rows [b0, b0 + count) of m: the row itself where it is one row that needs no conversion, else all its
/// features transposed into `block`.
template <class A>
const A* load_or_point(const MatrixView& m, int64_t b0, int64_t count, A* block) {
  if (count == 1 && m.col_stride == 1 && size_of(m.dtype) == sizeof(A)) return static_cast<const A*>(m.data) + b0 * m.row_stride;
  kernels<A>().load_block(m, b0, count, block_width(count), 0, m.cols, block);
  return block;
}

/// The matrix itself when its elements are of type A, else a converted copy in the arena.
template <class A>
DenseOperand<A> dense_operand(const MatrixView& m, Arena& arena, const ParallelFor& runner);

/// decoded (rows, in) = W[row0 : row0 + rows, :]; zeros included.
template <class A>
void decode_rows(const PatternView& pattern, DType dtype, const void* values, int64_t row0, int64_t rows, A* decoded,
                 const ParallelFor& runner);

/// dvalues[k] = product[row_k - row0, col_k] for the slots of those rows.
template <class A>
void gather_rows(const PatternView& pattern, int64_t row0, int64_t rows, const A* product, DType dtype, void* dvalues,
                 const ParallelFor& runner);

/// Calls f(slot, row - row0, col) for the slots of rows [row0, row0 + rows), one parallel task a tile.
template <class F>
void for_each_slot_of_rows(const PatternView& pattern, int64_t row0, int64_t rows, const ParallelFor& runner, F&& f) {
  const Geometry& g = pattern.geometry;
  const int bits = row_bits(g.packing);
  const int64_t first_strip = row0 >> bits, strips = ((row0 + rows - 1) >> bits) - first_strip + 1;
  parallel_for(runner, strips * g.panels(), [&](int64_t i) {
    const int64_t strip = first_strip + i % strips, panel = i / strips;
    const int64_t tile = panel * g.strips() + strip, shift = (strip << bits) - row0;
    const auto walk = [&](const auto* words) {
      for (int64_t slot = pattern.tile_ptr[tile]; slot < pattern.tile_ptr[tile + 1]; ++slot) {
        const int64_t row = int64_t(words[slot] >> kTileColBits) + shift;
        if (row >= 0 && row < rows) f(slot, row, (panel << kTileColBits) + int64_t(words[slot] & (kTileCols - 1)));
      }
    };
    if (g.packing == Packing::kNarrow) walk(static_cast<const uint16_t*>(pattern.index));
    else walk(static_cast<const uint32_t*>(pattern.index));
  });
}

/// Whether m (count) holds a NaN. A panel's zeros turn an infinite operand into NaN where nothing is connected; a product
/// that holds one is made again by the stream regime, which multiplies connections only.
template <class A>
bool has_nan(const A* m, int64_t count, const ParallelFor& runner);

/// out (rows, cols) = m + bias, converted; in place when m is out.
template <class A>
void finish_rows(const A* m, int64_t rows, int64_t cols, DType dtype, const void* bias, void* out,
                 const ParallelFor& runner);

}  // namespace snack::cpu
