// Stands for the CUDA backend in a library that was built without it: the same functions, and one sentence.
#include "snack/core/cuda.hpp"
#include "snack/core/error.hpp"
#include "snack/kernels/exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/select.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack::cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  fail(what, ": this library was built without CUDA; build it with nvcc and -DSNACK_CUDA=ON, or use the CPU.");
}

}  // namespace

int device_count() { return 0; }
int current_device() { refuse("current_device"); }
const char* architectures() { return ""; }
const CudaCapability& capability(int) { refuse("capability"); }
void use_costs(const CostTable&) { refuse("use_costs"); }
int64_t rewire_workspace(const Geometry&, int64_t, int64_t) { refuse("rewire_workspace"); }
int64_t select_smallest_workspace(DType, int64_t) { refuse("select_smallest_workspace"); }
int64_t exchange_workspace(const ExchangeArgs&) { refuse("exchange_workspace"); }
int64_t grow_uniform_workspace(const Geometry&, int64_t) { refuse("grow_uniform_workspace"); }
int64_t grow_gradient_workspace(const Geometry&, int64_t, DType) { refuse("grow_gradient_workspace"); }

void spmm(const SpmmArgs&, const Plan&, const Resources&) { refuse("spmm"); }
void spmm_t(const SpmmTArgs&, const Plan&, const Resources&) { refuse("spmm_t"); }
void sddmm(const SddmmArgs&, const Plan&, const Resources&) { refuse("sddmm"); }
void sddmm_update(const SddmmUpdateArgs&, const Plan&, const Resources&) { refuse("sddmm_update"); }
void rewire(const RewireArgs&, const RewireOutput&, const Resources&) { refuse("rewire"); }
void exchange(const ExchangeArgs&, ExchangeResult*, const Resources&) { refuse("exchange_"); }
void select_smallest(const SelectArgs&, int64_t*, SelectStatus*, const Resources&) { refuse("select_smallest"); }
void grow_uniform(const EmptyPositions&, int64_t, uint64_t, int64_t*, int64_t*, SelectStatus*, const Resources&) { refuse("grow_uniform"); }
void grow_gradient(const GrowGradientArgs&, int64_t*, int64_t*, SelectStatus*, const Resources&) { refuse("grow_gradient"); }

}  // namespace snack::cuda
