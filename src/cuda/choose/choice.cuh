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

#include "bracket.cuh"

namespace snack::cuda {

inline constexpr int kShortList = 8192;         // keys of a bin that the last block settles
inline constexpr int64_t kFewThings = 1 << 14;  // values that one block looks at
template <class Key>
inline constexpr int kStaged = 2048 / int(sizeof(Key));  // keys that a warp gathers before it lists them

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

// ---- sift ----

template <class Key>
struct SieveShared {
  Bracket<Key> bracket[2];
  Key staged[kThreads / 32][kStaged<Key>];  // a warp's
  unsigned long long counts[3];             // below the bracket of each class, of the second class
};

/// A warp's part of a sift: counts the keys that it is offered, and lists those in the bracket. All lanes call together.
template <class Key>
class Sieve {
 public:
  /// All threads of the block begin, each with its warp.
  __device__ Sieve(Choice<Key>* choice, Key* list, int64_t capacity, SieveShared<Key>& s) : choice_(choice), list_(list), capacity_(capacity), s_(s) {
    static_assert(sizeof(s.bracket) % 8 == 0);
    const auto* from = reinterpret_cast<const unsigned long long*>(choice->bracket);
    for (int i = threadIdx.x; i < int(sizeof(s.bracket) / 8); i += blockDim.x) reinterpret_cast<unsigned long long*>(s.bracket)[i] = from[i];
    if (threadIdx.x < 3) s.counts[threadIdx.x] = 0;
    __syncthreads();
  }

