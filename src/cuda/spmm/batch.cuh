// spmm, regime stream, narrow tiles with row starts, larger batches: y (batch, out) = x (batch, in) W^T + bias.
//
// Lanes hold vectors of the batch, so that what a slot costs besides its products is shared by 8 or 16 batch columns.
//   transpose_lines   x to lines (chunks, panels, 1025, columns): a line is the chunk's batch columns of one feature. A panel's
//                     last line is zero, and so are columns beyond the batch and features beyond `in`
//   spmm_batch        a block owns a run of rows and one chunk. A team of kLanes lanes owns kRows rows and walks their segments (a
//                     row's slots in a panel) panel by panel; a lane reads kPieces times 16 bytes of each slot's line. `splits`
//                     groups of teams share the panels of the same rows. Lines come from L1 and L2 (kStaged false), or the
//                     panel's window is copied to shared memory first, where two windows fit while the one before is in use.
//                     Slots are read in groups from aligned addresses by all lanes of a team (GroupWalk), or one a lane and
//                     handed round (HandedWalk). A place that holds no slot of the row counts as 0 x the zero line: a
//                     connection that is absent passes on no Inf or NaN
//   end               the splits' sums are added in shared memory in their order, and y is written row by row of the batch
// Sums are float; every addition has a fixed place, so results repeat bit for bit.
// Read: chunks * nnz * (2 + value), nnz * batch * value of lines from L1 or shared memory; staged also row blocks * in * batch *
// value from L2. Written: batch * out. Limit: instructions, 19 to 23 a slot and 16 bytes of its line.
#pragma once

#include "../stage.cuh"

namespace snack::cuda {

inline constexpr int kPanelLines = kPanelCols + 1;
// Largest block: more sums or gathers a lane, more registers.
constexpr int batch_threads(int rows, int fetch, bool staged) {
  return rows > 2 || (rows == 2 && !staged) ? 512 : rows == 1 && fetch != 8 && staged ? 1024 : 768;
}

/// A chunk of the batch: kLanes * kPieces * 16 bytes a line, kPieces times 16 bytes a lane.
template <class T, int kLanes, int kPieces>
struct Lines {
  static constexpr int kVector = 16 / int(sizeof(T)), kCols = kLanes * kPieces * kVector, kBytes = kLanes * kPieces * 16;
  static constexpr int64_t kPanelBytes = int64_t{kPanelLines} * kBytes;
};

template <class T>
struct SpmmBatch {
  const uint16_t* index;
  const int64_t* tile_ptr;
  const uint16_t* row_starts;  // (panels, out), counted from the start of the row's tile
  const T* values;
  const char* lines;  // 16-byte aligned
  const T* bias;
  T* y;  // (batch, out), of this launch
  int64_t out, batch, strips;
  int64_t vector_end;  // segments that end by here are read in vectors: nnz / 8 * 8, or 0 where index or values do not lie on 16 bytes
  int panels, panels_a_split;
  int teams, windows;  // of a split: teams, such that teams * kLanes is a multiple of 32; windows in shared memory, 1 or 2
  uint32_t row_blocks;
};
// Grid: row_blocks * chunks, row_blocks = ceil(out / (teams * kRows)). Block: splits * teams * kLanes, batch_threads() at most.

// Dynamic shared memory, bytes.
template <class T, int kLanes, int kPieces>
constexpr int64_t batch_shared(bool staged, int teams, int splits, int windows) {
  using L = Lines<T, kLanes, kPieces>;
  const int64_t sums = int64_t{4} * L::kCols * (teams + 1), window = staged ? L::kPanelBytes * splits * windows : 0;
  return sums > window ? sums : window;
}

// Keeps the compiler from shifting before it masks: masked first, shift and addition are one instruction.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm("" : "+r"(v));
  return v;
}

/// kCount (4 or 8) consecutive elements in registers, read as one or two vectors.
template <class T, int kCount>
struct Run {
  static constexpr int kAWord = 4 / int(sizeof(T)), kWords = kCount / kAWord;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const T* p) {
    if constexpr (kWords == 1) {
      word[0] = __ldg(reinterpret_cast<const uint32_t*>(p));
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(p));
      word[0] = two.x, word[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(p) + i / 4);
        word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
      }
    }
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
    else return to_float(from_bits<T>(kAWord == 1 ? word[i] : (word[i / 2] >> (16 * (i % 2))) & 0xffffu));
  }
  /// Column of element i, an index word, times kScale.
  template <uint32_t kScale>
  __device__ __forceinline__ uint32_t column(int i) const {
    if (i % 2 == 0) return kept(word[i / 2] & uint32_t(kPanelCols - 1)) * kScale;
    return kept(word[i / 2] & (uint32_t(kPanelCols - 1) << 16)) / ((1u << 16) / kScale);
  }
};

