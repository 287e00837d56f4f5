// The one place that knows torch: tensors to views, torch's threads and products to the injected seams of the core.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "snack/core/error.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack::torch_face {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// The device as PyTorch prints it: "cpu", "cuda:1".
inline std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

inline bool on_one_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() ? b.is_cpu() : !b.is_cpu() && a.device() == b.device();
}

/// Every operand is where the pattern is: its device decides, whichever is current.
inline void check_device(const char* operation, const char* what, const Tensor& t, const Tensor& index) {
  SNACK_CHECK(on_one_device(t, index), operation, ": ", what, " and the pattern are on different devices, ", device_name(t), " and ",
              device_name(index), "; move one of them.");
}

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
                  tile_ptr.numel() == g.pointer_words(),
              operation, ": tile_ptr has ", tile_ptr.numel(), " entries, a pattern of this shape needs ", g.pointer_words(),
              " int64 entries. Use snack.Pattern.");
  check_device(operation, "tile_ptr", tile_ptr, index);
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
  return torch::stable::empty(sizes, dtype, std::nullopt, torch::stable::Device(DeviceType::CPU));
}

/// What the argument `regime` of an operator asks for: a regime, or from kFirstKernel on a kernel of kCudaKernels.
struct Choice {
  Regime regime = Regime::kAuto;
  std::string_view kernel;
};
inline constexpr int64_t kFirstKernel = 16;
inline Choice choice_of(const char* operation, int64_t code) {
  const bool is_kernel = code >= kFirstKernel;
  SNACK_CHECK(code >= 0 && code < kFirstKernel + int64_t(std::size(kCudaKernels)) && (is_kernel || code <= int64_t(Regime::kPanel)), operation,
              ": regime ", code, " does not exist.");
  if (is_kernel) return {Regime::kAuto, kCudaKernels[code - kFirstKernel]};
  return {Regime(code), {}};
}

/// Contiguous memory of torch's allocator beside `like`, of its dtype unless another is named. The shim makes the tensor itself;
/// stable::new_empty looks the operator up by name on every call, which takes longer than everything else that is done here.
inline Tensor allocate(const char* operation, const Tensor& like, std::initializer_list<int64_t> sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  int32_t type = 0, device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  if (dtype) type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  const int64_t rows_and_columns[] = {sizes.size() == 2 ? std::max<int64_t>(1, sizes.begin()[1]) : 1, 1};
  const int64_t* strides = rows_and_columns + 2 - sizes.size();
  AtenTensorHandle made = nullptr;
  if (aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides, type, device_type, device_index, &made) == AOTI_TORCH_SUCCESS)
    return Tensor(made);
  std::ostringstream shape;  // torch has told its own story on stderr
  for (const int64_t* size = sizes.begin(); size != sizes.end(); ++size) shape << (size == sizes.begin() ? "" : ", ") << *size;
  fail(operation, ": out of memory: a tensor of shape (", shape.str(), ") does not fit on ", device_name(like),
       "; free memory there or use a smaller batch.");
}

/// Scratch of a call on the device of `like`, aligned to `alignment` bytes. Nothing is allocated where nothing is needed.
class Workspace {
 public:
  Workspace(const char* operation, const Tensor& like, int64_t bytes, int64_t alignment) : alignment_(alignment) {
    if (bytes > 0) tensor_ = allocate(operation, like, {bytes + alignment}, ScalarType::Byte);
  }
  void* data() const {
    if (!tensor_) return nullptr;
    const auto address = reinterpret_cast<uintptr_t>(tensor_->data_ptr());
    return reinterpret_cast<void*>((address + alignment_ - 1) / alignment_ * alignment_);
  }

 private:
  int64_t alignment_;
  std::optional<Tensor> tensor_;
};

}  // namespace snack::torch_face
