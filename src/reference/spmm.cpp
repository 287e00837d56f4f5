#include "snack/kernels/spmm.hpp"

#include <vector>

#include "element.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {

void spmm(const SpmmArgs& args) {
  check(args);
  const Geometry& g = args.pattern.geometry;
  std::vector<int32_t> rows(g.nnz), cols(g.nnz);
  unpack(args.pattern, rows.data(), cols.data(), serial());
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    const T* values = static_cast<const T*>(args.values);
    const T* bias = static_cast<const T*>(args.bias);
    for (int64_t b = 0; b < args.x.rows; ++b) {
      std::vector<double> y(g.out, 0.0);
      for (int64_t k = 0; k < g.nnz; ++k) y[rows[k]] += as_double(values[k]) * at<T>(args.x, b, cols[k]);
      for (int64_t r = 0; r < g.out; ++r)
        static_cast<T*>(args.y)[b * g.out + r] = from_double<T>(y[r] + (bias ? as_double(bias[r]) : 0.0));
    }
  });
}

}  // namespace snack::reference
