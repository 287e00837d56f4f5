// spmm, regime stream, narrow tiles with row starts, larger batches: y (batch, out) = x (batch, in) W^T + bias.
//
// Lanes hold vectors of the batch, so that what a slot costs besides its products is shared by 8 or 16 batch columns.
//   transpose_lines   x to lines (chunks, panels, 1025, columns): a line is the chunk's batch columns of one feature. A panel's
//                     last line is zero, and so are columns beyond the batch and features beyond `in`
//   spmm_batch        a block owns a run of rows and one chunk. A team of kLanes lanes owns a row and walks its segments (its
//                     slots in a panel); a lane reads kPieces times 16 bytes of each slot's line. `groups` of teams share
//                     the panels of the same rows, and the parts of a group the slots. Lines come from L1 and L2 (lines of 128 bytes: the segments of up to 16
//                     panels are walked as one list), or (kStaged) panel by panel the window is copied to shared memory
//                     first; where two windows fit, one is copied while the other is in use.
//                     Slots are read one a lane and handed round. A place that holds no slot of the row counts as
//                     0 x the zero line: a connection that is absent passes on no Inf or NaN
//   end               the sums of groups and parts are added in shared memory in their order. A team stops after `longest` slots of a
//                     segment; all teams of the block share what is left of such rows, one row after the other. Then y is
//                     written row by row of the batch
// Sums are float; every addition has a fixed place, so results repeat bit for bit.
// Read: chunks * nnz * (2 + value), nnz * batch * value of lines from L1 or shared memory; staged also row blocks * in * batch *
// value from L2. Written: batch * out. Limits: instructions, 19 to 23 a slot and 16 bytes of its line; a block that owns many
// long rows ends late, since other blocks do not help; 2^32 - 16 slots.
#pragma once

#include "../lines.cuh"

namespace snack::cuda {

template <class T>
struct SpmmBatch {
  const uint16_t* index;
  const int64_t* tile_ptr;
  const uint16_t* row_starts;
  const T* values;
  const char* lines;  // 16-byte aligned
  const T* bias;
  T* y;  // (batch, out), of this launch
  int64_t out, batch;
  int strips, panels, panels_a_group;
  int teams, groups, windows;  // teams * kLanes is a multiple of 32; windows of a group, 1 or 2
  int log_parts;               // log2 of the teams of a group that share a row's slots
  int longest;                 // slots of a segment that one team takes
  uint32_t row_blocks;
};
// Grid: row_blocks * chunks, row_blocks = ceil(out / teams). Block: groups * parts * teams * kLanes.

// Keeps the compiler from shifting before it masks: masked first, shift and addition are one instruction.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm("" : "+r"(v));
  return v;
}

__device__ __forceinline__ void copy_16(void* shared, const void* global) {
  const unsigned to = shared_address(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kOpen>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kOpen) : "memory");
}
// Barrier of one group's threads, a multiple of 32.
__device__ __forceinline__ void sync_group(unsigned group, unsigned threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(group + 1), "r"(threads) : "memory");
}

/// Where a lane's first piece of each line of a panel lies. The second lies kApart bytes on; in odd teams kApart bytes before, so
/// that eight lanes that are served together, two teams of four, read different banks.
template <uint32_t kApart>
struct SharedLines {
  uint32_t first;
  template <int kPieces>
  __device__ __forceinline__ void read(uint32_t at, uint4 (&x)[kPieces]) const {
    at += first;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) x[j] = read_shared<uint4>(at ^ (j * kApart));
  }
};
template <uint32_t kApart>
struct GlobalLines {
  const char* first;
  template <int kPieces>
  __device__ __forceinline__ void read(uint32_t at, uint4 (&x)[kPieces]) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) x[j] = *reinterpret_cast<const uint4*>(first + at + j * kApart);
  }
};

// The slots of a row in a panel, as they are loaded, well before they are needed.
struct Segment {
  int64_t tile;
  int start, stop;            // from the tile on; stop of its last row: the next tile's lowest 32 bits
  bool exists = false, last;  // row of its tile

