#include "snack/kernels/spmm_t.hpp"

#include <vector>

#include "element.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {

void spmm_t(const SpmmTArgs& args) {
  check(args);
  const Geometry& g = args.pattern.geometry;
  std::vector<int32_t> rows(g.nnz), cols(g.nnz);
  unpack(args.pattern, rows.data(), cols.data(), serial());
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    const T* values = static_cast<const T*>(args.values);
    for (int64_t b = 0; b < args.dy.rows; ++b) {
      std::vector<double> dx(g.in, 0.0);
      for (int64_t k = 0; k < g.nnz; ++k) dx[cols[k]] += as_double(values[k]) * at<T>(args.dy, b, rows[k]);
      for (int64_t c = 0; c < g.in; ++c) static_cast<T*>(args.dx)[b * g.in + c] = from_double<T>(dx[c]);
    }
  });
}

}  // namespace snack::reference
