// The cost model of the CUDA kernels: a product takes the sum of its terms, each times what it costs on the card (docs/plan.md).
// The terms count what the busiest multiprocessor does, so they follow a card's size. Costs are taken over from the card that was
// measured; those of bytes follow the number of multiprocessors (from L2) and the bandwidth of the memory (beyond it).
#include "snack/plan/costs.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "cuda_layout.hpp"
#include "snack/core/error.hpp"

namespace snack {
namespace {

using namespace cuda;

constexpr int kWidths = 10;  // 1, 2, 4 ... 512

// Place of a row in CostTable::us.
size_t place(size_t kernel, int element_bytes, CostForm form) {
  const int width = std::min(kWidths - 1, int(std::bit_width(unsigned(form.width))) - 1);
  return ((kernel * 2 + (element_bytes == 4)) * kWidths + size_t(width)) * 2 + size_t(form.variant);
}

size_t number_of(std::string_view kernel) { return size_t(std::find(std::begin(kCudaKernels), std::end(kCudaKernels), kernel) - kCudaKernels); }

// What a kernel does: launches, its blocks, and for one block bytes staged, slots and segments walked. `moved`: bytes of
// partial sums, results and copies of x, over all blocks; `passes` over the pattern.
struct Work {
  double launches = 1;
  int64_t blocks = 1, passes = 1;
  double staged = 0, slots = 0, segments = 0, moved = 0;
};

// Of an L2 cache, what a call finds again that the call before it read: parts of a large cache keep copies of each other's lines. On a
// card with 63 MB of L2 a pattern of 60 MB came wholly from memory, one of 20 MB hardly (docs/results/profile-h200.md).
constexpr double kKept = 0.5;
// Launches that finish() costs for kFinishAtOnce partial sums more.
constexpr double kFinishTurn = 0.2;

// Steps of `width` slots that a segment takes in the mean, where slots lie at random: sum over i of P(it has more than i * width).
double steps(double mean, double width) {
  double sum = 0;
  for (double more = 0; more < mean + 8 * std::sqrt(mean) + 1; more += width) sum += 0.5 * std::erfc((more + 0.5 - mean) / std::sqrt(2 * mean + 1e-9));
  return sum;
}

Work work_of(const Problem& p, const Plan& plan) {
  const Geometry& g = p.geometry;
  const int64_t batch = std::max<int64_t>(1, p.batch), bytes = size_of(p.dtype), panels = std::max<int64_t>(1, g.panels());
  const int64_t strips = std::max<int64_t>(1, g.strips()), width = std::max<int64_t>(1, plan.batch_block), widths = ceil_div(batch, width);
  const int64_t chunks = ceil_div(batch, std::max<int64_t>(1, plan.batch_chunk)), features = p.operation == Operation::kSpmmT ? g.in : g.out;
  const double nnz = double(g.nnz), window = double(kPanelCols * width), warps = plan.threads / 32;
  const double sums = plan.splits > 1 ? 8.0 * double(plan.splits * features * batch) : 0;
  Work w;
  if (sums > 0) w.launches += 1 + kFinishTurn * double(ceil_div(plan.splits, int64_t{kFinishAtOnce}) - 1);
  w.launches *= double(chunks);
  w.moved = sums + double(features * batch * bytes);
  w.passes = widths;
  const auto share = [&](int64_t parts, int64_t passes) { w.blocks = std::max<int64_t>(1, parts * passes), w.slots = nnz / double(std::max<int64_t>(1, parts)); };
  if (plan.kernel == "spmm_rows") {
    share(ceil_div(g.out, plan.rows) * plan.splits, widths);
    w.staged = double(ceil_div(panels, plan.splits)) * window * double(bytes);
    w.segments = double(plan.rows * ceil_div(panels, plan.splits));
  } else if (plan.kernel == "spmm_batch") {
    share(ceil_div(g.out, plan.rows), widths);
    w.launches = 2.0 * double(chunks);
    w.staged = plan.windows > 0 ? double(panels * panel_bytes(width * bytes)) : 0;
    w.segments = (nnz / double(std::max<int64_t>(1, g.out)) + 16.0 * double(panels)) / (plan.groups * plan.parts);  // steps that a team makes after each other
    w.moved += 2.0 * double(g.in * batch * bytes);
  } else if (plan.kernel == "spmm_stream") {
    share(ceil_div(strips, plan.strips) * plan.splits, widths);
    w.staged = 4 * window * double(ceil_div(panels, plan.splits));
    w.segments = double(plan.strips * ceil_div(panels, plan.splits));
  } else if (plan.kernel == "spmm_t_rows") {
    share(panels * plan.splits, widths);
    w.staged = 4 * (warps * window + double(plan.rows * width));
    w.segments = double(plan.rows) * steps(nnz / double(std::max<int64_t>(1, g.segments())), plan.lanes);
  } else if (plan.kernel == "spmm_t_batch") {
    share(panels * plan.splits, widths);
    w.staged = double(ceil_div(g.out, plan.splits) * width * bytes);
    w.segments = double(ceil_div(strips, plan.splits * plan.strips) * kPanelCols);  // columns
  } else if (plan.kernel == "sddmm_batch") {
    share(panels * plan.splits, 1);
    w.launches = 1, w.moved = 0, w.passes = widths;
    w.slots *= double(widths);
    const double turns = widths == 1 ? 1 : std::ceil(w.slots / double(widths * plan.slots));
    w.staged = double(width * widths) * (double(bytes) * turns * kPanelCols + 4.0 * double(ceil_div(g.out, plan.splits)));  // dy: as floats
  } else if (plan.kernel == "spmm_t_stream") {
    share(panels * plan.splits, widths);
    w.staged = 4 * (warps * window + double(plan.strips * kStripRows * width));
    w.segments = double(plan.strips);
  } else if (plan.kernel == "sddmm_chunks" || plan.kernel == "sddmm_stream") {
    const bool is_chunks = plan.kernel == "sddmm_chunks";
    const int64_t runs = is_chunks ? plan.splits : ceil_div(strips, std::max<int64_t>(1, plan.strips));
    share(panels * runs, 1);
    w.launches = 1, w.moved = 0, w.passes = 1;
    w.staged = is_chunks ? window * double(bytes) : 4 * window;
    w.segments = double(ceil_div(g.out, runs));
  } else {  // a thread a slot, and a sample
    share(std::max<int64_t>(1, g.tiles()) * plan.splits, 1);
    w.segments = w.slots;
    w.slots *= double(batch);
    w.passes = 1;
    const bool is_sampled = p.operation == Operation::kSddmm || p.operation == Operation::kSddmmUpdate;
    w.launches = is_sampled ? 1 : 3.0 * double(chunks);
    w.moved = is_sampled ? 0 : 8.0 * double(features * batch);
  }
  return w;
}

const CostTable& table_of(const CudaCapability& card) { return card.costs != nullptr ? *card.costs : built_in_costs(); }

// Of the card's memory beside that of the table's card; where one of them is not known, as many times as it has multiprocessors.
double bandwidth(const CudaCapability& card, const CostTable& table) {
  const CudaCapability& measured = table.capability;
  if (card.memory_gb_s > 0 && measured.memory_gb_s > 0) return double(card.memory_gb_s) / double(measured.memory_gb_s);
  return double(card.multiprocessors) / measured.multiprocessors;
}

}  // namespace

CostForm cost_form(const Problem& p, const Plan& plan) {
  const bool is_slotwise = plan.kernel.ends_with("_fixed") || plan.kernel.ends_with("_coo") || plan.kernel == "sddmm_slots";
  const bool has_long_rows = plan.kernel == "spmm_t_stream" && p.geometry.nnz >= kLongSegment * p.geometry.segments();
  return {is_slotwise ? 1 : int(plan.batch_block), plan.windows > 0 || has_long_rows || (plan.kernel == "spmm_t_rows" && plan.lanes == 128)};
}

CostTerms cost_terms(const Problem& p, const Plan& plan, const CudaCapability& card) {
  const Work w = work_of(p, plan);
  const double busiest = double(ceil_div(w.blocks, card.multiprocessors)), passes = double(w.passes), bytes = plan.floor_bytes;
  return {w.launches, (busiest * w.staged + w.moved / card.multiprocessors) / 1e3, busiest * w.slots / 1e3,
          busiest * w.segments / 1e3, passes * bytes / 1e6, passes * std::max(0.0, bytes - kKept * double(card.l2_bytes)) / 1e6};
}

double predict_us(const Problem& p, const Plan& plan, const CudaCapability& card) {
  const CostTable& table = table_of(card);
  const CostTerms& us = table.us[place(number_of(plan.kernel), int(size_of(p.dtype)), cost_form(p, plan))];
  if (us[0] < 0) return std::numeric_limits<double>::infinity();
  const CostTerms terms = cost_terms(p, plan, card);
  const double l2 = double(card.multiprocessors) / table.capability.multiprocessors, beyond = terms[kCostTerms - 1];
  double sum = us[kCostTerms - 2] * terms[kCostTerms - 2] / l2 + us[kCostTerms - 1] * beyond / bandwidth(card, table);
  for (size_t i = 0; i + 2 < kCostTerms; ++i) sum += us[i] * terms[i];
  return std::max(sum, floor_us(1e6 * beyond, card));
}

double floor_us(double bytes, const CudaCapability& card) {
  const CostTable& table = table_of(card);
  return bytes / (1e6 * table.copy_tb_s * bandwidth(card, table));
}

// ---- tables ----

CostTable parse_costs(std::string_view text) {
  CostTable table;
  table.us.assign(place(std::size(kCudaKernels), 2, {}), CostTerms{-1});
  std::istringstream lines{std::string(text)};
  std::string line;
  int rows = 0;
  bool has_head = false;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream words(line);
    std::string key;
    if (!(words >> key) || key[0] == '#') continue;
    CudaCapability& c = table.capability;
    bool is_good = true;
    if (key == "snack-costs") is_good = has_head = bool(words >> key) && key == "1";
    else if (key == "card") std::getline(words >> std::ws, table.card);
    else if (key == "kernels") is_good = bool(words >> table.kernels);
    else if (key == "capability") is_good = bool(words >> c.major >> c.minor >> c.multiprocessors >> c.shared_bytes >> c.l2_bytes >> c.memory_gb_s);
    else if (key == "copy_tb_s") is_good = bool(words >> table.copy_tb_s);
    else {
      int element_bytes = 0;
      CostForm form;
      CostTerms us{};
      const size_t kernel = number_of(key);
      is_good = kernel < std::size(kCudaKernels) && words >> element_bytes >> form.width >> form.variant;
      for (double& cost : us) is_good = is_good && words >> cost && cost >= 0 && cost < 1e9;
      is_good = is_good && (element_bytes == 2 || element_bytes == 4) && form.width > 0 && (form.variant == 0 || form.variant == 1);
      if (is_good) table.us[place(kernel, element_bytes, form)] = us, ++rows;
    }
    SNACK_CHECK(is_good && has_head, "cost table: line ", number, ", '", line, "', is not of version 1; measure again with snack bench tune.");
  }
  SNACK_CHECK(rows > 0 && table.copy_tb_s > 0 && table.capability.multiprocessors > 0,
              "cost table: it is cut off or lacks the card, its copy bandwidth or all costs; measure again with snack bench tune.");
  return table;
}

const CostTable& built_in_costs() {
  static const CostTable table = parse_costs(
#include "cuda_costs.inc"
  );
  return table;
}

}  // namespace snack