  template <class T>
  __device__ __forceinline__ void load(const SpmmBatch<T>& a, unsigned row, int panel, bool is_there) {
    exists = is_there;
    if (!exists) return;
    const int64_t* tile_at = a.tile_ptr + (int64_t{panel} * a.strips + int(row / kStripRows));
    const uint16_t* start_at = a.row_starts + (int64_t{panel} * int(a.out) + int(row));
    last = row % kStripRows == kStripRows - 1 || row + 1 == unsigned(a.out);
    tile = *tile_at, start = *start_at;
    stop = last ? *reinterpret_cast<const int*>(tile_at + 1) : start_at[1];
  }
  __device__ __forceinline__ int64_t begin() const { return exists ? tile + start : 0; }
  __device__ __forceinline__ int count() const { return exists ? int(unsigned(stop) - (last ? unsigned(tile) : 0u)) - start : 0; }
};

/// Slots that the lanes of a team hold, kOwn each, and hand round: place (the line of the slot's column, below 2^16) and value.
template <class T, int kLanes, int kOwn>
struct HandedSlots {
  uint32_t word[kOwn];  // 16-bit values lie beside the place
  float value[kOwn];

  /// place: of the zero line where no slot exists.
  __device__ __forceinline__ void set(int i, bool exists, uint32_t place, T its_value) {
    word[i] = place;
    if constexpr (sizeof(T) == 2) word[i] |= exists ? bits_of(its_value) << 16 : 0u;
    else value[i] = exists ? its_value : 0.f;
  }
  /// Adds kStep of them from the i-th on; their lines lie `unit` bytes a place apart.
  template <int kStep, int kPieces, int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], int i, uint32_t unit, const Source& source) const {
    uint4 x[kStep][kPieces];
    float v[kStep];
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      const uint32_t handed = __shfl_sync(~0u, word[(i + k) / kLanes], (i + k) % kLanes, kLanes);
      if constexpr (std::is_same_v<T, __nv_bfloat16>) v[k] = __uint_as_float(handed & 0xffff0000u);
      else if constexpr (sizeof(T) == 2) v[k] = to_float(from_bits<T>(handed >> 16));
      else v[k] = __shfl_sync(~0u, value[(i + k) / kLanes], (i + k) % kLanes, kLanes);
      source.read(kept(handed & 0xffffu) * unit, x[k]);
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) add_product<T>(sum + j * kSums / kPieces, v[k], x[k][j]);
  }
};

/// Walks segments in batches of slots that the lanes of a team read one each and hand round. All teams of a warp take as many
/// steps of kStep slots as the longest segment among theirs.
template <class T, int kLanes, int kPieces>
class SegmentWalk {
 public:
  bool was_cut = false;  // any segment

  __device__ __forceinline__ explicit SegmentWalk(int part) : part_(part) {}

  /// Reads the lane's first slots.
  __device__ __forceinline__ void open(const SpmmBatch<T>& a, const Segment& segment) {
    const int count = min(segment.count(), a.longest), first = count * part_ >> a.log_parts;
    was_cut |= segment.count() > a.longest;
    at_ = segment.begin() + first + lane(), left_ = (count * (part_ + 1) >> a.log_parts) - first;
    fetch(a);
  }
  /// Adds the open segment, and opens `next`.
  template <int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], const SpmmBatch<T>& a, const Segment& next, const Source& source) {
    int left = __reduce_max_sync(~0u, left_);
    do {
      constexpr uint32_t kLine = kLanes * kPieces;
      HandedSlots<T, kLanes, kOwn> slots;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool exists = i * kLanes + lane() < left_;
        slots.set(i, exists, (exists ? word_[i] & (kPanelCols - 1) : kPanelCols) * kLine, value_[i]);
      }
      if (left > kBatch) {
        at_ += kBatch, left_ -= kBatch;
        fetch(a);
      } else {
        open(a, next);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i += kStep) {
        if (i >= left) break;
        slots.template add<kStep, kPieces>(sum, i, 16, source);
      }
      left -= kBatch;
    } while (left > 0);
  }

 private:
  static constexpr int kStep = kLanes == 4 && kPieces == 1 ? 8 : 4 / kPieces, kBatch = kLanes < 4 ? 8 : 16, kOwn = kBatch / kLanes;
  __device__ static __forceinline__ int lane() { return int(threadIdx.x) % kLanes; }
  // The lane's slots of the batch.
  __device__ __forceinline__ void fetch(const SpmmBatch<T>& a) {
    const uint16_t* index = a.index + at_;
    const T* values = a.values + at_;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i * kLanes + lane() < left_) word_[i] = index[i * kLanes], value_[i] = values[i * kLanes];
  }

  int part_;
  int64_t at_;  // the lane's first slot in the batch
  int left_;  // slots of the segment from this batch on; may be negative
  uint32_t word_[kOwn];
  T value_[kOwn];
};

