// The state of a choice (choice.cuh), and how a sample brackets its bound: the last block of the sample's grid searches for the keys of two
// ranks, six standard deviations to both sides of the wanted one, in histograms of all sampled keys, and cuts what lies between into bins.
#pragma once

#include "block.cuh"
#include "snack/core/random.hpp"

namespace snack::cuda {

inline constexpr int kBinBits = 12, kBins = 1 << kBinBits;
inline constexpr int kIntervalBits = 4, kIntervalBins = 1 << kIntervalBits, kIntervals = kBins / kIntervalBins;
inline constexpr uint64_t kSampleStream = 0x5eed5a3b1e;  // any
template <class Key>
inline constexpr int kSampleBlocks = 256 / int(sizeof(Key));  // a few passes over all their keys are quick
template <class Key>
inline constexpr int64_t kSamples = int64_t{kChooseThreads} * kSampleBlocks<Key>;

/// The keys lo .. hi, cut into bins.
template <class Key>
struct Bracket {
  Key lo, hi;
  int shift;      // of bins of equal width, where there are no intervals
  int intervals;  // between keys of the sample; interval i has bins i * kIntervalBins and on
  Key begin[kIntervals + 1];  // of each interval, the first is lo; behind the last: hi

  __device__ __forceinline__ int bin_of(Key key) const {
    if (intervals == 0) return int((key - lo) >> shift);
    int first = 0;  // the last interval that begins at or before the key
    for (int left = intervals; left > 1;) {
      const int half = left / 2;
      if (begin[first + half] <= key) first += half, left -= half;
      else left = half;
    }
    return first * kIntervalBins + int((key - begin[first]) >> shift_in(first));
  }
  /// The keys of the bracket that fall into a bin: *first and on, below *beyond.
  __device__ void range_of(int bin, Key* first, Key* beyond) const {
    const int interval = bin / kIntervalBins, width = intervals == 0 ? shift : shift_in(interval);
    *first = intervals == 0 ? lo + (Key(bin) << width) : begin[interval] + (Key(bin % kIntervalBins) << width);
    *beyond = *first + (Key(1) << width);
    if (interval + 1 < intervals && *beyond > begin[interval + 1]) *beyond = begin[interval + 1];
  }

 private:
  __device__ __forceinline__ int shift_in(int interval) const { return shift_for(Key(begin[interval + 1] - begin[interval]), kIntervalBits); }
};

/// The state of a choice, in device memory; begins as zeros.
template <class Key>
struct Choice {
  Key bound[2];  // the outcome
  int is_settled;
  int is_listed;     // what the sift found below the bracket is below the bound, and all others that are stand in the list
  unsigned tickets;
  unsigned long long below[2];  // things of the class whose keys lie below the bracket
  unsigned long long seconds;   // things of the second class
  unsigned long long listed;
  unsigned short_count[2];
  unsigned long long bins[2][kBins];
  Bracket<Key> bracket[2];
};

/// How many keys are wanted of each class.
struct Wanted {
  int64_t k = 0;                  // at most, where both classes are asked
  const int64_t* of = nullptr;    // in place of k: a number on the device
  double fraction = -1;           // of each of two classes

