// Batch blocks inside the files compiled once per instruction set: transposed from operands of any dtype and stride, and
// back into results. Included by them only (see stream.isa.cpp).
#pragma once

#include "elements.isa.hpp"

namespace snack::cpu {
namespace {

// Stores the 128-bit blocks of v at to, to + stride, ...
template <class D, class V>
HWY_INLINE void store_blocks(D d, V v, float* to, int64_t stride) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), to, stride);
    store_blocks(half, hn::UpperHalf(half, v), to + int64_t(hn::MaxLanes(half)) / 4 * stride, stride);
  }
}

// Transposes 4 rows of `from` (kColumns adjacent columns each) into kColumns rows of 4: to[c][r] = from[r][c] + shift[r].
template <int kColumns>
HWY_INLINE void transpose_four(const float* from, int64_t from_stride, const float* shift, float* to, int64_t to_stride) {
  const hn::CappedTag<float, kColumns> d;
  const hn::RepartitionToWide<decltype(d)> wide;
  constexpr int kLanes = int(hn::MaxLanes(d));
  for (int at = 0; at < kColumns; at += kLanes) {
    const auto row = [&](int r) SNACK_INLINE {
      const auto v = hn::LoadU(d, from + r * from_stride + at);
      return shift == nullptr ? v : hn::Add(v, hn::Set(d, shift[r]));
    };
    const auto a = row(0), b = row(1), c = row(2), e = row(3);
    const auto ab_low = hn::BitCast(wide, hn::InterleaveLower(d, a, b)), ab_high = hn::BitCast(wide, hn::InterleaveUpper(d, a, b));
    const auto ce_low = hn::BitCast(wide, hn::InterleaveLower(d, c, e)), ce_high = hn::BitCast(wide, hn::InterleaveUpper(d, c, e));
    // Every block of vector j holds one column of the result: j, j + 4, j + 8, ...
    float* out = to + at * to_stride;
    store_blocks(d, hn::BitCast(d, hn::InterleaveLower(wide, ab_low, ce_low)), out, 4 * to_stride);
    store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(wide, ab_low, ce_low)), out + to_stride, 4 * to_stride);
    store_blocks(d, hn::BitCast(d, hn::InterleaveLower(wide, ab_high, ce_high)), out + 2 * to_stride, 4 * to_stride);
    store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(wide, ab_high, ce_high)), out + 3 * to_stride, 4 * to_stride);
  }
}

constexpr int64_t kTransposeTile = 16;  // features a transposition step reads from each batch row

template <class T, class A>
void load_block(const MatrixView& m, int64_t batch_begin, int64_t count, int width, int64_t begin, int64_t end, A* block) {
  const T* data = static_cast<const T*>(m.data);
  for (int64_t tile = begin; tile < end; tile += kTransposeTile) {
    const int64_t stop = tile + kTransposeTile < end ? tile + kTransposeTile : end;
    int64_t b = 0;
    if constexpr (sizeof(A) == 4) {
      if (m.col_stride == 1 && stop - tile == kTransposeTile) {
        for (; b + 4 <= count; b += 4) {
          const T* from = data + (batch_begin + b) * m.row_stride + tile;
          if constexpr (sizeof(T) == 4) {
            transpose_four<kTransposeTile>(from, m.row_stride, nullptr, block + tile * width + b, width);
          } else {
            HWY_ALIGN A rows[4 * kTransposeTile];
            for (int r = 0; r < 4; ++r) load_values(from + r * m.row_stride, kTransposeTile, rows + r * kTransposeTile);
            transpose_four<kTransposeTile>(rows, kTransposeTile, nullptr, block + tile * width + b, width);
          }
        }
      }
    }
    for (; b < count; ++b) {
      A one;
      for (int64_t c = tile; c < stop; ++c)
        block[c * width + b] = *load_values(data + (batch_begin + b) * m.row_stride + c * m.col_stride, 1, &one);
    }
    for (; b < width; ++b)
      for (int64_t c = tile; c < stop; ++c) block[c * width + b] = A(0);
  }
}

template <class T, class A>
void store_block(const A* block, int width, int64_t count, int64_t begin, int64_t end, const T* bias, T* out,
                 int64_t stride) {
  int64_t c = begin;
  if constexpr (sizeof(T) == 4) {
    // A cache line of `out` (16 features) is written by neighbouring steps, and only 8 rows are open at a time: rows are
    // often a power of two apart and would push each other out of the L1 cache half written.
    for (; width >= 4 && c + kTransposeTile <= end; c += kTransposeTile) {
      const float* from = block + (c - begin) * width;
      const auto shift = [&](int64_t j) { return bias == nullptr ? nullptr : bias + c + j; };
      int64_t b = 0;
      for (; b + 8 <= count; b += 8)
        for (int64_t j = 0; j < kTransposeTile; j += 4)
          transpose_four<8>(from + j * width + b, width, shift(j), out + b * stride + c + j, stride);
      for (; b + 4 <= count; b += 4)
        for (int64_t j = 0; j < kTransposeTile; j += 4)
          transpose_four<4>(from + j * width + b, width, shift(j), out + b * stride + c + j, stride);
      for (; b < count; ++b)
        for (int64_t j = 0; j < kTransposeTile; ++j) out[b * stride + c + j] = from[j * width + b] + (bias == nullptr ? -0.0f : bias[c + j]);
    }
  }
  for (; c < end; ++c) {
    A shift = A(-0.0);  // added to anything, changes nothing
    if (bias != nullptr) shift = *load_values(bias + c, 1, &shift);
    for (int64_t b = 0; b < count; ++b) narrow(block[(c - begin) * width + b] + shift, &out[b * stride + c]);
  }
}

template <class T, class A>
void from_accumulator(const A* in, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) narrow(in[i], &out[i]);
}

}  // namespace
}  // namespace snack::cpu
