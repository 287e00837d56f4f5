// Operators on topologies: packing, sampling, selection, rewire. Index lists are int64, contiguous, on the CPU.
#include <cstring>
#include <sstream>

#include "compat.hpp"
#include "exchange.hpp"
#include "snack/core/cpu_info.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/select.hpp"
#include "snack/plan/costs.hpp"

namespace snack::torch_face {
namespace {

const int64_t* index_list(const char* operation, const char* what, const Tensor& t) {
  SNACK_CHECK(t.is_cpu() && t.dim() == 1 && t.is_contiguous() && t.scalar_type() == ScalarType::Long, operation, ": ",
              what, " must be a contiguous 1-D int64 tensor on the CPU.");
  return static_cast<const int64_t*>(t.data_ptr());
}

template <class T>
Tensor to_tensor(const std::vector<T>& data, int64_t count, ScalarType dtype) {
  Tensor t = empty_cpu({count}, dtype);
  if (!data.empty()) std::memcpy(t.data_ptr(), data.data(), data.size() * sizeof(T));
  return t;
}

Tensor to_tensor(const std::vector<int64_t>& data) { return to_tensor(data, int64_t(data.size()), ScalarType::Long); }

std::tuple<Tensor, Tensor> to_tensors(const HostPattern& pattern) {
  const bool narrow = pattern.geometry.packing == Packing::kNarrow;
  return {to_tensor(pattern.index, pattern.geometry.nnz, narrow ? ScalarType::Short : ScalarType::Int),
          to_tensor(pattern.tile_ptr)};
}

std::tuple<Tensor, Tensor, Tensor> pack(const Tensor& rows, const Tensor& cols, int64_t out, int64_t in, bool sum_duplicates) {
  const int64_t count = rows.numel();
  SNACK_CHECK(cols.numel() == count, "Pattern: rows has ", count, " entries and cols has ", cols.numel(), "; both list the connections.");
  make_geometry(out, in, 0);  // checks the shape
  const SortedCoo sorted = sort_coo(index_list("Pattern", "rows", rows), index_list("Pattern", "cols", cols), count, out, in);
  std::vector<SlotKey> keys;
  std::vector<int64_t> slots(count);
  for (int64_t i = 0; i < count; ++i) {
    const SlotKey key = sorted.keys[i];
    if (keys.empty() || keys.back() != key) keys.push_back(key);
    else
      SNACK_CHECK(sum_duplicates, "Pattern: position (", key_row(key), ", ", key_col(key),
                  ") is listed twice; remove the repetition or pass sum_duplicates=True to add the values.");
    slots[sorted.order[i]] = int64_t(keys.size()) - 1;
  }
  auto [index, tile_ptr] = to_tensors(encode(keys, make_geometry(out, in, int64_t(keys.size())), torch_parallel()));
  return {index, tile_ptr, to_tensor(slots)};
}

std::tuple<Tensor, Tensor> unpack(const Tensor& index, const Tensor& tile_ptr, int64_t out, int64_t in) {
  const PatternView pattern = pattern_view("unpack", index, tile_ptr, out, in);
  Tensor rows = empty_cpu({index.numel()}, ScalarType::Int), cols = empty_cpu({index.numel()}, ScalarType::Int);
  snack::unpack(pattern, static_cast<int32_t*>(rows.data_ptr()), static_cast<int32_t*>(cols.data_ptr()), torch_parallel());
  return {rows, cols};
}

std::tuple<bool, int64_t> geometry(int64_t out, int64_t in, int64_t nnz) {
  const Geometry g = make_geometry(out, in, nnz);
  return {g.packing == Packing::kNarrow, g.pointer_words()};
}

Problem problem_of(int64_t operation, int64_t out, int64_t in, int64_t nnz, int64_t batch, ScalarType dtype, int64_t regime) {
  SNACK_CHECK(operation >= 0 && operation <= int64_t(Operation::kSddmmUpdate) && regime >= 0 && batch >= 0,
              "explain: operation ", operation, ", regime ", regime, " or batch ", batch, " does not exist.");
  const DType type = dtype_of(empty_cpu({0}, dtype), "explain", "dtype");
  return {Operation(operation), make_geometry(out, in, nnz), batch, type};
}

std::string explain(int64_t operation, int64_t out, int64_t in, int64_t nnz, int64_t batch, ScalarType dtype, int64_t regime) {
  const Problem problem = problem_of(operation, out, in, nnz, batch, dtype, regime);
  return to_string(make_cpu_plan(problem, choice_of("explain", regime).regime, {torch_parallel().threads, true}));
}

// A card as the operators take it: without numbers of its own, or with the user's cost table.
struct Card {
  CostTable costs;
  CudaCapability capability;
  Card(int64_t major, int64_t minor, int64_t multiprocessors, int64_t shared_bytes, int64_t l2_bytes, int64_t memory_gb_s, const std::string& text)
      : capability{int(major), int(minor), int(multiprocessors), shared_bytes, l2_bytes, memory_gb_s} {
    if (text.empty()) return;
    costs = parse_costs(text);
    capability.costs = &costs;
  }
};

std::vector<Candidate> candidates_of(const Problem& problem, int64_t code, const CudaCapability& card) {
  const Choice choice = choice_of("explain", code);
  if (choice.kernel.empty()) return cuda_candidates(problem, choice.regime, card);
  const Plan plan = make_cuda_plan(problem, choice.regime, card, choice.kernel);
  return {{plan, predict_us(problem, plan, card)}};
}

std::string explain_cuda(int64_t operation, int64_t out, int64_t in, int64_t nnz, int64_t batch, ScalarType dtype, int64_t regime, int64_t major,
                         int64_t minor, int64_t multiprocessors, int64_t shared_bytes, int64_t l2_bytes, int64_t memory_gb_s, std::string costs) {
  const Problem problem = problem_of(operation, out, in, nnz, batch, dtype, regime);
  const Card card(major, minor, multiprocessors, shared_bytes, l2_bytes, memory_gb_s, costs);
  return snack::explain(candidates_of(problem, regime, card.capability), card.capability);
}

// A line a kernel that can serve, the fastest first: name, element size, width, variant; predicted microseconds; the terms.
std::string cuda_candidates_text(int64_t operation, int64_t out, int64_t in, int64_t nnz, int64_t batch, ScalarType dtype, int64_t regime, int64_t major,
                                 int64_t minor, int64_t multiprocessors, int64_t shared_bytes, int64_t l2_bytes, int64_t memory_gb_s, std::string costs) {
  const Problem problem = problem_of(operation, out, in, nnz, batch, dtype, regime);
  const Card card(major, minor, multiprocessors, shared_bytes, l2_bytes, memory_gb_s, costs);
  std::ostringstream text;
  for (const Candidate& candidate : candidates_of(problem, regime, card.capability)) {
    const CostForm form = cost_form(problem, candidate.plan);
    text << candidate.plan.kernel << ' ' << size_of(problem.dtype) << ' ' << form.width << ' ' << form.variant << ' ' << candidate.predicted_us;
    for (const double term : cost_terms(problem, candidate.plan, card.capability)) text << ' ' << term;
    text << '\n';
  }
  return text.str();
}

std::string cpu_isa() { return cpu::isa_name(); }

template <bool kReference>
std::tuple<Tensor, Tensor, Tensor> rewire(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, const Tensor& rows,
                                          const Tensor& cols, int64_t out, int64_t in) {
  SNACK_CHECK(rows.numel() == cols.numel(), "rewire: grow has ", rows.numel(), " rows and ", cols.numel(), " columns; both list the positions.");
  const RewireArgs args{pattern_view("rewire", index, tile_ptr, out, in), index_list("rewire", "drop", drop), drop.numel(),
                        index_list("rewire", "grow rows", rows), index_list("rewire", "grow columns", cols), rows.numel()};
  const RewireResult result = kReference ? reference::rewire(args) : cpu::rewire(args, torch_parallel());
  auto [new_index, new_tile_ptr] = to_tensors(result.pattern);
  return {new_index, new_tile_ptr, to_tensor(result.source)};
}

template <bool kReference>
Tensor select_smallest(const Tensor& values, int64_t k, int64_t sign) {
  SNACK_CHECK(values.is_cpu() && values.dim() == 1 && values.is_contiguous(),
              "select_smallest: values must be a contiguous 1-D tensor on the CPU.");
  SNACK_CHECK(sign >= 0 && sign <= int64_t(Sign::kNegative), "select_smallest: sign ", sign, " is none of 0 (any), 1 (positive), 2 (negative).");
  const SelectArgs args{dtype_of(values, "select_smallest", "values"), values.data_ptr(), values.numel(), k, Sign(sign)};
  return to_tensor(kReference ? reference::select_smallest(args) : cpu::select_smallest(args));
}

template <bool kReference>
std::tuple<Tensor, Tensor> grow_uniform(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, int64_t k, int64_t key,
                                        int64_t out, int64_t in) {
  const EmptyPositions empty{pattern_view("grow_uniform", index, tile_ptr, out, in), index_list("grow_uniform", "drop", drop), drop.numel()};
  const Positions grown = kReference ? reference::grow_uniform(empty, k, uint64_t(key)) : cpu::grow_uniform(empty, k, uint64_t(key));
  return {to_tensor(grown.rows), to_tensor(grown.cols)};
}

template <bool kReference>
std::tuple<Tensor, Tensor> grow_gradient(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, const Tensor& dy,
                                         const Tensor& x, int64_t k, int64_t out, int64_t in) {
  GrowGradientArgs args{{pattern_view("grow_gradient", index, tile_ptr, out, in), index_list("grow_gradient", "drop", drop), drop.numel()}};
  const DType dtype = dtype_of(x, "grow_gradient", "x");
  SNACK_CHECK(x.is_cpu() && dy.is_cpu() && x.dim() == 2 && dy.dim() == 2 && x.size(0) == dy.size(0) && x.size(1) == in &&
                  dy.size(1) == out && dtype_of(dy, "grow_gradient", "dy") == dtype,
              "grow_gradient: dy must be (batch, ", out, ") and x (batch, ", in, "), of one dtype, on the CPU.");
  args.dy = matrix(dy, dtype);
  args.x = matrix(x, dtype);
  args.k = k;
  const Positions grown = kReference ? reference::grow_gradient(args) : cpu::grow_gradient(args, torch_gemm(), torch_parallel());
  return {to_tensor(grown.rows), to_tensor(grown.cols)};
}

template <bool kReference>
struct Exchange {
  static Tensor run(const Tensor&, const ExchangeArgs& args) {
    const ExchangeResult result = kReference ? reference::exchange(args) : cpu::exchange(args, torch_gemm(), torch_parallel());
    return to_tensor({result.moved, result.error});
  }
};

template <bool kReference>
std::tuple<Tensor, Tensor> sample(int64_t out, int64_t in, int64_t nnz, int64_t key) {
  return to_tensors(kReference ? reference::sample(out, in, nnz, uint64_t(key)) : cpu::sample(out, in, nnz, uint64_t(key), torch_parallel()));
}

}  // namespace
}  // namespace snack::torch_face

