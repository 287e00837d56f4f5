// Every operator's signature. A backend is an implementation of these names: `snack` has the fast ones, `snack_reference`
// the specification (CPU, single thread) under the same signatures.
//
// index, tile_ptr: a packed pattern (include/snack/formats/pattern.hpp); values: (nnz,) in slot order;
// x (batch, in), dy (batch, out), bias (out,): one floating dtype. regime: 0 auto, 1 coo, 2 stream, 3 tensor, 4 panel;
// on a card also kFirstKernel + number of a kernel in kCudaKernels: that one.
#include "compat.hpp"

namespace {

void define(torch::stable::detail::StableLibrary& m) {
  m.def(
      "spmm(Tensor index, Tensor tile_ptr, Tensor values, Tensor x, Tensor? bias, int out_features, int in_features, "
      "int regime=0) -> Tensor");
  m.def(
      "spmm_t(Tensor index, Tensor tile_ptr, Tensor values, Tensor dy, int out_features, int in_features, int regime=0) "
      "-> Tensor");
  m.def(
      "sddmm(Tensor index, Tensor tile_ptr, Tensor dy, Tensor x, int out_features, int in_features, int regime=0) -> "
      "Tensor");
  // One step of torch.optim's rule (0 SGD, 1 AdamW) by the gradient sddmm(dy, x), which is stored nowhere. state: SGD's momentum
  // buffer where there is momentum; AdamW's exp_avg and exp_avg_sq. lr, step: float32 scalars beside the values, in place of the
  // numbers'. numbers: SGD lr, momentum, dampening, weight_decay, nesterov, maximize, is_first; AdamW lr, beta1, beta2, eps,
  // weight_decay, step, maximize.
  m.def(
      "sddmm_update(Tensor index, Tensor tile_ptr, Tensor(a!) values, Tensor(b!)[] state, Tensor dy, Tensor x, Tensor? lr, Tensor? step, "
      "int rule, float[] numbers, int out_features, int in_features, int regime=0) -> ()");
  // -> index, tile_ptr of the edited pattern, source (new slot -> old slot, or -(1 + g) for grown position g).
  m.def(
      "rewire(Tensor index, Tensor tile_ptr, Tensor drop, Tensor grow_rows, Tensor grow_cols, int out_features, "
      "int in_features) -> (Tensor, Tensor, Tensor)");
  m.def("select_smallest(Tensor values, int k, int sign=0) -> Tensor");
  m.def(
      "grow_uniform(Tensor index, Tensor tile_ptr, Tensor drop, int k, int key, int out_features, int in_features) -> "
      "(Tensor, Tensor)");
  m.def(
      "grow_gradient(Tensor index, Tensor tile_ptr, Tensor drop, Tensor dy, Tensor x, int k, int out_features, "
      "int in_features) -> (Tensor, Tensor)");
  // One update in place: connections are dropped by carried[0], the values, as many are grown, and every carried tensor (one entry a
  // connection) follows; grown entries get fills (float32, one a carried tensor). drop_rule: 0 the k smallest |value|, 1 SET's, by
  // `fraction` of each sign and k at most. grow_rule: 0 uniform by `key`, 1 by |dy^T x|. -> int64 (2,): connections moved, error
  // (0: none, 1: fewer positions than that have a gradient that is a number, and nothing was changed; on a CPU it is raised).
  m.def(
      "exchange_(Tensor(a!) index, Tensor(b!) tile_ptr, Tensor(c!)[] carried, Tensor fills, int drop_rule, float fraction, int k, "
      "int grow_rule, int key, Tensor? dy, Tensor? x, int out_features, int in_features) -> Tensor");
  m.def("sample(int out_features, int in_features, int nnz, int key) -> (Tensor, Tensor)");
}

}  // namespace

STABLE_TORCH_LIBRARY(snack, m) {
  define(m);
  // -> index, tile_ptr, slot of every listed connection.
  m.def("pack(Tensor rows, Tensor cols, int out_features, int in_features, bool sum_duplicates=False) -> (Tensor, Tensor, Tensor)");
  m.def("unpack(Tensor index, Tensor tile_ptr, int out_features, int in_features) -> (Tensor, Tensor)");
  // Shape of the packed arrays: index entries are int16 (narrow) or int32; -> (is narrow, int64 words of tile_ptr).
  m.def("geometry(int out_features, int in_features, int nnz) -> (bool, int)");
  m.def("explain(int operation, int out_features, int in_features, int nnz, int batch, ScalarType dtype, int regime) -> str");
  // The plan of a card with this capability (as `cuda_capability` of the CUDA library gives it); needs neither card nor library.
  m.def(
      "explain_cuda(int operation, int out_features, int in_features, int nnz, int batch, ScalarType dtype, int regime, "
      "int major, int minor, int multiprocessors, int shared_bytes, int l2_bytes, int memory_gb_s=0, str costs='') -> str");
  // A line a kernel that can serve: what it costs there, and by what.
  m.def(
      "cuda_candidates(int operation, int out_features, int in_features, int nnz, int batch, ScalarType dtype, int regime, "
      "int major, int minor, int multiprocessors, int shared_bytes, int l2_bytes, int memory_gb_s=0, str costs='') -> str");
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY(snack_reference, m) { define(m); }
