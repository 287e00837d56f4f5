#include "snack/kernels/select.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "element.hpp"
#include "snack/core/error.hpp"
#include "snack/core/random.hpp"
#include "snack/kernels/check.hpp"

namespace snack::reference {
namespace {

std::set<SlotKey> live_keys(const EmptyPositions& empty) {
  const int64_t nnz = empty.pattern.geometry.nnz;
  std::vector<SlotKey> keys(nnz);
  decode_keys(empty.pattern, 0, nnz, keys.data());
  std::set<SlotKey> live(keys.begin(), keys.end());
  for (int64_t i = 0; i < empty.drops; ++i) {
    SNACK_CHECK(empty.drop[i] >= 0 && empty.drop[i] < nnz, "slot ", empty.drop[i], " to drop is outside 0 .. ", nnz - 1, ".");
    live.erase(keys[empty.drop[i]]);
  }
  return live;
}

void check_room(const Geometry& g, size_t live, int64_t k) {
  const int64_t room = g.out * g.in - int64_t(live);
  SNACK_CHECK(k >= 0 && k <= room, "cannot grow ", k, " connections: shape (", g.out, ", ", g.in, ") has ", room,
              " empty positions.");
}

}  // namespace

std::vector<int64_t> select_smallest(const SelectArgs& args) {
  check(args);
  return with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    std::vector<std::tuple<bool, double, int64_t>> scored;  // NaN after everything, then |value|, then slot
    for (int64_t slot = 0; slot < args.nnz; ++slot) {
      const double value = as_double(static_cast<const T*>(args.values)[slot]);
      const bool negative = value < 0;
      if (args.sign == Sign::kPositive && negative) continue;
      if (args.sign == Sign::kNegative && !negative) continue;
      scored.emplace_back(std::isnan(value), std::isnan(value) ? 0.0 : std::abs(value), slot);
    }
    SNACK_CHECK(args.k >= 0 && args.k <= int64_t(scored.size()), "cannot drop ", args.k, " of ", scored.size(),
                " connections.");
    std::sort(scored.begin(), scored.end());
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < args.k; ++i) slots.push_back(std::get<2>(scored[i]));
    std::sort(slots.begin(), slots.end());
    return slots;
  });
}

Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key) {
  check(empty, "grow_uniform");
  const Geometry& g = empty.pattern.geometry;
  std::set<SlotKey> taken = live_keys(empty);
  check_room(g, taken.size(), k);
  Positions grown;
  for (uint64_t i = 0; int64_t(grown.rows.size()) < k; ++i) {
    const int64_t position = int64_t(bounded(random_bits(key, i), uint64_t(g.out * g.in)));
    const int64_t row = position / g.in, col = position % g.in;
    if (!taken.insert(slot_key(row, col)).second) continue;
    grown.rows.push_back(row);
    grown.cols.push_back(col);
  }
  return grown;
}

Positions grow_gradient(const GrowGradientArgs& args) {
  check(args);
  const Geometry& g = args.empty.pattern.geometry;
  const std::set<SlotKey> live = live_keys(args.empty);
  check_room(g, live.size(), args.k);
  std::vector<std::pair<double, SlotKey>> scored;  // (-score, key): sorts best first, ties in slot order
  with_type(args.x.dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = 0; row < g.out; ++row) {
      for (int64_t col = 0; col < g.in; ++col) {
        if (live.count(slot_key(row, col))) continue;
        double sum = 0.0;
        for (int64_t b = 0; b < args.x.rows; ++b) sum += at<T>(args.dy, b, row) * at<T>(args.x, b, col);
        if (!std::isnan(sum)) scored.emplace_back(-std::abs(sum), slot_key(row, col));
      }
    }
  });
  SNACK_CHECK(int64_t(scored.size()) >= args.k, "grow_gradient: only ", scored.size(), " of the ", args.k,
              " positions asked for have a gradient that is a number; the others are NaN.");
  std::sort(scored.begin(), scored.end());
  Positions grown;
  for (int64_t i = 0; i < args.k; ++i) {
    grown.rows.push_back(key_row(scored[i].second));
    grown.cols.push_back(key_col(scored[i].second));
  }
  return grown;
}

HostPattern sample(int64_t out, int64_t in, int64_t nnz, uint64_t key) {
  const Geometry g = make_geometry(out, in, nnz);
  const int64_t total = out * in;
  const bool name_empty = nnz > total / 2;
  const int64_t draws = name_empty ? total - nnz : nnz;
  std::set<int64_t> drawn;
  for (uint64_t i = 0; int64_t(drawn.size()) < draws; ++i)
    drawn.insert(int64_t(bounded(random_bits(key, i), uint64_t(total))));
  std::vector<SlotKey> keys;
  if (name_empty) {
    for (int64_t p = 0; p < total; ++p)
      if (!drawn.count(p)) keys.push_back(slot_key(p / in, p % in));
  } else {
    for (const int64_t p : drawn) keys.push_back(slot_key(p / in, p % in));
  }
  std::sort(keys.begin(), keys.end());
  return encode(keys, g);
}

}  // namespace snack::reference
