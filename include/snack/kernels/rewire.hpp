// rewire: the one way to change a topology. Connections are dropped and grown; every other keeps its value.
#pragma once

#include <string>
#include <vector>

#include "snack/core/cuda.hpp"
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

  /// What belongs to a connection (weight, momentum, ...) in the new order of slots; `grown` for the new ones.
  template <class T>
  std::vector<T> carry(const std::vector<T>& old, T grown = T{}) const {
    std::vector<T> moved;
    moved.reserve(source.size());
    for (const int64_t from : source) moved.push_back(from < 0 ? grown : old.at(size_t(from)));
    return moved;
  }
};

/// Throws Error, and changes nothing, on a slot out of range or named twice, a position out of range, occupied or named twice.
namespace reference {
RewireResult rewire(const RewireArgs& args);
}
namespace cpu {
RewireResult rewire(const RewireArgs& args, const ParallelFor& runner);
}

namespace cuda {

/// Why an edit was refused, written by the device.
enum class RewireError : int {
  kNone, kDropOutOfRange, kDropTwice, kGrowOutOfRange, kGrowTwice, kGrowOccupied
};
struct RewireStatus {
  int64_t error = 0;                   // a RewireError
  int64_t row_or_slot = 0, col = 0;    // one offender: the slot (drop errors) or the position (grow errors)
};

/// Where the edited pattern goes; device memory, disjoint from the old pattern. geometry is that of nnz - drops + grows slots.
struct RewireOutput {
  Geometry geometry;
  void* index = nullptr;              // geometry.nnz words
  int64_t* tile_ptr = nullptr;        // geometry.pointer_words()
  int64_t* source = nullptr;          // geometry.nnz, as in RewireResult
  RewireStatus* status = nullptr;     // written last; the host reads it when it wants to know
};

/// Scratch of an edit on the current device: about 5 bytes a slot and 48 bytes a grown position.
int64_t rewire_workspace(const Geometry& before, int64_t drops, int64_t grows);

/// The same edit on the device, without waiting for it: pointers of `args` are device memory. A refused edit is reported in
/// *status; the other outputs are then the old pattern where the sizes agree (a copy of it changes nothing), else some pattern of
/// the new size that can be walked.
void rewire(const RewireArgs& args, const RewireOutput& output, const Resources& resources);

/// The sentence for a status that the host has read; empty when there was no error.
std::string describe(const RewireStatus& status, const Geometry& before);

}  // namespace cuda

}  // namespace snack
