// The stream regime's inner loops, compiled once per instruction set (SNACK_ISA_TITLE and SNACK_ISA_NAME name
// the table that this file defines).
//
// Mapping: a row segment (the slots of one row inside one panel) is the unit of work. Its end is found by
// comparing the row bits of neighbouring words; no row pointers are stored. For width >= 4 a slot broadcasts its value
// and multiplies one vector of the batch, so loads are contiguous whatever the pattern; for width 1 a vector of slots
// gathers from the panel's 4 KB window of x.
// Read: nnz * (value + index) once a batch block, one vector of x (or dy) a slot from L1/L2.
//
// Everything here is in an anonymous namespace and free of library templates: an inline function compiled for AVX-512
// that the linker shared with other files would crash older processors (a test looks for weak symbols).
#include "block.isa.hpp"

namespace snack::cpu {
namespace {

// The batch block as vectors: kWidth lanes in kVectors vectors of type Tag.
template <class A, int kWidth>
struct Block {
  using Tag = hn::CappedTag<A, kWidth>;
  using V = hn::Vec<Tag>;
  static constexpr int kLanes = int(hn::MaxLanes(Tag()));
  static constexpr int kVectors = kWidth / kLanes;
};

HWY_INLINE int64_t lower_bound(const int64_t* sorted, int64_t count, int64_t key) {
  int64_t begin = 0, end = count;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (sorted[middle] < key) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

template <class Word>
HWY_INLINE int64_t lower_bound_word(const Word* words, int64_t begin, int64_t end, uint64_t key) {
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (uint64_t(words[middle]) < key) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

constexpr int64_t kColMask = kTileCols - 1;

struct Segment {
  int64_t row, begin, end;
};
constexpr int kSegments = 128;

// Lists the row segments of slots [begin, end) of a tile, kSegments at a time, and calls f(list, count) for each list.
// A segment ends where the row bits of neighbouring words differ: found for a vector of slots at once, so that no search
// waits for the one before it.
template <class Word, class F>
HWY_INLINE void for_each_list(const Word* words, int64_t row0, int64_t begin, int64_t end, F&& f) {
  if (begin >= end) return;
  const hn::ScalableTag<Word> d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto col_mask = hn::Set(d, Word(kColMask));
  Segment list[kSegments];
  int count = 0;
  int64_t first = begin;
  const auto close = [&](int64_t last) SNACK_INLINE {
    list[count++] = {row0 + int64_t(words[last] >> kTileColBits), first, last + 1};
    first = last + 1;
    if (count == kSegments) {
      f(list, count);
      count = 0;
    }
  };
  int64_t slot = begin;
  for (; slot + lanes < end; slot += lanes) {  // the word after the vector is read too
    const auto change = hn::Gt(hn::Xor(hn::LoadU(d, words + slot), hn::LoadU(d, words + slot + 1)), col_mask);
    uint64_t bits = 0;
    hn::StoreMaskBits(d, change, reinterpret_cast<uint8_t*>(&bits));
    for (; bits != 0; bits &= bits - 1) close(slot + __builtin_ctzll(bits));
  }
  for (; slot + 1 < end; ++slot)
    if ((words[slot] ^ words[slot + 1]) > kColMask) close(slot);
  close(end - 1);
  if (count > 0) f(list, count);
}

// Calls f(panel, list, count) for the row segments of slots [slot_begin, slot_end).
template <class Word, class F>
HWY_INLINE void for_each_list_of_slots(const PatternView& pattern, int64_t slot_begin, int64_t slot_end, F&& f) {
  const Geometry& g = pattern.geometry;
  const auto* words = static_cast<const Word*>(pattern.index);
  const int64_t strips = (g.out + (int64_t{1} << row_bits(g.packing)) - 1) >> row_bits(g.packing);
  const int64_t tiles = strips * ((g.in + kTileCols - 1) >> kTileColBits);
  int64_t tile = lower_bound(pattern.tile_ptr, tiles + 1, slot_begin + 1) - 1;
  for (int64_t slot = slot_begin; slot < slot_end; ++tile) {
    const int64_t stop = pattern.tile_ptr[tile + 1] < slot_end ? pattern.tile_ptr[tile + 1] : slot_end;
    const int64_t panel = tile / strips, row0 = (tile % strips) << row_bits(g.packing);
    for_each_list(words, row0, slot, stop, [&](const Segment* list, int count) { f(panel, list, count); });
    slot = stop;
  }
}

// ---- spmm ----

// yt[row] += sum of value * xt[col] over a segment; batch vectors in registers.
template <class A, int kWidth, class Word>
HWY_INLINE void accumulate_row(const Word* words, const A* values, int64_t count, const A* x, A* y) {
  using B = Block<A, kWidth>;
  const typename B::Tag d;
  // A multiply-add takes 4 cycles: keep at least 4 independent sums in flight (8 of 64 columns were no faster).
  constexpr int kCopies = B::kVectors >= 4 ? 1 : 8 / B::kVectors;
  typename B::V sum[kCopies][B::kVectors];
  for (int v = 0; v < B::kVectors; ++v) {
    sum[0][v] = hn::LoadU(d, y + v * B::kLanes);
    for (int copy = 1; copy < kCopies; ++copy) sum[copy][v] = hn::Zero(d);
  }
  int64_t i = 0;
  for (; i + kCopies <= count; i += kCopies) {
    for (int copy = 0; copy < kCopies; ++copy) {
      const auto value = hn::Set(d, values[i + copy]);
      const A* from = x + int64_t(words[i + copy] & kColMask) * kWidth;
      for (int v = 0; v < B::kVectors; ++v)
        sum[copy][v] = hn::MulAdd(value, hn::LoadU(d, from + v * B::kLanes), sum[copy][v]);
    }
  }
  for (; i < count; ++i) {
    const auto value = hn::Set(d, values[i]);
    const A* from = x + int64_t(words[i] & kColMask) * kWidth;
    for (int v = 0; v < B::kVectors; ++v) sum[0][v] = hn::MulAdd(value, hn::LoadU(d, from + v * B::kLanes), sum[0][v]);
  }
  for (int v = 0; v < B::kVectors; ++v) {
    for (int copy = 1; copy < kCopies; ++copy) sum[0][v] = hn::Add(sum[0][v], sum[copy][v]);
    hn::StoreU(sum[0][v], d, y + v * B::kLanes);
  }
}

// Sum of the 128-bit blocks of v.
template <class D, class V>
HWY_INLINE auto fold_blocks(D /*tag*/, V v) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) <= 16) {
    return v;
  } else {
    const hn::Half<D> half;
    return fold_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The lane sums of four vectors, as one vector of four. Two interleaved additions leave sums of a, b, c, e in every
// 128-bit block, which are then added across blocks.
template <class D, class V>
HWY_INLINE auto sum_of_four(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> wide;
  const auto ab = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));  // a b a b
  const auto ce = hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  const auto low = hn::BitCast(d, hn::InterleaveLower(wide, ab, ce));
  return fold_blocks(d, hn::Add(low, hn::BitCast(d, hn::InterleaveUpper(wide, ab, ce))));
}

// The lane sum of v, in the same order of additions: a row's result must not depend on how rows are grouped.
template <class D, class V>
HWY_INLINE float sum_of_one(D d, V v) {
  const auto zero = hn::Zero(d);
  return hn::GetLane(sum_of_four(d, v, zero, zero, zero));
}

// Lane-wise partial sums of value * x[col] over a segment, by gathers.
template <class Word>
HWY_INLINE hn::Vec<hn::ScalableTag<float>> gather_products(const Word* words, const float* values, int64_t count, const float* x) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<Word, decltype(d)> dw;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto mask = hn::Set(di, int32_t(kColMask));
  const auto columns = [&](hn::Vec<decltype(dw)> w) SNACK_INLINE {
    if constexpr (sizeof(Word) == 2) return hn::And(hn::PromoteTo(di, w), mask);
    else return hn::And(hn::BitCast(di, w), mask);
  };
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    sum = hn::MulAdd(hn::LoadU(d, values + i), hn::GatherIndex(d, x, columns(hn::LoadU(dw, words + i))), sum);
  if (i < count) {
#if HWY_TARGET <= HWY_AVX3
    // Masked lanes load nothing; they gather x[0], which must not turn 0 * Inf into NaN.
    const size_t rest = size_t(count - i);
    const auto x_rest = hn::GatherIndex(d, x, columns(hn::MaskedLoad(hn::FirstN(dw, rest), dw, words + i)));
    const auto inside = hn::FirstN(d, rest);
    sum = hn::Add(sum, hn::IfThenElseZero(inside, hn::Mul(hn::MaskedLoad(inside, d, values + i), x_rest)));
#else
    float rest = 0;
    for (; i < count; ++i) rest += values[i] * x[words[i] & kColMask];
    sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, 1), hn::Set(d, rest)));
