// spmm, regime stream, narrow tiles with row starts: y (batch, out) = x (batch, in) W^T + bias, in one launch.
//
// A block owns a run of rows, W batch columns and the panels of its split; all of their x lies in its shared memory. A team of
// lanes owns a row from its first panel to its last, so sums stay in registers and every addition has a fixed place: results
// repeat bit for bit. A team is one or more groups of lanes, 32 lanes at most; with g groups, each takes every g-th panel. Phases:
//   table   where the slots of every row and panel lie, in chunks of eight slots that begin at multiples of eight
//   stage   x, [column][W] in its own type
//   walk    a lane takes every lanes-th chunk of its group's panels: two or three 16-byte loads, then eight reads of x and
//           multiply-adds; slots of other rows at either end of a segment are masked. The next chunk is under way meanwhile
//   join    shuffles add the team's sums
// Rows with a segment of more than long_chunks are left to the whole block at the end, one after the other.
// With one split y is written in its dtype, else float partials (splits, batch, out) are, for finish().
// Read: nnz * (2 + value), x once a block. Written: batch * out. Limits: 2^32 - 16 slots; requests to L1 and shared memory.
#pragma once

#include "../columns.cuh"

namespace snack::cuda {

template <class T>
struct SpmmRows {
  const uint16_t* index;
  const int64_t* tile_ptr;
  const uint16_t* row_starts;
  const T* values;
  Strided<T> x;
  const T* bias;
  T* y;
  float* partials;  // null: y is written
  int64_t out, in, batch, b0;  // of this launch: batch columns [b0, b0 + batch)
  uint32_t strips, runs, splits;
  uint32_t slots, whole_chunks;  // all slots; chunks that lie on 16 bytes and exist whole
  int panels, panels_a_split, rows_a_block, log_rows, log_lanes, log_team, long_chunks;
};

// The chunks of a segment: where they begin, how many there are, and which slots of the first and of the last are the segment's.
struct Chunks {
  uint32_t first, count_and_masks;  // count << 16 | last mask << 8 | first mask

  __device__ static Chunks of(uint32_t begin, uint32_t end) {
    if (begin == end) return {0, 0};
    const uint32_t count = (end + 7) / 8 - begin / 8;
    return {begin / 8, count << 16 | (0xffu >> (7 - (end - 1) % 8)) << 8 | (0xffu << begin % 8 & 0xffu)};
  }
  __device__ __forceinline__ static Chunks load(uint32_t address) {
    const uint2 two = read_shared<uint2>(address);
    return {two.x, two.y};
  }
  __device__ __forceinline__ uint32_t count() const { return count_and_masks >> 16; }
  __device__ __forceinline__ uint32_t mask(uint32_t chunk) const {
    const uint32_t first_mask = chunk == 0 ? count_and_masks : 0xffu, last_mask = chunk + 1 == count() ? count_and_masks >> 8 : 0xffu;
    return first_mask & last_mask & 0xffu;
  }
};

// Eight slots as loaded: their words, values, which of them belong to the row, and where the panel's columns lie.
template <class T, int W>
struct Chunk {
  using X = Columns<T, W>;
  static constexpr int kValueWords = sizeof(T) / 2;  // of 16 bytes
  uint4 words;
  uint4 values[kValueWords];
  uint32_t mask, window;

  __device__ __forceinline__ void load(const SpmmRows<T>& a, uint32_t at) {
    if (at < a.whole_chunks) {
      words = reinterpret_cast<const uint4*>(a.index)[at];
#pragma unroll
      for (int i = 0; i < kValueWords; ++i) values[i] = reinterpret_cast<const uint4*>(a.values)[size_t(at) * kValueWords + i];
      return;
    }
    Eight<uint16_t> index;
    Eight<T> value;
    const int limit = int(min(8u, a.slots - 8 * at));
    index.load(a.index + 8 * size_t(at), limit, false);
    value.load(a.values + 8 * size_t(at), limit, false);
    words = make_uint4(index.word[0], index.word[1], index.word[2], index.word[3]);
#pragma unroll
    for (int i = 0; i < kValueWords; ++i)
      values[i] = make_uint4(value.word[4 * i], value.word[4 * i + 1], value.word[4 * i + 2], value.word[4 * i + 3]);
  }

