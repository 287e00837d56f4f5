// Keys: what is chosen by, as one integer. The bits of the number are followed by the number of the thing, so that no two keys are equal
// and ties are settled by order: the k smallest are the keys below one bound.
//
// Keys of 64 bits are (31 bits of a float, up to 32 of a number), those of 128 (63 of a double or 31, up to 62). The top bit is free; in lists
// it holds the class.
#pragma once

#include "../element.cuh"
#include "snack/core/random.hpp"

namespace snack::cuda {

using Key64 = unsigned long long;
using Key128 = uint128;

/// Bits that tell numbers 0 .. count - 1 apart.
inline int bits_for(int64_t count) {
  int bits = 0;
  while (bits < 63 && (int64_t{1} << bits) < count) ++bits;
  return bits;
}

template <class Key>
constexpr int score_bits() { return sizeof(Key) == 8 ? 31 : 63; }

template <class Key>
__device__ __forceinline__ Key tagged(Key key, int which) { return key | Key(which) << (8 * sizeof(Key) - 1); }
template <class Key>
__device__ __forceinline__ int class_of(Key tagged_key) { return int(tagged_key >> (8 * sizeof(Key) - 1)); }
template <class Key>
__device__ __forceinline__ Key untagged(Key tagged_key) { return tagged_key & ~(Key(1) << (8 * sizeof(Key) - 1)); }

/// Which values count, and for what.
enum class Classes : int { kAny, kPositive, kNegative, kBoth };  // kBoth: two classes, 0 values >= 0 and NaN, 1 negative ones

/// Keys of values by |value|, NaN largest. Key64: float32, float16, bfloat16; Key128: float64.
template <class KeyType>
struct ValueKeys {
  using Key = KeyType;
  using Raw = std::conditional_t<sizeof(Key) == 8, uint32_t, uint64_t>;  // the bits as they lie in memory
  static constexpr Raw kSign = Raw(1) << (8 * sizeof(Raw) - 1);
  static constexpr Raw kInfinity = sizeof(Raw) == 4 ? Raw(0x7f800000u) : Raw(0x7ff0000000000000ull);

  const void* values;
  DType dtype;
  int64_t slots;
  int index_bits;
  Classes classes;

  __device__ int64_t count() const { return slots; }
  __device__ int key_bits() const { return score_bits<Key>() + index_bits; }
  __device__ int class_count() const { return classes == Classes::kBoth ? 2 : 1; }

  __device__ __forceinline__ bool is_short() const { return sizeof(Key) == 8 && dtype != DType::kFloat32; }
  __device__ __forceinline__ Raw load_whole(int64_t slot) const { return static_cast<const Raw*>(values)[slot]; }
  __device__ __forceinline__ Raw load_short(int64_t slot) const { return static_cast<const uint16_t*>(values)[slot]; }
  __device__ __forceinline__ Raw widen(Raw bits) const {
    if (!is_short()) return bits;
    if (dtype == DType::kBFloat16) return bits << 16;
    return Raw(__float_as_uint(__half2float(__ushort_as_half(uint16_t(bits)))));
  }

  /// Whether the value with these bits counts; its key and class.
  __device__ __forceinline__ bool key_of(Raw bits, int64_t slot, Key* key, int* which) const {
    const Raw magnitude = bits & ~kSign;
    const bool is_nan = magnitude > kInfinity, is_negative = (bits & kSign) != 0 && magnitude != 0 && !is_nan;
    *key = (Key(is_nan ? Raw(~kSign) : magnitude) << index_bits) | Key(slot);
    *which = classes == Classes::kBoth && is_negative;
    return classes == Classes::kAny || classes == Classes::kBoth || is_negative == (classes == Classes::kNegative);
  }
  __device__ __forceinline__ bool at(int64_t slot, Key* key, int* which) const {
    return key_of(widen(is_short() ? load_short(slot) : load_whole(slot)), slot, key, which);
  }
};

template <class Key>
ValueKeys<Key> value_keys(DType dtype, const void* values, int64_t nnz, Classes classes) { return {values, dtype, nnz, bits_for(nnz), classes}; }

}  // namespace snack::cuda
