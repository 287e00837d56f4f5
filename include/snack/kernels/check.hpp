// What a caller can get wrong, found before anything is written. Every backend calls these first: they look at sizes and
// pointers only, never at the memory behind them, so they cost nanoseconds and serve host and device pointers alike.
// All throw Error with one sentence: what was given, what is expected, what to do.
#pragma once

#include "snack/kernels/exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/select.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack {

/// Unknown dtypes, a geometry that make_geometry does not give, null pointers to what is not empty, matrices of another
/// size or dtype than the pattern's, a negative batch.
void check(const SpmmArgs& args);
void check(const SpmmTArgs& args);
void check(const SddmmArgs& args);
void check(const SddmmUpdateArgs& args);
void check(const RewireArgs& args);
void check(const SelectArgs& args);
void check(const EmptyPositions& empty, const char* operation);
void check(const GrowGradientArgs& args);
void check(const ExchangeArgs& args);

/// The view alone; `operation` begins the sentence.
void check(const PatternView& pattern, const char* operation);

/// `workspace` holds the `needed` bytes and is aligned to `alignment`.
void check_workspace(const char* operation, const void* workspace, int64_t bytes, int64_t needed, int64_t alignment);

namespace cpu {
/// Threads, workspace and gemm are what the plan counts on, and the plan fits the problem (another batch, another number of
/// threads or another dtype would cut more from the workspace than it holds).
void check(const Problem& problem, const Plan& plan, const CpuResources& resources);
}  // namespace cpu

}  // namespace snack
