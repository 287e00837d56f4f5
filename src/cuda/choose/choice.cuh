// choose: the `wanted` smallest of n keys, as one bound: those that are below it.
//
//   sample   keys of random things; the last block reads off a bracket, which holds the key of the wanted rank but for one in 10^9 times
//   sift     every thing's key once: counts those below the bracket, lists those inside and counts them in 4096 bins
//   pick     the bin of the wanted rank; the last block takes the key of that rank among its few
// Keys may cluster (values that are 0), so the bins lie between keys of the sample: each holds about as many as the others.
// What the bracket missed, or the list could not hold, one block finds by histograms over all things: slow and never needed, or the way
// to look at few. A pick that may ask for another look (gradients of sparse layers, whose tail a sample hardly meets) narrows the bracket instead.
// Two classes (negative values, the others) have a bracket and a bound each.
#pragma once

#include "block.cuh"
#include "snack/core/random.hpp"

namespace snack::cuda {

inline constexpr int kBinBits = 12, kBins = 1 << kBinBits;
inline constexpr int kIntervalBits = 4, kIntervalBins = 1 << kIntervalBits, kIntervals = kBins / kIntervalBins;
inline constexpr int kShortList = 8192;
inline constexpr int64_t kFewThings = 1 << 14;       // values that one block looks at
inline constexpr uint64_t kSampleStream = 0x5eed5a3b1e;  // any
template <class Key>
inline constexpr int kSampleBlocks = 256 / int(sizeof(Key));  // the keys of all of them fit into the L1 cache of the last one
template <class Key>
inline constexpr int64_t kSamples = int64_t{kChooseThreads} * kSampleBlocks<Key>;
template <class Key>
inline constexpr int kStaged = 2048 / int(sizeof(Key));  // keys that a warp gathers before it lists them

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
    return first * kIntervalBins + int((key - begin[first]) >> shift_for(Key(begin[first + 1] - begin[first]), kIntervalBits));
  }
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

/// Where the outcome is told besides: numbers on the device.
struct Report {
  int64_t* taken = nullptr;   // keys below the bounds
  int64_t* error = nullptr;   // becomes `code` where there are too few keys; none is taken then
  int64_t* number = nullptr;  // and so many there are
  int64_t code = 0;
  int64_t* empty = nullptr;   // becomes spare + taken
  int64_t spare = 0;
  unsigned long long* retaken = nullptr;  // becomes 0 where what the sift took already must be taken anew
};

enum class Look : int { kWhole, kMayAskAgain, kLast, kOnly };  // kWhole: nothing was sifted; kOnly: the sift took what lay below the bracket

/// Keys above all others.
template <class Keys>
__device__ typename Keys::Key last_key(const Keys& keys) { return (typename Keys::Key(1) << keys.key_bits()) - 1; }

template <class Key>
__device__ void set_bracket(Bracket<Key>& bracket, Key lo, Key hi) {
  bracket.lo = lo, bracket.hi = hi, bracket.shift = shift_for(Key(hi - lo), kBinBits), bracket.intervals = 0;
}

// ---- sample ----

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
  unsigned eligible[2];
  Key lowest[32][2], highest[32][2];  // of each warp
};

// Calls f(key, class) for this thread's keys of the sample.
template <class Key, class F>
__device__ __forceinline__ void for_samples(const Key* sample, int step, const F& f) {
#pragma unroll 4
  for (int i = 0; i < kSampleBlocks<Key>; i += step) {
    const Key entry = sample[i * kChooseThreads + int(threadIdx.x)];
    if (entry != ~Key{0}) f(untagged(entry), class_of(entry));
  }
}

// Of each class: how many keys there are, the lowest and the highest.
template <class Key>
__device__ __forceinline__ void survey(const Key* sample, BracketScratch<Key>& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < 2) s.eligible[threadIdx.x] = 0;
  __syncthreads();
  unsigned counts[2] = {0, 0};
  Key low_of[2] = {~Key{0}, ~Key{0}}, high_of[2] = {0, 0};
  for_samples(sample, 1, [&](Key key, int which) {
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      if (which != of) continue;
      ++counts[of];
      if (key < low_of[of]) low_of[of] = key;
      if (key > high_of[of]) high_of[of] = key;
    }
  });
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    Key lowest = low_of[which], highest = high_of[which];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const Key low = shuffled_xor(lowest, d), high = shuffled_xor(highest, d);
      if (low < lowest) lowest = low;
      if (high > highest) highest = high;
    }
    const unsigned count = __reduce_add_sync(~0u, counts[which]);
    if (lane == 0) {
      s.lowest[warp][which] = lowest, s.highest[warp][which] = highest;
      atomicAdd(&s.eligible[which], count);
    }
  }
  __syncthreads();
}

