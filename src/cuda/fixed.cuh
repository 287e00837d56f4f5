// spmm and spmm_t on tall tiles (hyper-sparse patterns), where slots that share an output lie in different panels.
//
// Outputs are summed by 64-bit integer atomics in fixed point: addition of integers has no order, so results repeat bit for bit.
// Every output has a unit of its own, from the largest product that it sums: |product| < 2^e and at most 2^t slots share an output,
// so with the unit 2^(e + t - 62) no sum overflows, and 62 - t >= 31 bits lie below the largest product. Products are exact in
// double. Those that are not finite go to a float sum beside, which turns the output into the Inf or NaN of float arithmetic.
// Phases: clear; exponents; sums; result. Read: twice nnz * (4 + value) + nnz random operands a column. Limit: atomics in L2.
#pragma once

#include "element.cuh"
#include "launch.hpp"
#include "slots.cuh"
#include "snack/plan/plan.hpp"

namespace snack::cuda {

/// One side of the product: outputs are rows of W for spmm and columns for spmm_t, operands the other.
template <class T>
struct FixedProduct {
  const uint32_t* index;
  const int64_t* tile_ptr;
  const T* values;
  Strided<T> operand;
  int64_t features_in, features_out, nnz;
  int64_t strips, tiles, pieces;
  int64_t b0, batch;             // of this launch: batch columns [b0, b0 + batch)
  unsigned long long* sums;      // (batch, features_out), two's complement
  float* special;                // (batch, features_out): sums of the products that are not finite
  int* exponents;                // (batch, features_out): e; far below any where nothing is summed
  int term_bits;                 // t

  // log2 of the unit of output i.
  __device__ __forceinline__ int unit(int64_t i) const { return exponents[i] + term_bits - 62; }
};

// Calls f(output, product) for this block's slots and every batch column.
template <bool kTransposed, class T, class F>
__device__ __forceinline__ void for_products(const FixedProduct<T>& a, F&& f) {
  for_slots_of_piece(a.index, a.tile_ptr, a.strips, a.pieces, blockIdx.x, [&](int64_t slot, int64_t row, int64_t col) {
    const int64_t from = kTransposed ? row : col, to = kTransposed ? col : row;
    const double value = double(to_float(a.values[slot]));
    for (int64_t b = 0; b < a.batch; ++b) f(b * a.features_out + to, value * double(a.operand(a.b0 + b, from)));
  });
}

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) fixed_exponents(const FixedProduct<T> a) {
  await_stream();
  for_products<kTransposed>(a, [&](int64_t i, double product) {
    if (isfinite(product) && product != 0.0) atomicMax(a.exponents + i, ilogb(product) + 1);
  });
}

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) fixed_sums(const FixedProduct<T> a) {
  await_stream();
  for_products<kTransposed>(a, [&](int64_t i, double product) {
    if (!isfinite(product)) {
      atomicAdd(a.special + i, float(product));
    } else if (product != 0.0) {
      const long long fixed = __double2ll_rn(scalbn(product, -a.unit(i)));
      if (fixed != 0) atomicAdd(a.sums + i, static_cast<unsigned long long>(fixed));
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) fixed_result(const FixedProduct<T> a, const T* bias, T* y) {
  await_stream();
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.batch * a.features_out; i += int64_t(gridDim.x) * blockDim.x) {
    const long long fixed = static_cast<long long>(a.sums[i]);
    const double sum = fixed == 0 ? 0.0 : scalbn(double(fixed), a.unit(i));
    const double whole = bias == nullptr ? sum : sum + double(to_float(bias[i % a.features_out]));
    y[a.b0 * a.features_out + i] = from_float<T>(float(whole) + a.special[i]);
  }
}

/// Runs all phases over the batch, chunk by chunk.
template <class T, bool kTransposed>
void fixed_product(const char* operation, FixedProduct<T> a, int64_t batch, const T* bias, T* y, const Plan& plan, const Resources& resources) {
  const int64_t outputs = plan.batch_chunk * a.features_out;
  char* memory = static_cast<char*>(resources.workspace);
  a.sums = reinterpret_cast<unsigned long long*>(memory);
  a.special = reinterpret_cast<float*>(memory + aligned_256(8 * outputs));
  a.exponents = reinterpret_cast<int*>(memory + aligned_256(8 * outputs) + aligned_256(4 * outputs));
  const int64_t terms = std::max<int64_t>(1, std::min(a.nnz, a.features_in));
  while ((int64_t{1} << a.term_bits) < terms) ++a.term_bits;
  for (a.b0 = 0; a.b0 < batch; a.b0 += plan.batch_chunk) {
    a.batch = std::min(plan.batch_chunk, batch - a.b0);
    check(cudaMemsetAsync(memory, 0, size_t(aligned_256(8 * outputs) + aligned_256(4 * outputs)), resources.stream), operation);
    check(cudaMemsetAsync(a.exponents, 0x80, size_t(4 * outputs), resources.stream), operation);  // about INT_MIN
    if (a.nnz > 0) {
      launch<fixed_exponents<T, kTransposed>>(operation, a.tiles * a.pieces, kThreads, 0, resources.stream, a);
      launch<fixed_sums<T, kTransposed>>(operation, a.tiles * a.pieces, kThreads, 0, resources.stream, a);
    }
    const int64_t blocks = std::min<int64_t>(ceil_div(a.batch * a.features_out, kThreads), 1 << 14);
    launch<fixed_result<T>>(operation, blocks, kThreads, 0, resources.stream, a, bias, y);
  }
}

}  // namespace snack::cuda
