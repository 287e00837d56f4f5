// The inner loops that are compiled once per instruction set; dispatch.cpp picks a table by cpuid.
//
// All of them work on a *batch block*: `width` batch columns, batch-contiguous, in the accumulator type A.
//   xt (in, width), yt (out, width): row c holds the block's values of feature c; unused columns are zero.
// width is 1, 4, 8, 16, 32 or 64.
#pragma once

#include "snack/core/types.hpp"
#include "snack/formats/pattern.hpp"

namespace snack::cpu {

template <class A>
struct IsaKernels {
  /// yt[r - row_begin] = sum over row r, for rows [row_begin, row_end); all panels.
  void (*spmm_rows)(const PatternView& pattern, DType dtype, const void* values, int width, const A* xt, A* yt,
                    int64_t row_begin, int64_t row_end);
  /// window[c] += values * dyt[row] over slots [slot_begin, slot_end) of one panel; window (1024, width).
  void (*spmm_t_slots)(const PatternView& pattern, DType dtype, const void* values, int width, const A* dyt, A* window,
                       int64_t slot_begin, int64_t slot_end);
  /// dvalues[k] (+)= dot(dyt[row_k], xt[col_k]) for slots [slot_begin, slot_end).
  void (*sddmm_slots)(const PatternView& pattern, int width, const A* dyt, const A* xt, A* dvalues, int64_t slot_begin,
                      int64_t slot_end, bool accumulate);
  /// block[c][b] = m[batch_begin + b][c] for features [begin, end), b < count; zeros up to width.
  void (*load_block)(const MatrixView& m, int64_t batch_begin, int64_t count, int width, int64_t begin, int64_t end,
                     A* block);
  /// out[b][begin + c] = block[c][b] + bias[begin + c] for features [begin, end); out has row stride `stride`,
  /// `block` starts at feature `begin`.
  void (*store_block)(const A* block, int width, int64_t count, int64_t begin, int64_t end, DType dtype,
                      const void* bias, void* out, int64_t stride);
  /// out[i] = in[i] between the accumulator type and dtype.
  void (*from_accumulator)(const A* in, int64_t count, DType dtype, void* out);
};

struct Isa {
  const char* name;
  IsaKernels<float> f32;
  IsaKernels<double> f64;
};

/// Tables of the compiled instruction sets.
extern const Isa kIsaBase, kIsaAvx2, kIsaAvx512;

/// The best table this processor can run; the environment variable SNACK_ISA=base|avx2|avx512 can only lower it.
const Isa& isa();

template <class A>
const IsaKernels<A>& kernels() {
  if constexpr (sizeof(A) == 4) return isa().f32;
  else return isa().f64;
}

}  // namespace snack::cpu
