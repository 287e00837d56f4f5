// What the operators on CUDA tensors share. libsnack_ops_cuda.so is linked against the libraries of a CPU-only PyTorch: the one symbol
// of libtorch_cuda is weak.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "compat.hpp"
#include "snack/core/cuda.hpp"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace snack::torch_face {

inline constexpr int64_t kAlignment = 256;  // of workspace

inline cuda::Stream current_stream(const char* operation, int32_t device) {
  SNACK_CHECK(aoti_torch_get_current_cuda_stream != nullptr, operation,
              ": this PyTorch is built without CUDA; install a CUDA build of it, or move the tensors to the CPU.");
  void* stream = nullptr;
  SNACK_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS, operation, ": PyTorch has no stream for cuda:",
              device, "; its own message stands above.");
  return static_cast<cuda::Stream>(stream);
}

}  // namespace snack::torch_face
