// Element types inside the files compiled once per instruction set: every type to its accumulator type and back.
// Included by them only, so everything is in an anonymous namespace and free of library templates (see stream.isa.cpp).
#pragma once

#include "isa.hpp"

#define HWY_COMPILE_ONLY_STATIC 1
#include <hwy/highway.h>

// Lambdas that return vectors must be inlined: a call would pass them through memory.
#define SNACK_INLINE __attribute__((always_inline))

namespace snack::cpu {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE float widen(float v) { return v; }
HWY_INLINE double widen(double v) { return v; }
HWY_INLINE float widen(BFloat16 v) {
  uint32_t word = uint32_t(v.bits) << 16;
  float out;
  __builtin_memcpy(&out, &word, 4);
  return out;
}

// Values of a segment in the accumulator type: a pointer to the originals, or a converted copy in `buffer`.
template <class A>
HWY_INLINE const A* load_values(const A* values, int64_t, A*) { return values; }
HWY_INLINE const float* load_values(const BFloat16* values, int64_t count, float* buffer) {
  for (int64_t i = 0; i < count; ++i) buffer[i] = widen(values[i]);
  return buffer;
}

// Half precision: by F16C from AVX2 on. Highway's emulation for older processors knows no Inf and NaN and truncates, so
// there the conversions of types.hpp are written again, without library templates.
#if HWY_TARGET <= HWY_AVX2
HWY_INLINE float widen(Half v) {
  const hn::CappedTag<float, 4> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> d16;
  HWY_ALIGN hwy::float16_t lanes[HWY_MAX_BYTES / 2] = {};
  __builtin_memcpy(lanes, &v.bits, 2);
  return hn::GetLane(hn::PromoteTo(d, hn::Load(d16, lanes)));
}
HWY_INLINE uint16_t half_bits(float v) {
  const hn::CappedTag<float, 4> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> d16;
  HWY_ALIGN hwy::float16_t lanes[HWY_MAX_BYTES / 2];
  hn::Store(hn::DemoteTo(d16, hn::Set(d, v)), d16, lanes);
  uint16_t bits;
  __builtin_memcpy(&bits, lanes, 2);
  return bits;
}
#else
HWY_INLINE uint32_t float_bits(float v) {
  uint32_t word;
  __builtin_memcpy(&word, &v, 4);
  return word;
}
HWY_INLINE float bits_float(uint32_t word) {
  float v;
  __builtin_memcpy(&v, &word, 4);
  return v;
}
HWY_INLINE float widen(Half v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, exponent = (v.bits >> 10) & 31u, mantissa = v.bits & 0x3ffu;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) return sign != 0 ? -float(mantissa) * 0x1p-24f : float(mantissa) * 0x1p-24f;
  return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
HWY_INLINE uint16_t half_bits(float v) {
  const uint32_t word = float_bits(v), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));  // subnormal
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
#endif

HWY_INLINE const float* load_values(const Half* values, int64_t count, float* buffer) {
  int64_t i = 0;
#if HWY_TARGET <= HWY_AVX2
  const hn::ScalableTag<float> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> d16;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto* in = reinterpret_cast<const hwy::float16_t*>(values);
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, in + i)), d, buffer + i);
#endif
  for (; i < count; ++i) buffer[i] = widen(values[i]);
  return buffer;
}

HWY_INLINE void narrow(float in, float* out) { *out = in; }
HWY_INLINE void narrow(double in, double* out) { *out = in; }
HWY_INLINE void narrow(float in, BFloat16* out) {
  uint32_t word;
  __builtin_memcpy(&word, &in, 4);
  const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  out->bits = uint16_t((word & 0x7fffffffu) > 0x7f800000u ? (word >> 16) | 0x40u : rounded);
}
HWY_INLINE void narrow(float in, Half* out) { out->bits = half_bits(in); }

}  // namespace
}  // namespace snack::cpu
