// rewire: the one way to change a topology. Connections are dropped and grown; every other keeps its value.
#pragma once

#include <vector>

#include "snack/core/parallel.hpp"
#include "snack/formats/pattern.hpp"

namespace snack {

/// drop: `drops` slots; grow_rows, grow_cols: `grows` positions, empty or dropped by the same edit.
struct RewireArgs {
  PatternView pattern;
  const int64_t* drop = nullptr;
  int64_t drops = 0;
  const int64_t* grow_rows = nullptr;
  const int64_t* grow_cols = nullptr;
  int64_t grows = 0;
};

/// The edited pattern and, for each new slot, where its connection comes from:
/// the old slot, or -(1 + g) for grown position number g. Scratch: 16 bytes a slot.
struct RewireResult {
  HostPattern pattern;
  std::vector<int64_t> source;
};

/// Throws Error, and changes nothing, on a slot out of range or named twice, a position out of range, occupied or named twice.
namespace reference {
RewireResult rewire(const RewireArgs& args);
}
namespace cpu {
RewireResult rewire(const RewireArgs& args, const ParallelFor& runner);
}

}  // namespace snack
