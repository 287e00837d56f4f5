// spmm, regime stream, narrow tiles with row starts, larger batches: y (batch, out) = x (batch, in) W^T + bias.
//
// Lanes hold vectors of the batch, so that what a slot costs besides its products is shared by 8 or 16 batch columns.
//   transpose_lines   x to lines (chunks, panels, 1025, columns): a line is the chunk's batch columns of one feature. A panel's
//                     last line is zero, and so are columns beyond the batch and features beyond `in`
//   spmm_batch        a block owns a run of rows and one chunk. A team of kLanes lanes owns a row and walks its segments (its
//                     slots in a panel) panel by panel; a lane reads kPieces times 16 bytes of each slot's line. `groups` of
//                     teams share the panels of the same rows. Lines come from L1 and L2, or (kStaged) the panel's window is
//                     copied to shared memory first; where two windows fit, one is copied while the other is in use.
//                     Slots are read one a lane and handed round. A place that holds no slot of the row counts as
//                     0 x the zero line: a connection that is absent passes on no Inf or NaN
//   end               the groups' sums are added in shared memory in their order. A team stops after `longest` slots of a
//                     segment; all teams of the block share what is left of such rows, one row after the other. Then y is
//                     written row by row of the batch
// Sums are float; every addition has a fixed place, so results repeat bit for bit.
// Read: chunks * nnz * (2 + value), nnz * batch * value of lines from L1 or shared memory; staged also row blocks * in * batch *
// value from L2. Written: batch * out. Limits: instructions, 19 to 23 a slot and 16 bytes of its line; a block that owns many
// long rows ends late, since other blocks do not help.
#pragma once

#include "../element.cuh"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {

/// A chunk of the batch: kLanes * kPieces * 16 bytes a line, kPieces times 16 bytes a lane.
template <class T, int kLanes, int kPieces>
struct Lines {
  static constexpr int kVector = 16 / int(sizeof(T)), kCols = kLanes * kPieces * kVector, kBytes = kLanes * kPieces * 16;
  static constexpr int64_t kPanelBytes = panel_bytes(kBytes);
};

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
  int teams, groups, windows;  // teams of a group, such that teams * kLanes is a multiple of 32; windows of a group, 1 or 2
  int longest;                 // slots of a segment that one team takes
  uint32_t row_blocks;
};
// Grid: row_blocks * chunks, row_blocks = ceil(out / teams). Block: groups * teams * kLanes.

// Keeps the compiler from shifting before it masks: masked first, shift and addition are one instruction.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm("" : "+r"(v));
  return v;
}

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
    for (int j = 0; j < kPieces; ++j)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n" : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w) : "r"(at ^ (j * kApart)));
  }
};
template <uint32_t kApart>
struct GlobalLines {
  const char* first;
  template <int kPieces>
  __device__ __forceinline__ void read(uint32_t at, uint4 (&x)[kPieces]) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) x[j] = __ldg(reinterpret_cast<const uint4*>(first + at + j * kApart));
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
    tile = __ldg(tile_at), start = __ldg(start_at);
    stop = last ? __ldg(reinterpret_cast<const int*>(tile_at + 1)) : __ldg(start_at + 1);
  }
  __device__ __forceinline__ int64_t begin() const { return exists ? tile + start : 0; }
  __device__ __forceinline__ int count() const { return exists ? int(unsigned(stop) - (last ? unsigned(tile) : 0u)) - start : 0; }
};

/// Walks segments in batches of slots that the lanes of a team read one each and hand round. All teams of a warp take as many
/// steps of kStep slots as the longest segment among theirs.
template <class T, int kLanes, int kPieces>
class SegmentWalk {
 public:
  bool was_cut = false;  // any segment