// Thread 0 says what to search for: the wanted rank, six standard deviations to both sides.
template <class Keys>
__device__ __forceinline__ void begin_search(const Keys& keys, const Wanted& wanted, int which, BracketScratch<typename Keys::Key>& s) {
  using Key = typename Keys::Key;
  const int64_t samples = kSamples<Key>, eligible = s.eligible[which];
  Key lowest = ~Key{0}, highest = 0;
  for (int warp = 0; warp < kChooseThreads / 32; ++warp) {
    if (s.lowest[warp][which] < lowest) lowest = s.lowest[warp][which];
    if (s.highest[warp][which] > highest) highest = s.highest[warp][which];
  }
  const double expected = wanted.expected(keys.count(), samples, eligible), part = min(1.0, expected / double(samples));
  const double margin = 6 * sqrt(expected * (1 - part)) + 8, first = floor(expected - margin), last = ceil(expected + margin);
  for (int end = 0; end < 2; ++end) {
    const double rank = end == 0 ? first : last;
    s.base[2 * which + end] = lowest;
    s.shift[2 * which + end] = eligible == 0 ? 0 : shift_for(Key(highest - lowest), kDigitBits) + kDigitBits;
    s.rank[2 * which + end] = rank > 0 && rank < double(eligible) ? int(rank) : -1;
  }
}

