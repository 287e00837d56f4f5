// spmm and spmm_t on tall tiles (hyper-sparse patterns), where slots that share an output lie in different panels.
//
// Outputs are summed by 64-bit integer atomics in fixed point: addition of integers has no order, so results repeat bit for
// bit, and the unit is so fine that nothing is lost. |value| < 2^ev, |operand of this batch column| < 2^eo and at most 2^t
// slots share an output, so with the unit 2^(ev + eo + t - 62) no sum overflows; products are exact in double. Products that are
// not finite go to a float sum beside, which turns the output into the Inf or NaN that float arithmetic would give.
// Phases: clear; maxima; sums; result. Read: nnz * (4 + value) + nnz random operands a column. Limit: atomics in L2.
#pragma once

#include "element.cuh"
#include "launch.hpp"
#include "plan/cuda_layout.hpp"
#include "snack/plan/plan.hpp"

namespace snack::cuda {

/// One side of the product: outputs are rows of W for spmm and columns for spmm_t, operands the other.
template <class T>
struct FixedProduct {
  const void* index;
  const int64_t* tile_ptr;
  const T* values;
  Strided<T> operand;
  int64_t features_in, features_out, nnz;
  int64_t strips, tiles, pieces;
  int64_t b0, batch, capacity;
  float* maxima;           // [0]: values; [1 + b]: operand column b
  unsigned long long* sums;  // (batch, features_out), two's complement
  float* special;          // (batch, features_out): sums of the products that are not finite
  int term_bits;
};

__device__ __forceinline__ float finite_magnitude(float v) { return isfinite(v) ? fabsf(v) : 0.f; }

// Non-negative floats order like their bits.
__device__ __forceinline__ void raise(float* maximum, float v) {
  for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  if (threadIdx.x % 32 == 0 && v > 0.f) atomicMax(reinterpret_cast<int*>(maximum), __float_as_int(v));
}

template <class T>
__global__ void __launch_bounds__(kThreads) fixed_max_values(const FixedProduct<T> a) {
  float largest = 0.f;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.nnz; i += int64_t(gridDim.x) * blockDim.x)
    largest = fmaxf(largest, finite_magnitude(to_float(a.values[i])));
  raise(a.maxima, largest);
}

// blocks_a_column blocks share a batch column.
template <class T>
__global__ void __launch_bounds__(kThreads) fixed_max_operand(const FixedProduct<T> a, int64_t blocks_a_column) {
  const int64_t b = blockIdx.x / blocks_a_column, block = blockIdx.x % blocks_a_column;
  float largest = 0.f;
  for (int64_t f = block * blockDim.x + threadIdx.x; f < a.features_in; f += blocks_a_column * blockDim.x)
    largest = fmaxf(largest, finite_magnitude(a.operand(a.b0 + b, f)));
  raise(a.maxima + 1 + b, largest);
}

// log2 of the unit of batch column b.
template <class T>
__device__ __forceinline__ int unit_exponent(const FixedProduct<T>& a, int64_t b) {
  const float value = a.maxima[0], operand = a.maxima[1 + b];
  return value > 0.f && operand > 0.f ? ilogbf(value) + 1 + ilogbf(operand) + 1 + a.term_bits - 62 : 0;
}

// Calls f(slot, row, column) for this block's piece of its tile.
template <class Word, class F>
__device__ __forceinline__ void for_slots_of_piece(const Word* __restrict__ index, const int64_t* __restrict__ tile_ptr, int64_t strips,
                                                   int64_t pieces, int64_t block, F&& f) {
  constexpr int kRowBits = sizeof(Word) == 2 ? 6 : 22;
  const int64_t tile = block / pieces, piece = block % pieces, begin = __ldg(tile_ptr + tile), slots = __ldg(tile_ptr + tile + 1) - begin;
  const int64_t row0 = (tile % strips) << kRowBits, col0 = tile / strips * kPanelCols;
  for (int64_t i = slots * piece / pieces + threadIdx.x; i < slots * (piece + 1) / pieces; i += blockDim.x) {
    const uint32_t word = __ldg(index + begin + i);
    f(begin + i, row0 + (word >> kTileColBits), col0 + (word & (kPanelCols - 1)));
  }
}

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) fixed_sums(const FixedProduct<T> a) {
  for_slots_of_piece(static_cast<const uint32_t*>(a.index), a.tile_ptr, a.strips, a.pieces, blockIdx.x,
                     [&](int64_t slot, int64_t row, int64_t col) {
    const int64_t from = kTransposed ? row : col, to = kTransposed ? col : row;
    const float value = to_float(a.values[slot]);
    for (int64_t b = 0; b < a.batch; ++b) {
      const double product = double(value) * double(a.operand(a.b0 + b, from));
      if (isfinite(product)) {
        const long long fixed = __double2ll_rn(scalbn(product, -unit_exponent(a, b)));
        if (fixed != 0) atomicAdd(a.sums + b * a.features_out + to, static_cast<unsigned long long>(fixed));
      } else {
        atomicAdd(a.special + b * a.features_out + to, float(product));
      }
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) fixed_result(const FixedProduct<T> a, const T* __restrict__ bias, T* __restrict__ y) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.batch * a.features_out; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t b = i / a.features_out, f = i % a.features_out;
    const double sum = scalbn(double(static_cast<long long>(a.sums[i])), unit_exponent(a, b));
    const double whole = sum + (bias == nullptr ? 0.0 : double(to_float(bias[f])));
    y[a.b0 * a.features_out + i] = from_float<T>(float(whole) + a.special[i]);
  }
}

/// Runs all phases over the batch, chunk by chunk.
template <class T, bool kTransposed>
void fixed_product(const char* operation, FixedProduct<T> a, int64_t batch, const T* bias, T* y, const Plan& plan, const Resources& resources) {
  char* memory = static_cast<char*>(resources.workspace);
  a.capacity = plan.batch_chunk;
  a.maxima = reinterpret_cast<float*>(memory);
  a.sums = reinterpret_cast<unsigned long long*>(memory + fixed_header(a.capacity));
  a.special = reinterpret_cast<float*>(memory + fixed_header(a.capacity) + aligned_256(8 * a.capacity * a.features_out));
  const int64_t terms = std::max<int64_t>(1, std::min(a.nnz, a.features_in));
  while ((int64_t{1} << a.term_bits) < terms) ++a.term_bits;
  const auto blocks = [](int64_t elements) { return std::min<int64_t>(ceil_div(elements, kThreads), 1 << 14); };
  for (a.b0 = 0; a.b0 < batch; a.b0 += a.capacity) {
    a.batch = std::min(a.capacity, batch - a.b0);
    check(cudaMemsetAsync(memory, 0, size_t(fixed_workspace(a.capacity, a.features_out)), resources.stream), operation);
    if (a.nnz > 0) {
      launch<fixed_max_values<T>>(operation, blocks(a.nnz), kThreads, 0, resources.stream, a);
      const int64_t a_column = std::clamp<int64_t>(4096 / a.batch, 1, ceil_div(a.features_in, kThreads));
      launch<fixed_max_operand<T>>(operation, a.batch * a_column, kThreads, 0, resources.stream, a, a_column);
      launch<fixed_sums<T, kTransposed>>(operation, a.tiles * a.pieces, kThreads, 0, resources.stream, a);
    }
    launch<fixed_result<T>>(operation, blocks(a.batch * a.features_out), kThreads, 0, resources.stream, a, bias, y);
  }
}

}  // namespace snack::cuda
