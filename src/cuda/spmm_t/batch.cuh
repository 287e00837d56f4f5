// spmm_t, regime stream, narrow tiles, larger batches: dx (batch, in) = dy (batch, out) W.
//
// A block owns one panel (1024 columns), a chunk of the batch (a line of dy) and an equal share of the panel's slots. It sorts the
// slots of a few strips by column in shared memory, then every column is a sum that one team of lanes makes in registers. Phases
// of a round:
//   stage   the strips' rows of dy as lines
//   mark    a bit for every slot: mask[strip][column], bit of its row
//   count   where each column begins: a scan; and how many of its slots lie in earlier strips
//   sort    a slot's place follows from that and the bits below its own: (row, value) go there
//   add     a team walks the slots of its columns, in the order of rows; a lane holds 16 bytes of the line
// A place depends on the pattern alone, so sums have a fixed order and results repeat bit for bit; they are float, whatever Inf,
// NaN or outlier comes. With one split dx is written in its dtype, else float partials (splits, batch, in), for finish().
// Read: chunks * nnz * (4 + value), the index the second time from L2. Limits: instructions and requests to shared memory; uneven
// columns; every block looks through all tile pointers of its panel.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../lines.cuh"
#include "args.cuh"

namespace snack::cuda {

template <class T>
struct SpmmTBatch : SpmmTNarrow<T> {
  int round_strips, round_slots;  // of a round at most
};

// A sorted slot: where its row's line lies, and its value.
template <class T>
struct SortedSlot {
  uint32_t word;  // 16-bit values: beside the place in vectors
  __device__ static __forceinline__ void write(uint32_t to, uint32_t place, T value) { write_shared(to, bits_of(value) << 16 | place); }
  __device__ __forceinline__ uint32_t address(uint32_t lines, uint32_t lane) const { return lines + ((word & 0xffffu) ^ lane) * 16; }
  __device__ __forceinline__ float value() const { return to_float(from_bits<T>(word >> 16)); }
};
template <>
struct SortedSlot<float> {
  uint32_t place;
  float number;
  __device__ static __forceinline__ void write(uint32_t to, uint32_t place, float value) { write_shared(to, place, __float_as_uint(value)); }
  __device__ __forceinline__ uint32_t address(uint32_t lines, uint32_t lane) const { return lines + (place ^ lane) * 16; }
  __device__ __forceinline__ float value() const { return number; }
};
// Two of them: a column's slots begin at an even place, and where their number is odd, 0 x the zero line ends them.
template <class T>
struct alignas(2 * sizeof(SortedSlot<T>)) SortedPair {
  SortedSlot<T> slot[2];
};

template <class T, int kLanes>
__global__ void __launch_bounds__(batch_t_threads(Lines<T, kLanes>::kCols), batch_t_resident(Lines<T, kLanes>::kCols)) spmm_t_batch(const __grid_constant__ SpmmTBatch<T> a) {
  await_stream();
  using L = Lines<T, kLanes>;
  constexpr int kThreads = batch_t_threads(L::kCols), kTeams = kThreads / kLanes, kOwn = kPanelCols / kTeams, kVector = L::kVector;
  constexpr int kAhead = 8;  // values of a thread under way
  constexpr int kScanned = kPanelCols / kThreads;  // columns of a thread in the scan
  using Scan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  extern __shared__ float4 shared[];
  __shared__ typename Scan::TempStorage scan;
  __shared__ int start[kBatchStrips + 1];
  __shared__ uint32_t first_strip;
  const int kStrips = a.round_strips;
  char* lines = reinterpret_cast<char*>(shared);  // and the zero line behind them
  uint32_t* mask = reinterpret_cast<uint32_t*>(lines + (kStrips * kStripRows + 1) * L::kBytes);  // [strip][half][column]
  uint32_t* begin = mask + kStrips * 2 * kPanelCols;                                             // [column]: its place in `sorted`, its slots
  uint16_t* before = reinterpret_cast<uint16_t*>(begin + kPanelCols);                            // [strip][column]: in earlier strips
  SortedSlot<T>* sorted = reinterpret_cast<SortedSlot<T>*>(before + kStrips * kPanelCols);

  const uint32_t panel = blockIdx.x % a.panels, group = blockIdx.x / a.panels, split = group % a.splits;
  const int64_t b0 = int64_t(group / a.splits) * L::kCols;
  const int64_t* tiles = a.tile_ptr + int64_t(panel) * a.strips;
  const int64_t first = tiles[0], slots = tiles[a.strips] - first;
  int64_t from = first + slots * split / a.splits;
  const int64_t stop = first + slots * (split + 1) / a.splits;
  for (int64_t i = threadIdx.x; i < a.strips; i += kThreads)
    if (tiles[i] <= from && from < tiles[i + 1]) first_strip = uint32_t(i);

  const uint32_t team = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t mask_at = shared_address(mask), begin_at = shared_address(begin), before_at = shared_address(before), sorted_at = shared_address(sorted);
  const uint32_t lines_at = shared_address(lines), start_at = shared_address(start), zero_place = StagedLines<T, kLanes>::place(kStrips * kStripRows);
  if (threadIdx.x < kLanes) reinterpret_cast<uint4*>(lines)[zero_place ^ threadIdx.x] = uint4{};
  float sum[kOwn][kVector] = {};
  __syncthreads();
  int64_t strip = first_strip;
#pragma unroll 1
  while (from < stop) {
    while (tiles[strip + 1] <= from) ++strip;
    const int strips = int(min(int64_t(kStrips), a.strips - strip)), rows = strips * kStripRows;
    const int64_t to = min(min(from + a.round_slots, tiles[strip + strips]), stop);
    const int count = int(to - from);
    __syncthreads();  // the round before is done
    if (threadIdx.x <= strips) start[threadIdx.x] = int(min(max(tiles[strip + threadIdx.x], from), to) - from);
    for (int i = threadIdx.x; i < strips * (2 * kPanelCols / 4); i += kThreads) reinterpret_cast<uint4*>(mask)[i] = uint4{};
    StagedLines<T, kLanes>::stage(lines, a.dy, strip * kStripRows, rows, a.out, a.b0 + b0, a.b0 + a.batch);
    __syncthreads();

    const uint16_t* index = a.index + from;
    const T* values = a.values + from;
    // f(number of the load, strip of the round, row, column) for the round's slots; `ahead` loads of a thread are under way, and
    // load(the thread's first slot) begins others.
    const auto for_slots = [&](auto ahead, auto&& load, auto&& f) {
      constexpr int kLoads = decltype(ahead)::value;
      int s = 0, next = start[1];
#pragma unroll 1
      for (int first = threadIdx.x; first < count; first += kLoads * kThreads) {
        uint32_t word[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) word[i] = first + i * kThreads < count ? index[first + i * kThreads] : 0u;
        load(first);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int slot = first + i * kThreads;
          if (slot >= count) break;
          while (slot >= next) next = read_shared<int>(start_at + 4 * (++s + 1));  // a thread's slots ascend
          f(i, s, word[i] >> kTileColBits, word[i] & (kPanelCols - 1));
        }
      }
    };
    for_slots(std::integral_constant<int, 16>{}, [](int) {}, [&](int, int s, uint32_t row, uint32_t column) {
      or_shared(mask_at + 4 * ((2 * s + row / 32) * kPanelCols + column), 1u << row % 32);
    });
    __syncthreads();

    int counts[kScanned] = {}, even[kScanned];
#pragma unroll 1
    for (int t = 0; t < strips; ++t)
#pragma unroll
      for (int i = 0; i < kScanned; ++i) {
        const int column = threadIdx.x * kScanned + i;
        const uint32_t* at = mask + 2 * t * kPanelCols + column;
        before[t * kPanelCols + column] = uint16_t(counts[i]);  // of the column
        counts[i] += __popc(at[0]) + __popc(at[kPanelCols]);
      }
#pragma unroll
    for (int i = 0; i < kScanned; ++i) even[i] = (counts[i] + 1) & ~1;
    Scan(scan).ExclusiveSum(even, even);
#pragma unroll
    for (int i = 0; i < kScanned; ++i) {
      begin[threadIdx.x * kScanned + i] = even[i] << 16 | counts[i];
      if (counts[i] % 2 != 0) SortedSlot<T>::write(sorted_at + (even[i] + counts[i]) * int(sizeof(SortedSlot<T>)), zero_place, from_float<T>(0.f));
    }
    __syncthreads();

    T value[kAhead];
    for_slots(
        std::integral_constant<int, kAhead>{}, [&](int first) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
            if (first + i * kThreads < count) value[i] = values[first + i * kThreads];
        },
        [&](int i, int s, uint32_t row, uint32_t column) {
          const uint32_t at = mask_at + 4 * (2 * s * kPanelCols + column), low = read_shared<uint32_t>(at), below = (1u << row % 32) - 1;
          const uint32_t rank = row < 32 ? __popc(low & below) : __popc(low) + __popc(read_shared<uint32_t>(at + 4 * kPanelCols) & below);
          const uint32_t to = (read_shared<uint32_t>(begin_at + 4 * column) >> 16) + read_shared<uint16_t>(before_at + 2 * (s * kPanelCols + column)) + rank;
          SortedSlot<T>::write(sorted_at + to * uint32_t(sizeof(SortedSlot<T>)), StagedLines<T, kLanes>::place(s * kStripRows + row), value[i]);
        });
    __syncthreads();