/// Walks a row's slots in up to kListPanels panels as one list, which the lanes of a team read one each and hand round. All teams
/// of a warp take as many steps as the longest row among theirs.
template <class T, int kLanes>
class ListWalk {
 public:
  bool was_cut = false;  // any of the lane's segments

  __device__ __forceinline__ explicit ListWalk(int part) : part_(part) {}

  /// Reads where the segments lie (a lane holds those of every kLanes-th panel) and the lane's first slots.
  __device__ __forceinline__ void open(const SpmmBatch<T>& a, unsigned row, bool is_row, int panel, int panels) {
    Segment segment[kHeld];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) segment[h].load(a, row, panel + h * kLanes + lane(), is_row && h * kLanes + lane() < panels);
    int total = 0;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int count = segment[h].count();
      was_cut |= count > a.longest;
      int sum = min(count, a.longest);
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) {
        const int before = __shfl_up_sync(~0u, sum, d, kLanes);
        if (lane() >= d) sum += before;
      }
      end_[h] = total + sum;
      shift_[h] = uint32_t(segment[h].begin()) - uint32_t(end_[h] - min(count, a.longest));
      total += __shfl_sync(~0u, sum, kLanes - 1, kLanes);
    }
    const int first = int(int64_t(total) * part_ >> a.log_parts);
    stop_ = int(int64_t(total) * (part_ + 1) >> a.log_parts);
    left_ = stop_ - first, at_ = first + lane(), panel_ = 0;
    enter();
    fetch(a);
  }
  /// Adds the row.
  template <int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], const SpmmBatch<T>& a, const Source& source) {
    for (int left = __reduce_max_sync(~0u, left_); left > 0; left -= kBatch) {
      HandedSlots<T, kLanes, kOwn> slots;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        slots.set(i, exists_[i], exists_[i] ? (word_[i] & (kPanelCols - 1)) + line0_[i] : uint32_t(kPanelCols), value_[i]);
      if (left > kBatch) fetch(a);
#pragma unroll
      for (int i = 0; i < kBatch; i += kStep) {
        if (i >= left) break;
        slots.template add<kStep, 1>(sum, i, kLanes * 16, source);
      }
    }
  }

 private:
  static constexpr int kStep = 8, kBatch = 16, kOwn = kBatch / kLanes, kHeld = kListPanels / kLanes;
  __device__ static __forceinline__ int lane() { return int(threadIdx.x) % kLanes; }
  // The segment of panel_, from the lane that holds it.
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int end = __shfl_sync(~0u, end_[h], panel_ % kLanes, kLanes);
      const uint32_t shift = __shfl_sync(~0u, shift_[h], panel_ % kLanes, kLanes);
      if (h == 0 || panel_ / kLanes == h) its_end_ = end, its_shift_ = shift;
    }
  }
  // The lane's next slots.
  __device__ __forceinline__ void fetch(const SpmmBatch<T>& a) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      exists_[i] = at_ < stop_;
      while (__any_sync(~0u, exists_[i] && at_ >= its_end_)) {
        if (exists_[i] && at_ >= its_end_) ++panel_;
        enter();
      }
      const uint32_t slot = its_shift_ + uint32_t(at_);
      line0_[i] = panel_ * (kPanelCols + 1);
      if (exists_[i]) word_[i] = a.index[slot], value_[i] = a.values[slot];
      at_ += kLanes;
    }
  }

  int part_, left_;
  int end_[kHeld], stop_, at_, panel_, its_end_;  // ends and places in the row's list; panels from the first that was opened
  uint32_t shift_[kHeld], its_shift_;              // slot = shift + place
  bool exists_[kOwn];
  uint32_t word_[kOwn], line0_[kOwn];
  T value_[kOwn];
};