#endif
  }
  return sum;
}

// yt[row] += dot(segment, x) for a list of segments, four reductions at a time.
template <class Word>
HWY_INLINE void gather_rows(const Word* words, const float* values, const Segment* list, int count, const float* x, float* yt) {
  const hn::ScalableTag<float> d;
  const auto products = [&](const Segment& s) SNACK_INLINE {
    return gather_products(words + s.begin, values + s.begin, s.end - s.begin, x);
  };
  HWY_ALIGN float four[4];
  const hn::CappedTag<float, 4> d4;
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const Segment* s = list + i;
    hn::Store(sum_of_four(d, products(s[0]), products(s[1]), products(s[2]), products(s[3])), d4, four);
    for (int j = 0; j < 4; ++j) yt[s[j].row] += four[j];
  }
  for (; i < count; ++i) yt[list[i].row] += sum_of_one(d, products(list[i]));
}

// The same for types without a vector gather here: converted values, or double.
template <class T, class A, class Word>
HWY_INLINE void gather_rows(const Word* words, const T* values, const Segment* list, int count, const A* x, A* yt) {
  HWY_ALIGN A buffer[kTileCols];
  for (int i = 0; i < count; ++i) {
    const Segment& s = list[i];
    const A* segment = load_values(values + s.begin, s.end - s.begin, buffer);
    if constexpr (sizeof(A) == 4) {
      yt[s.row] += sum_of_one(hn::ScalableTag<float>(), gather_products(words + s.begin, segment, s.end - s.begin, x));
    } else {
      for (int64_t k = s.begin; k < s.end; ++k) yt[s.row] += values[k] * x[words[k] & kColMask];
    }
  }
}

