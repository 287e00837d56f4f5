// What one block of kChooseThreads threads does together: sums, the last block of a grid, the key of a rank.
#pragma once

#include "../launch.hpp"
#include "keys.cuh"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {

inline constexpr int kChooseThreads = 512;
inline constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

/// Where a rank lies in a row of bins.
struct FoundBin {
  int bin;                      // -1: the rank lies beyond them all
  int64_t before, inside, all;  // things in the bins before it, in it, in all bins
};

/// Inclusive sum over the block; *total: of all its threads, a multiple of 32, who all call it.
__device__ __forceinline__ int64_t inclusive_sum(int64_t value, int64_t (&warp_sums)[32], int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before += warp_sums[w];
    all += warp_sums[w];
  }
  __syncthreads();
  *total = all;
  return before + value;
}

/// Whether all other blocks of the grid have passed here; what they wrote before can be read then, past the L1 cache.
__device__ __forceinline__ bool is_last_block(unsigned* tickets, bool& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for the whole block, which has met before
    is_last = atomicAdd(tickets, 1u) == gridDim.x - 1;
    if (is_last) *tickets = 0;  // for the next kernel
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

/// Memory that other blocks have written while this kernel runs.
template <class T>
__device__ __forceinline__ T fresh(const T* p) {
  static_assert(sizeof(T) % 8 == 0 || sizeof(T) == 4);
  if constexpr (sizeof(T) == 4) {
    return T(__ldcg(reinterpret_cast<const unsigned*>(p)));
  } else {
    const auto* words = reinterpret_cast<const unsigned long long*>(p);
    if constexpr (sizeof(T) == 8) return T(__ldcg(words));
    else return T(__ldcg(words)) | T(__ldcg(words + 1)) << 64;
  }
}

/// The bin that holds the thing of that rank, from 0, where bin i holds count_of(i). bins: a multiple of the threads.
template <class CountOf>
__device__ __forceinline__ FoundBin find_bin(const CountOf& count_of, int bins, int64_t rank, int64_t (&warp_sums)[32], FoundBin& result) {
  const int share = bins / int(blockDim.x), first = int(threadIdx.x) * share;
  int64_t mine = 0, all;
  for (int i = 0; i < share; ++i) mine += count_of(first + i);
  if (threadIdx.x == 0) result.bin = -1;
  int64_t before = inclusive_sum(mine, warp_sums, &all) - mine;
  if (threadIdx.x == 0) result.all = all;
  if (rank >= before && rank < before + mine) {
    for (int i = 0; i < share; ++i) {
      const int64_t inside = count_of(first + i);
      if (rank >= before && rank < before + inside) result.bin = first + i, result.before = before, result.inside = inside;
      before += inside;
    }
  }
  __syncthreads();
  const FoundBin found = result;
  __syncthreads();
  return found;
}

/// The shift by which numbers up to `range` fall into 2^bits bins.
template <class Key>
__device__ __forceinline__ int shift_for(Key range, int bits) {
  int length = 64 - __clzll(static_cast<long long>(range));
  if constexpr (sizeof(Key) == 16)
    if (range >> 64 != 0) length = 128 - __clzll(static_cast<long long>(range >> 64));
  return max(0, length - bits);
}

template <class Key>
struct SelectScratch {
  int64_t warp[32];
  unsigned counts[kDigits], carries[kDigits];  // of a bin: carries * 2^32 + counts
  Key lowest[32], highest[32];                 // of each warp
  Key found;
  FoundBin bin;
  bool is_last;
};

/// The key of that rank, where no two are equal, and rank lies below their number. key_at(i, &key): whether thing i < count has a key. A
/// histogram of the keys that are left, of 2,048 bins, at a time.
template <class Key, class KeyAt>
__device__ Key select_key(int64_t count, int64_t rank, const KeyAt& key_at, SelectScratch<Key>& s) {
  Key base = ~Key{0}, range = 0;  // the key lies in base .. base + range
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    Key key;
    if (!key_at(i, &key)) continue;
    if (key < base) base = key;
    if (key > range) range = key;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const Key low = shuffled_xor(base, d), high = shuffled_xor(range, d);
    if (low < base) base = low;
    if (high > range) range = high;
  }
  if (threadIdx.x % 32 == 0) s.lowest[threadIdx.x / 32] = base, s.highest[threadIdx.x / 32] = range;
  __syncthreads();
  for (int warp = 0; warp < int(blockDim.x / 32); ++warp) {
    if (s.lowest[warp] < base) base = s.lowest[warp];
    if (s.highest[warp] > range) range = s.highest[warp];
  }
  range -= base;

  const bool may_carry = count > int64_t(~0u);
  int64_t inside = 2;
  while (range > 0 && inside > 1) {
    const int shift = shift_for(range, kDigitBits);
    for (int i = threadIdx.x; i < kDigits; i += blockDim.x) s.counts[i] = s.carries[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      Key key;
      if (!key_at(i, &key) || key < base || key - base > range) continue;
      const int bin = int((key - base) >> shift);
      if (!may_carry) atomicAdd(&s.counts[bin], 1u);
      else if (atomicAdd(&s.counts[bin], 1u) == ~0u) atomicAdd(&s.carries[bin], 1u);
    }
    __syncthreads();
    const FoundBin found = find_bin([&](int i) { return int64_t(uint64_t(s.carries[i]) << 32 | s.counts[i]); }, kDigits, rank, s.warp, s.bin);
    base += Key(found.bin) << shift;
    range = (Key(1) << shift) - 1;
    rank -= found.before;
    inside = found.inside;
  }
  if (range == 0) return base;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    Key key;
    if (key_at(i, &key) && key >= base && key - base <= range) s.found = key;
  }
  __syncthreads();
  const Key key = s.found;
  __syncthreads();
  return key;
}

}  // namespace snack::cuda
