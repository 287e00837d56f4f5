#include "snack/kernels/sddmm_update.hpp"

#include <vector>

#include "element.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {

void sddmm_update(const SddmmUpdateArgs& args) {
  check(args);
  const Geometry& g = args.pattern.geometry;
  std::vector<int32_t> rows(g.nnz), cols(g.nnz);
  unpack(args.pattern, rows.data(), cols.data(), serial());
  with_rule<double>(args, [&](auto rule) {
    rule.read(args.lr, args.step);
    with_type(args.dtype, [&](auto element) {
      using T = decltype(element);
      const auto slot = [](void* data, int64_t k) -> T& { return static_cast<T*>(data)[k]; };
      for (int64_t k = 0; k < g.nnz; ++k) {
        double gradient = 0.0, state[2] = {};
        for (int64_t b = 0; b < args.x.rows; ++b) gradient += at<T>(args.dy, b, rows[k]) * at<T>(args.x, b, cols[k]);
        for (int i = 0; i < rule.kStates; ++i) state[i] = as_double(slot(args.state[i], k));
        slot(args.values, k) = from_double<T>(rule(as_double(slot(args.values, k)), gradient, state));
        for (int i = 0; i < rule.kStates; ++i) slot(args.state[i], k) = from_double<T>(state[i]);
      }
    });
  });
}

}  // namespace snack::reference
