#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "launch.hpp"

#ifndef SNACK_CUDA_ARCHITECTURES
#error "the build defines SNACK_CUDA_ARCHITECTURES, the list of architectures in this binary"
#endif

namespace snack::cuda {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // no driver, or no card: not an error of anything that follows
  return 0;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "snack");
  return device;
}

const char* architectures() { return SNACK_CUDA_ARCHITECTURES; }

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "snack");
  return value;
}

CudaCapability ask(int device) {
  CudaCapability c;
  c.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  c.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  c.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  c.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  c.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  SNACK_CHECK(c.major >= 8, "snack: CUDA device ", device, " has compute capability ", c.major, ".", c.minor,
              "; the kernels need 8.0 or later. Use the CPU.");
  SNACK_CHECK(runs_on(architectures(), c.major, c.minor), "snack: CUDA device ", device, " has compute capability ", c.major, ".",
              c.minor, ", and this binary has code for ", architectures(), " only; build from source with -DSNACK_CUDA_ARCHITECTURES=",
              c.major, c.minor, ".");
  return c;
}

}  // namespace

const CudaCapability& capability(int device) {
  constexpr int kDevices = 64;
  static std::atomic<const CudaCapability*> known[kDevices];  // never freed: a card does not change
  if (device >= 0 && device < kDevices)
    if (const CudaCapability* capability = known[device].load(std::memory_order_acquire)) return *capability;
  const int count = std::min(device_count(), kDevices);
  SNACK_CHECK(device >= 0 && device < count, "snack: CUDA device ", device, " does not exist; the driver shows ", count, " devices.");
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (known[device].load(std::memory_order_acquire) == nullptr) known[device].store(new CudaCapability(ask(device)), std::memory_order_release);
  return *known[device].load(std::memory_order_acquire);
}

}  // namespace snack::cuda
