#include "snack/kernels/sddmm.hpp"

#include <vector>

#include "element.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {

void sddmm(const SddmmArgs& args) {
  check(args);
  const Geometry& g = args.pattern.geometry;
  std::vector<int32_t> rows(g.nnz), cols(g.nnz);
  unpack(args.pattern, rows.data(), cols.data(), serial());
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t k = 0; k < g.nnz; ++k) {
      double sum = 0.0;
      for (int64_t b = 0; b < args.x.rows; ++b) sum += at<T>(args.dy, b, rows[k]) * at<T>(args.x, b, cols[k]);
      static_cast<T*>(args.dvalues)[k] = from_double<T>(sum);
    }
  });
}

}  // namespace snack::reference
