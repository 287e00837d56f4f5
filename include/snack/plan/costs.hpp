// What products cost on a card: microseconds by kernel, measured. The built-in table is generated from committed measurements
// (tools/cost_table.py); `snack bench tune` writes one of the user's own card. docs/plan.md has the model and the format.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "snack/plan/plan.hpp"

namespace snack {

// launches · KB that the busiest multiprocessor stages or writes · thousands of slots it walks · thousands of segments (or tiles,
// or rows) it walks · MB of the format that all passes read or write · those of them that the L2 cache does not hold
inline constexpr int kCostTerms = 6;
using CostTerms = std::array<double, kCostTerms>;

struct CostTable {
  std::string card;            // its name, for people
  std::string kernels;         // fingerprint of the kernels that were measured
  CudaCapability capability;   // of that card; `costs` is null
  double copy_tb_s = 0;        // what a copy kernel reads and writes
  std::vector<CostTerms> us;   // microseconds a unit of each term, by kernel, element size and form; negative: not measured
};

/// The table that came with the library.
const CostTable& built_in_costs();

/// Reads what tools/cost_table.py and `snack bench tune` write. Throws Error, naming the line, when it is no such table.
CostTable parse_costs(std::string_view text);

/// How much of each term the plan has to do on a card.
CostTerms cost_terms(const Problem& problem, const Plan& plan, const CudaCapability& card);

/// Together with kernel and element size they name a row of the table.
struct CostForm {
  int width = 1;    // of a pass, columns of the batch
  int variant = 0;  // 1: spmm_batch with x in shared memory, spmm_t_rows and spmm_t_stream with steps of four slots a lane
};
CostForm cost_form(const Problem& problem, const Plan& plan);

/// Microseconds, by the card's own table or the built-in one; infinite where the table has no such row.
double predict_us(const Problem& problem, const Plan& plan, const CudaCapability& card);

/// Microseconds in which the card copies so many bytes: measured where the table is the card's, else in proportion to memory bandwidth.
double floor_us(double bytes, const CudaCapability& card);

}  // namespace snack
