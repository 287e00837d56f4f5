#include "panel.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace snack::cpu {
namespace {

template <class T, class A>
A widen(T value) {
  if constexpr (sizeof(T) == 2) return A(float(value));
  else return A(value);
}

template <class T, class A>
T narrow(A value) {
  if constexpr (sizeof(T) == 2) return T(float(value));
  else return T(value);
}

}  // namespace

int64_t stream_workers(const Geometry& g, int64_t width, int64_t batch, int threads) {
  // Waking a thread pays from about 8 microseconds of work. A slot costs 0.4 ns and 0.03 ns a batch column, a feature of
  // the transpositions 0.1 ns a batch column (measured, AVX-512).
  constexpr double kNanosecondsAWorker = 8000;
  const double block = double(g.nnz) * (0.4 + 0.03 * double(width)) + 0.1 * double(width) * double(g.in + g.out);
  const double work = block * double(ceil_div(batch, width));
  return std::clamp<int64_t>(int64_t(work / kNanosecondsAWorker), 1, std::max(1, threads));
}

template <class A>
DenseOperand<A> dense_operand(const MatrixView& m, Arena& arena, const ParallelFor& runner) {
  if (size_of(m.dtype) == sizeof(A)) return {static_cast<const A*>(m.data), m.row_stride, m.col_stride};
  A* copy = arena.take<A>(m.rows * m.cols);
  with_type(m.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(runner, m.rows, [&](int64_t row) {
      const T* from = static_cast<const T*>(m.data) + row * m.row_stride;
      for (int64_t col = 0; col < m.cols; ++col) copy[row * m.cols + col] = widen<T, A>(from[col * m.col_stride]);
    });
  });
  return {copy, m.cols, 1};
}

template <class A>
void decode_rows(const PatternView& pattern, DType dtype, const void* values, int64_t row0, int64_t rows, A* decoded,
                 const ParallelFor& runner) {
  const int64_t in = pattern.geometry.in;
  parallel_for(runner, rows, [&](int64_t row) { std::memset(decoded + row * in, 0, size_t(in) * sizeof(A)); });
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const T* from = static_cast<const T*>(values);
    for_each_slot_of_rows(pattern, row0, rows, runner,
                          [&](int64_t slot, int64_t row, int64_t col) { decoded[row * in + col] = widen<T, A>(from[slot]); });
  });
}

template <class A>
void gather_rows(const PatternView& pattern, int64_t row0, int64_t rows, const A* product, DType dtype, void* dvalues,
                 const ParallelFor& runner) {
  const int64_t in = pattern.geometry.in;
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    T* to = static_cast<T*>(dvalues);
    for_each_slot_of_rows(pattern, row0, rows, runner,
                          [&](int64_t slot, int64_t row, int64_t col) { to[slot] = narrow<T, A>(product[row * in + col]); });
  });
}

template <class A>
bool has_nan(const A* m, int64_t count, const ParallelFor& runner) {
  constexpr int64_t kChunk = 1 << 15;
  std::atomic<bool> found{false};
  parallel_for(runner, ceil_div(count, kChunk), [&](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * kChunk, count);
    int64_t nans = 0;
    for (int64_t i = chunk * kChunk; i < end; ++i) nans += m[i] != m[i];
    if (nans > 0) found = true;
  });
  return found;
}

template <class A>
void finish_rows(const A* m, int64_t rows, int64_t cols, DType dtype, const void* bias, void* out,
                 const ParallelFor& runner) {
  if (m == out && bias == nullptr) return;
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(runner, rows, [&](int64_t row) {
      const T* shift = static_cast<const T*>(bias);
      T* to = static_cast<T*>(out) + row * cols;
      const A* from = m + row * cols;
      for (int64_t col = 0; col < cols; ++col)
        to[col] = narrow<T, A>(from[col] + (shift ? widen<T, A>(shift[col]) : A(0)));
    });
  });
}

#define SNACK_INSTANTIATE(A)                                                                                         \
  template DenseOperand<A> dense_operand<A>(const MatrixView&, Arena&, const ParallelFor&);                          \
  template void decode_rows<A>(const PatternView&, DType, const void*, int64_t, int64_t, A*, const ParallelFor&);    \
  template void gather_rows<A>(const PatternView&, int64_t, int64_t, const A*, DType, void*, const ParallelFor&);    \
  template bool has_nan<A>(const A*, int64_t, const ParallelFor&);                                                   \
  template void finish_rows<A>(const A*, int64_t, int64_t, DType, const void*, void*, const ParallelFor&);
SNACK_INSTANTIATE(float)
SNACK_INSTANTIATE(double)
#undef SNACK_INSTANTIATE

}  // namespace snack::cpu
