// spmm and spmm_t, regime coo: the mapping of the SNACK paper, kept as a baseline: one thread a non-zero and sample,
// y[b, row] += value * x[b, col] by a float atomic in global memory (spmm_t: rows and columns exchanged). The order varies, so
// results do not repeat bit for bit. float32 is summed in the output itself, 16-bit types in float workspace.
#pragma once

#include "finish.hpp"
#include "fixed.cuh"

namespace snack::cuda {

template <class T, class Word, bool kTransposed>
__global__ void __launch_bounds__(kThreads)
    product_coo(const Word* index, const int64_t* tile_ptr, const T* values, const Strided<T> operand,
                float* sums, int64_t features_out, int64_t strips, int64_t tiles, int64_t pieces, int64_t b0) {
  await_stream();
  const int64_t blocks = tiles * pieces, b = blockIdx.x / blocks;
  for_slots_of_piece(index, tile_ptr, strips, pieces, blockIdx.x % blocks, [&](int64_t slot, int64_t row, int64_t col) {
    const int64_t from = kTransposed ? row : col, to = kTransposed ? col : row;
    atomicAdd(sums + b * features_out + to, to_float(values[slot]) * operand(b0 + b, from));
  });
}

/// Both phases, chunk by chunk: outputs set to the bias, then the sums.
template <class T, bool kTransposed>
void coo_product(const char* operation, const PatternView& pattern, const T* values, const MatrixView& operand, const T* bias, T* y,
                 int64_t features_out, const Plan& plan, const Resources& resources) {
  const Geometry& g = pattern.geometry;
  const int64_t batch = operand.rows;
  for (int64_t b0 = 0; b0 < batch; b0 += plan.batch_chunk) {
    const int64_t count = std::min(plan.batch_chunk, batch - b0), blocks = count * g.tiles() * plan.splits;
    T* y_chunk = y + b0 * features_out;
    float* sums = sizeof(T) == 4 ? reinterpret_cast<float*>(y_chunk) : static_cast<float*>(resources.workspace);
    if (sizeof(T) == 4) finish(operation, nullptr, 0, count, features_out, bias, ElementOf<T>::dtype, y_chunk, resources.stream);
    else check(cudaMemsetAsync(sums, 0, size_t(4 * count * features_out), resources.stream), operation);
    const auto run = [&](auto* index) {
      using Word = std::remove_const_t<std::remove_pointer_t<decltype(index)>>;
      launch<product_coo<T, Word, kTransposed>>(operation, blocks, plan.threads, 0, resources.stream, index, pattern.tile_ptr, values,
                                                Strided<T>(operand), sums, features_out, g.strips(), g.tiles(), plan.splits, b0);
    };
    if (g.packing == Packing::kNarrow) run(static_cast<const uint16_t*>(pattern.index));
    else run(static_cast<const uint32_t*>(pattern.index));
    if (sizeof(T) == 2) finish(operation, sums, 1, count, features_out, bias, ElementOf<T>::dtype, y_chunk, resources.stream);
  }
}

}  // namespace snack::cuda