    const SortedPair<T>* pairs = reinterpret_cast<const SortedPair<T>*>(sorted);
    // What a team needs next is under way: the pair after the one it adds, or the next column's first.
    uint32_t column = begin[team];
    SortedPair<T> next = pairs[column >> 17];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const SortedPair<T>* pair = pairs + (column >> 17);
      const int pairs_left = int((column & 0xffffu) + 1) / 2;
      if (j + 1 < kOwn) column = begin[team + kTeams * (j + 1)];
      const SortedPair<T> next_columns = pairs[column >> 17];
#pragma unroll 1
      for (int left = pairs_left; left > 0; --left) {
        const SortedPair<T> two = next;
        next = *++pair;
        const uint4 x0 = read_shared<uint4>(two.slot[0].address(lines_at, lane)), x1 = read_shared<uint4>(two.slot[1].address(lines_at, lane));
        add_product<T>(sum[j], two.slot[0].value(), x0);
        add_product<T>(sum[j], two.slot[1].value(), x1);
      }
      next = next_columns;
    }
    from = to;
  }

  // Columns of equal j are neighbours; through shared memory they are written batch row by batch row, four j at a time.
  constexpr int kPart = 4 * kTeams, kPitch = kPart + 1;
  static_assert(kOwn % 4 == 0 && kPart == batch_t_columns(sizeof(T)));
  float* tile = reinterpret_cast<float*>(shared);
  const int present = int(min(int64_t(L::kCols), a.batch - b0));
#pragma unroll 1
  for (int part = 0; part < kOwn / 4; ++part) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      if (j / 4 == part) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) tile[(lane * kVector + i) * kPitch + j % 4 * kTeams + team] = sum[j][i];
      }
    __syncthreads();
    const int64_t column0 = int64_t(panel) * kPanelCols + part * kPart;
#pragma unroll 1
    for (int b = threadIdx.x / 32; b < present; b += kThreads / 32) {
      float* partial = a.partials + (split * a.batch + b0 + b) * a.in + column0;
      T* dx = a.dx + (a.b0 + b0 + b) * a.in + column0;
#pragma unroll
      for (int i = threadIdx.x % 32; i < kPart; i += 32) {
        if (column0 + i >= a.in) break;
        if (a.partials != nullptr) partial[i] = tile[b * kPitch + i];
        else dx[i] = from_float<T>(tile[b * kPitch + i]);
      }
    }
  }
}

}  // namespace snack::cuda
