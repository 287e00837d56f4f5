// choose: the `wanted` smallest of n keys, as one bound: those that are below it.
//
//   sample   keys of random things; the last block reads off a bracket, which holds the key of the wanted rank but for one in 10^9 times
//   sift     every thing's key once: counts those below the bracket, lists those inside and counts them in 4096 bins
//   pick     the bin of the wanted rank; the last block takes the key of that rank among its few
// What the bracket missed, or the list could not hold, one block finds by histograms over all things: slow and never needed, or the way
// to look at few. A pick that may ask for another look (gradients of sparse layers, whose tail a sample hardly meets) narrows the bracket instead.
// Two classes (negative values, the others) have a bracket and a bound each.
#pragma once

#include "block.cuh"
#include "keys.cuh"

namespace snack::cuda {

inline constexpr int kBins = 4096, kShortList = 1024;
inline constexpr int64_t kFewThings = 1 << 16;       // values that one block looks at
inline constexpr uint64_t kSampleStream = 0x5eed5a3b1e;  // any
template <class Key>
inline constexpr int kStaged = 2048 / int(sizeof(Key));  // keys that a warp gathers before it lists them

/// The state of a choice, in device memory; begins as zeros.
template <class Key>
struct Choice {
  Key bound[2];  // the outcome
  Key lo[2], hi[2];  // the bracket, both ends inside
  int shift[2];      // bin of a key: (key - lo) >> shift
  int is_settled;
  unsigned tickets;
  unsigned long long below[2], total[2];  // things of the class that have a key: below the bracket, in all
  unsigned long long listed;
  unsigned short_count[2];
  Key short_list[2][kShortList];
  unsigned long long bins[2][kBins];
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
};

enum class Look : int { kWhole, kMayAskAgain, kLast };  // kWhole: nothing was sifted

/// Keys above all others.
template <class Keys>
__device__ typename Keys::Key last_key(const Keys& keys) { return (typename Keys::Key(1) << keys.key_bits()) - 1; }

template <class Key>
__device__ void set_bracket(Choice<Key>& choice, int which, Key lo, Key hi) {
  int shift = 0;
  while (((hi - lo) >> shift) >= kBins) ++shift;
  choice.lo[which] = lo, choice.hi[which] = hi, choice.shift[which] = shift;
}

/// Reads the bracket of a class off the sample: the wanted rank, six standard deviations to both sides.
template <class Keys>
__device__ void bracket_class(const Keys& keys, const Wanted& wanted, Choice<typename Keys::Key>& choice, const typename Keys::Key* sample, int64_t samples,
                              int which, BlockScratch& s) {
  using Key = typename Keys::Key;
  const auto key_at = [&](int64_t i, Key* key) {
    const Key tagged_key = fresh(sample + i);
    *key = untagged(tagged_key);
    return tagged_key != ~Key{0} && class_of(tagged_key) == which;
  };
  int64_t mine = 0, eligible;
  for (int64_t i = threadIdx.x; i < samples; i += blockDim.x) {
    Key key;
    mine += key_at(i, &key);
  }
  inclusive_sum(mine, s.warp, &eligible);
  const double expected = wanted.expected(keys.count(), samples, eligible), part = min(1.0, expected / max(1.0, double(samples)));
  const double margin = 6 * sqrt(expected * (1 - part)) + 8;
  const int64_t first = int64_t(floor(expected - margin)), last = int64_t(ceil(expected + margin));
  const int64_t enough = max(int64_t{1}, samples / 1024);
  Key lo = 0, hi = last_key(keys);
  if (first > 0 && first < eligible) lo = select_run<Key>(samples, first, keys.key_bits(), enough, key_at, s).first;
  if (last < eligible) {
    const KeyRun<Key> run = select_run<Key>(samples, last, keys.key_bits(), enough, key_at, s);
    hi = run.first + ((Key(1) << run.bits) - 1);
  }
  if (threadIdx.x == 0) set_bracket(choice, which, lo, hi);
}

template <class Keys>
__global__ void __launch_bounds__(kChooseThreads) sample_keys(Keys keys, Wanted wanted, Choice<typename Keys::Key>* choice, typename Keys::Key* sample,
                                                             int64_t samples) {
  using Key = typename Keys::Key;
  __shared__ BlockScratch s;
  await_stream();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < samples) {
    Key key;
    int which;
    const bool has_key = keys.at(int64_t(bounded(random_bits(kSampleStream, uint64_t(i)), uint64_t(keys.count()))), &key, &which);
    sample[i] = has_key ? tagged(key, which) : ~Key{0};
  }
  if (!is_last_block(&choice->tickets, s)) return;
  for (int which = 0; which < keys.class_count(); ++which) bracket_class(keys, wanted, *choice, sample, samples, which, s);
}