// The lines of a panel but the zero line, 2 KiB a warp at a time.
template <class L>
__device__ __forceinline__ void copy_window(char* window, const char* panel, unsigned thread, unsigned threads) {
  constexpr unsigned kStep = 2048, kWindow = kPanelCols * L::kBytes;
  static_assert(kWindow % kStep == 0);
#pragma unroll 1
  for (unsigned at = thread / 32 * kStep + thread % 32 * 16; at < kWindow; at += threads / 32 * kStep)
#pragma unroll
    for (unsigned i = 0; i < kStep; i += 512) copy_16(window + at + i, panel + at + i);
}

// What is left of segments that were cut: the block's teams share a row, so many a panel. sums: [column][row of the block].
template <class T, int kLanes, int kPieces>
__device__ __forceinline__ void add_long_rows(const SpmmBatch<T>& a, unsigned row0, unsigned chunk, const int* is_long, float* sums, float* warp_sums) {
  using L = Lines<T, kLanes, kPieces>;
  const int teams = int(blockDim.x) / kLanes, team = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  const int parts = max(1, teams / a.panels), part = team / a.panels, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
#pragma unroll 1
  for (int row = 0; row < a.teams; ++row) {
    if (!is_long[row]) continue;
    float sum[kPieces * L::kVector] = {};
#pragma unroll 1
    for (int panel = part < parts ? team % a.panels : a.panels; panel < a.panels; panel += teams) {
      const GlobalLines<kLanes * 16> source{a.lines + (int64_t{chunk} * a.panels + panel) * L::kPanelBytes + lane * 16};
      Segment segment;
      segment.load(a, row0 + row, panel, true);
      const int rest = max(0, segment.count() - a.longest), share = (rest + parts - 1) / parts;
      const int64_t begin = segment.begin() + a.longest + part * share;
      const int count = min(share, rest - part * share);
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        uint4 x[kPieces];
        source.read((a.index[begin + i] & (kPanelCols - 1)) * L::kBytes, x);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) add_product<T>(sum + j * L::kVector, to_float(a.values[begin + i]), x[j]);
      }
    }
#pragma unroll 1
    for (int d = kLanes; d < 32; d *= 2)
#pragma unroll
      for (int i = 0; i < kPieces * L::kVector; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
    float* to = warp_sums + warp * L::kCols + lane * L::kVector;
#pragma unroll
    for (int i = 0; i < kPieces * L::kVector; ++i)
      if (threadIdx.x % 32 < kLanes) to[i / L::kVector * kLanes * L::kVector + i % L::kVector] = sum[i];
    __syncthreads();
#pragma unroll 1
    for (int column = threadIdx.x; column < L::kCols; column += blockDim.x)
#pragma unroll 1
      for (int w = 0; w < warps; ++w) sums[column * (a.teams + 1) + row] += warp_sums[w * L::kCols + column];
    __syncthreads();
  }
}

