// What belongs to a connection follows it: to[slot] = from[source[slot]], or the fill where source is below 0; then back in place.
// source grows within what stays, so that reads are nearly in order. Bytes: 4 a slot of source, and four times the element.
#pragma once

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

inline constexpr int kCarriedAtOnce = 4;
inline int64_t carry_blocks(int64_t count) { return ceil_div(count, kCarriedAtOnce * kThreads); }

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

template <class Word>
__global__ void __launch_bounds__(kThreads) put_back(const Word* from, int64_t count, Word* to, const ExchangeState* state) {
  await_stream();
  if (state->error != 0) return;
  const int64_t first = int64_t(blockIdx.x) * kCarriedAtOnce * kThreads + threadIdx.x;
  Word word[kCarriedAtOnce];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u)
    if (first + u * kThreads < count) word[u] = from[first + u * kThreads];
#pragma unroll
  for (int u = 0; u < kCarriedAtOnce; ++u)
    if (first + u * kThreads < count) to[first + u * kThreads] = word[u];
}

static __global__ void report_exchange(const ExchangeState* state, ExchangeResult* result) {
  await_stream();
  *result = {state->error == 0 ? state->drawing.wanted : 0, state->error};
}

/// Copies bytes to where they belong, unless there was an error, in the widest words that both addresses and the length allow.
inline void put_back_bytes(const char* operation, const void* from, void* to, int64_t bytes, const ExchangeState* state, Stream stream) {
  const auto run = [&](auto word) {
    using Word = decltype(word);
    const int64_t count = bytes / int64_t(sizeof(Word));
    launch<put_back<Word>>(operation, carry_blocks(count), kThreads, 0, stream, static_cast<const Word*>(from), count, static_cast<Word*>(to), state);
  };
  const uint64_t together = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  const int64_t whole = together % 16 == 0 ? bytes / 16 * 16 : 0;
  if (whole > 0) launch<put_back<uint4>>(operation, carry_blocks(whole / 16), kThreads, 0, stream, static_cast<const uint4*>(from), whole / 16, static_cast<uint4*>(to), state);
  if (whole == bytes) return;
  from = static_cast<const char*>(from) + whole, to = static_cast<char*>(to) + whole, bytes -= whole;
  const uint64_t all = together | uint64_t(bytes);
  if (all % 8 == 0) run(uint64_t{});
  else if (all % 4 == 0) run(uint32_t{});
  else if (all % 2 == 0) run(uint16_t{});
  else run(uint8_t{});
}

/// Moves one carried tensor through `scratch`, which holds as many elements.
inline void carry(const char* operation, const Carried& tensor, const float* fill, const int32_t* source, int64_t count, void* scratch, const ExchangeState* state,
                  Stream stream) {
  const auto gather = [&](auto element) {
    using Element = decltype(element);
    launch<gather_carried<Element>>(operation, carry_blocks(count), kThreads, 0, stream, static_cast<const Element*>(tensor.data), source, count, tensor.type, fill,
                                    static_cast<Element*>(scratch), state);
  };
  switch (size_of(tensor.type)) {
    case 1: gather(uint8_t{}); break;
    case 2: gather(uint16_t{}); break;
    case 4: gather(uint32_t{}); break;
    default: gather(uint64_t{}); break;
  }
  put_back_bytes(operation, scratch, tensor.data, count * size_of(tensor.type), state, stream);
}

}  // namespace snack::cuda
