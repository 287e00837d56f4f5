// A plan says how a product is computed and why. It is a plain value: comparable, printable, computed from
// (shape, nnz, batch, dtype, device and its threads) alone, so that it can be tested anywhere and stays fixed for fixed shapes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "snack/core/cuda.hpp"
#include "snack/core/types.hpp"
#include "snack/formats/pattern.hpp"

namespace snack {

enum class Regime : int { kAuto, kCoo, kStream, kTensor, kPanel };
enum class Operation : int { kSpmm, kSpmmT, kSddmm, kSddmmUpdate };

const char* name(Regime regime);
const char* name(Operation operation);

struct Problem {
  Operation operation = Operation::kSpmm;
  Geometry geometry;
  int64_t batch = 0;
  DType dtype = DType::kFloat32;

  bool operator==(const Problem&) const = default;
};

struct Plan {
  Regime regime = Regime::kStream;
  int64_t batch_block = 0;      // stream: columns of the batch handled in one pass over the pattern
  int64_t panel_rows = 0;       // panel: rows of W decoded at a time
  int64_t batch_chunk = 0;      // CUDA: columns of the batch that share one launch and the workspace
  int64_t rows = 0;             // CUDA *_rows, spmm_batch: rows that a thread block owns
  int lanes = 0, groups = 0;    // CUDA spmm_rows, spmm_batch: lanes that share a row in a panel, and groups of them that share its
                                // panels; spmm_t_rows: slots of a row that a warp takes at once
  int64_t slots = 0;            // CUDA spmm_t_batch: the most that are sorted at a time; sddmm_batch: whose sums wait in shared memory
  int parts = 1;                // CUDA spmm_batch: teams that share the slots of a row in the panels of their group
  int windows = 0;              // CUDA spmm_batch: panels of x in shared memory, a group; 0: x is read from L2
  int64_t strips = 0;           // CUDA stream: strips of tiles that one thread block takes at a time
  int64_t splits = 1;           // CUDA: parts of a sum that different blocks make (added in a fixed order), or of a tile
  int threads = 0;              // CUDA: threads of a block
  bool evict_first = false;     // CUDA: values leave the L2 cache before the pattern does, for which they are too many together; of
                                // sddmm_update where the rule has no state
  int64_t workspace_bytes = 0;  // scratch the caller provides for the duration of the call; aligned to 64 bytes, CUDA: 256
  double floor_bytes = 0;       // bytes of the format that must move once: nnz * (value + index)
  std::string_view kernel;      // CUDA: name of the kernel that is launched
  std::string_view reason;      // one clause for people

  bool operator==(const Plan&) const = default;
};

/// What the CPU backend may use: `threads` of the runner and whether a gemm comes with it. The kernel is lent the same.
struct CpuCapability {
  int threads = 1;
  bool has_gemm = false;
};

/// Throws Error when `requested` cannot serve the problem; the text names the reason and the nearest regime that can.
Plan make_cpu_plan(const Problem& problem, Regime requested, const CpuCapability& capability);

/// The same for a card: of the kernels that can serve, the one that is predicted to be fastest, or the one that is named. Pure:
/// needs no GPU. Throws Error when the named kernel cannot serve, too.
Plan make_cuda_plan(const Problem& problem, Regime requested, const CudaCapability& capability, std::string_view kernel = {});

/// A kernel that can serve, its plan, and what is predicted for it (infinite: the cost table knows nothing of it).
struct Candidate {
  Plan plan;
  double predicted_us = 0;
};

/// All of them, the fastest first; of equals the one that stands first in kCudaKernels.
std::vector<Candidate> cuda_candidates(const Problem& problem, Regime requested, const CudaCapability& capability);

/// Names of the kernels that compute products on a card.
inline constexpr std::string_view kCudaKernels[] = {
    "spmm_rows",     "spmm_batch",   "spmm_stream", "spmm_fixed",   "spmm_coo",    "spmm_t_rows",  "spmm_t_batch",
    "spmm_t_stream", "spmm_t_fixed", "spmm_t_coo",  "sddmm_chunks", "sddmm_batch", "sddmm_stream", "sddmm_slots"};

/// For people: kernel, plan, predicted time, bytes, floor and runner-up.
std::string explain(const std::vector<Candidate>& candidates, const CudaCapability& capability);

/// One line: regime, block sizes, workspace, bytes, reason.
std::string to_string(const Plan& plan);

}  // namespace snack