template <class T, int kLanes, int kPieces, bool kStaged>
__global__ void __launch_bounds__(kBatchThreads, 1) spmm_batch(const SpmmBatch<T> a) {
  await_stream();
  static_assert(kPieces == 1 || (kPieces == 2 && kStaged));
  static_assert(kLanes < 8 || !kStaged);
  using L = Lines<T, kLanes, kPieces>;
  constexpr int kVector = L::kVector;
  constexpr unsigned kApart = kLanes * 16;
  extern __shared__ __align__(256) float4 shared[];  // aligned to lines: pieces differ in one address bit
  const unsigned part_threads = unsigned(a.teams) * kLanes, threads = part_threads << a.log_parts;  // of a group
  const unsigned group = threadIdx.x / threads, thread = threadIdx.x % threads, team = thread % part_threads / kLanes, lane = thread % kLanes;
  const int part = int(thread / part_threads);
  const unsigned row0 = blockIdx.x % a.row_blocks * a.teams, chunk = blockIdx.x / a.row_blocks;
  const int begin = int(group) * a.panels_a_group, end = min(a.panels, begin + a.panels_a_group);
  const char* lines = a.lines + (int64_t{chunk} * a.panels + begin) * L::kPanelBytes;  // of the panel

  char* windows = reinterpret_cast<char*>(shared) + int64_t{group} * a.windows * L::kPanelBytes;
  const int windows_apart = (a.windows - 1) * int(L::kPanelBytes);
  int window = 0;  // offset of this panel's; windows_apart - window: of the next panel's
  if constexpr (kStaged) {
    if (thread < L::kBytes / 16)
      for (int w = 0; w < a.windows; ++w) reinterpret_cast<uint4*>(windows + w * L::kPanelBytes + kPanelCols * L::kBytes)[thread] = uint4{};
    if (begin < end) copy_window<L>(windows, lines, thread, threads);
    commit_copies();
  }

  const unsigned turn = kPieces == 2 ? team % 2 : 0, first_piece = turn * kApart + lane * 16;
  const unsigned row = row0 + team;
  const bool is_row = row < unsigned(a.out);
  float sum[kPieces * kVector] = {};
  bool was_cut = false;
  if constexpr (kLanes == 8) {  // fewer lanes hold too many segments each
    using Walk = ListWalk<T, kLanes>;
    Walk walk(part);
#pragma unroll 1
    for (int panel = begin; panel < end; panel += kListPanels, lines += kListPanels * L::kPanelBytes) {
      walk.open(a, row, is_row, panel, min(end - panel, kListPanels));
      walk.add(sum, a, GlobalLines<kApart>{lines + first_piece});
    }
    was_cut = (__ballot_sync(~0u, walk.was_cut) >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes) - 1)) != 0;  // any lane's
  } else {
    Segment next;
    next.load(a, row, begin, is_row && begin < end);
    SegmentWalk<T, kLanes, kPieces> walk(part);
    walk.open(a, next);
#pragma unroll 1
    for (int panel = begin; panel < end; ++panel, lines += L::kPanelBytes) {
      next.load(a, row, panel + 1, is_row && panel + 1 < end);
      if constexpr (kStaged) {
        if (a.windows == 2) {
          if (panel + 1 < end) copy_window<L>(windows + (windows_apart - window), lines + L::kPanelBytes, thread, threads);
          commit_copies();
          wait_copies<1>();
        } else {
          wait_copies<0>();
        }
        sync_group(group, threads);
        walk.add(sum, a, next, SharedLines<kApart>{shared_address(windows) + window + first_piece});
        sync_group(group, threads);  // the window is free
        if (a.windows == 1 && panel + 1 < end) copy_window<L>(windows, lines + L::kPanelBytes, thread, threads), commit_copies();
        window = windows_apart - window;
      } else {
        walk.add(sum, a, next, GlobalLines<kApart>{lines + first_piece});
      }
    }
    was_cut = walk.was_cut;
  }

  // Sums [column][row], the warps' of a long row, and which rows are long; as batch_shared() counts them.
  float* sums = reinterpret_cast<float*>(shared);
  const int pitch = a.teams + 1;
  float* warp_sums = sums + L::kCols * pitch;
  int* is_long = reinterpret_cast<int*>(warp_sums + L::kCols * (blockDim.x / 32));
