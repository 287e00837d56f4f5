// Counter-based random numbers: draw i of a stream depends on (key, i) alone, so that every device, thread count and
// resumed run sees the same numbers. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#pragma once

#include <cstdint>

namespace snack {

constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15ull;

constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

/// Draw number `i` of the stream `key`: 64 uniform bits.
constexpr uint64_t random_bits(uint64_t key, uint64_t i) { return mix64(key + (i + 1) * kGoldenGamma); }

__extension__ using uint128 = unsigned __int128;

/// A draw mapped to [0, bound). The bias is below bound / 2^64.
constexpr uint64_t bounded(uint64_t bits, uint64_t bound) {
  return static_cast<uint64_t>((static_cast<uint128>(bits) * bound) >> 64);
}

}  // namespace snack
