// sddmm: dvalues[k] = sum_b dy[b, row_k] x[b, col_k]: the gradient of W sampled on its pattern.
#pragma once

#include "snack/kernels/spmm.hpp"

namespace snack {

/// dy (batch, out), x (batch, in): any strides; dvalues: nnz elements in slot order. All of one dtype.
struct SddmmArgs {
  PatternView pattern;
  DType dtype = DType::kFloat32;
  MatrixView dy;
  MatrixView x;
  void* dvalues = nullptr;
};

namespace reference {
void sddmm(const SddmmArgs& args);
}
namespace cpu {
void sddmm(const SddmmArgs& args, const Plan& plan, const CpuResources& resources);
}
namespace cuda {
/// Every pointer of `args` is device memory. float32, float16, bfloat16.
void sddmm(const SddmmArgs& args, const Plan& plan, const Resources& resources);
}

}  // namespace snack