STABLE_TORCH_LIBRARY_IMPL(snack, CPU, m) {
  using namespace snack::torch_face;
  m.impl("rewire", TORCH_BOX(&rewire<false>));
  m.impl("select_smallest", TORCH_BOX(&select_smallest<false>));
  m.impl("grow_uniform", TORCH_BOX(&grow_uniform<false>));
  m.impl("grow_gradient", TORCH_BOX(&grow_gradient<false>));
  m.impl("exchange_", TORCH_BOX(&exchange<Exchange<false>>));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("unpack", TORCH_BOX(&unpack));
}

STABLE_TORCH_LIBRARY_IMPL(snack, CompositeExplicitAutograd, m) {
  using namespace snack::torch_face;
  m.impl("sample", TORCH_BOX(&sample<false>));
  m.impl("geometry", TORCH_BOX(&geometry));
  m.impl("explain", TORCH_BOX(&explain));
  m.impl("explain_cuda", TORCH_BOX(&explain_cuda));
  m.impl("cuda_candidates", TORCH_BOX(&cuda_candidates_text));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}

STABLE_TORCH_LIBRARY_IMPL(snack_reference, CPU, m) {
  using namespace snack::torch_face;
  m.impl("rewire", TORCH_BOX(&rewire<true>));
  m.impl("select_smallest", TORCH_BOX(&select_smallest<true>));
  m.impl("grow_uniform", TORCH_BOX(&grow_uniform<true>));
  m.impl("grow_gradient", TORCH_BOX(&grow_gradient<true>));
  m.impl("exchange_", TORCH_BOX(&exchange<Exchange<true>>));
}

STABLE_TORCH_LIBRARY_IMPL(snack_reference, CompositeExplicitAutograd, m) {
  m.impl("sample", TORCH_BOX(&snack::torch_face::sample<true>));
}
