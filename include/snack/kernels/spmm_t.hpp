// spmm_t: dx (batch, in) = dy (batch, out) W, W (out, in) sparse: the product with the transpose, from the same copy.
#pragma once

#include "snack/kernels/spmm.hpp"

namespace snack {

/// values: nnz elements in slot order; dy: any strides; dx: contiguous (batch, in). All of one dtype.
/// Where one column panel is shared by several tasks, their partial sums are added in a fixed order: a result repeats
/// bit for bit at the same number of threads.
struct SpmmTArgs {
  PatternView pattern;
  DType dtype = DType::kFloat32;
  const void* values = nullptr;
  MatrixView dy;
  void* dx = nullptr;
};

namespace reference {
void spmm_t(const SpmmTArgs& args);
}
namespace cpu {
void spmm_t(const SpmmTArgs& args, const Plan& plan, const CpuResources& resources);
}
namespace cuda {
/// Every pointer of `args` is device memory. float32, float16, bfloat16.
void spmm_t(const SpmmTArgs& args, const Plan& plan, const Resources& resources);
}

}  // namespace snack
