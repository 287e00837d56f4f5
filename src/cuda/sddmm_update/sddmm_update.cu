#include "snack/kernels/sddmm_update.hpp"

#include "../sddmm/run.cuh"

namespace snack::cuda {

/// The sink of sddmm_update: values and state are read, changed by the rule and written. Moved: nnz * value * 2 * (1 + states).
template <class T, class Rule>
struct UpdateValues {
  using Element = T;
  static constexpr int kStates = Rule::kStates;
  Rule rule;
  const float *lr, *step;
  T *values, *state0, *state1;
  bool aligned;  // values and states lie on 16 bytes

  /// What is read and written, unless states are as well: then nothing of it stays anyway.
  const T* rewritten() const { return kStates == 0 ? values : nullptr; }
  __device__ __forceinline__ UpdateValues started() const {
    UpdateValues sink = *this;
    sink.rule.read(lr, step);
    return sink;
  }

  __device__ __forceinline__ void one(int64_t slot, float gradient) const {
    float state[2] = {};
    if constexpr (kStates > 0) state[0] = to_float(state0[slot]);
    if constexpr (kStates > 1) state[1] = to_float(state1[slot]);
    values[slot] = from_float<T>(rule(to_float(values[slot]), gradient, state));
    if constexpr (kStates > 0) state0[slot] = from_float<T>(state[0]);
    if constexpr (kStates > 1) state1[slot] = from_float<T>(state[1]);
  }

  // 16 bytes of each array. With two states they would not fit into the registers while the products are made.
  static constexpr bool kIsEarly = kStates < 2;
  static constexpr int kAhead = kIsEarly ? 2 : 1;
  static constexpr int kSlots = 16 / sizeof(T);
  struct alignas(16) Loaded {
    T element[1 + kStates][kSlots];
  };

  __device__ __forceinline__ Loaded early(size_t slot) const {
    Loaded loaded;
    if (kIsEarly && aligned) load(slot, loaded);
    return loaded;
  }

  __device__ __forceinline__ void chunk(size_t slot, const float (&gradient)[kSlots], Loaded loaded) const {
    if (!aligned) {
#pragma unroll
      for (int k = 0; k < kSlots; ++k) one(slot + k, gradient[k]);
      return;
    }
    if (!kIsEarly) load(slot, loaded);
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      float state[2] = {};
#pragma unroll
      for (int i = 0; i < kStates; ++i) state[i] = to_float(loaded.element[1 + i][k]);
      loaded.element[0][k] = from_float<T>(rule(to_float(loaded.element[0][k]), gradient[k], state));
#pragma unroll
      for (int i = 0; i < kStates; ++i) loaded.element[1 + i][k] = from_float<T>(state[i]);
    }
    each(slot, [&](int a, uint4& four) { four = *reinterpret_cast<const uint4*>(loaded.element[a]); });
  }

 private:
  // f(array, its 16 bytes of the slots).
  template <class F>
  __device__ __forceinline__ void each(size_t slot, F&& f) const {
    T* const arrays[] = {values, state0, state1};
#pragma unroll
    for (int a = 0; a < 1 + kStates; ++a) f(a, *reinterpret_cast<uint4*>(arrays[a] + slot));
  }
  __device__ __forceinline__ void load(size_t slot, Loaded& loaded) const {
    each(slot, [&](int a, const uint4& four) { *reinterpret_cast<uint4*>(loaded.element[a]) = four; });
  }
};

void sddmm_update(const SddmmUpdateArgs& args, const Plan& plan, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  if (g.nnz == 0) return;
  check({Operation::kSddmmUpdate, g, args.x.rows, args.dtype}, plan, resources);
  with_device_type("sddmm_update", args.dtype, [&](auto element) {
    using T = decltype(element);
    with_rule<float>(args, [&](auto rule) {
      using Sink = UpdateValues<T, decltype(rule)>;
      const bool aligned = is_aligned_16(args.values) && is_aligned_16(args.state[0]) && is_aligned_16(args.state[1]);
      const Sink sink{rule, args.lr, args.step, static_cast<T*>(args.values), static_cast<T*>(args.state[0]), static_cast<T*>(args.state[1]), aligned};
      SddmmRun<Sink, SddmmUpdateArgs>("sddmm_update", args, plan, resources.stream, sink)();
    });
  });
}

}  // namespace snack::cuda