// One step of all searches: a histogram of the keys in each run, of 2,048 bins. Sets is_crowded where a run still holds many keys.
template <class Key>
__device__ __forceinline__ void search_on(const Key* sample, bool are_pairs_alike, BracketScratch<Key>& s) {
  for (int i = threadIdx.x; i < 4 * kDigits; i += blockDim.x) (&s.counts[0][0])[i] = 0;
  if (threadIdx.x == 0) s.is_crowded = 0;
  __syncthreads();
  for_samples(sample, 1, [&](Key key, int which) {
    const int first = 2 * which;
    for (int search = first; search < first + (are_pairs_alike ? 1 : 2); ++search) {
      const int shift = max(0, s.shift[search] - kDigitBits);
      const Key from_base = key - s.base[search];  // below the base: large
      if ((from_base >> shift) < Key(kDigits)) atomicAdd(&s.counts[search][int(from_base >> shift)], 1u);
    }
  });
  __syncthreads();
  // All four sums at once: there are fewer than 2^15 keys.
  constexpr int kShare = kDigits / kChooseThreads;
  const int bin = int(threadIdx.x) * kShare;
  int64_t packed = 0, all;
#pragma unroll
  for (int search = 0; search < 4; ++search)
#pragma unroll
    for (int i = 0; i < kShare; ++i) packed += int64_t(s.counts[are_pairs_alike ? search & ~1 : search][bin + i]) << (16 * search);
  const int64_t before_all = inclusive_sum(packed, s.warp, &all) - packed;
#pragma unroll
  for (int search = 0; search < 4; ++search) {
    int before = int((before_all >> (16 * search)) & 0xffff);
    const int rank = s.rank[search], shift = max(0, s.shift[search] - kDigitBits);
    if (rank < before || rank >= before + int((packed >> (16 * search)) & 0xffff)) continue;  // one thread stays, where there is a rank
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int inside = int(s.counts[are_pairs_alike ? search & ~1 : search][bin + i]);
      if (rank >= before && rank < before + inside) {
        s.base[search] += Key(bin + i) << shift;
        s.shift[search] = shift;
        s.rank[search] = rank - before;
        if (shift > 0 && inside > kSamples<Key> / 256) s.is_crowded = 1;
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
  for_samples(sample, 4, [&](Key key, int of) {
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

  survey(sample, s);
  if (threadIdx.x < 2) begin_search(keys, wanted, int(threadIdx.x), s);
  __syncthreads();
  for (bool are_pairs_alike = true;; are_pairs_alike = false) {
    search_on(sample, are_pairs_alike, s);
    if (s.is_crowded == 0) break;
    __syncthreads();
  }
#pragma unroll 1
  for (int which = 0; which < keys.class_count(); ++which) {
    const int lo = 2 * which, hi = lo + 1;
    cut_bracket(sample, which, s.rank[lo] < 0 ? Key(0) : s.base[lo], s.rank[hi] < 0 ? last_key(keys) : s.base[hi] + ((Key(1) << s.shift[hi]) - 1),
                choice->bracket[which], s);
  }
}

// ---- sift ----

/// A warp's part of a sift: counts the keys that it is offered, and lists those in the bracket. All lanes call together.
template <class Key>
class Sieve {
 public:
  /// staged: kStaged<Key> keys of shared memory, the warp's own.
  __device__ Sieve(Choice<Key>* choice, Key* list, int64_t capacity, Key* staged) : choice_(choice), list_(list), capacity_(capacity), staged_(staged) {
    lo_[0] = choice->bracket[0].lo, lo_[1] = choice->bracket[1].lo, hi_[0] = choice->bracket[0].hi, hi_[1] = choice->bracket[1].hi;
  }

  /// Lists a key that lies in the bracket; whether it lies below.
  __device__ __forceinline__ bool list(bool has_key, Key key, int which) {
    const bool is_below = has_key && key < (which ? lo_[1] : lo_[0]), is_inside = has_key && !is_below && key <= (which ? hi_[1] : hi_[0]);
    const uint32_t insiders = __ballot_sync(~0u, is_inside);
    if (insiders == 0) return is_below;
    if (is_inside) staged_[count_ + __popc(insiders & ((1u << lane()) - 1))] = tagged(key, which);
    count_ += __popc(insiders);
    if (count_ > kStaged<Key> - 32) flush();
    return is_below;
  }
  __device__ __forceinline__ void count(bool is_below, bool is_second) {
    below_ += is_below, below_seconds_ += is_below && is_second, seconds_ += is_second;
  }
  /// Once, at the end.
  __device__ void finish() {
    flush();
    add(&choice_->below[0], below_ - below_seconds_);
    add(&choice_->below[1], below_seconds_);
    add(&choice_->seconds, seconds_);
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void flush() {
    __syncwarp();
    unsigned long long begin = 0;
    if (lane() == 0 && count_ > 0) begin = atomicAdd(&choice_->listed, static_cast<unsigned long long>(count_));
    begin = __shfl_sync(~0u, begin, 0);
    for (int i = lane(); i < count_; i += 32) {
      const Key key = staged_[i];
      const int which = class_of(key);
      if (int64_t(begin) + i < capacity_) list_[begin + i] = key;
      atomicAdd(&choice_->bins[which][choice_->bracket[which].bin_of(untagged(key))], 1ull);
    }
    __syncwarp();
    count_ = 0;
  }

  __device__ static void add(unsigned long long* to, unsigned value) {
    unsigned long long sum = value;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
    if (lane() == 0 && sum != 0) atomicAdd(to, sum);
  }

  Choice<Key>* choice_;
  Key* list_;
  int64_t capacity_;
  Key* staged_;
  int count_ = 0;
  unsigned below_ = 0, below_seconds_ = 0, seconds_ = 0;  // of this thread, which sees fewer than 2^32 things
  Key lo_[2], hi_[2];
};

/// The sift of values, and a bit for each: whether it lies at or above the bracket's lower end (kept.cuh). A warp takes 128 at a time; most
/// are told by the bits of the value alone.
template <class Key>
__global__ void __launch_bounds__(kThreads) sift_values(ValueKeys<Key> keys, Choice<Key>* choice, Key* list, int64_t capacity, uint32_t* kept) {
  constexpr int kAtOnce = 4;
  using Raw = typename ValueKeys<Key>::Raw;
  __shared__ Key staged[kThreads / 32][kStaged<Key>];
  await_stream();
  if (choice->is_settled) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sieve<Key> sieve(choice, list, capacity, staged[warp]);
  const Raw lo[2] = {Raw(choice->bracket[0].lo >> keys.index_bits), Raw(choice->bracket[1].lo >> keys.index_bits)};
  const Raw hi[2] = {Raw(choice->bracket[0].hi >> keys.index_bits), Raw(choice->bracket[1].hi >> keys.index_bits)};
  const int64_t step = int64_t(gridDim.x) * kThreads * kAtOnce;
  for (int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + warp) * 32 * kAtOnce; first < keys.slots; first += step) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t slot = first + 32 * u + lane;
      raw[u] = slot < keys.slots ? keys.load(slot) : Raw(0);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t slot = first + 32 * u + lane;
      Raw magnitude;
      bool is_second;
      const bool counts = keys.classify(raw[u], &magnitude, &is_second) && slot < keys.slots;
      bool is_below = counts && magnitude < (is_second ? lo[1] : lo[0]);
      const bool is_near = counts && !is_below && magnitude <= (is_second ? hi[1] : hi[0]);
      if (__any_sync(~0u, is_near)) is_below |= sieve.list(is_near, keys.join(magnitude, slot), is_second);
      sieve.count(is_below, counts && is_second);
      const uint32_t word = __ballot_sync(~0u, slot < keys.slots && !is_below);
      if (lane == 0 && first + 32 * u < keys.slots) kept[(first + 32 * u) / 32] = word;
    }
  }
  sieve.finish();
}

// ---- pick ----

enum class Verdict : int { kFound, kTooFew, kAgain };

/// What the last block of a pick works with.
template <class Keys>
struct Picker {
  using Key = typename Keys::Key;
  const Keys& keys;
  Choice<Key>& choice;
  const Key* list;
  int64_t capacity;
  const Key* short_list;  // kShortList keys for each class
  Look look;
  SelectScratch<Key>& s;

  __device__ int64_t count_all(int which) const {
    int64_t mine = 0, all;
    for (int64_t i = threadIdx.x; i < keys.count(); i += blockDim.x) {
      Key key;
      int of;
      mine += keys.at(i, &key, &of) && of == which;
    }
    inclusive_sum(mine, s.warp, &all);
    return all;
  }
  __device__ Key among_all(int which, int64_t rank) const {
    return select_key<Key>(keys.count(), rank, [&](int64_t i, Key* key) {
      int of;
      return keys.at(i, key, &of) && of == which;
    }, s);
  }
  __device__ Key among_listed(int which, int64_t rank) const {
    return select_key<Key>(int64_t(choice.listed), rank, [&](int64_t i, Key* key) {
      const Key entry = list[i];
      *key = untagged(entry);
      return class_of(entry) == which;
    }, s);
  }
  __device__ Key among_short(int which, int64_t rank, int64_t count) const {
    return select_key<Key>(count, rank, [&](int64_t i, Key* key) {
      *key = fresh(short_list + which * kShortList + i);
      return true;
    }, s);
  }

  /// The bound of the `wanted` smallest keys of a class; found: where its rank lies in the bracket. *is_listed: see Choice. *available: on
  /// kTooFew. A class that asks for another look must be the only one.
  __device__ __forceinline__ Verdict pick(int which, int64_t wanted, const FoundBin& found, Key* bound, bool* is_listed, int64_t* available) const {
    *bound = 0;
    *is_listed = look != Look::kWhole && choice.below[which] == 0;
    if (wanted == 0) return Verdict::kFound;
    const int64_t rank = wanted - 1 - int64_t(choice.below[which]);
    const bool fits = int64_t(choice.listed) <= capacity, is_inside = look != Look::kWhole && found.bin >= 0;
    *is_listed = is_inside && fits;
    if (is_inside && fits) {
      *bound = 1 + (found.inside <= kShortList ? among_short(which, rank - found.before, found.inside) : among_listed(which, rank));
      return Verdict::kFound;
    }
    if (look == Look::kMayAskAgain) {
      Bracket<Key>& bracket = choice.bracket[which];
      const Key lo = bracket.lo, hi = bracket.hi, last = last_key(keys);
      *available = int64_t(choice.below[which]) + found.all;
      if (!is_inside && rank >= 0 && hi == last) return Verdict::kTooFew;
      // The interval of the rank, or the bin where there are none.
      const int interval = found.bin / kIntervalBins, intervals = bracket.intervals;
      const Key begin = !is_inside ? lo : intervals > 0 ? bracket.begin[interval] : lo + (Key(found.bin) << bracket.shift);
      const Key end = !is_inside ? hi : intervals > 0 ? bracket.begin[interval + 1] : begin + ((Key(1) << bracket.shift) - 1);
      __syncthreads();
      if (threadIdx.x == 0) {
        if (is_inside) set_bracket(bracket, begin, end < hi ? end : hi);
        else if (rank < 0) set_bracket(bracket, Key(0), Key(lo - 1));
        else set_bracket(bracket, Key(hi + 1), last);
      }
      return Verdict::kAgain;
    }
    *available = count_all(which);
    if (wanted > *available) return Verdict::kTooFew;
    *bound = 1 + among_all(which, wanted - 1);
    return Verdict::kFound;
  }
};

template <class Keys>
__global__ void __launch_bounds__(kChooseThreads, 1) pick_keys(Keys keys, Wanted wanted, Choice<typename Keys::Key>* choice, const typename Keys::Key* list,
                                                           int64_t capacity, typename Keys::Key* short_list, Look look, Report report) {
  using Key = typename Keys::Key;
  __shared__ SelectScratch<Key> s;
  await_stream();
  if (choice->is_settled) return;
  const Picker<Keys> picker{keys, *choice, list, capacity, short_list, look, s};
  const bool are_two = keys.class_count() == 2, is_whole = look == Look::kWhole;
  int64_t total[2] = {0, int64_t(choice->seconds)}, numbers[2];
  if (are_two && is_whole) total[1] = picker.count_all(1);
  total[0] = keys.count() - total[1];  // of two classes each thing has one
  wanted.numbers(total, numbers);
  FoundBin found[2] = {{-1, 0, 0, 0}, {-1, 0, 0, 0}};
  if (!is_whole) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (which == 1 && !are_two) continue;
      found[which] = find_bin([&](int i) { return int64_t(choice->bins[which][i]); }, kBins, numbers[which] - 1 - int64_t(choice->below[which]), s.warp, s.bin);
    }
    const int64_t listed = min(int64_t(choice->listed), capacity);
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < listed; i += int64_t(gridDim.x) * blockDim.x) {
      const Key entry = list[i], key = untagged(entry);
      const int which = class_of(entry);
      if (choice->bracket[which].bin_of(key) != (which ? found[1].bin : found[0].bin)) continue;
      const unsigned at = atomicAdd(&choice->short_count[which], 1u);
      if (at < kShortList) short_list[which * kShortList + at] = key;
    }
  }
  if (!is_last_block(&choice->tickets, s.is_last)) return;

  Key bound[2] = {0, 0};
  bool is_listed[2] = {true, true};
  int64_t available = 0, available_of_second = 0;
  const Verdict first = picker.pick(0, numbers[0], found[0], &bound[0], &is_listed[0], &available);
  const Verdict second = are_two ? picker.pick(1, numbers[1], found[1], &bound[1], &is_listed[1], &available_of_second) : Verdict::kFound;
  __syncthreads();
  if (first == Verdict::kAgain) {  // another look counts anew
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) choice->bins[0][i] = 0;
    if (threadIdx.x == 0) choice->below[0] = choice->seconds = choice->listed = choice->short_count[0] = 0;
    return;
  }
  if (threadIdx.x != 0) return;
  const bool are_enough = first == Verdict::kFound && second == Verdict::kFound;
  const int64_t taken = are_enough ? numbers[0] + numbers[1] : 0;
  choice->is_settled = 1;
  choice->is_listed = look == Look::kOnly && are_enough && is_listed[0] && is_listed[1];
  choice->bound[0] = are_enough ? bound[0] : Key(0), choice->bound[1] = are_enough ? bound[1] : Key(0);
  if (report.taken != nullptr) *report.taken = taken;
  if (report.empty != nullptr) *report.empty = report.spare + taken;
  if (report.retaken != nullptr && !choice->is_listed) *report.retaken = 0;
  if (!are_enough && report.error != nullptr) *report.error = report.code, *report.number = first == Verdict::kTooFew ? available : available_of_second;
}