  __device__ __forceinline__ static uint32_t word_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

  __device__ __forceinline__ float value(int k) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word_of(values[k / 4], k % 4));
    else {
      const float2 two = unpack_pair<T>(word_of(values[0], k / 2));
      return k % 2 == 0 ? two.x : two.y;
    }
  }

  __device__ __forceinline__ void add(float (&sum)[W]) const {
    constexpr uint32_t kColumn = uint32_t(kPanelCols - 1) << X::kLogBytes;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if ((mask >> k & 1) == 0) continue;
      const uint32_t pair = word_of(words, k / 2);
      const uint32_t column = (k % 2 == 0 ? pair << X::kLogBytes : pair >> (16 - X::kLogBytes)) & kColumn;
      float x[W];
      X::read(window | column, x);  // windows lie at multiples of their size
      const float v = value(k);
#pragma unroll
      for (int b = 0; b < W; ++b) sum[b] = fmaf(v, x[b], sum[b]);
    }
  }
};

// One lane's way through the chunks of a row.
template <class T, int W>
struct RowWalk {
  uint32_t entry, stop, entry_step;  // addresses in the table: now, behind the row, a step of panels
  uint32_t window, window_step;      // address of the panel's columns
  uint32_t chunk, chunk_step;        // in the segment
  Chunks segment;

  /// Finds the next chunk; false, and false again, where the row ends.
  __device__ __forceinline__ bool advance() {
    while (chunk >= segment.count()) {
      chunk -= segment.count();
      if (entry >= stop) {
        chunk = 1u << 31;
        return false;
      }
      segment = Chunks::load(entry);
      entry += entry_step, window += window_step;
    }
    return true;
  }

  /// Loads it, and steps on.
  __device__ __forceinline__ void fetch(const SpmmRows<T>& a, Chunk<T, W>& into) {
    into.mask = segment.mask(chunk);
    into.window = window;
    into.load(a, segment.first + chunk);
    chunk += chunk_step;
  }
};

// Whether a row has a segment of more than `limit` chunks.
__device__ __forceinline__ bool is_long(const Chunks* entry, int panels, int rows_a_block, int limit) {
  for (int p = 0; p < panels; ++p)
    if (entry[p * rows_a_block].count() > limit) return true;
  return false;
}