#pragma unroll 1
  for (int g = 0; g < a.groups << a.log_parts; ++g) {
    __syncthreads();
    if (int(threadIdx.x / part_threads) != g) continue;
    if (lane == 0) is_long[team] = (g > 0 && is_long[team]) || was_cut;
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i) {
      const unsigned piece = (unsigned(i / kVector) ^ turn) * kLanes + lane;
      float& to = sums[(piece * kVector + i % kVector) * pitch + team];
      to = g == 0 ? sum[i] : to + sum[i];
    }
  }
  if (__syncthreads_or(was_cut)) add_long_rows<T, kLanes, kPieces>(a, row0, chunk, is_long, sums, warp_sums);

  const int64_t b0 = int64_t{chunk} * L::kCols;
  const int columns = int(min(int64_t{L::kCols}, a.batch - b0)), rows = int(min(int64_t{a.teams}, a.out - row0));
#pragma unroll 1
  for (int b = threadIdx.x / 32; b < columns; b += blockDim.x / 32)
#pragma unroll 2
    for (int r = threadIdx.x % 32; r < rows; r += 32) {
      const float bias = a.bias == nullptr ? 0.f : to_float(a.bias[row0 + r]);
      a.y[(b0 + b) * a.out + row0 + r] = from_float<T>(sums[b * pitch + r] + bias);
    }
}

inline constexpr int kTransposeThreads = 256, kTransposeFeatures = kPanelCols / kPanelTiles;

// x: `batch` columns of a launch. A block takes 64 features of a chunk. Grid: tiles * chunks, tiles = panels * kPanelTiles.
// Bits: uint32_t or uint16_t, since numbers are only moved. kVectors: 16-byte vectors a line.
template <class Bits, int kVectors>
__global__ void __launch_bounds__(kTransposeThreads) transpose_lines(const Strided<Bits> x, int64_t in, int64_t batch, uint32_t tiles, char* lines) {
  await_stream();
  using L = Lines<Bits, kVectors, 1>;
  constexpr int kPitch = kTransposeFeatures + 1;
  __shared__ Bits tile[L::kCols * kPitch];
  const int64_t at = blockIdx.x % tiles, panel = at / kPanelTiles, chunk = blockIdx.x / tiles;
  const int64_t f0 = at * kTransposeFeatures, b0 = chunk * L::kCols;
  const bool batch_first = x.row_stride == 1 && x.col_stride != 1;
#pragma unroll 8
  for (int i = threadIdx.x; i < L::kCols * kTransposeFeatures; i += kTransposeThreads) {
    const int f = batch_first ? i / L::kCols : i % kTransposeFeatures, b = batch_first ? i % L::kCols : i / kTransposeFeatures;
    const bool exists = f0 + f < in && b0 + b < batch;
    tile[b * kPitch + f] = exists ? x.data[(b0 + b) * x.row_stride + (f0 + f) * x.col_stride] : Bits(0);
  }
  __syncthreads();
  const int first = int(at % kPanelTiles) * kTransposeFeatures;
  uint4* to = reinterpret_cast<uint4*>(lines + (chunk * (tiles / kPanelTiles) + panel) * L::kPanelBytes) + first * kVectors;
  for (int i = threadIdx.x; i < kTransposeFeatures * kVectors; i += kTransposeThreads) {
    const int f = i / kVectors, lane = i % kVectors;
    uint32_t word[4] = {};
#pragma unroll
    for (int j = 0; j < L::kVector; ++j) {
      const int byte = j * int(sizeof(Bits));
      word[byte / 4] |= uint32_t(tile[(lane * L::kVector + j) * kPitch + f]) << (8 * (byte % 4));
    }
    to[i] = make_uint4(word[0], word[1], word[2], word[3]);
  }
  if (first + kTransposeFeatures == kPanelCols && threadIdx.x < kVectors) to[kTransposeFeatures * kVectors + threadIdx.x] = uint4{};
}

}  // namespace snack::cuda