// ---- the host's part ----

/// Keys beside those of the list: the short list and the sample, one after the other.
template <class Key>
inline constexpr int64_t kKeysBeside = std::max(kSamples<Key>, int64_t{2} * kShortList);

/// Memory of a choice: its state, and room for keys.
template <class Key>
struct ChoiceMemory {
  Choice<Key>* choice;  // zeros
  Key* keys;
  int64_t capacity;     // keys

  Key* list() const { return keys + kKeysBeside<Key>; }
  int64_t list_capacity() const { return capacity - kKeysBeside<Key>; }
};

/// Launches a choice among `count` things, of which one block looks at `few`. sift(): launches a sift into the list.
template <class Keys, class Sift>
void choose(const char* operation, const Keys& keys, int64_t count, int64_t few, int looks, const Wanted& wanted, const ChoiceMemory<typename Keys::Key>& memory,
            const Report& report, Stream stream, const Sift& sift) {
  using Key = typename Keys::Key;
  if (count <= few) {
    launch<pick_keys<Keys>>(operation, 1, kChooseThreads, 0, stream, keys, wanted, memory.choice, memory.keys, int64_t{0}, memory.keys,
                            Look::kWhole, report);
    return;
  }
  launch<sample_keys<Keys>>(operation, kSampleBlocks<Key>, kChooseThreads, 0, stream, keys, wanted, memory.choice, memory.keys);
  const int64_t blocks = std::min<int64_t>(capability(current_device()).multiprocessors, ceil_div(count, 4 * kFewThings));
  for (int look = 1; look <= looks; ++look) {
    sift();
    launch<pick_keys<Keys>>(operation, blocks, kChooseThreads, 0, stream, keys, wanted, memory.choice, memory.list(), memory.list_capacity(),
                            memory.keys, looks == 1 ? Look::kOnly : look == looks ? Look::kLast : Look::kMayAskAgain, report);
  }
}

}  // namespace snack::cuda
