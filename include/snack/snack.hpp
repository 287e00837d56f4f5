// Everything a C++ program needs: patterns, products, topology edits, plans, and default threads and workspaces.
//
// Ownership   HostPattern, RewireResult, Positions and cpu::Context own their memory. PatternView, MatrixView, ParallelFor,
//             Gemm and all ...Args only borrow it: what they point to must live until the call returns (on the CPU) or until
//             the stream has passed the launch (CUDA). No call keeps a pointer.
// Errors      Everything throws snack::Error (a std::runtime_error) with one sentence, before anything is written; running
//             out of memory throws std::bad_alloc. cuda::rewire reports a refused edit in its status, since it never waits.
// Threads     Every function may be called from several threads at once, as long as no memory that one writes (outputs,
//             workspace) is used by another. Nothing is kept between calls; results do not depend on who calls.
// Workspace   A product needs Plan::workspace_bytes for the duration of the call, aligned to 64 bytes (CUDA: 256).
// Streams     A CUDA launch is ordered on Resources::stream like any kernel, never waits and never allocates, and may be
//             captured in a graph. Its device must be current.
#pragma once

#include "snack/core/cpu_info.hpp"
#include "snack/core/cuda.hpp"
#include "snack/core/error.hpp"
#include "snack/core/gemm.hpp"
#include "snack/core/parallel.hpp"
#include "snack/core/random.hpp"
#include "snack/core/types.hpp"
#include "snack/defaults/context.hpp"
#include "snack/defaults/gemm.hpp"
#include "snack/defaults/threads.hpp"
#include "snack/formats/pattern.hpp"
#include "snack/kernels/check.hpp"
#include "snack/kernels/exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/select.hpp"
#include "snack/kernels/spmm.hpp"
#include "snack/kernels/spmm_t.hpp"
#include "snack/plan/costs.hpp"
#include "snack/plan/plan.hpp"
