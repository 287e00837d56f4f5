#include "snack/kernels/rewire.hpp"

#include <algorithm>
#include <map>

#include "snack/core/error.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {

RewireResult rewire(const RewireArgs& args) {
  check(args);
  const Geometry& g = args.pattern.geometry;
  std::vector<SlotKey> keys(g.nnz);
  decode_keys(args.pattern, 0, g.nnz, keys.data());

  std::map<SlotKey, int64_t> source;  // position -> where its connection comes from, in slot order
  for (int64_t slot = 0; slot < g.nnz; ++slot) source[keys[slot]] = slot;
  for (int64_t i = 0; i < args.drops; ++i) {
    const int64_t slot = args.drop[i];
    SNACK_CHECK(slot >= 0 && slot < g.nnz, "rewire: slot ", slot, " to drop is outside 0 .. ", g.nnz - 1, ".");
    SNACK_CHECK(source.erase(keys[slot]) == 1, "rewire: slot ", slot, " is named twice in drop.");
  }
  for (int64_t i = 0; i < args.grows; ++i) {
    const int64_t row = args.grow_rows[i], col = args.grow_cols[i];
    SNACK_CHECK(row >= 0 && row < g.out && col >= 0 && col < g.in, "rewire: position (", row, ", ", col,
                ") to grow is outside the shape (", g.out, ", ", g.in, ").");
    const bool inserted = source.emplace(slot_key(row, col), -(1 + i)).second;
    SNACK_CHECK(inserted, "rewire: position (", row, ", ", col, ") to grow is occupied or named twice.");
  }

  std::vector<SlotKey> new_keys;
  RewireResult result;
  for (const auto& [key, from] : source) {
    new_keys.push_back(key);
    result.source.push_back(from);
  }
  result.pattern = encode(new_keys, make_geometry(g.out, g.in, int64_t(new_keys.size())));
  return result;
}

}  // namespace snack::reference
