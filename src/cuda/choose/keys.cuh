// Keys: what is chosen by, as one integer. The bits of the number are followed by the number of the thing, so that no two keys are equal
// and ties are settled by order: the k smallest are the keys below one bound.
//
// Keys of 64 bits are (up to 31 bits of a float, up to 32 of a number), those of 128 (up to 63 of a double, up to 62). The top bit is free; in lists
// it holds the class.
#pragma once

#include <type_traits>

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
__device__ __forceinline__ Key tagged(Key key, int which) { return key | Key(which) << (8 * sizeof(Key) - 1); }
template <class Key>
__device__ __forceinline__ int class_of(Key tagged_key) { return int(tagged_key >> (8 * sizeof(Key) - 1)); }
template <class Key>
__device__ __forceinline__ Key untagged(Key tagged_key) { return tagged_key & ~(Key(1) << (8 * sizeof(Key) - 1)); }

/// Which values count, and for what.
enum class Classes : int { kAny, kPositive, kNegative, kBoth };  // kBoth: two classes, 0 values >= 0 and NaN, 1 negative ones

/// The same number of another lane.
template <class Key>
__device__ __forceinline__ Key shuffled_xor(Key key, int lanes) {
  if constexpr (sizeof(Key) == 8) return __shfl_xor_sync(~0u, key, lanes);
  else
    return Key(__shfl_xor_sync(~0u, static_cast<unsigned long long>(key), lanes)) |
           Key(__shfl_xor_sync(~0u, static_cast<unsigned long long>(key >> 64), lanes)) << 64;
}

/// Keys of values by |value|, NaN largest. Key64: float32, float16, bfloat16; Key128: float64. The bits of a value without its sign sort
/// like |value| in every type.
template <class KeyType>
struct ValueKeys {
  using Key = KeyType;
  using Raw = std::conditional_t<sizeof(Key) == 8, uint32_t, uint64_t>;  // holds the bits of a value

  const void* values;
  int64_t slots;
  Raw infinity;  // its bits
  Classes classes;
  bool is_short;  // values of 16 bits
  int value_bits, index_bits;

  __device__ int64_t count() const { return slots; }
  __device__ int key_bits() const { return value_bits - 1 + index_bits; }
  __device__ int class_count() const { return classes == Classes::kBoth ? 2 : 1; }

  __device__ __forceinline__ Raw load(int64_t slot) const {
    return is_short ? Raw(static_cast<const uint16_t*>(values)[slot]) : static_cast<const Raw*>(values)[slot];
  }
  /// Whether values of a sign count.
  __device__ bool counts(bool is_negative) const { return classes != (is_negative ? Classes::kPositive : Classes::kNegative); }
  /// Whether the value with these bits is negative, which -0 and NaN are not; *magnitude: the bits of |value|, all ones of NaN.
  __device__ __forceinline__ bool split(Raw bits, Raw* magnitude) const {
    const Raw sign = Raw(1) << (value_bits - 1);
    *magnitude = bits & (sign - 1);
    const bool is_nan = *magnitude > infinity, is_negative = bits > sign && !is_nan;
    if (is_nan) *magnitude = sign - 1;
    return is_negative;
  }
  __device__ __forceinline__ bool at(int64_t slot, Key* key, int* which) const {
    Raw magnitude;
    const bool is_negative = split(load(slot), &magnitude);
    *key = (Key(magnitude) << index_bits) | Key(slot);
    *which = is_negative && classes == Classes::kBoth;
    return counts(is_negative);
  }
};

template <class Key>
ValueKeys<Key> value_keys(DType dtype, const void* values, int64_t nnz, Classes classes) {
  using Raw = typename ValueKeys<Key>::Raw;
  const uint64_t infinity = dtype == DType::kFloat64    ? 0x7ff0000000000000ull
                            : dtype == DType::kFloat32  ? 0x7f800000u
                            : dtype == DType::kBFloat16 ? 0x7f80u
                                                        : 0x7c00u;
  return {values, nnz, Raw(infinity), classes, size_of(dtype) == 2, int(8 * size_of(dtype)), bits_for(nnz)};
}

}  // namespace snack::cuda
