// Uniform growth: the first k distinct empty positions of a random stream, as grow_uniform takes them one by one.
//
// Which positions they are depends on the number of draws alone, not on their order: as long as fewer than k are found, all that the
// draws so far name belong to them. So rounds of draws, each too few to overshoot, insert into a set side by side; the last few are
// settled by one block, which knows the order of 1,024 draws at a time.
//
// With r to find, and p the part of all positions that is empty, a round makes D draws of which at most r are likely to be new: the number
// of new ones is below that of a binomial variable of D and p, whose mean is kept twelve standard deviations and more below r. So a
// round overshoots with a probability below 10^-25.
#pragma once

#include <cmath>

#include "../pattern.cuh"
#include "block.cuh"
#include "kept.cuh"

namespace snack::cuda {

inline constexpr int kDrawThreads = 1024;
inline constexpr int kMaxRounds = 24;
inline constexpr int64_t kFewest = 512;  // below so many to find the draws are settled one after another

/// All positions of a matrix, numbered row by row.
struct AllPositions {
  int64_t in, count;
  double inverse;  // of `in`

  AllPositions(int64_t out, int64_t in) : in(in), count(out * in), inverse(1.0 / double(std::max<int64_t>(1, in))) {}
  __device__ __forceinline__ void draw(uint64_t key, uint64_t i, int64_t* row, int64_t* col) const {
    const int64_t position = int64_t(bounded(random_bits(key, i), uint64_t(count)));
    *row = int64_t(double(position) * inverse);  // or one beside it: rows are below 2^31
    *col = position - *row * in;
    if (*col < 0) --*row, *col += in;
    else if (*col >= in) ++*row, *col -= in;
  }
};

/// What is drawn, in device memory; begins as zeros.
struct Drawing {
  int64_t wanted;  // positions to find
  int64_t empty;   // positions that were empty before
  unsigned long long found[kMaxRounds];  // by round
};

/// Draws that are safe where `left` of `empty` positions are to be found; none below kFewest.
__host__ __device__ inline double safe_draws(double left, double empty, double count) {
  if (left < kFewest) return 0;
  const double part = empty / count, deviation = sqrt(left * (1 - part) + 1);
  const double draws = (left - 12 * deviation - 50) / part;
  return draws > 0 ? floor(draws) : 0;
}

/// Where a round begins and how many draws it makes.
struct Round {
  int64_t left;     // positions to find
  uint64_t first, draws;
};
__device__ inline Round round_of(const Drawing& d, const AllPositions& all, int number) {
  Round round{d.wanted, 0, 0};
  for (int i = 0;; ++i) {
    round.draws = uint64_t(safe_draws(double(round.left), double(d.empty - (d.wanted - round.left)), double(all.count)));
    if (i == number) return round;
    round.first += round.draws;
    round.left -= int64_t(d.found[i]);
  }
}

/// Rounds after which the settling block has little to do, where k positions are drawn and `spare` more are empty.
inline int rounds_for(int64_t positions, int64_t spare, int64_t k) {
  double left = double(k), empty = double(spare) + left;
  int rounds = 0;
  while (rounds < kMaxRounds && left >= 3 * kFewest) {
    const double found = empty * -std::expm1(-safe_draws(left, empty, double(positions)) / double(positions));
    left -= found, empty -= found;
    ++rounds;
  }
  return rounds;
}

/// Positions drawn so far as a table of keys: open addressing, ~0 is free. `first`: null, or the smallest draw that named the key.
struct HashSet {
  DevicePattern pattern;
  const uint32_t* kept;
  unsigned long long* table;
  unsigned long long* first;
  uint64_t capacity;

