#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "launch.hpp"
#include "snack/plan/costs.hpp"

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

// Gigabytes a second, from kilohertz of a memory that moves two bits a line and beat; 0 where the driver does not tell.
int64_t memory_gb_s(int device) {
  int kilohertz = 0, bits = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess)
    return int64_t{2} * kilohertz * bits / 8 / 1000000;
  (void)cudaGetLastError();
  return 0;
}

CudaCapability ask(int device) {
  CudaCapability c;
  c.major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  c.minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  c.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  c.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  c.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  c.memory_gb_s = memory_gb_s(device);
  SNACK_CHECK(c.major >= 8, "snack: CUDA device ", device, " has compute capability ", c.major, ".", c.minor,
              "; the kernels need 8.0 or later. Use the CPU.");
  SNACK_CHECK(runs_on(architectures(), c.major, c.minor), "snack: CUDA device ", device, " has compute capability ", c.major, ".",
              c.minor, ", and this binary has code for ", architectures(), " only; build from source with -DSNACK_CUDA_ARCHITECTURES=",
              c.major, c.minor, ".");
  return c;
}

std::mutex mutex;  // of what follows; nothing is freed: a card does not change, and plans keep their tables
std::atomic<const CudaCapability*> known[kDevices];
std::vector<const CostTable*> tables;

}  // namespace

void use_costs(const CostTable& table) {
  const std::lock_guard lock(mutex);
  for (const auto& device : known)
    SNACK_CHECK(device.load() == nullptr, "use_costs: plans have been made already, and they must not change; load the table before the first product.");
  tables.push_back(new CostTable(table));
}

const CudaCapability& capability(int device) {
  if (device >= 0 && device < kDevices)
    if (const CudaCapability* capability = known[device].load(std::memory_order_acquire)) return *capability;
  const int count = std::min(device_count(), kDevices);
  SNACK_CHECK(device >= 0 && device < count, "snack: CUDA device ", device, " does not exist; the driver shows ", count, " devices.");
  const std::lock_guard lock(mutex);
  if (known[device].load(std::memory_order_acquire) == nullptr) {
    CudaCapability card = ask(device);
    const auto is_of_card = [&](const CostTable* table) { return table->capability == card; };
    const auto found = std::find_if(tables.rbegin(), tables.rend(), is_of_card);
    if (found != tables.rend()) card.costs = *found;
    known[device].store(new CudaCapability(card), std::memory_order_release);
  }
  return *known[device].load(std::memory_order_acquire);
}

}  // namespace snack::cuda