// sum += value * the vector x.
__device__ __forceinline__ void add_product(float* sum, float value, const uint4& x, float) {
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = fmaf(value, __uint_as_float(word[i]), sum[i]);
}
__device__ __forceinline__ void add_product(float* sum, float value, const uint4& x, __nv_bfloat16) {
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(value, __uint_as_float(word[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(value, __uint_as_float(word[i] & 0xffff0000u), sum[2 * i + 1]);
  }
}
__device__ __forceinline__ void add_product(float* sum, float value, const uint4& x, __half) {
  const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 half = __halves2half2(__ushort_as_half(uint16_t(word[i])), __ushort_as_half(uint16_t(word[i] >> 16)));
    const float2 two = __half22float2(half);
    sum[2 * i] = fmaf(value, two.x, sum[2 * i]), sum[2 * i + 1] = fmaf(value, two.y, sum[2 * i + 1]);
  }
}

__device__ __forceinline__ void copy_16(void* shared, const void* global) {
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kOpen>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kOpen) : "memory");
}
// Barrier of one split's threads, a multiple of 32.
__device__ __forceinline__ void sync_split(unsigned split, unsigned threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(split + 1), "r"(threads) : "memory");
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
    for (int j = 0; j < kPieces; ++j)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n" : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w) : "r"(at ^ (j * kApart)));
  }
};
template <uint32_t kApart>
struct GlobalLines {
  const char* first;
  int32_t second;  // from the first piece on
  template <int kPieces>
  __device__ __forceinline__ void read(uint32_t at, uint4 (&x)[kPieces]) const {
    x[0] = __ldg(reinterpret_cast<const uint4*>(first + at));
    if constexpr (kPieces == 2) x[1] = __ldg(reinterpret_cast<const uint4*>(first + at + second));
  }
};

// The slots of a row in a panel as they are loaded, well before they are needed.
struct SegmentPointers {
  int64_t tile, next_tile;
  int start, stop;
  bool exists, last;  // last row of its tile

  // tile_at, start_at: the tile pointer and the row start of this row and panel
  __device__ __forceinline__ void load(const int64_t* tile_at, const uint16_t* start_at, unsigned row, unsigned out) {
    exists = row < out;
    if (!exists) return;
    last = row % kStripRows == kStripRows - 1 || row + 1 == out;
    tile = __ldg(tile_at), next_tile = __ldg(tile_at + 1);
    start = __ldg(start_at), stop = last ? 0 : __ldg(start_at + 1);
  }
  __device__ __forceinline__ int64_t begin() const { return exists ? tile + start : 0; }
  __device__ __forceinline__ int count() const { return !exists ? 0 : last ? int(next_tile - tile) - start : stop - start; }
};

