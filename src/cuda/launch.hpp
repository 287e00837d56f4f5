// How every kernel of this backend is started: dynamic shared memory raised once a device, the launch checked.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "snack/core/cuda.hpp"
#include "snack/core/error.hpp"

namespace snack::cuda {

inline void check(cudaError_t status, const char* operation) {
  SNACK_CHECK(status == cudaSuccess, operation, ": CUDA reports '", cudaGetErrorString(status), "'.");
}

inline constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

/// Starts kernel<<<blocks, threads, shared, stream>>>(args...). Throws Error when the launch is refused.
template <auto kKernel, class... Args>
void launch(const char* operation, int64_t blocks, int threads, int64_t shared, Stream stream, const Args&... args) {
  if (blocks <= 0) return;
  SNACK_CHECK(blocks <= kMaxGrid, operation, ": the problem needs ", blocks, " thread blocks, CUDA allows ", kMaxGrid, "; split the batch.");
  if (shared > 48 * 1024) {
    constexpr int kDevices = 64;
    static std::atomic<int64_t> granted[kDevices];  // what this kernel was allowed before, by device
    const int device = current_device();
    if (device >= kDevices || granted[device].load(std::memory_order_relaxed) < shared) {
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), operation);
      if (device < kDevices) granted[device].store(shared, std::memory_order_relaxed);
    }
  }
  kKernel<<<dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared), stream>>>(args...);
  check(cudaGetLastError(), operation);
}

}  // namespace snack::cuda
