#include "snack/plan/plan.hpp"

#include <sstream>

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
  text << ", workspace " << plan.workspace_bytes << " bytes, format " << int64_t(plan.floor_bytes) << " bytes: " << plan.reason;
  return text.str();
}

}  // namespace snack
