// A plan says how a product is computed and why. It is a plain value: comparable, printable, computed from
// (shape, nnz, batch, dtype, device and its threads) alone, so that it can be tested anywhere and stays fixed for fixed shapes.
#pragma once

#include <string>

#include "snack/core/types.hpp"
#include "snack/formats/pattern.hpp"

namespace snack {

enum class Regime : int { kAuto, kCoo, kStream, kTensor, kPanel };
enum class Operation : int { kSpmm, kSpmmT, kSddmm };

const char* name(Regime regime);
const char* name(Operation operation);

struct Problem {
  Operation operation = Operation::kSpmm;
  Geometry geometry;
  int64_t batch = 0;
  DType dtype = DType::kFloat32;
};

struct Plan {
  Regime regime = Regime::kStream;
  int64_t batch_block = 0;      // stream: columns of the batch handled in one pass over the pattern
  int64_t panel_rows = 0;       // panel: rows of W decoded at a time
  int64_t workspace_bytes = 0;  // scratch the caller provides for the duration of the call
  double floor_bytes = 0;       // bytes of the format that must move once: nnz * (value + index)
  const char* reason = "";      // one clause for people

  bool operator==(const Plan&) const = default;
};

/// What the CPU backend may use.
struct CpuCapability {
  int threads = 1;
  bool has_gemm = false;
};

/// Throws Error when `requested` cannot serve the problem; the text names the reason and the nearest regime that can.
Plan make_cpu_plan(const Problem& problem, Regime requested, const CpuCapability& capability);

/// One line: regime, block sizes, workspace, bytes, reason.
std::string to_string(const Plan& plan);

}  // namespace snack
