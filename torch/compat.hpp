// The one place that knows torch: tensors to views, torch's threads and products to the injected seams of the core.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "snack/core/error.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack::torch_face {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t, const char* operation, const char* what) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    default: fail(operation, ": ", what, " has a dtype that is not float32, float16, bfloat16 or float64; convert it.");
  }
}

inline MatrixView matrix(const Tensor& t, DType dtype) {
  return {t.data_ptr(), dtype, t.size(0), t.size(1), t.stride(0), t.stride(1)};
}

/// The packed pattern behind two tensors; throws when their sizes do not belong to the shape. Contents are trusted.
inline PatternView pattern_view(const char* operation, const Tensor& index, const Tensor& tile_ptr, int64_t out, int64_t in) {
  const Geometry g = make_geometry(out, in, index.numel());
  const ScalarType expected = g.packing == Packing::kNarrow ? ScalarType::Short : ScalarType::Int;
  SNACK_CHECK(index.dim() == 1 && index.is_contiguous() && index.scalar_type() == expected, operation,
              ": index is not a packed pattern of shape (", out, ", ", in, ") with ", index.numel(), " connections; it must be contiguous ",
              expected == ScalarType::Short ? "int16" : "int32", ". Use snack.Pattern.");
  SNACK_CHECK(tile_ptr.dim() == 1 && tile_ptr.is_contiguous() && tile_ptr.scalar_type() == ScalarType::Long &&
                  tile_ptr.numel() == g.tiles() + 1,
              operation, ": tile_ptr has ", tile_ptr.numel(), " entries, a pattern of this shape needs ", g.tiles() + 1,
              " int64 entries. Use snack.Pattern.");
  const auto* pointers = static_cast<const int64_t*>(tile_ptr.data_ptr());
  SNACK_CHECK(!tile_ptr.is_cpu() || (pointers[0] == 0 && pointers[g.tiles()] == g.nnz), operation, ": tile_ptr does not run from 0 to ",
              g.nnz, ", the number of connections. Use snack.Pattern.");
  return {g, index.data_ptr(), pointers};
}

inline ParallelFor torch_parallel() {
  ParallelFor runner;
  runner.threads = int(torch::stable::get_num_threads());
  runner.run = [](void*, int64_t count, void* task_context, ParallelFor::Task task) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) { task(task_context, begin, end); });
  };
  return runner;
}

/// torch's mm and addmm on the caller's memory.
Gemm torch_gemm();

inline Tensor empty_cpu(std::vector<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(sizes, dtype, std::nullopt, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace snack::torch_face
