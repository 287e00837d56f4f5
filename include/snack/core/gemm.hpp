// The dense product is injected: torch supplies its own, a C++ caller any BLAS.
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

struct Gemm {
  void* context = nullptr;
  void (*run)(void* context, const GemmArgs& args) = nullptr;
  explicit operator bool() const { return run != nullptr; }
  void operator()(const GemmArgs& args) const { run(context, args); }
};

}  // namespace snack