  __device__ __forceinline__ bool is_live(int64_t row, int64_t col) const {
    bool found;
    const int64_t slot = pattern.lower_bound(row, col, &found);
    return found && is_kept(kept, slot);
  }
  __device__ __forceinline__ uint64_t home(SlotKey key) const { return bounded(mix64(key), capacity); }
  __device__ bool contains(int64_t row, int64_t col) const {
    if (is_live(row, col)) return true;
    const SlotKey key = slot_key(row, col);
    for (uint64_t at = home(key);; at = at + 1 == capacity ? 0 : at + 1) {
      const SlotKey there = fresh(table + at);
      if (there == key || there == ~SlotKey{0}) return there == key;
    }
  }
  /// Whether the position is empty and new.
  __device__ bool insert(int64_t row, int64_t col, uint64_t draw) const {
    if (is_live(row, col)) return false;
    const SlotKey key = slot_key(row, col);
    for (uint64_t at = home(key);; at = at + 1 == capacity ? 0 : at + 1) {
      const SlotKey there = atomicCAS(table + at, ~0ull, static_cast<unsigned long long>(key));
      if (there != key && there != ~SlotKey{0}) continue;
      if (first != nullptr) atomicMin(first + at, static_cast<unsigned long long>(draw));
      return there != key;
    }
  }
};

template <class Set>
__global__ void __launch_bounds__(kThreads) draw_round(Set set, AllPositions all, uint64_t key, int number, Drawing* drawing) {
  constexpr int kAtOnce = 4;
  await_stream();
  const Round round = round_of(*drawing, all, number);
  unsigned found = 0;
  for (uint64_t base = uint64_t(blockIdx.x) * kThreads * kAtOnce; base < round.draws; base += uint64_t(gridDim.x) * kThreads * kAtOnce) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint64_t i = base + u * kThreads + threadIdx.x;
      if (i >= round.draws) continue;
      int64_t row, col;
      all.draw(key, round.first + i, &row, &col);
      found += set.insert(row, col, round.first + i);
    }
  }
  found = __reduce_add_sync(~0u, found);
  if (threadIdx.x % 32 == 0 && found != 0) atomicAdd(&drawing->found[number], static_cast<unsigned long long>(found));
}

/// One block draws on, 1,024 positions at a time, until all are found. Of draws that name one position the first counts.
template <class Set>
__global__ void __launch_bounds__(kDrawThreads) draw_last(Set set, AllPositions all, uint64_t key, int rounds, const Drawing* drawing) {
  constexpr int kSlots = 2 * kDrawThreads;
  __shared__ int64_t warp_sums[32];
  __shared__ unsigned long long named[kSlots];
  __shared__ unsigned by[kSlots];
  await_stream();
  Round round = round_of(*drawing, all, rounds);
  for (uint64_t first = round.first; round.left > 0; first += kDrawThreads) {
    for (int i = threadIdx.x; i < kSlots; i += kDrawThreads) named[i] = ~0ull, by[i] = ~0u;
    __syncthreads();
    int64_t row, col;
    all.draw(key, first + threadIdx.x, &row, &col);
    const bool is_candidate = !set.contains(row, col);
    unsigned at = 0;
    if (is_candidate) {
      const unsigned long long position = slot_key(row, col);
      for (at = unsigned(mix64(position)) % kSlots;; at = (at + 1) % kSlots) {
        const unsigned long long there = atomicCAS(&named[at], ~0ull, position);
        if (there == ~0ull || there == position) break;
      }
      atomicMin(&by[at], threadIdx.x);
    }
    __syncthreads();
    const bool is_new = is_candidate && by[at] == threadIdx.x;
    int64_t all_new;
    const int64_t rank = inclusive_sum(is_new, warp_sums, &all_new);
    if (is_new && rank <= round.left) set.insert(row, col, first + threadIdx.x);
    round.left -= min(all_new, round.left);
    __syncthreads();
  }
}

/// Launches all rounds; drawing->wanted and ->empty are set. About `spare` positions stay empty.
template <class Set>
void draw(const char* operation, const Set& set, const AllPositions& all, uint64_t key, int64_t spare, int64_t k, Drawing* drawing, Stream stream) {
  const int rounds = rounds_for(all.count, spare, k);
  for (int number = 0; number < rounds; ++number)
    launch<draw_round<Set>>(operation, std::min<int64_t>(ceil_div(2 * k, 4 * kThreads), 16 * capability(current_device()).multiprocessors), kThreads, 0, stream, set,
                            all, key, number, drawing);
  launch<draw_last<Set>>(operation, 1, kDrawThreads, 0, stream, set, all, key, rounds, drawing);
}

/// Slots of a table for k positions.
inline int64_t table_capacity(int64_t k) { return k + k / 2 + 64; }

}  // namespace snack::cuda
