// What the CUDA backend runs on. No CUDA header is needed to include this: a stream is CUDA's own opaque pointer.
#pragma once

#include <cstdint>
#include <string>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace snack {

struct CostTable;  // snack/plan/costs.hpp

/// What a plan needs to know of a card.
struct CudaCapability {
  int major = 0, minor = 0;      // compute capability
  int multiprocessors = 0;
  int64_t shared_bytes = 0;      // largest shared memory a block may ask for
  int64_t l2_bytes = 0;
  int64_t memory_gb_s = 0;       // bandwidth of the memory by its data sheet; 0: not known
  const CostTable* costs = nullptr;  // measured on this card; null: the built-in table, scaled. Lives as long as plans are made

  bool operator==(const CudaCapability&) const = default;
};

namespace cuda {

using Stream = CUstream_st*;

inline constexpr int kDevices = 64;  // the most that are used

/// Devices the driver shows; 0 without a driver or a card. Never throws.
int device_count();

/// Costs measured on a card with this table's capability, for all devices of that kind. Devices keep their plans, so it must come
/// before the first call of `capability`; throws Error when it comes later.
void use_costs(const CostTable& table);

/// Capability of a device, asked once and kept. Throws Error when it does not exist or when this binary has no code for it.
const CudaCapability& capability(int device);

/// The device that is current on this thread.
int current_device();

/// Architectures compiled into this binary, e.g. "80 90a 120+PTX"; empty when the library was built without CUDA.
const char* architectures();

/// Whether code for `architectures` (as above) runs on a card of that compute capability.
bool runs_on(const char* architectures, int major, int minor);

/// What the caller lends to a CUDA kernel. The launch is ordered on `stream`, whose device must be current; nothing is
/// allocated and the host never waits. `workspace`: at least Plan::workspace_bytes on the device, 256-byte aligned, not
/// shared with work that may run at the same time.
struct Resources {
  Stream stream = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

}  // namespace cuda
}  // namespace snack