template <class T, class A, int kWidth, class Word>
void spmm_rows(const PatternView& pattern, const T* values, const A* xt, A* yt, int64_t row_begin, int64_t row_end) {
  const Geometry& g = pattern.geometry;
  const auto* words = static_cast<const Word*>(pattern.index);
  const int bits = row_bits(g.packing);
  const int64_t strips = (g.out + (int64_t{1} << bits) - 1) >> bits;
  const int64_t panels = (g.in + kTileCols - 1) >> kTileColBits;
  if (row_begin >= row_end) return;
  __builtin_memset(yt, 0, size_t(row_end - row_begin) * kWidth * sizeof(A));
  HWY_ALIGN A buffer[sizeof(T) == 2 ? kTileCols : 1];
  for (int64_t panel = 0; panel < panels; ++panel) {
    const A* x = xt + (panel << kTileColBits) * kWidth;
    for (int64_t strip = row_begin >> bits; strip <= (row_end - 1) >> bits; ++strip) {
      const int64_t tile = panel * strips + strip, row0 = strip << bits;
      int64_t begin = pattern.tile_ptr[tile], end = pattern.tile_ptr[tile + 1];
      if (row0 < row_begin) begin = lower_bound_word(words, begin, end, uint64_t(row_begin - row0) << kTileColBits);
      if (row0 + (int64_t{1} << bits) > row_end)
        end = lower_bound_word(words, begin, end, uint64_t(row_end - row0) << kTileColBits);
      for_each_list(words, row0 - row_begin, begin, end, [&](const Segment* list, int count) {
        if constexpr (kWidth == 1) {
          gather_rows(words, values, list, count, x, yt);
        } else {
          for (const Segment* s = list; s < list + count; ++s) {
            const A* segment = load_values(values + s->begin, s->end - s->begin, buffer);
            accumulate_row<A, kWidth>(words + s->begin, segment, s->end - s->begin, x, yt + s->row * kWidth);
          }
        }
      });
    }
  }
}

// ---- spmm_t ----

