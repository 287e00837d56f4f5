// rewire on the CPU: one merge of the surviving slots with the sorted grown positions, cut into independent parts.
#include "snack/kernels/rewire.hpp"

#include <algorithm>

#include "snack/core/error.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

std::vector<int64_t> sorted_slots(const RewireArgs& args) {
  std::vector<int64_t> drop(args.drop, args.drop + args.drops);
  std::sort(drop.begin(), drop.end());
  const int64_t nnz = args.pattern.geometry.nnz;
  if (!drop.empty()) {
    const int64_t worst = drop.front() < 0 ? drop.front() : drop.back();
    SNACK_CHECK(worst >= 0 && worst < nnz, "rewire: slot ", worst, " to drop is outside 0 .. ", nnz - 1, ".");
  }
  const auto twice = std::adjacent_find(drop.begin(), drop.end());
  SNACK_CHECK(twice == drop.end(), "rewire: slot ", *twice, " is named twice in drop.");
  return drop;
}

SortedCoo sorted_positions(const RewireArgs& args) {
  const Geometry& g = args.pattern.geometry;
  for (int64_t i = 0; i < args.grows; ++i)
    SNACK_CHECK(args.grow_rows[i] >= 0 && args.grow_rows[i] < g.out && args.grow_cols[i] >= 0 && args.grow_cols[i] < g.in,
                "rewire: position (", args.grow_rows[i], ", ", args.grow_cols[i], ") to grow is outside the shape (", g.out,
                ", ", g.in, ").");
  return sort_coo(args.grow_rows, args.grow_cols, args.grows, g.out, g.in);
}

// Slots [slot_begin, slot_end) of the old pattern merged with grown positions [grow_begin, grow_end).
struct Part {
  int64_t slot_begin, slot_end, grow_begin, grow_end, output;
};

void merge(const RewireArgs& args, const std::vector<int64_t>& drop, const SortedCoo& grow, const Part& part,
           SlotKey* keys, int64_t* source) {
  std::vector<SlotKey> old(part.slot_end - part.slot_begin);
  decode_keys(args.pattern, part.slot_begin, part.slot_end, old.data());
  int64_t at = part.output, g = part.grow_begin;
  auto next_drop = std::lower_bound(drop.begin(), drop.end(), part.slot_begin);
  const auto emit = [&](SlotKey key, int64_t from) {
    SNACK_CHECK(at == part.output || keys[at - 1] != key, "rewire: position (", key_row(key), ", ", key_col(key),
                ") to grow is occupied or named twice.");
    keys[at] = key;
    source[at++] = from;
  };
  const auto emit_grown_up_to = [&](SlotKey limit) {
    for (; g < part.grow_end && grow.keys[g] <= limit; ++g) emit(grow.keys[g], -(1 + grow.order[g]));
  };
  for (int64_t slot = part.slot_begin; slot < part.slot_end; ++slot) {
    const SlotKey key = old[slot - part.slot_begin];
    emit_grown_up_to(key);
    if (next_drop != drop.end() && *next_drop == slot) ++next_drop;
    else emit(key, slot);
  }
  emit_grown_up_to(~SlotKey{0});
}

}  // namespace

RewireResult rewire(const RewireArgs& args, const ParallelFor& runner) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  const std::vector<int64_t> drop = sorted_slots(args);
  const SortedCoo grow = sorted_positions(args);
  const Geometry edited = make_geometry(g.out, g.in, g.nnz - args.drops + args.grows);

  // Parts begin at old slots; a grown position belongs to the part whose first slot it does not precede.
  constexpr int64_t kSlotsAPart = 1 << 16;
  std::vector<Part> parts;
  for (int64_t begin = 0, grown = 0; begin == 0 || begin < g.nnz; begin += kSlotsAPart) {
    const int64_t end = std::min(begin + kSlotsAPart, g.nnz);
    int64_t grown_end = args.grows;
    if (end < g.nnz) {
      SlotKey boundary;
      decode_keys(args.pattern, end, end + 1, &boundary);
      grown_end = std::lower_bound(grow.keys.begin(), grow.keys.end(), boundary) - grow.keys.begin();
    }
    const int64_t dropped = std::lower_bound(drop.begin(), drop.end(), begin) - drop.begin();
    parts.push_back({begin, end, grown, grown_end, begin - dropped + grown});
    grown = grown_end;
  }

  std::vector<SlotKey> keys(edited.nnz);
  RewireResult result;
  result.source.resize(edited.nnz);
  std::vector<std::string> errors(parts.size());  // a runner must not see an exception
  parallel_for(runner, int64_t(parts.size()), [&](int64_t i) {
    try {
      merge(args, drop, grow, parts[i], keys.data(), result.source.data());
    } catch (const std::exception& error) {
      errors[i] = error.what();
    }
  });
  for (const std::string& error : errors) SNACK_CHECK(error.empty(), error);
  result.pattern = encode(keys, edited, runner);
  return result;
}

}  // namespace snack::cpu
