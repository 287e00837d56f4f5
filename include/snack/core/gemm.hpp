// The dense product is injected: torch supplies its own, a C++ caller any BLAS, or snack::default_gemm()
// (snack/defaults/gemm.hpp).
#pragma once

#include <cstdint>

#include "snack/core/types.hpp"

namespace snack {

/// c (m, n) = a (m, k) b (k, n), plus c when `accumulate`. Strides count elements.
struct GemmArgs {
  DType dtype = DType::kFloat32;
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t a_row_stride = 0, a_col_stride = 0;
  const void* b = nullptr;
  int64_t b_row_stride = 0, b_col_stride = 0;
  void* c = nullptr;
  int64_t c_row_stride = 0;  // columns of c are adjacent
  bool accumulate = false;
};

/// `run` is called on the thread that called the kernel and may use threads of its own; what it throws reaches the caller.
/// `context` is its own and must live as long as it is used.
struct Gemm {
  void* context = nullptr;
  void (*run)(void* context, const GemmArgs& args) = nullptr;
  explicit operator bool() const { return run != nullptr; }
  void operator()(const GemmArgs& args) const { run(context, args); }
};

}  // namespace snack