  /// Lists a key that lies in the bracket; whether it lies below.
  __device__ __forceinline__ bool list(bool has_key, Key key, int which) {
    const Bracket<Key>& bracket = s_.bracket[which];
    const bool is_below = has_key && key < bracket.lo, is_inside = has_key && !is_below && key <= bracket.hi;
    const uint32_t insiders = __ballot_sync(~0u, is_inside);
    if (insiders == 0) return is_below;
    if (is_inside) staged()[count_ + __popc(insiders & ((1u << lane()) - 1))] = tagged(key, which);
    count_ += __popc(insiders);
    if (count_ > kStaged<Key> - 32) flush();
    return is_below;
  }
  __device__ __forceinline__ void count_below(bool is_below, bool is_second) { below_ += is_below, below_seconds_ += is_below && is_second; }
  __device__ __forceinline__ void count_second(bool is_second) { seconds_ += is_second; }
  /// Once, at the end, all threads of the block. Many atomic operations on one number are slow, so a block has one.
  __device__ void finish() {
    flush();
    add(&s_.counts[0], below_ - below_seconds_);
    add(&s_.counts[1], below_seconds_);
    add(&s_.counts[2], seconds_);
    __syncthreads();
    unsigned long long* to = threadIdx.x == 0 ? &choice_->below[0] : threadIdx.x == 1 ? &choice_->below[1] : &choice_->seconds;
    if (threadIdx.x < 3 && s_.counts[threadIdx.x] != 0) atomicAdd(to, s_.counts[threadIdx.x]);
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ Key* staged() const { return s_.staged[threadIdx.x / 32]; }

  __device__ void flush() {
    __syncwarp();
    unsigned long long begin = 0;
    if (lane() == 0 && count_ > 0) begin = atomicAdd(&choice_->listed, static_cast<unsigned long long>(count_));
    begin = __shfl_sync(~0u, begin, 0);
    for (int i = lane(); i < count_; i += 32) {
      const Key key = staged()[i];
      const int which = class_of(key);
      if (int64_t(begin) + i < capacity_) list_[begin + i] = key;
      atomicAdd(&choice_->bins[which][s_.bracket[which].bin_of(untagged(key))], 1ull);
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
  SieveShared<Key>& s_;
  int count_ = 0;
  unsigned below_ = 0, below_seconds_ = 0, seconds_ = 0;  // of this thread, which sees fewer than 2^32 things
};

/// Values of one sign by their bits alone: below `lo` they lie below the bracket, from there on and below `beyond` near it or inside.
template <class Raw>
struct Near {
  Raw lo, beyond;
};
template <class Key>
__device__ __forceinline__ Near<typename ValueKeys<Key>::Raw> near_of(const ValueKeys<Key>& keys, const Bracket<Key> (&bracket)[2], bool is_negative) {
  using Raw = typename ValueKeys<Key>::Raw;
  if (!keys.counts(is_negative)) return {0, 0};
  const Bracket<Key>& of = bracket[keys.class_count() == 2 && is_negative];
  return {Raw(of.lo >> keys.index_bits), Raw(of.hi >> keys.index_bits) + 1};
}

/// The sift of values, and a bit for each: whether it lies at or above the bracket's lower end (kept.cuh). Most are told by the bits of the
/// value alone; a warp gathers the others in shared memory and compares 32 keys at a time.
template <class Key>
__global__ void __launch_bounds__(kThreads) sift_values(ValueKeys<Key> keys, Choice<Key>* choice, Key* list, int64_t capacity, uint32_t* kept) {
  constexpr int kAtOnce = 64 / int(sizeof(Key)), kNear = 32 * (kAtOnce + 1);
  using Raw = typename ValueKeys<Key>::Raw;
  __shared__ SieveShared<Key> shared;
  __shared__ Key near_keys[kThreads / 32][kNear];
  await_stream();
  if (choice->is_settled) return;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Key* near = near_keys[warp];
  Sieve<Key> sieve(choice, list, capacity, shared);
  const bool are_two = keys.class_count() == 2;
  const Near<Raw> near_positive = near_of(keys, shared.bracket, false), near_negative = near_of(keys, shared.bracket, true);
  int gathered = 0;
  const auto compare = [&](int count) {  // the last ones
    __syncwarp();
    for (gathered -= count; count > 0; count -= 32) {
      const bool exists = int(lane) < count;
      const Key entry = exists ? near[gathered + count - 1 - int(lane)] : Key(0);
      const bool is_second = exists && class_of(entry) != 0, is_below = sieve.list(exists, untagged(entry), is_second);
      const uint32_t slot = uint32_t(entry & ((Key(1) << keys.index_bits) - 1));
      if (is_below) atomicAnd(kept + slot / 32, ~(1u << (slot % 32)));
      sieve.count_below(is_below, is_second);
    }
    __syncwarp();
  };

  // Slots are below 2^31.
  const uint32_t slots = uint32_t(keys.slots), step = gridDim.x * kThreads * kAtOnce;
  for (uint32_t first = (blockIdx.x * (kThreads / 32) + warp) * 32 * kAtOnce; first < slots; first += step) {
    const uint32_t left = slots - first;
    Raw bits[kAtOnce];
    uint32_t is_near = 0;  // bits of this thread's values
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) bits[u] = 32 * u + lane < left ? keys.load(first + 32 * u + lane) : Raw(0);
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; ++u) {
      const bool exists = 32 * u + lane < left;
      Raw magnitude;
      const bool is_negative = keys.split(bits[u], &magnitude), is_below = exists && magnitude < (is_negative ? near_negative.lo : near_positive.lo);
      if (exists && !is_below && magnitude < (is_negative ? near_negative.beyond : near_positive.beyond)) is_near |= 1u << u;
      sieve.count_below(is_below, is_negative && are_two);
      sieve.count_second(is_negative && are_two);
      const uint32_t word = __ballot_sync(~0u, exists && !is_below);
      if (lane == 0 && 32 * u < left) kept[first / 32 + u] = word;
    }
    int upto = __popc(is_near);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (int(lane) >= d) upto += other;
    }
    int at = gathered + upto - __popc(is_near);
    gathered += __shfl_sync(~0u, upto, 31);
    for (; is_near != 0; is_near &= is_near - 1) {
      Key key;
      int which;
      keys.at(first + 32 * (__ffs(int(is_near)) - 1) + lane, &key, &which);
      near[at++] = tagged(key, which);
    }
    if (gathered >= 32) compare(gathered / 32 * 32);
  }
  compare(gathered);
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
    Key first[2] = {0, 0}, beyond[2] = {0, 0};
#pragma unroll
    for (int which = 0; which < 2; ++which)
      if (found[which].bin >= 0) choice->bracket[which].range_of(found[which].bin, &first[which], &beyond[which]);
    const int64_t listed = min(int64_t(choice->listed), capacity);
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < listed; i += int64_t(gridDim.x) * blockDim.x) {
      const Key entry = list[i], key = untagged(entry);
      const int which = class_of(entry);
      if (key < (which ? first[1] : first[0]) || key >= (which ? beyond[1] : beyond[0])) continue;
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
