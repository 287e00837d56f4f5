#include "snack/kernels/select.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_set>

#include "panel.hpp"
#include "snack/core/error.hpp"
#include "snack/core/random.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

// |value| as an integer that sorts like the number; every NaN sorts last.
uint64_t magnitude(float v) { return std::isnan(v) ? ~uint64_t{0} : std::bit_cast<uint32_t>(v) & 0x7fffffffu; }
uint64_t magnitude(double v) { return std::isnan(v) ? ~uint64_t{0} : std::bit_cast<uint64_t>(v) & ~(uint64_t{1} << 63); }
uint64_t magnitude(Half v) { return magnitude(float(v)); }
uint64_t magnitude(BFloat16 v) { return magnitude(float(v)); }

template <class T>
bool is_negative(T v) {
  if constexpr (sizeof(T) == 2) return float(v) < 0;
  else return v < 0;
}

std::vector<int64_t> sorted_drop(const EmptyPositions& empty) {
  std::vector<int64_t> drop(empty.drop, empty.drop + empty.drops);
  std::sort(drop.begin(), drop.end());
  drop.erase(std::unique(drop.begin(), drop.end()), drop.end());
  const int64_t nnz = empty.pattern.geometry.nnz;
  if (!drop.empty()) {
    const int64_t worst = drop.front() < 0 ? drop.front() : drop.back();
    SNACK_CHECK(worst >= 0 && worst < nnz, "slot ", worst, " to drop is outside 0 .. ", nnz - 1, ".");
  }
  return drop;
}

void check_room(const Geometry& g, int64_t live, int64_t k) {
  const int64_t room = g.out * g.in - live;
  SNACK_CHECK(k >= 0 && k <= room, "cannot grow ", k, " connections: shape (", g.out, ", ", g.in, ") has ", room,
              " empty positions.");
}

struct Candidate {
  double score;
  SlotKey key;
};
bool is_better(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.key < b.key;
}

// The best k of a stream of candidates in O(k) memory.
class TopK {
 public:
  explicit TopK(int64_t k) : k_(k) { best_.reserve(size_t(2 * k + kSlack)); }

  /// Candidates below this score cannot enter.
  double threshold() const { return threshold_; }

  void offer(double score, SlotKey key) {
    best_.push_back({score, key});
    if (int64_t(best_.size()) == 2 * k_ + kSlack) trim();
  }

  std::vector<Candidate> sorted() {
    trim();
    std::sort(best_.begin(), best_.end(), is_better);
    return best_;
  }

 private:
  static constexpr int64_t kSlack = 1024;

  void trim() {
    if (int64_t(best_.size()) <= k_) return;
    std::nth_element(best_.begin(), best_.begin() + (k_ - 1), best_.end(), is_better);
    best_.resize(size_t(k_));
    threshold_ = best_.back().score;
  }

  int64_t k_;
  double threshold_ = 0;
  std::vector<Candidate> best_;
};

template <class A>
void scan_panel(const A* product, int64_t row0, int64_t rows, int64_t in, TopK& top) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < in; ++col) {
      const A score = std::abs(product[row * in + col]);
      if (double(score) >= top.threshold()) top.offer(double(score), slot_key(row0 + row, col));
    }
  }
}

template <class A>
std::vector<Candidate> best_by_gradient(const GrowGradientArgs& args, const std::vector<int64_t>& drop, const Gemm& gemm,
                                        const ParallelFor& runner) {
  const Geometry& g = args.empty.pattern.geometry;
  const int64_t panel_rows = std::clamp<int64_t>(kPanelBytes / std::max<int64_t>(1, g.in * int64_t(sizeof(A))), 1, std::max<int64_t>(1, g.out));
  std::vector<A> product(size_t(panel_rows * g.in)), copies(size_t(args.x.rows * (g.in + g.out)) + 32);
  void* aligned_copies = copies.data();
  size_t space = copies.size() * sizeof(A);
  Arena arena(std::align(kAlign, 1, aligned_copies, space));
  const DenseOperand<A> dy = dense_operand<A>(args.dy, arena, runner);
  const DenseOperand<A> x = dense_operand<A>(args.x, arena, runner);
  TopK top(args.k);
  for (int64_t row0 = 0; row0 < g.out; row0 += panel_rows) {
    const int64_t rows = std::min(panel_rows, g.out - row0);
    gemm({.dtype = ElementTraits<A>::dtype, .m = rows, .n = g.in, .k = args.x.rows,
          .a = dy.data + row0 * dy.col_stride, .a_row_stride = dy.col_stride, .a_col_stride = dy.row_stride,
          .b = x.data, .b_row_stride = x.row_stride, .b_col_stride = x.col_stride, .c = product.data(), .c_row_stride = g.in});
    // A live position must lose every comparison: NaN does.
    for_each_slot_of_rows(args.empty.pattern, row0, rows, runner, [&](int64_t slot, int64_t row, int64_t col) {
      if (!std::binary_search(drop.begin(), drop.end(), slot)) product[row * g.in + col] = A(NAN);
    });
    scan_panel(product.data(), row0, rows, g.in, top);
  }
  return top.sorted();
}

}  // namespace

