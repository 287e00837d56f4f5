#include "snack/plan/plan.hpp"

#include <cmath>
#include <iomanip>
#include <sstream>

#include "snack/plan/costs.hpp"

namespace snack {

const char* name(Regime regime) {
  switch (regime) {
    case Regime::kAuto: return "auto";
    case Regime::kCoo: return "coo";
    case Regime::kStream: return "stream";
    case Regime::kTensor: return "tensor";
    case Regime::kPanel: return "panel";
  }
  return "unknown";
}

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kSpmm: return "spmm";
    case Operation::kSpmmT: return "spmm_t";
    case Operation::kSddmm: return "sddmm";
    case Operation::kSddmmUpdate: return "sddmm_update";
  }
  return "unknown";
}

std::string to_string(const Plan& plan) {
  std::ostringstream text;
  text << name(plan.regime);
  if (plan.regime == Regime::kPanel) text << ", panels of " << plan.panel_rows << " rows";
  else text << ", batch blocks of " << plan.batch_block;
  text << ", workspace " << plan.workspace_bytes << " bytes, format " << int64_t(plan.floor_bytes) << " bytes: " << plan.reason
       << (plan.evict_first ? "; values leave the L2 cache first" : "");
  return text.str();
}

std::string explain(const std::vector<Candidate>& candidates, const CudaCapability& card) {
  const Candidate& first = candidates.front();
  std::ostringstream text;
  const auto time = [&](double us) -> std::ostringstream& {
    if (std::isinf(us)) text << "not measured";
    else text << us << " us";
    return text;
  };
  text << "kernel " << first.plan.kernel << ": " << to_string(first.plan) << std::fixed << std::setprecision(1) << "; predicted ";
  time(first.predicted_us) << ", floor ";
  time(floor_us(first.plan.floor_bytes, card)) << ", runner-up ";
  if (candidates.size() == 1) text << "none";
  else text << candidates[1].plan.kernel << " ", time(candidates[1].predicted_us);
  return text.str();
}

}  // namespace snack
