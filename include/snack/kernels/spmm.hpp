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

/// What the caller lends to a CPU kernel: threads, the dense product, scratch of plan.workspace_bytes (64-byte aligned).
struct CpuResources {
  ParallelFor parallel;
  Gemm gemm;
  void* workspace = nullptr;
};

namespace reference {
void spmm(const SpmmArgs& args);
}
namespace cpu {
void spmm(const SpmmArgs& args, const Plan& plan, const CpuResources& resources);
}

}  // namespace snack