/// A warp's part of a sift: counts the keys that it is offered, and lists those in the bracket. All lanes call together.
template <class Key>
class Sieve {
 public:
  /// staged: kStaged<Key> keys of shared memory, the warp's own.
  __device__ Sieve(Choice<Key>* choice, Key* list, int64_t capacity, Key* staged) : choice_(choice), list_(list), capacity_(capacity), staged_(staged) {
    for (int which = 0; which < 2; ++which) lo_[which] = choice->lo[which], hi_[which] = choice->hi[which], below_[which] = total_[which] = 0;
  }

  __device__ __forceinline__ void offer(bool has_key, Key key, int which) {
    const Key lo = which ? lo_[1] : lo_[0], hi = which ? hi_[1] : hi_[0];
    const bool is_below = has_key && key < lo, is_inside = has_key && !is_below && key <= hi;
    below_[0] += is_below && !which, below_[1] += is_below && which;
    total_[0] += has_key && !which, total_[1] += has_key && which;
    const uint32_t insiders = __ballot_sync(~0u, is_inside);
    if (insiders == 0) return;
    if (is_inside) staged_[count_ + __popc(insiders & ((1u << lane()) - 1))] = tagged(key, which);
    count_ += __popc(insiders);
    if (count_ > kStaged<Key> - 32) flush();
  }

  /// Once, at the end.
  __device__ void finish() {
    flush();
    for (int which = 0; which < 2; ++which) {
      add(&choice_->below[which], below_[which]);
      add(&choice_->total[which], total_[which]);
    }
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
      atomicAdd(&choice_->bins[which][int((untagged(key) - choice_->lo[which]) >> choice_->shift[which])], 1ull);
    }
    __syncwarp();
    count_ = 0;
  }

  __device__ static void add(unsigned long long* to, int64_t value) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) value += __shfl_down_sync(~0u, value, d);
    if (lane() == 0 && value != 0) atomicAdd(to, static_cast<unsigned long long>(value));
  }

  Choice<Key>* choice_;
  Key* list_;
  int64_t capacity_;
  Key* staged_;
  int count_ = 0;
  Key lo_[2], hi_[2];
  int64_t below_[2], total_[2];
};

/// The sift of values: once over the slots, four loads of a thread under way.
template <class Key>
__global__ void __launch_bounds__(kThreads) sift_values(ValueKeys<Key> keys, Choice<Key>* choice, Key* list, int64_t capacity) {
  constexpr int kAtOnce = 4;
  using Raw = typename ValueKeys<Key>::Raw;
  __shared__ Key staged[kThreads / 32][kStaged<Key>];
  await_stream();
  if (choice->is_settled) return;
  Sieve<Key> sieve(choice, list, capacity, staged[threadIdx.x / 32]);
  const bool is_short = keys.is_short();
  for (int64_t base = int64_t(blockIdx.x) * kThreads * kAtOnce; base < keys.slots; base += int64_t(gridDim.x) * kThreads * kAtOnce) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t slot = base + u * kThreads + threadIdx.x;
      raw[u] = slot >= keys.slots ? Raw(0) : is_short ? keys.load_short(slot) : keys.load_whole(slot);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t slot = base + u * kThreads + threadIdx.x;
      Key key;
      int which;
      const bool counts = keys.key_of(keys.widen(raw[u]), slot, &key, &which);
      sieve.offer(counts && slot < keys.slots, key, which);
    }
  }
  sieve.finish();
}

enum class Verdict : int { kFound, kTooFew, kAgain };

