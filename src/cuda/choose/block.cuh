// What one block of kChooseThreads threads does together: sums, the last block of a grid, the key of a rank.
#pragma once

#include "../launch.hpp"
#include "plan/cuda_layout.hpp"
#include "snack/core/random.hpp"

namespace snack::cuda {

inline constexpr int kChooseThreads = 1024;
inline constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

struct alignas(16) BlockScratch {
  int64_t warp[32];
  unsigned long long counts[kDigits];
  int bin;
  int64_t before, inside;
  unsigned long long found[2];
  bool is_last;
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
__device__ __forceinline__ bool is_last_block(unsigned* tickets, BlockScratch& s) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.is_last = atomicAdd(tickets, 1u) == gridDim.x - 1;
    if (s.is_last) *tickets = 0;  // for the next kernel
  }
  __syncthreads();
  if (s.is_last) __threadfence();
  return s.is_last;
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

struct FoundBin {
  int bin;                   // -1: the rank lies beyond them all
  int64_t before, inside, all;  // things in the bins before it, in it, in all bins
};

/// The bin that holds the thing of that rank, from 0. bins: a multiple of the threads.
__device__ __forceinline__ FoundBin find_bin(const unsigned long long* counts, int bins, int64_t rank, BlockScratch& s) {
  const int share = bins / int(blockDim.x), first = int(threadIdx.x) * share;
  int64_t mine = 0, all;
  for (int i = 0; i < share; ++i) mine += int64_t(counts[first + i]);
  if (threadIdx.x == 0) s.bin = -1;
  int64_t before = inclusive_sum(mine, s.warp, &all) - mine;
  if (rank >= before && rank < before + mine) {
    for (int i = 0; i < share; ++i) {
      const int64_t inside = int64_t(counts[first + i]);
      if (rank >= before && rank < before + inside) s.bin = first + i, s.before = before, s.inside = inside;
      before += inside;
    }
  }
  __syncthreads();
  const FoundBin found{s.bin, s.before, s.inside, all};
  __syncthreads();
  return found;
}

/// A run of keys: those whose bits above `bits` are those of `first`.
template <class Key>
struct KeyRun {
  Key first;
  int bits;
  int64_t before, inside;  // keys below it, and in it
};

/// A run that holds the key of that rank, of `enough` keys at most or of one value. key_at(i, &key): whether thing i < count has a key,
/// of key_bits bits. rank must lie below their number. A histogram of 11 bits of the keys at a time.
template <class Key, class KeyAt>
__device__ KeyRun<Key> select_run(int64_t count, int64_t rank, int key_bits, int64_t enough, const KeyAt& key_at, BlockScratch& s) {
  KeyRun<Key> run{0, key_bits, 0, enough + 1};
  while (run.bits > 0 && run.inside > enough) {
    const int digit_bits = min(kDigitBits, run.bits), shift = run.bits - digit_bits;
    for (int i = threadIdx.x; i < kDigits; i += blockDim.x) s.counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      Key key;
      if (key_at(i, &key) && (key >> run.bits) == (run.first >> run.bits)) atomicAdd(&s.counts[int(key >> shift) & ((1 << digit_bits) - 1)], 1ull);
    }
    __syncthreads();
    const FoundBin found = find_bin(s.counts, kDigits, rank - run.before, s);
    run.first |= Key(found.bin) << shift;
    run.before += found.before;
    run.inside = found.inside;
    run.bits = shift;
  }
  return run;
}

/// The key of that rank, where no two are equal.
template <class Key, class KeyAt>
__device__ Key select_key(int64_t count, int64_t rank, int key_bits, const KeyAt& key_at, BlockScratch& s) {
  const KeyRun<Key> run = select_run<Key>(count, rank, key_bits, 1, key_at, s);
  if (run.bits == 0) return run.first;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    Key key;
    if (!key_at(i, &key) || (key >> run.bits) != (run.first >> run.bits)) continue;
    s.found[0] = static_cast<unsigned long long>(key);
    if constexpr (sizeof(Key) == 16) s.found[1] = static_cast<unsigned long long>(key >> 64);
  }
  __syncthreads();
  Key key = s.found[0];
  if constexpr (sizeof(Key) == 16) key |= Key(s.found[1]) << 64;
  __syncthreads();
  return key;
}

}  // namespace snack::cuda
