// What belongs to a connection follows it, out of place; and what was made out of place is put where it belongs, unless there was an error.
#pragma once

#include "../layout.hpp"
#include "state.cuh"

namespace snack::cuda {

/// The bits of `fill` as an element of that type.
__device__ __forceinline__ uint64_t fill_bits(CarriedType type, float fill) {
  switch (type) {
    case CarriedType::kFloat32: return __float_as_uint(fill);
    case CarriedType::kFloat16: return __half_as_ushort(__float2half_rn(fill));
    case CarriedType::kBFloat16: return __bfloat16_as_ushort(__float2bfloat16_rn(fill));
    case CarriedType::kFloat64: return uint64_t(__double_as_longlong(double(fill)));
    case CarriedType::kBool: return fill != 0;
    default: return uint64_t(int64_t(fill));
  }
}

/// Calls f with an unsigned integer as long as an element of that type.
template <class F>
__host__ __device__ __forceinline__ void with_element(CarriedType type, F&& f) {
  switch (size_of(type)) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    default: return f(uint64_t{});
  }
}

inline constexpr int kCarriedAtOnce = 4;
inline int64_t carry_blocks(int64_t count) { return ceil_div(count, kCarriedAtOnce * kThreads); }

/// to[slot] = from[source[slot]], or the fill where source is below 0. source grows within what stays, so reads are nearly in order.
template <class Element>
__global__ void __launch_bounds__(kThreads) gather_carried(const Element* from, const int32_t* source, int64_t count, CarriedType type, const float* fill, Element* to,
                                                           const ExchangeState* state) {
  await_stream();
  if (state->error != 0) return;
  const int64_t first = int64_t(blockIdx.x) * kCarriedAtOnce * kThreads + threadIdx.x;
  const Element grown = Element(fill_bits(type, *fill));
  int32_t slot[kCarriedAtOnce];
  Element element[kCarriedAtOnce];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u) slot[u] = first + u * kThreads < count ? source[first + u * kThreads] : -1;
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u) element[u] = slot[u] < 0 ? grown : from[slot[u]];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u)
    if (first + u * kThreads < count) to[first + u * kThreads] = element[u];
}

inline constexpr int kMostRegions = int(kMaxCarried) + 2;  // and tile pointers and row starts

/// Copies of several regions: blocks of kCarriedAtOnce * kThreads words each, the widest words that the addresses allow.
struct Copies {
  struct Region {
    const char* from;
    char* to;
    int64_t bytes, first_block;
    int word;
  };
  Region region[kMostRegions];
  int count = 0;
  int64_t blocks = 0;

  void add(const void* from, void* to, int64_t bytes) {
    if (bytes == 0) return;
    const uint64_t together = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
    int word = 16;
    while (together % uint64_t(word) != 0) word /= 2;
    region[count++] = {static_cast<const char*>(from), static_cast<char*>(to), bytes, blocks, word};
    blocks += carry_blocks(ceil_div(bytes, word));
  }
};

template <class Word>
__device__ __forceinline__ void copy_block(const Copies::Region& r, int64_t block) {
  const auto* from = reinterpret_cast<const Word*>(r.from);
  auto* to = reinterpret_cast<Word*>(r.to);
  const int64_t words = r.bytes / int64_t(sizeof(Word)), first = block * kCarriedAtOnce * kThreads + threadIdx.x;
  Word word[kCarriedAtOnce];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u)
    if (first + u * kThreads < words) word[u] = from[first + u * kThreads];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u)
    if (first + u * kThreads < words) to[first + u * kThreads] = word[u];
  // The end of the region, shorter than a word.
  const int64_t whole = words * int64_t(sizeof(Word));
  if (block == 0 && threadIdx.x < r.bytes - whole) r.to[whole + threadIdx.x] = r.from[whole + threadIdx.x];
}

/// Puts everything where it belongs, unless there was an error; result: null, or what is told in the end.
static __global__ void __launch_bounds__(kThreads) put_back(const __grid_constant__ Copies copies, const ExchangeState* state, ExchangeResult* result) {
  await_stream();
  if (blockIdx.x == 0 && threadIdx.x == 0 && result != nullptr) *result = {state->error == 0 ? state->drawing.wanted : 0, state->error};
  if (state->error != 0) return;
  int at = 0;
  while (at + 1 < copies.count && copies.region[at + 1].first_block <= int64_t(blockIdx.x)) ++at;
  const Copies::Region& r = copies.region[at];
  const int64_t block = int64_t(blockIdx.x) - r.first_block;
  switch (r.word) {
    case 16: return copy_block<uint4>(r, block);
    case 8: return copy_block<uint64_t>(r, block);
    case 4: return copy_block<uint32_t>(r, block);
    case 2: return copy_block<uint16_t>(r, block);
    default: return copy_block<uint8_t>(r, block);
  }
}

}  // namespace snack::cuda