  __device__ int64_t number() const { return of == nullptr ? k : *of; }
  __device__ void numbers(const int64_t (&total)[2], int64_t (&wanted)[2]) const {
    wanted[0] = number(), wanted[1] = 0;
    if (fraction < 0) return;
    wanted[0] = int64_t(fraction * double(total[0])), wanted[1] = int64_t(fraction * double(total[1]));
    const int64_t sum = wanted[0] + wanted[1];
    if (sum > k) wanted[0] = wanted[0] * k / sum, wanted[1] = wanted[1] * k / sum;
  }
  /// Of `samples` things, `eligible` of which belong to the class, so many are expected to be below the bound.
  __device__ double expected(int64_t count, int64_t samples, int64_t eligible) const {
    if (fraction < 0) return double(number()) / double(count) * double(samples);
    return min(fraction, double(k) / double(count)) * double(eligible);
  }
};

/// Keys above all others.
template <class Keys>
__device__ typename Keys::Key last_key(const Keys& keys) { return (typename Keys::Key(1) << keys.key_bits()) - 1; }

template <class Key>
__device__ void set_bracket(Bracket<Key>& bracket, Key lo, Key hi) {
  bracket.lo = lo, bracket.hi = hi, bracket.shift = shift_for(Key(hi - lo), kBinBits), bracket.intervals = 0;
}

/// Four searches for keys of a rank, side by side: the bracket's lower and upper end for each class.
template <class Key>
struct BracketScratch {
  int64_t warp[32];
  unsigned counts[4][kDigits];
  Key base[4];      // the run in which the key lies begins here and has 2^shift values
  int shift[4];
  int rank[4];      // of the key in its run; -1: there is nothing to search
  int is_crowded;
  bool is_last;
};

// Calls f(key, class) for every `step`th of this thread's keys of the sample, in which ~0 is no key.
template <int step, class Key, class F>
__device__ __forceinline__ void for_samples(const Key* sample, const F& f) {
  constexpr int kCount = kSampleBlocks<Key> / step, kAtOnce = std::min(8, kCount);
#pragma unroll 1
  for (int first = 0; first < kCount; first += kAtOnce) {
    Key entry[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) entry[i] = fresh(sample + (first + i) * step * kChooseThreads + int(threadIdx.x));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (entry[i] != ~Key{0}) f(untagged(entry[i]), class_of(entry[i]));
  }
}

// The rank that a search looks for: the wanted one, six standard deviations to a side; -1: all keys of the class are on the other side.
template <class Keys>
__device__ __forceinline__ int rank_of(const Keys& keys, const Wanted& wanted, int search, int eligible) {
  const int64_t samples = kSamples<typename Keys::Key>;
  const double expected = wanted.expected(keys.count(), samples, eligible), part = min(1.0, expected / double(samples));
  const double margin = 6 * sqrt(expected * (1 - part)) + 8, rank = search % 2 == 0 ? floor(expected - margin) : ceil(expected + margin);
  return rank > 0 && rank < double(eligible) ? int(rank) : -1;
}

// One step of all searches: a histogram of the keys in each run, of 2,048 bins. In the first the ends of a class are alike, and the ranks are
// not known before. Sets is_crowded where a run still holds many keys.
template <bool kIsFirst, class Keys>
__device__ __forceinline__ void search_on(const Keys& keys, const Wanted& wanted, const typename Keys::Key* sample,
                                          BracketScratch<typename Keys::Key>& s) {
  using Key = typename Keys::Key;
  for (int i = threadIdx.x; i < 4 * kDigits; i += blockDim.x) (&s.counts[0][0])[i] = 0;
  if (threadIdx.x == 0) s.is_crowded = 0;
  if (kIsFirst && threadIdx.x < 4) s.base[threadIdx.x] = 0, s.shift[threadIdx.x] = keys.key_bits();
  __syncthreads();
  Key base[4];
  int shift[4];
#pragma unroll
  for (int search = 0; search < 4; ++search) base[search] = s.base[search], shift[search] = max(0, s.shift[search] - kDigitBits);
  for_samples<1, Key>(sample, [&](Key key, int which) {
#pragma unroll
    for (int end = 0; end < (kIsFirst ? 1 : 2); ++end) {
      const Key bin = (key - (which ? base[2 + end] : base[end])) >> (which ? shift[2 + end] : shift[end]);  // below the base: large
      if (bin < Key(kDigits)) atomicAdd(&s.counts[2 * which + end][int(bin)], 1u);
    }
  });
  __syncthreads();
  // All four sums at once: there are fewer than 2^15 keys.
  constexpr int kShare = kDigits / kChooseThreads;
  const auto counts_of = [&](int search) -> const unsigned* { return s.counts[kIsFirst ? search & ~1 : search] + int(threadIdx.x) * kShare; };
  const auto part_of = [](int64_t packed, int search) { return int((packed >> (16 * search)) & 0xffff); };
  int64_t packed = 0, all;
#pragma unroll
  for (int search = 0; search < 4; ++search)
#pragma unroll
    for (int i = 0; i < kShare; ++i) packed += int64_t(counts_of(search)[i]) << (16 * search);
  const int64_t before_all = inclusive_sum(packed, s.warp, &all) - packed;
  if (kIsFirst) {
    if (threadIdx.x < 4) s.rank[threadIdx.x] = rank_of(keys, wanted, int(threadIdx.x), part_of(all, int(threadIdx.x)));
    __syncthreads();
  }
  int rank[4];
#pragma unroll
  for (int search = 0; search < 4; ++search) rank[search] = s.rank[search];
  __syncthreads();
#pragma unroll
  for (int search = 0; search < 4; ++search) {
    int before = part_of(before_all, search);
    if (rank[search] < before || rank[search] >= before + part_of(packed, search)) continue;  // one thread stays, where there is a rank
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int inside = int(counts_of(search)[i]);
      if (rank[search] >= before && rank[search] < before + inside) {
        s.base[search] += Key(int(threadIdx.x) * kShare + i) << shift[search];
        s.shift[search] = shift[search];
        s.rank[search] = rank[search] - before;
        if (shift[search] > 0 && inside > kSamples<Key> / 256) s.is_crowded = 1;
      }
      before += inside;
    }
  }
  __syncthreads();
}

