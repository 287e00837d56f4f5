#include <cstdio>

#include <snack/plan/plan.hpp>

int main() {
  const snack::Problem problem{snack::Operation::kSpmm, snack::make_geometry(300, 784, 23520), 64, snack::DType::kFloat32};
  std::puts(snack::to_string(snack::make_cpu_plan(problem, snack::Regime::kAuto, {})).c_str());
}
