#include "snack/defaults/gemm.hpp"

#include <algorithm>

#include "snack/core/error.hpp"

namespace snack {
namespace {

// A block of b is copied so that its rows are contiguous; every row of a then goes over it once. 32 KiB and 1 KiB of floats.
constexpr int64_t kDepth = 64, kWidth = 128;

template <class T>
void multiply(const GemmArgs& g) {
  const T* a = static_cast<const T*>(g.a);
  const T* b = static_cast<const T*>(g.b);
  T* c = static_cast<T*>(g.c);
  T block[kDepth][kWidth];
  for (int64_t j0 = 0; j0 < g.n; j0 += kWidth) {
    const int64_t width = std::min(kWidth, g.n - j0);
    for (int64_t k0 = 0; k0 < std::max<int64_t>(1, g.k); k0 += kDepth) {  // k = 0 still writes zeros
      const int64_t depth = std::min(kDepth, g.k - k0);
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t j = 0; j < width; ++j) block[k][j] = b[(k0 + k) * g.b_row_stride + (j0 + j) * g.b_col_stride];
      for (int64_t i = 0; i < g.m; ++i) {
        T* row = c + i * g.c_row_stride + j0;
        T sum[kWidth];
        if (g.accumulate || k0 > 0) std::copy_n(row, width, sum);
        else std::fill_n(sum, width, T(0));
        for (int64_t k = 0; k < depth; ++k) {
          const T factor = a[i * g.a_row_stride + (k0 + k) * g.a_col_stride];
          for (int64_t j = 0; j < width; ++j) sum[j] += factor * block[k][j];
        }
        std::copy_n(sum, width, row);
      }
    }
  }
}

void check(const GemmArgs& g) {
  SNACK_CHECK(g.m >= 0 && g.n >= 0 && g.k >= 0, "gemm: sizes m=", g.m, ", n=", g.n, ", k=", g.k, "; none of them can be negative.");
  const bool is_empty = g.m == 0 || g.n == 0;
  SNACK_CHECK(is_empty || (g.c != nullptr && (g.k == 0 || (g.a != nullptr && g.b != nullptr))), "gemm: a, b or c is null.");
  SNACK_CHECK(g.dtype == DType::kFloat32 || g.dtype == DType::kFloat64, "gemm: dtype ", name(g.dtype),
              " was given, the default product takes float32 and float64.");
}

}  // namespace

Gemm default_gemm() {
  return {nullptr, [](void*, const GemmArgs& args) {
            check(args);
            args.dtype == DType::kFloat64 ? multiply<double>(args) : multiply<float>(args);
          }};
}

}  // namespace snack