/// What the last block of a pick works with.
template <class Keys>
struct Picker {
  using Key = typename Keys::Key;
  const Keys& keys;
  Choice<Key>& choice;
  const Key* list;
  int64_t capacity;
  Look look;
  BlockScratch& s;

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
    return select_key<Key>(keys.count(), rank, keys.key_bits(), [&](int64_t i, Key* key) {
      int of;
      return keys.at(i, key, &of) && of == which;
    }, s);
  }
  __device__ Key among_listed(int which, int64_t rank) const {
    return select_key<Key>(int64_t(choice.listed), rank, keys.key_bits(), [&](int64_t i, Key* key) {
      *key = untagged(list[i]);
      return class_of(list[i]) == which;
    }, s);
  }
  __device__ Key among_short(int which, int64_t rank) const {
    Key* all = reinterpret_cast<Key*>(s.counts);
    static_assert(sizeof(Key) * kShortList <= sizeof(s.counts));
    const int count = int(fresh(&choice.short_count[which])), mine = threadIdx.x;
    Key key = 0;
    if (mine < count) all[mine] = key = fresh(&choice.short_list[which][mine]);
    __syncthreads();
    int64_t smaller = 0;
    if (mine < count)
      for (int i = 0; i < count; ++i) smaller += all[i] < key;
    if (mine < count && smaller == rank) {
      s.found[0] = static_cast<unsigned long long>(key);
      if constexpr (sizeof(Key) == 16) s.found[1] = static_cast<unsigned long long>(key >> 64);
    }
    __syncthreads();
    key = s.found[0];
    if constexpr (sizeof(Key) == 16) key |= Key(s.found[1]) << 64;
    __syncthreads();
    return key;
  }

  /// The bound of the `wanted` smallest keys of a class; found: where its rank lies in the bracket. *available: on kTooFew. A class
  /// that asks for another look must be the only one.
  __device__ Verdict pick(int which, int64_t wanted, const FoundBin& found, Key* bound, int64_t* available) const {
    *bound = 0;
    if (wanted == 0) return Verdict::kFound;
    const int64_t rank = wanted - 1 - int64_t(choice.below[which]);
    const bool fits = int64_t(choice.listed) <= capacity, is_inside = look != Look::kWhole && found.bin >= 0;
    if (is_inside && fits) {
      *bound = 1 + (fresh(&choice.short_count[which]) <= kShortList ? among_short(which, rank - found.before) : among_listed(which, rank));
      return Verdict::kFound;
    }
    if (look == Look::kMayAskAgain) {
      const Key lo = choice.lo[which], hi = choice.hi[which], last = last_key(keys);
      *available = int64_t(choice.below[which]) + found.all;
      if (!is_inside && rank >= 0 && hi == last) return Verdict::kTooFew;
      __syncthreads();
      if (threadIdx.x == 0) {
        const Key begin = lo + (Key(max(0, found.bin)) << choice.shift[which]), end = begin + ((Key(1) << choice.shift[which]) - 1);
        if (is_inside) set_bracket(choice, which, begin, end < hi ? end : hi);
        else if (rank < 0) set_bracket(choice, which, Key(0), lo - 1);
        else set_bracket(choice, which, hi + 1, last);
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
__global__ void __launch_bounds__(kChooseThreads) pick_keys(Keys keys, Wanted wanted, Choice<typename Keys::Key>* choice, const typename Keys::Key* list,
                                                           int64_t capacity, Look look, Report report) {
  using Key = typename Keys::Key;
  __shared__ BlockScratch s;
  await_stream();
  if (choice->is_settled) return;
  const Picker<Keys> picker{keys, *choice, list, capacity, look, s};
  const bool are_two = keys.class_count() == 2, is_whole = look == Look::kWhole;
  int64_t total[2] = {int64_t(choice->total[0]), int64_t(choice->total[1])}, numbers[2];
  if (is_whole) {
    total[0] = picker.count_all(0);
    if (are_two) total[1] = picker.count_all(1);
  }
  wanted.numbers(total, numbers);
  FoundBin found[2] = {{-1, 0, 0, 0}, {-1, 0, 0, 0}};
  if (!is_whole) {
    found[0] = find_bin(choice->bins[0], kBins, numbers[0] - 1 - int64_t(choice->below[0]), s);
    if (are_two) found[1] = find_bin(choice->bins[1], kBins, numbers[1] - 1 - int64_t(choice->below[1]), s);
    const int64_t listed = min(int64_t(choice->listed), capacity);
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < listed; i += int64_t(gridDim.x) * blockDim.x) {
      const Key key = untagged(list[i]);
      const int which = class_of(list[i]);
      if (int((key - choice->lo[which]) >> choice->shift[which]) != (which ? found[1].bin : found[0].bin)) continue;
      const unsigned at = atomicAdd(&choice->short_count[which], 1u);
      if (at < kShortList) choice->short_list[which][at] = key;
    }
  }
  if (!is_last_block(&choice->tickets, s)) return;

  Key bound[2] = {0, 0};
  int64_t available = 0, available_of_second = 0;
  const Verdict first = picker.pick(0, numbers[0], found[0], &bound[0], &available);
  const Verdict second = are_two ? picker.pick(1, numbers[1], found[1], &bound[1], &available_of_second) : Verdict::kFound;
  __syncthreads();
  if (first == Verdict::kAgain) {  // another look counts anew
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) choice->bins[0][i] = 0;
    if (threadIdx.x == 0) choice->below[0] = choice->total[0] = choice->listed = choice->short_count[0] = 0;
    return;
  }
  if (threadIdx.x != 0) return;
  const bool are_enough = first == Verdict::kFound && second == Verdict::kFound;
  const int64_t taken = are_enough ? numbers[0] + numbers[1] : 0;
  choice->is_settled = 1;
  choice->bound[0] = are_enough ? bound[0] : Key(0), choice->bound[1] = are_enough ? bound[1] : Key(0);
  if (report.taken != nullptr) *report.taken = taken;
  if (report.empty != nullptr) *report.empty = report.spare + taken;
  if (!are_enough && report.error != nullptr) *report.error = report.code, *report.number = first == Verdict::kTooFew ? available : available_of_second;
}

/// Memory of a choice: its state, and room for the sample and the list.
template <class Key>
struct ChoiceMemory {
  Choice<Key>* choice;  // zeros
  Key* keys;
  int64_t capacity;     // keys
};

/// How much is looked at.
struct ChoicePlan {
  int64_t few = kFewThings;  // one block looks at so many
  int64_t samples = 1 << 14;
  int looks = 1;
};

/// Launches a choice. sift(list, capacity): launches a sift.
template <class Keys, class Sift>
void choose(const char* operation, const Keys& keys, int64_t count, const Wanted& wanted, const ChoiceMemory<typename Keys::Key>& memory,
            const ChoicePlan& plan, const Report& report, Stream stream, const Sift& sift) {
  if (count <= plan.few) {
    launch<pick_keys<Keys>>(operation, 1, kChooseThreads, 0, stream, keys, wanted, memory.choice, memory.keys, int64_t{0}, Look::kWhole, report);
    return;
  }
  typename Keys::Key* list = memory.keys + plan.samples;
  const int64_t capacity = memory.capacity - plan.samples;
  launch<sample_keys<Keys>>(operation, ceil_div(plan.samples, kChooseThreads), kChooseThreads, 0, stream, keys, wanted, memory.choice, memory.keys, plan.samples);
  for (int look = 1; look <= plan.looks; ++look) {
    sift(list, capacity);
    launch<pick_keys<Keys>>(operation, std::min<int64_t>(64, ceil_div(count, kFewThings)), kChooseThreads, 0, stream, keys, wanted, memory.choice, list, capacity,
                            look == plan.looks ? Look::kLast : Look::kMayAskAgain, report);
  }
}

/// Keys that a choice of the values has room for: the sample, and what a bracket holds, twice.
inline int64_t value_capacity(int64_t nnz) { return nnz <= kFewThings ? 0 : ChoicePlan{}.samples + nnz / 8; }

/// The choice of values.
template <class Key>
void choose_values(const char* operation, const ValueKeys<Key>& keys, const Wanted& wanted, const ChoiceMemory<Key>& memory, const Report& report, Stream stream) {
  choose(operation, keys, keys.slots, wanted, memory, ChoicePlan{}, report, stream, [&](Key* list, int64_t capacity) {
    const int64_t blocks = std::min<int64_t>(ceil_div(keys.slots, 4 * kThreads), 8 * capability(current_device()).multiprocessors);
    launch<sift_values<Key>>(operation, blocks, kThreads, 0, stream, keys, memory.choice, list, capacity);
  });
}

}  // namespace snack::cuda
