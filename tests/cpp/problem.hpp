// Test problems: a pattern, values and operands in any dtype and layout, and comparison with a tolerance by dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "plan/cpu_layout.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack::testing {

/// A dense matrix that owns its memory, filled with normal numbers; `pad` extra columns make its rows non-contiguous,
/// `offset` elements in front make it misaligned.
struct Dense {
  std::vector<uint8_t> bytes;
  MatrixView view;
  Dense(int64_t rows, int64_t cols, DType dtype, std::mt19937_64& rng, int64_t pad = 0, int64_t offset = 0)
      : bytes(size_t(((rows + 1) * (cols + pad) + offset) * size_of(dtype))) {
    std::normal_distribution<double> normal;
    with_type(dtype, [&](auto element) {
      using T = decltype(element);
      T* data = reinterpret_cast<T*>(bytes.data()) + offset;
      for (int64_t i = 0; i < rows * (cols + pad); ++i) data[i] = T(float(normal(rng)));
      view = {data, dtype, rows, cols, cols + pad, 1};
    });
  }
};

inline HostPattern pattern_of(const std::set<std::pair<int64_t, int64_t>>& positions, int64_t out, int64_t in) {
  std::vector<SlotKey> keys;
  for (const auto& [row, col] : positions) keys.push_back(slot_key(row, col));
  std::sort(keys.begin(), keys.end());
  return encode(keys, make_geometry(out, in, int64_t(keys.size())));
}

/// nnz uniform positions, with row 0 full and the last row empty where the shape allows it.
inline HostPattern skewed_pattern(int64_t out, int64_t in, int64_t nnz, std::mt19937_64& rng) {
  std::set<std::pair<int64_t, int64_t>> positions;
  if (out > 2)
    for (int64_t c = 0; c < in; ++c) positions.emplace(0, c);
  const int64_t rows = std::max<int64_t>(1, out - 1);
  while (out > 0 && in > 0 && int64_t(positions.size()) < std::min(nnz, rows * in))
    positions.emplace(int64_t(rng() % uint64_t(rows)), int64_t(rng() % uint64_t(in)));
  return pattern_of(positions, out, in);
}

/// Real threads, for tests under a sanitizer: one a task chunk.
inline ParallelFor threads(int count) {
  ParallelFor runner;
  runner.threads = count;
  runner.context = reinterpret_cast<void*>(intptr_t(count));
  runner.run = [](void* context, int64_t n, void* task_context, ParallelFor::Task task) {
    const int64_t workers = std::min<int64_t>(reinterpret_cast<intptr_t>(context), n);
    std::vector<std::thread> pool;
    for (int64_t w = 0; w < workers; ++w) pool.emplace_back([=] { task(task_context, n * w / workers, n * (w + 1) / workers); });
    for (auto& thread : pool) thread.join();
  };
  return runner;
}

/// The obvious dense product, so that the panel regime can be tested without a BLAS.
inline Gemm plain_gemm() {
  return {nullptr, [](void*, const GemmArgs& g) {
            with_type(g.dtype, [&](auto element) {
              using T = decltype(element);
              if constexpr (sizeof(T) >= 4) {
                const T *a = static_cast<const T*>(g.a), *b = static_cast<const T*>(g.b);
                T* c = static_cast<T*>(g.c);
                for (int64_t i = 0; i < g.m; ++i)
                  for (int64_t j = 0; j < g.n; ++j) {
                    T sum = g.accumulate ? c[i * g.c_row_stride + j] : T(0);
                    for (int64_t k = 0; k < g.k; ++k)
                      sum += a[i * g.a_row_stride + k * g.a_col_stride] * b[k * g.b_row_stride + j * g.b_col_stride];
                    c[i * g.c_row_stride + j] = sum;
                  }
              }
            });
          }};
}

inline double element_at(const void* data, DType dtype, int64_t i) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const T value = static_cast<const T*>(data)[i];
    if constexpr (sizeof(T) == 2) return double(float(value));
    else return double(value);
  });
}

/// Largest |a - b| over the largest |b|, both finite everywhere; 1e9 where one is not (a NaN that poisoned the output).
inline double relative_error(const void* a, const void* b, DType dtype, int64_t count) {
  double error = 0, scale = 1e-30;
  for (int64_t i = 0; i < count; ++i) {
    const double x = element_at(a, dtype, i), y = element_at(b, dtype, i);
    if (!std::isfinite(x) || !std::isfinite(y)) return 1e9;
    error = std::max(error, std::abs(x - y));
    scale = std::max(scale, std::abs(y));
  }
  return error / scale;
}

inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 1e-13;
    case DType::kFloat32: return 1e-5;
    case DType::kFloat16: return 2e-3;
    case DType::kBFloat16: return 1e-2;
  }
  return 0;
}

/// An output poisoned with NaN.
struct Output {
  std::vector<uint8_t> bytes;
  explicit Output(int64_t count, DType dtype) : bytes(size_t(count * size_of(dtype)), 0xff) {}
  void* data() { return bytes.data(); }
};

}  // namespace snack::testing