// Cuts a bracket into intervals between every fourth of the samples in it.
template <class Key>
__device__ __forceinline__ void cut_bracket(const Key* sample, int which, Key lo, Key hi, Bracket<Key>& bracket, BracketScratch<Key>& s) {
  constexpr int kMost = 2 * kIntervals;
  static_assert(kMost <= kChooseThreads && kMost * sizeof(Key) <= sizeof(s.counts));
  Key* inside = reinterpret_cast<Key*>(s.counts);
  __syncthreads();
  if (threadIdx.x == 0) s.is_crowded = 0;  // counts them now
  __syncthreads();
  for_samples<4, Key>(sample, [&](Key key, int of) {
    if (of != which || key <= lo || key > hi) return;
    const int at = atomicAdd(&s.is_crowded, 1);
    if (at < kMost) inside[at] = key;
  });
  __syncthreads();
  const int count = s.is_crowded, every = (count + kIntervals) / kIntervals;
  if (threadIdx.x == 0) {
    set_bracket(bracket, lo, hi);
    if (count <= kMost) bracket.intervals = 1 + count / every, bracket.begin[0] = lo, bracket.begin[1 + count / every] = hi;
  }
  if (int(threadIdx.x) >= count || count > kMost) return;
  const Key key = inside[threadIdx.x];
  int rank = 1;
  for (int i = 0; i < count; ++i) rank += inside[i] < key || (inside[i] == key && i < int(threadIdx.x));  // one may be sampled twice
  if (rank % every == 0) bracket.begin[rank / every] = key;
}

template <class Keys>
__global__ void __launch_bounds__(kChooseThreads, 1) sample_keys(Keys keys, Wanted wanted, Choice<typename Keys::Key>* choice, typename Keys::Key* sample) {
  using Key = typename Keys::Key;
  __shared__ BracketScratch<Key> s;
  await_stream();
  const int64_t i = int64_t(blockIdx.x) * kChooseThreads + threadIdx.x;
  Key key;
  int which;
  const bool has_key = keys.at(int64_t(bounded(random_bits(kSampleStream, uint64_t(i)), uint64_t(keys.count()))), &key, &which);
  sample[i] = has_key ? tagged(key, which) : ~Key{0};
  if (!is_last_block(&choice->tickets, s.is_last)) return;

  search_on<true>(keys, wanted, sample, s);
  while (s.is_crowded != 0) {
    __syncthreads();
    search_on<false>(keys, wanted, sample, s);
  }
#pragma unroll 1
  for (int which = 0; which < keys.class_count(); ++which) {
    const int lo = 2 * which, hi = lo + 1;
    cut_bracket<Key>(sample, which, s.rank[lo] < 0 ? Key(0) : s.base[lo], s.rank[hi] < 0 ? last_key(keys) : s.base[hi] + ((Key(1) << s.shift[hi]) - 1),
                     choice->bracket[which], s);
  }
}

}  // namespace snack::cuda