// window[col] += value * dy over a segment; the columns of a segment are distinct.
template <class A, int kWidth, class Word>
HWY_INLINE void scatter_row(const Word* words, const A* values, int64_t count, const A* dy, A* window) {
  if constexpr (kWidth == 1) {
    const A scale = dy[0];
    for (int64_t i = 0; i < count; ++i) window[words[i] & kColMask] += values[i] * scale;
  } else {
    using B = Block<A, kWidth>;
    const typename B::Tag d;
    typename B::V from[B::kVectors];
    for (int v = 0; v < B::kVectors; ++v) from[v] = hn::LoadU(d, dy + v * B::kLanes);
    for (int64_t i = 0; i < count; ++i) {
      const auto value = hn::Set(d, values[i]);
      A* to = window + int64_t(words[i] & kColMask) * kWidth;
      for (int v = 0; v < B::kVectors; ++v)
        hn::StoreU(hn::MulAdd(value, from[v], hn::LoadU(d, to + v * B::kLanes)), d, to + v * B::kLanes);
    }
  }
}

template <class T, class A, int kWidth, class Word>
void spmm_t_slots(const PatternView& pattern, const T* values, const A* dyt, A* window, int64_t slot_begin,
                  int64_t slot_end) {
  const auto* words = static_cast<const Word*>(pattern.index);
  HWY_ALIGN A buffer[sizeof(T) == 2 ? kTileCols : 1];
  for_each_list_of_slots<Word>(pattern, slot_begin, slot_end, [&](int64_t, const Segment* list, int count) {
    for (const Segment* s = list; s < list + count; ++s) {
      const A* segment = load_values(values + s->begin, s->end - s->begin, buffer);
      scatter_row<A, kWidth>(words + s->begin, segment, s->end - s->begin, dyt + s->row * kWidth, window);
    }
  });
}

// ---- sddmm ----

template <class A, int kWidth, class Word>
HWY_INLINE void sample_row(const Word* words, int64_t count, const A* dy, const A* x, A* dvalues, bool accumulate) {
  if constexpr (kWidth == 1) {
    const A scale = dy[0];
    for (int64_t i = 0; i < count; ++i) {
      const A product = scale * x[words[i] & kColMask];
      dvalues[i] = accumulate ? dvalues[i] + product : product;
    }
  } else {
    using B = Block<A, kWidth>;
    const typename B::Tag d;
    typename B::V from[B::kVectors];
    for (int v = 0; v < B::kVectors; ++v) from[v] = hn::LoadU(d, dy + v * B::kLanes);
    const auto dot = [&](int64_t i) SNACK_INLINE {
      const A* at = x + int64_t(words[i] & kColMask) * kWidth;
      auto sum = hn::Mul(from[0], hn::LoadU(d, at));
      for (int v = 1; v < B::kVectors; ++v) sum = hn::MulAdd(from[v], hn::LoadU(d, at + v * B::kLanes), sum);
      return sum;
    };
    int64_t i = 0;
    if constexpr (sizeof(A) == 4) {
      const hn::CappedTag<float, 4> d4;
      for (; i + 4 <= count; i += 4) {
        auto total = sum_of_four(d, dot(i), dot(i + 1), dot(i + 2), dot(i + 3));
        if (accumulate) total = hn::Add(total, hn::LoadU(d4, dvalues + i));
        hn::StoreU(total, d4, dvalues + i);
      }
    }
    for (; i < count; ++i) {
      A total;
      if constexpr (sizeof(A) == 4) total = sum_of_one(d, dot(i));
      else total = hn::GetLane(hn::SumOfLanes(d, dot(i)));
      dvalues[i] = accumulate ? dvalues[i] + total : total;
    }
  }
}

template <class A, int kWidth, class Word>
void sddmm_slots(const PatternView& pattern, const A* dyt, const A* xt, A* dvalues, int64_t slot_begin, int64_t slot_end,
                 bool accumulate) {
  const auto* words = static_cast<const Word*>(pattern.index);
  for_each_list_of_slots<Word>(pattern, slot_begin, slot_end, [&](int64_t panel, const Segment* list, int count) {
    const A* x = xt + (panel << kTileColBits) * kWidth;
    for (const Segment* s = list; s < list + count; ++s)
      sample_row<A, kWidth>(words + s->begin, s->end - s->begin, dyt + s->row * kWidth, x, dvalues + s->begin, accumulate);
  });
}

