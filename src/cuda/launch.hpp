// How every kernel of this backend is started: dynamic shared memory raised once a device, the launch checked.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

/// What every kernel calls before it reads or writes global memory: launch() may start it while the kernel before it on the stream
/// still runs. Returns when that one is done and its results are there. What it wrote was not constant while this kernel ran, so kernels
/// know no __restrict__ and no __ldg().
__device__ __forceinline__ void await_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel on the stream start, which waits for this one to end; without it, it starts when all blocks have ended. Not
/// for every kernel: blocks that come while others end lie unevenly, which costs more than an early start saves.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// What is known of a kernel on a device.
struct KernelFacts {
  std::atomic<int> architecture{0};  // of the code that runs there: 80, 90, …; 0: CUDA was not asked yet
  std::atomic<bool> has_room{false};  // it may have all the shared memory there is
  std::atomic<int> window{-1};       // bytes that an access policy may be for; below 0: CUDA was not asked yet

  int64_t most_window(int device, const char* operation) {
    int bytes = window.load(std::memory_order_relaxed);
    if (bytes >= 0) return bytes;
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxAccessPolicyWindowSize, device), operation);
    window.store(bytes, std::memory_order_relaxed);
    return bytes;
  }
};

/// What a launch reads or writes that leaves the L2 cache before all else does; null: nothing. Beyond the largest window of the
/// card (128 MiB on an H200) data is treated like all else.
struct EvictFirst {
  const void* data = nullptr;
  int64_t bytes = 0;
};

/// Starts kernel<<<blocks, threads, shared, stream>>>(args...), which calls await_stream(). Throws Error when the launch is refused.
template <auto kKernel, class... Args>
void launch(const EvictFirst& first, const char* operation, int64_t blocks, int threads, int64_t shared, Stream stream, const Args&... args) {
  if (blocks <= 0) return;
  SNACK_CHECK(blocks <= kMaxGrid, operation, ": the problem needs ", blocks, " thread blocks, CUDA allows ", kMaxGrid, "; split the batch.");
  static KernelFacts facts[kDevices];
  const int device = current_device();
  const CudaCapability& card = capability(device);  // throws beyond kDevices
  KernelFacts& known = facts[device];
  constexpr int64_t kWithoutAsking = 40 * 1024;  // CUDA's 48 KiB, less room for what a kernel holds statically
  const bool needs_room = shared > kWithoutAsking && !known.has_room.load(std::memory_order_relaxed);
  int architecture = known.architecture.load(std::memory_order_relaxed);
  if (architecture == 0 || needs_room) {
    cudaFuncAttributes code;
    check(cudaFuncGetAttributes(&code, kKernel), operation);
    if (needs_room) {
      const int most = int(card.shared_bytes - int64_t(code.sharedSizeBytes));
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), operation);
      known.has_room.store(true, std::memory_order_relaxed);
    }
    known.architecture.store(architecture = code.ptxVersion, std::memory_order_relaxed);
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (architecture >= 90) {  // programmatic dependent launch: the kernel itself waits for the stream, which older code does not
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (const int64_t most = first.data == nullptr ? 0 : known.most_window(device, operation); most > 0) {
    attributes[count].id = cudaLaunchAttributeAccessPolicyWindow;
    cudaAccessPolicyWindow& window = attributes[count++].val.accessPolicyWindow;
    window.base_ptr = const_cast<void*>(first.data);
    window.num_bytes = size_t(std::min(first.bytes, most));
    window.hitRatio = 1;
    window.hitProp = cudaAccessPropertyStreaming;
    window.missProp = cudaAccessPropertyNormal;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t status = cudaLaunchKernelEx(&config, kKernel, args...);  // unlike <<<>>>, it tells an older error from its own
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  fail(operation, ": CUDA reports '", cudaGetErrorString(status), "' for ", blocks, " blocks of ", threads, " threads and ", shared,
       " bytes of shared memory.");
}
template <auto kKernel, class... Args>
void launch(const char* operation, int64_t blocks, int threads, int64_t shared, Stream stream, const Args&... args) {
  launch<kKernel>(EvictFirst{}, operation, blocks, threads, shared, stream, args...);
}

}  // namespace snack::cuda