/// Walks segments in groups of kGroup slots (4 or 8), which every lane of a team reads from aligned addresses.
template <class T, int kLanes, int kPieces, int kGroup>
class GroupWalk {
 public:
  /// Reads the first slots of the segment that `p` points to.
  __device__ __forceinline__ void open(const SpmmBatch<T>& a, const SegmentPointers& p) {
    const int count = p.count();
    const int64_t begin = p.begin();
    from_ = int(begin) & (kGroup - 1), first_ = begin - from_;
    to_ = count > 0 ? from_ + count : 0;
    if (to_ > 0 && first_ + to_ <= a.vector_end) group_.load(a.index + first_, a.values + first_);
  }
  /// Adds the open segment, and opens the one that `ahead` points to.
  template <int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], const SpmmBatch<T>& a, const SegmentPointers& ahead, const Source& source) {
    const bool vectors = first_ + to_ <= a.vector_end;
    int to = vectors ? to_ : 0;
    if (!vectors) add_singly(sum, a, source);
    const uint16_t* index = a.index + first_;
    const T* values = a.values + first_;
    Group next;
    if (to > kGroup) next.load(index + kGroup, values + kGroup);
    if (to > 0) add_group<false>(sum, group_, from_, to, source);
#pragma unroll 2
    for (; to >= 2 * kGroup; to -= kGroup) {
      index += kGroup, values += kGroup;
      Group ahead_of_it;
      if (to > 2 * kGroup) ahead_of_it.load(index + kGroup, values + kGroup);
      add_group<true>(sum, next, 0, kGroup, source);
      next = ahead_of_it;
    }
    open(a, ahead);
    if (to > kGroup) add_group<false>(sum, next, 0, to - kGroup, source);
  }

 private:
  static constexpr uint32_t kBytes = uint32_t(Lines<T, kLanes, kPieces>::kBytes);
  struct Group {
    Run<uint16_t, kGroup> words;
    Run<T, kGroup> values;
    __device__ __forceinline__ void load(const uint16_t* index, const T* values_at) { words.load(index), values.load(values_at); }
  };

  // Slots [from, to) of a group; kWhole: all.
  template <bool kWhole, int kSums, class Source>
  __device__ static __forceinline__ void add_group(float (&sum)[kSums], const Group& group, int from, int to, const Source& source) {
    uint4 x[kGroup][kPieces];
    float value[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      uint32_t at = group.words.template column<kBytes>(k);
      value[k] = group.values.value(k);
      if (!kWhole) {
        const bool mine = k >= from && k < to;
        at = mine ? at : kPanelCols * kBytes, value[k] = mine ? value[k] : 0.f;
      }
      source.read(at, x[k]);
    }
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) add_product(sum + j * kSums / kPieces, value[k], x[k][j], T{});
  }
  // Slot after slot, where groups cannot be read as vectors.
  template <int kSums, class Source>
  __device__ __forceinline__ void add_singly(float (&sum)[kSums], const SpmmBatch<T>& a, const Source& source) const {
#pragma unroll 1
    for (int i = from_; i < to_; ++i) {
      uint4 x[kPieces];
      source.read((a.index[first_ + i] & (kPanelCols - 1)) * kBytes, x);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) add_product(sum + j * kSums / kPieces, to_float(a.values[first_ + i]), x[j], T{});
    }
  }

  int64_t first_;  // a multiple of kGroup; the segment's slots are first_ + [from_, to_), none where to_ is 0
  int from_, to_;
  Group group_;
};

/// Walks segments in batches of slots that the lanes of a team read one each and hand round. All teams of a warp take as many
/// steps of kStep slots as the longest segment among theirs.
template <class T, int kLanes, int kPieces, int kStep>
class HandedWalk {
 public:
  __device__ __forceinline__ void open(const SpmmBatch<T>& a, const SegmentPointers& p) {
    const int64_t begin = p.begin() + lane();
    index_ = a.index + begin, values_ = a.values + begin;
    left_ = max(0, p.count());
    fetch();
  }
  template <int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], const SpmmBatch<T>& a, const SegmentPointers& ahead, const Source& source) {
    int left = __reduce_max_sync(~0u, left_);
    do {
      uint32_t column[kOwn];
      float value[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool exists = i * kLanes + lane() < left_;
        column[i] = (exists ? word_[i] & (kPanelCols - 1) : kPanelCols) * (kLanes * kPieces);
        if constexpr (sizeof(T) == 2) column[i] |= exists ? bits_of(value_[i]) << 16 : 0u;
        else value[i] = exists ? value_[i] : 0.f;
      }
      if (left > kBatch) {
        index_ += kBatch, values_ += kBatch, left_ -= kBatch;
        fetch();
      } else {
        open(a, ahead);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i += kStep) {
        if (i >= left) break;
        uint4 x[kStep][kPieces];
        float v[kStep];
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          const uint32_t word = __shfl_sync(~0u, column[(i + k) / kLanes], (i + k) % kLanes, kLanes);
          if constexpr (std::is_same_v<T, __nv_bfloat16>) v[k] = __uint_as_float(word & 0xffff0000u);
          else if constexpr (sizeof(T) == 2) v[k] = to_float(from_bits<T>(word >> 16));
          else v[k] = __shfl_sync(~0u, value[(i + k) / kLanes], (i + k) % kLanes, kLanes);
          source.read(kept(word & 0xffffu) * 16, x[k]);
        }
#pragma unroll
        for (int k = 0; k < kStep; ++k)
#pragma unroll
          for (int j = 0; j < kPieces; ++j) add_product(sum + j * kSums / kPieces, v[k], x[k][j], T{});
      }
      left -= kBatch;
    } while (left > 0);
  }

 private:
  static constexpr int kBatch = kLanes < 4 ? 8 : 16, kOwn = kBatch / kLanes;
  __device__ static __forceinline__ int lane() { return int(threadIdx.x) % kLanes; }
  // The lane's slots of the batch.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i * kLanes + lane() < left_) word_[i] = __ldg(index_ + i * kLanes), value_[i] = values_[i * kLanes];
  }

  const uint16_t* index_;  // of the lane's first slot in the batch
  const T* values_;
  int left_;  // slots of the segment from this batch on; may be negative
  uint32_t word_[kOwn];
  T value_[kOwn];
};

