#include "snack/kernels/sddmm.hpp"

#include "run.cuh"

namespace snack::cuda {

/// The sink of sddmm. Written: nnz * value.
template <class T>
struct StoreGradient {
  using Element = T;
  static constexpr int kAhead = 2;  // chunks whose words are under way
  T* dvalues;
  bool aligned;  // dvalues lie on 16 bytes

  const T* rewritten() const { return nullptr; }
  __device__ __forceinline__ const StoreGradient& started() const { return *this; }
  __device__ __forceinline__ void one(int64_t slot, float gradient) const { dvalues[slot] = from_float<T>(gradient); }
  struct Nothing {};
  __device__ __forceinline__ Nothing early(size_t) const { return {}; }
  template <int kSlots>
  __device__ __forceinline__ void chunk(size_t slot, const float (&gradient)[kSlots], Nothing) const {
    alignas(16) T element[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) element[i] = from_float<T>(gradient[i]);
    if (aligned) {
      *reinterpret_cast<uint4*>(dvalues + slot) = *reinterpret_cast<const uint4*>(element);
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) dvalues[slot + i] = element[i];
    }
  }
};

void sddmm(const SddmmArgs& args, const Plan& plan, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  if (g.nnz == 0) return;
  check({Operation::kSddmm, g, args.x.rows, args.dtype}, plan, resources);
  with_device_type("sddmm", args.dtype, [&](auto element) {
    using Sink = StoreGradient<decltype(element)>;
    auto* dvalues = static_cast<decltype(element)*>(args.dvalues);
    SddmmRun<Sink, SddmmArgs>("sddmm", args, plan, resources.stream, Sink{dvalues, is_aligned_16(dvalues)})();
  });
}

}  // namespace snack::cuda