  /// Reads the lane's first slots.
  __device__ __forceinline__ void open(const SpmmBatch<T>& a, const Segment& segment) {
    const int count = segment.count();
    was_cut |= count > a.longest;
    at_ = segment.begin() + lane(), left_ = min(count, a.longest);
    fetch(a);
  }
  /// Adds the open segment, and opens `next`.
  template <int kSums, class Source>
  __device__ __forceinline__ void add(float (&sum)[kSums], const SpmmBatch<T>& a, const Segment& next, const Source& source) {
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
        at_ += kBatch, left_ -= kBatch;
        fetch(a);
      } else {
        open(a, next);
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
  static constexpr int kStep = 4 / kPieces, kBatch = kLanes < 4 ? 8 : 16, kOwn = kBatch / kLanes;
  __device__ static __forceinline__ int lane() { return int(threadIdx.x) % kLanes; }
  // The lane's slots of the batch.
  __device__ __forceinline__ void fetch(const SpmmBatch<T>& a) {
    const uint16_t* index = a.index + at_;
    const T* values = a.values + at_;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i * kLanes + lane() < left_) word_[i] = __ldg(index + i * kLanes), value_[i] = values[i * kLanes];
  }

  int64_t at_;  // the lane's first slot in the batch
  int left_;  // slots of the segment from this batch on; may be negative
  uint32_t word_[kOwn];
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
        for (int j = 0; j < kPieces; ++j) add_product(sum + j * L::kVector, to_float(a.values[begin + i]), x[j], T{});
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
__global__ void __launch_bounds__(batch_threads(kStaged), 1) spmm_batch(const SpmmBatch<T> a) {
  static_assert(kPieces == 1 || (kPieces == 2 && kStaged));
  using L = Lines<T, kLanes, kPieces>;
  constexpr int kVector = L::kVector;
  constexpr unsigned kApart = kLanes * 16;
  extern __shared__ __align__(256) float4 shared[];  // aligned to lines: pieces differ in one address bit
  const unsigned threads = unsigned(a.teams) * kLanes;  // of a group
  const unsigned group = threadIdx.x / threads, thread = threadIdx.x % threads, team = thread / kLanes, lane = thread % kLanes;
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
  Segment next;
  next.load(a, row, begin, is_row && begin < end);
  SegmentWalk<T, kLanes, kPieces> walk;
  walk.open(a, next);
  float sum[kPieces * kVector] = {};
#pragma unroll 1
  for (int panel = begin; panel < end; ++panel) {
    std::conditional_t<kStaged, SharedLines<kApart>, GlobalLines<kApart>> source;
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
      source.first = uint32_t(__cvta_generic_to_shared(windows)) + window + first_piece;
    } else {
      source.first = lines + first_piece;
    }
    walk.add(sum, a, next, source);
    lines += L::kPanelBytes;
    if constexpr (kStaged) {
      sync_group(group, threads);  // the window is free
      if (a.windows == 1 && panel + 1 < end) copy_window<L>(windows, lines, thread, threads), commit_copies();
      window = windows_apart - window;
    }
  }

  // Sums [column][row], the warps' of a long row, and which rows are long; as batch_shared() counts them.
  float* sums = reinterpret_cast<float*>(shared);
  const int pitch = a.teams + 1;
  float* warp_sums = sums + L::kCols * pitch;
  int* is_long = reinterpret_cast<int*>(warp_sums + L::kCols * (blockDim.x / 32));
#pragma unroll 1
  for (int g = 0; g < a.groups; ++g) {
    __syncthreads();
    if (int(group) != g) continue;
    if (lane == 0) is_long[team] = (g > 0 && is_long[team]) || walk.was_cut;
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i) {
      const unsigned piece = (unsigned(i / kVector) ^ turn) * kLanes + lane;
      float& to = sums[(piece * kVector + i % kVector) * pitch + team];
      to = g == 0 ? sum[i] : to + sum[i];
    }
  }
  if (__syncthreads_or(walk.was_cut)) add_long_rows<T, kLanes, kPieces>(a, row0, chunk, is_long, sums, warp_sums);

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
    tile[b * kPitch + f] = exists ? __ldg(x.data + (b0 + b) * x.row_stride + (f0 + f) * x.col_stride) : Bits(0);
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