std::vector<int64_t> select_smallest(const SelectArgs& args) {
  snack::check(args);
  return with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    const T* values = static_cast<const T*>(args.values);
    const auto counts = [&](T v) { return args.sign == Sign::kAny || is_negative(v) == (args.sign == Sign::kNegative); };
    std::vector<uint64_t> scores;
    for (int64_t slot = 0; slot < args.nnz; ++slot)
      if (counts(values[slot])) scores.push_back(magnitude(values[slot]));
    SNACK_CHECK(args.k >= 0 && args.k <= int64_t(scores.size()), "cannot drop ", args.k, " of ", scores.size(),
                " connections.");
    std::vector<int64_t> slots;
    if (args.k == 0) return slots;
    std::nth_element(scores.begin(), scores.begin() + (args.k - 1), scores.end());
    const uint64_t threshold = scores[args.k - 1];
    // nth_element puts everything smaller in front; the rest of the k are ties, taken from the lowest slots.
    int64_t ties = std::count(scores.begin(), scores.begin() + args.k, threshold);
    for (int64_t slot = 0; slot < args.nnz; ++slot) {
      if (!counts(values[slot])) continue;
      const uint64_t score = magnitude(values[slot]);
      if (score < threshold || (score == threshold && ties-- > 0)) slots.push_back(slot);
    }
    return slots;
  });
}

Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key) {
  snack::check(empty, "grow_uniform");
  const Geometry& g = empty.pattern.geometry;
  const std::vector<int64_t> drop = sorted_drop(empty);
  check_room(g, g.nnz - int64_t(drop.size()), k);
  const auto is_live = [&](SlotKey position) {
    const int64_t slot = find_slot(empty.pattern, position);
    return slot >= 0 && !std::binary_search(drop.begin(), drop.end(), slot);
  };
  std::unordered_set<SlotKey> drawn;
  drawn.reserve(size_t(k));
  Positions grown;
  for (uint64_t i = 0; int64_t(grown.rows.size()) < k; ++i) {
    const int64_t position = int64_t(bounded(random_bits(key, i), uint64_t(g.out * g.in)));
    const int64_t row = position / g.in, col = position % g.in;
    const SlotKey at = slot_key(row, col);
    if (is_live(at) || !drawn.insert(at).second) continue;
    grown.rows.push_back(row);
    grown.cols.push_back(col);
  }
  return grown;
}

Positions grow_gradient(const GrowGradientArgs& args, const Gemm& gemm, const ParallelFor& runner) {
  snack::check(args);
  SNACK_CHECK(gemm, "grow_gradient: no dense product (gemm) was given; supply a BLAS's or snack::default_gemm().");
  const Geometry& g = args.empty.pattern.geometry;
  const std::vector<int64_t> drop = sorted_drop(args.empty);
  check_room(g, g.nnz - int64_t(drop.size()), args.k);
  Positions grown;
  if (args.k == 0) return grown;
  const bool is_double = args.x.dtype == DType::kFloat64;
  const std::vector<Candidate> best = is_double ? best_by_gradient<double>(args, drop, gemm, runner)
                                                : best_by_gradient<float>(args, drop, gemm, runner);
  SNACK_CHECK(int64_t(best.size()) == args.k, "grow_gradient: only ", best.size(), " of the ", args.k,
              " positions asked for have a gradient that is a number; the others are NaN.");
  for (const Candidate& candidate : best) {
    grown.rows.push_back(key_row(candidate.key));
    grown.cols.push_back(key_col(candidate.key));
  }
  return grown;
}

HostPattern sample(int64_t out, int64_t in, int64_t nnz, uint64_t key, const ParallelFor& runner) {
  const Geometry g = make_geometry(out, in, nnz);
  const int64_t total = out * in;
  const bool names_empty = nnz > total / 2;
  const int64_t wanted = names_empty ? total - nnz : nnz;
  // Draw as many as are missing, sort, drop repetitions, until enough are distinct: the same set as drawing one by one.
  std::vector<SlotKey> keys;
  for (int64_t drawn = 0; int64_t(keys.size()) < wanted;) {
    const int64_t known = int64_t(keys.size()), missing = wanted - known;
    keys.resize(size_t(wanted));
    parallel_for(runner, ceil_div(missing, 1 << 16), [&](int64_t chunk) {
      for (int64_t i = chunk << 16; i < std::min((chunk + 1) << 16, missing); ++i) {
        const int64_t position = int64_t(bounded(random_bits(key, uint64_t(drawn + i)), uint64_t(total)));
        keys[known + i] = slot_key(position / in, position % in);
      }
    });
    drawn += missing;
    std::sort(keys.begin() + known, keys.end());
    std::inplace_merge(keys.begin(), keys.begin() + known, keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  }
  if (!names_empty) return encode(keys, g, runner);
  std::vector<SlotKey> live;
  live.reserve(size_t(nnz));
  auto next_empty = keys.begin();
  for (int64_t col0 = 0; col0 < in; col0 += kTileCols) {
    for (int64_t row = 0; row < out; ++row) {
      for (int64_t col = col0; col < std::min(col0 + kTileCols, in); ++col) {
        const SlotKey at = slot_key(row, col);
        if (next_empty != keys.end() && *next_empty == at) ++next_empty;
        else live.push_back(at);
      }
    }
  }
  return encode(live, g, runner);
}

}  // namespace snack::cpu