template <class T, int W>
__global__ void __launch_bounds__(kRowsThreads, rows_resident(W)) spmm_rows(const __grid_constant__ SpmmRows<T> a) {
  using X = Columns<T, W>;
  extern __shared__ float4 shared[];
  __shared__ float warp_sums[kRowsThreads / 32 * W];  // of a long row
  // A division is a long chain of instructions; small layers would notice two of them.
  uint32_t run = blockIdx.x, split = 0, width = 0;
  if (gridDim.x > a.runs) {
    const uint32_t group = run / a.runs;
    run -= group * a.runs, width = group / a.splits, split = group % a.splits;
  }
  const uint32_t row0 = run * a.rows_a_block;
  const int64_t b0 = a.b0 + int64_t(width) * W;
  const int rows = min(a.rows_a_block, int(uint32_t(a.out) - row0)), present = int(min(int64_t(W), a.b0 + a.batch - b0));
  const int first_panel = split * a.panels_a_split, panels = min(a.panels_a_split, a.panels - first_panel);
  const uint32_t shared_at = shared_address(shared);
  const uint32_t x_at = (shared_at + X::kPanelBytes - 1) & ~(X::kPanelBytes - 1), table_at = x_at + a.panels_a_split * X::kPanelBytes;
  unsigned char* x = reinterpret_cast<unsigned char*>(shared) + (x_at - shared_at);
  auto* table = reinterpret_cast<Chunks*>(x + (table_at - x_at));  // [panel][row]

  const int column0 = first_panel * kPanelCols;
  const auto stage = [&] { X::stage(x, a.x, column0, min(panels * kPanelCols, int(a.in) - column0), b0, present); };
  await_stream();
  let_next_start();
  if constexpr (W == 1) stage();
  bool found_long = false;
  for (int i = threadIdx.x; i < panels << a.log_rows; i += blockDim.x) {
    const int p = i >> a.log_rows, r = i & ((1 << a.log_rows) - 1);
    if (r >= rows) continue;
    const uint32_t row = row0 + r, panel = first_panel + p;
    const int64_t* tile = a.tile_ptr + (panel * a.strips + row / kStripRows);
    const uint16_t* start = a.row_starts + (panel * uint32_t(a.out) + row);
    const bool is_last = row % kStripRows == kStripRows - 1 || row + 1 == uint32_t(a.out);
    const uint32_t tile_at = uint32_t(tile[0]), end = is_last ? uint32_t(tile[1]) : tile_at + start[1];
    const Chunks chunks = Chunks::of(tile_at + start[0], end);
    table[p * a.rows_a_block + r] = chunks;
    found_long |= chunks.count() > a.long_chunks;
  }
  if constexpr (W > 1) stage();
  const bool has_long = __syncthreads_or(found_long);
  const auto is_own = [&](int r) { return r < rows && !(has_long && is_long(table + r, panels, a.rows_a_block, a.long_chunks)); };

  // Rows that would keep one team busy while the others are done come last: all warps share one, a panel each, and the warps'
  // sums are added in order.
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int log_lanes = a.log_lanes, log_team = a.log_team, step = blockDim.x >> log_team, r = threadIdx.x >> log_team, first = 0;
  bool is_shared = false, is_staged = false;
  while (true) {
    const int in_team = threadIdx.x & ((1 << log_team) - 1), group = is_shared ? warp : in_team >> log_lanes;
    const int groups = is_shared ? warps : 1 << (log_team - log_lanes);
    const bool active = is_shared ? group < panels : is_own(r);
    RowWalk<T, W> walk;
    walk.segment = {0, 0}, walk.chunk = in_team & ((1 << log_lanes) - 1), walk.chunk_step = 1 << log_lanes;
    walk.entry_step = 8 * groups * a.rows_a_block, walk.window_step = groups * X::kPanelBytes;
    walk.stop = table_at + 8 * panels * a.rows_a_block, walk.entry = active ? table_at + 8 * (group * a.rows_a_block + r) : walk.stop;
    walk.window = x_at + (group - groups) * X::kPanelBytes;
    float sum[W] = {};
    Chunk<T, W> ahead;
    ahead.mask = 0;
    do {
      const Chunk<T, W> now = ahead;
      const bool more = walk.advance();
      __syncwarp();  // lanes that crossed into another panel and those that did not load together
      ahead.mask = 0;
      if (more) walk.fetch(a, ahead);
      if (W == 1 && !is_staged) {  // the first loads are under way while x arrives
        X::arrived();
        __syncthreads();
        is_staged = true;
      }
      if (now.mask != 0) now.add(sum);
    } while (__any_sync(~0u, ahead.mask != 0));
#pragma unroll
    for (int b = 0; b < W; ++b)
      for (int d = 1 << log_team >> 1; d > 0; d >>= 1) sum[b] += __shfl_xor_sync(~0u, sum[b], d);
    if (is_shared) {
#pragma unroll
      for (int b = 0; b < W; ++b)
        if (in_team == 0) warp_sums[warp * W + b] = sum[b];
      __syncthreads();
      for (int w = 1; w < warps; ++w)
#pragma unroll
        for (int b = 0; b < W; ++b) sum[b] = warp == 0 ? sum[b] + warp_sums[w * W + b] : sum[b];
    }
    if (in_team == 0 && active && (!is_shared || warp == 0)) {
      const int64_t row = int64_t(row0) + r;
      const float bias = a.bias == nullptr ? 0.f : to_float(a.bias[row]);
#pragma unroll
      for (int b = 0; b < W; ++b) {
        if (b >= present) break;
        if (a.partials != nullptr) a.partials[(split * a.batch + b0 - a.b0 + b) * a.out + row] = sum[b];
        else a.y[(b0 + b) * a.out + row] = from_float<T>(sum[b] + bias);
      }
    }
    if (!is_shared) {
      first += step, r += step;
      if (first < rows) continue;
      if (!has_long) return;
      is_shared = true, log_lanes = log_team = 5, r = -1;
    }
    __syncthreads();
    do ++r;
    while (r < rows && is_own(r));
    if (r >= rows) return;
  }
}

}  // namespace snack::cuda
