// How every kernel of this backend is started: dynamic shared memory raised once a device, the launch checked.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "snack/core/cuda.hpp"
#include "snack/core/error.hpp"

namespace snack::cuda {

/// Throws Error and takes the failure off CUDA's record, so that the caller's next check does not meet it.
inline void check(cudaError_t status, const char* operation) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  fail(operation, ": CUDA reports '", cudaGetErrorString(status), "'.");
}

inline constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

/// Starts kernel<<<blocks, threads, shared, stream>>>(args...). Throws Error when the launch is refused.
template <auto kKernel, class... Args>
void launch(const char* operation, int64_t blocks, int threads, int64_t shared, Stream stream, const Args&... args) {
  if (blocks <= 0) return;
  SNACK_CHECK(blocks <= kMaxGrid, operation, ": the problem needs ", blocks, " thread blocks, CUDA allows ", kMaxGrid, "; split the batch.");
  constexpr int64_t kWithoutAsking = 40 * 1024;  // CUDA's 48 KiB, less room for what a kernel holds statically
  if (shared > kWithoutAsking) {
    constexpr int kDevices = 64;
    static std::atomic<int64_t> granted[kDevices];  // what this kernel was allowed before, by device
    const int device = current_device();
    if (device >= kDevices || granted[device].load(std::memory_order_relaxed) < shared) {
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), operation);
      if (device < kDevices) granted[device].store(shared, std::memory_order_relaxed);
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared);
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kKernel, args...);  // unlike <<<>>>, it tells an older error from its own
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  fail(operation, ": CUDA reports '", cudaGetErrorString(status), "' for ", blocks, " blocks of ", threads, " threads and ", shared,
       " bytes of shared memory.");
}

}  // namespace snack::cuda