// kFetch > 0: groups of so many slots; < 0: handed round, in steps of so many.
template <class T, int kLanes, int kPieces, int kFetch>
struct WalkOf {
  using type = GroupWalk<T, kLanes, kPieces, kFetch>;
};
template <class T, int kLanes, int kPieces, int kFetch>
  requires(kFetch < 0)
struct WalkOf<T, kLanes, kPieces, kFetch> {
  using type = HandedWalk<T, kLanes, kPieces, -kFetch>;
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

template <class T, int kLanes, int kPieces, int kRows, int kFetch, bool kStaged>
__global__ void __launch_bounds__(batch_threads(kRows * kPieces, kFetch, kStaged), 1) spmm_batch(const SpmmBatch<T> a) {
  using L = Lines<T, kLanes, kPieces>;
  constexpr int kVector = L::kVector;
  extern __shared__ __align__(256) float4 shared[];  // aligned to lines: pieces differ in one address bit
  const unsigned threads = unsigned(a.teams) * kLanes;  // of a split
  const unsigned split = threadIdx.x / threads, thread = threadIdx.x % threads, team = thread / kLanes, lane = thread % kLanes;
  const int64_t row0 = int64_t(blockIdx.x % a.row_blocks) * (a.teams * kRows), chunk = blockIdx.x / a.row_blocks;
  const int begin = int(split) * a.panels_a_split, end = min(a.panels, begin + a.panels_a_split);
  const char* lines = a.lines + (chunk * a.panels + begin) * L::kPanelBytes;  // of the panel

  char* windows = reinterpret_cast<char*>(shared) + int64_t{split} * a.windows * L::kPanelBytes;
  int other = a.windows == 2 ? int(L::kPanelBytes) : 0, window = 0;  // offsets of the next panel's window and of this one's
  if constexpr (kStaged) {
    if (thread < L::kBytes / 16)
      for (int w = 0; w < a.windows; ++w) reinterpret_cast<uint4*>(windows + w * L::kPanelBytes + kPanelCols * L::kBytes)[thread] = uint4{};
    if (begin < end) copy_window<L>(windows, lines, thread, threads);
    commit_copies();
  }

  static_assert(kPieces == 1 || kPieces == 2);
  constexpr unsigned kApart = kLanes * 16;
  const unsigned turn = kPieces == 2 ? team % 2 : 0, first_piece = turn * kApart + lane * 16;
  const unsigned out = unsigned(a.out), row = unsigned(min(row0 + team, a.out));
  const auto row_of = [&](int k) { return min(row + unsigned(k * a.teams), out); };
  const int64_t* tile_at = a.tile_ptr + begin * a.strips + row / kStripRows;
  const uint16_t* start_at = a.row_starts + begin * a.out + row;
  SegmentPointers ahead;
  ahead.load(tile_at, start_at, row, begin < end ? out : 0);
  typename WalkOf<T, kLanes, kPieces, kFetch>::type walk;
  walk.open(a, ahead);
  float sum[kRows][kPieces * kVector] = {};

#pragma unroll 1
  for (int panel = begin; panel < end; ++panel) {
    std::conditional_t<kStaged, SharedLines<kApart>, GlobalLines<kApart>> source;
    lines += L::kPanelBytes;
    if constexpr (kStaged) {
      if (a.windows == 2) {
        if (panel + 1 < end) copy_window<L>(windows + other, lines, thread, threads);
        commit_copies();
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      sync_split(split, threads);
      source.first = uint32_t(__cvta_generic_to_shared(windows)) + window + first_piece;
    } else {
      source.first = lines - L::kPanelBytes + first_piece, source.second = team % 2 ? -int(kApart) : int(kApart);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (k + 1 == kRows) {
        tile_at += a.strips, start_at += a.out;
        ahead.load(tile_at, start_at, row, panel + 1 == end ? 0 : out);
      } else {
        const unsigned next = row_of(k + 1);
        ahead.load(tile_at + (next / kStripRows - row / kStripRows), start_at + (next - row), next, out);
      }
      walk.add(sum[k], a, ahead, source);
    }
    if constexpr (kStaged) {
      sync_split(split, threads);  // the window is free
      if (a.windows == 1 && panel + 1 < end) copy_window<L>(windows, lines, thread, threads), commit_copies();
      const int free = window;
      window = other, other = free;
    }
  }

  // The sums of kCols columns x teams rows at a time.
  float* sums = reinterpret_cast<float*>(shared);
  const unsigned splits = blockDim.x / threads;
  const int pitch = a.teams + 1;
  const int64_t b0 = chunk * L::kCols;
  const int columns = int(min(int64_t{L::kCols}, a.batch - b0));
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    for (unsigned s = 0; s < splits; ++s) {
      __syncthreads();
      if (split == s)
#pragma unroll
        for (int i = 0; i < kPieces * kVector; ++i) {
          const unsigned piece = (unsigned(i / kVector) ^ turn) * kLanes + lane;
          float& to = sums[(piece * kVector + i % kVector) * pitch + team];
          to = s == 0 ? sum[k][i] : to + sum[k][i];
        }
    }
    __syncthreads();
    const int64_t first = row0 + int64_t{k} * a.teams;
    const int rows = int(min(int64_t{a.teams}, a.out - first));
    for (int b = threadIdx.x / 32; b < columns; b += blockDim.x / 32)
      for (int r = threadIdx.x % 32; r < rows; r += 32) {
        const float bias = a.bias == nullptr ? 0.f : to_float(a.bias[first + r]);
        a.y[(b0 + b) * a.out + first + r] = from_float<T>(sums[b * pitch + r] + bias);
      }
  }
}

inline constexpr int kTransposeThreads = 256, kTransposeFeatures = 64;

// x: `batch` columns of a launch. A block takes 64 features of a chunk. Grid: panels * 16 * chunks.
// kVectors: 16-byte vectors a line.
template <class T, int kVectors>
__global__ void __launch_bounds__(kTransposeThreads) transpose_lines(const Strided<T> x, int64_t in, int64_t batch, uint32_t tiles, char* lines) {
  using L = Lines<T, kVectors, 1>;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int kPitch = kTransposeFeatures + 1, kTiles = kPanelCols / kTransposeFeatures;
  __shared__ Bits tile[L::kCols * kPitch];
  const int64_t at = blockIdx.x % tiles, panel = at / kTiles, chunk = blockIdx.x / tiles;
  const int64_t f0 = at * kTransposeFeatures, b0 = chunk * L::kCols;
  const bool batch_first = x.row_stride == 1 && x.col_stride != 1;
  const Bits* from = reinterpret_cast<const Bits*>(x.data);
#pragma unroll 8
  for (int i = threadIdx.x; i < L::kCols * kTransposeFeatures; i += kTransposeThreads) {
    const int f = batch_first ? i / L::kCols : i % kTransposeFeatures, b = batch_first ? i % L::kCols : i / kTransposeFeatures;
    const bool exists = f0 + f < in && b0 + b < batch;
    tile[b * kPitch + f] = exists ? __ldg(from + (b0 + b) * x.row_stride + (f0 + f) * x.col_stride) : Bits(0);
  }
  __syncthreads();
  const int first = int(at % kTiles) * kTransposeFeatures;
  uint4* to = reinterpret_cast<uint4*>(lines + (chunk * (tiles / kTiles) + panel) * L::kPanelBytes) + first * kVectors;
  for (int i = threadIdx.x; i < kTransposeFeatures * kVectors; i += kTransposeThreads) {
    const int f = i / kVectors, lane = i % kVectors;
    uint32_t word[4] = {};
#pragma unroll
    for (int j = 0; j < L::kVector; ++j) {
      const int byte = j * int(sizeof(T));
      word[byte / 4] |= uint32_t(tile[(lane * L::kVector + j) * kPitch + f]) << (8 * (byte % 4));
    }
    to[i] = make_uint4(word[0], word[1], word[2], word[3]);
  }
  if (first + kTransposeFeatures == kPanelCols && threadIdx.x < kVectors) to[kTransposeFeatures * kVectors + threadIdx.x] = uint4{};
}

}  // namespace snack::cuda