// ---- run time to compile time ----

// Calls f<T, kWidth, Word>().
template <class A, class F>
void with_dtype(DType dtype, F&& f) {
  if constexpr (sizeof(A) == 8) {
    f(double{});
  } else {
    if (dtype == DType::kBFloat16) f(BFloat16{});
    else if (dtype == DType::kFloat16) f(Half{});
    else f(float{});
  }
}

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};

template <class F>
void with_shape(int width, Packing packing, F&& f) {
  const auto with_word = [&](auto chosen) {
    if (packing == Packing::kNarrow) f(chosen, uint16_t{});
    else f(chosen, uint32_t{});
  };
  switch (width) {
    case 1: return with_word(Int<1>{});
    case 4: return with_word(Int<4>{});
    case 8: return with_word(Int<8>{});
    case 16: return with_word(Int<16>{});
    case 32: return with_word(Int<32>{});
    default: return with_word(Int<64>{});
  }
}

// constexpr, so that the table is data: code that ran when the library is loaded would run before any look at cpuid.
template <class A>
constexpr IsaKernels<A> make_kernels() {
  IsaKernels<A> table{};
  table.spmm_rows = [](const PatternView& pattern, DType dtype, const void* values, int width, const A* xt, A* yt,
                       int64_t row_begin, int64_t row_end) {
    with_dtype<A>(dtype, [&](auto element) {
      using T = decltype(element);
      with_shape(width, pattern.geometry.packing, [&](auto w, auto word) {
        spmm_rows<T, A, decltype(w)::value, decltype(word)>(pattern, static_cast<const T*>(values), xt, yt, row_begin,
                                                            row_end);
      });
    });
  };
  table.spmm_t_slots = [](const PatternView& pattern, DType dtype, const void* values, int width, const A* dyt,
                          A* window, int64_t slot_begin, int64_t slot_end) {
    with_dtype<A>(dtype, [&](auto element) {
      using T = decltype(element);
      with_shape(width, pattern.geometry.packing, [&](auto w, auto word) {
        spmm_t_slots<T, A, decltype(w)::value, decltype(word)>(pattern, static_cast<const T*>(values), dyt, window,
                                                               slot_begin, slot_end);
      });
    });
  };
  table.sddmm_slots = [](const PatternView& pattern, int width, const A* dyt, const A* xt, A* dvalues,
                         int64_t slot_begin, int64_t slot_end, bool accumulate) {
    with_shape(width, pattern.geometry.packing, [&](auto w, auto word) {
      sddmm_slots<A, decltype(w)::value, decltype(word)>(pattern, dyt, xt, dvalues, slot_begin, slot_end, accumulate);
    });
  };
  table.load_block = [](const MatrixView& m, int64_t batch_begin, int64_t count, int width, int64_t begin, int64_t end,
                        A* block) {
    with_dtype<A>(m.dtype, [&](auto element) {
      load_block<decltype(element), A>(m, batch_begin, count, width, begin, end, block);
    });
  };
  table.store_block = [](const A* block, int width, int64_t count, int64_t begin, int64_t end, DType dtype,
                         const void* bias, void* out, int64_t stride) {
    with_dtype<A>(dtype, [&](auto element) {
      using T = decltype(element);
      store_block<T, A>(block, width, count, begin, end, static_cast<const T*>(bias), static_cast<T*>(out), stride);
    });
  };
  table.from_accumulator = [](const A* in, int64_t count, DType dtype, void* out) {
    with_dtype<A>(dtype, [&](auto element) {
      using T = decltype(element);
      from_accumulator<T, A>(in, count, static_cast<T*>(out));
    });
  };
  return table;
}

}  // namespace

#define SNACK_CONCAT2(a, b) a##b
#define SNACK_CONCAT(a, b) SNACK_CONCAT2(a, b)
#define SNACK_TEXT2(a) #a
#define SNACK_TEXT(a) SNACK_TEXT2(a)

extern const Isa SNACK_CONCAT(kIsa, SNACK_ISA_TITLE);
constinit const Isa SNACK_CONCAT(kIsa, SNACK_ISA_TITLE) = {SNACK_TEXT(SNACK_ISA_NAME), make_kernels<float>(), make_kernels<double>()};

}  // namespace snack::cpu
