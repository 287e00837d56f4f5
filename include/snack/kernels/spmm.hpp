// spmm: y (batch, out) = x (batch, in) W^T + bias, W (out, in) sparse.
#pragma once

#include "snack/core/gemm.hpp"
#include "snack/core/parallel.hpp"
#include "snack/plan/plan.hpp"

namespace snack {

/// values: nnz elements in slot order; x: any strides; bias: `out` elements or null; y: contiguous (batch, out).
/// All of one dtype. Sums are made in float for 16-bit types, else in the dtype.
/// Every row of W is summed in slot order, so a result does not depend on the number of threads (stream regime).
struct SpmmArgs {
  PatternView pattern;
  DType dtype = DType::kFloat32;
  const void* values = nullptr;
  MatrixView x;
  const void* bias = nullptr;
  void* y = nullptr;
};

/// What the caller lends to a CPU kernel for the duration of the call: threads, the dense product (only the panel regime
/// needs it) and scratch, 64-byte aligned, of at least Plan::workspace_bytes and not shared with another call that runs at
/// the same time.
struct CpuResources {
  ParallelFor parallel;
  Gemm gemm;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

namespace reference {
void spmm(const SpmmArgs& args);
}
namespace cpu {
void spmm(const SpmmArgs& args, const Plan& plan, const CpuResources& resources);
}
namespace cuda {
/// Every pointer of `args` is device memory. float32, float16, bfloat16.
void spmm(const SpmmArgs& args, const Plan& plan, const Resources& resources);
}

}  // namespace snack
