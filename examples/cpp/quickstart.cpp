#include <cstdio>
#include <vector>

#include <snack/snack.hpp>

int main() try {
  // W (300, 784), one position in ten connected. `values` holds one number a connection, in the pattern's slot order.
  constexpr int64_t out = 300, in = 784, nnz = 23520, batch = 64, k = 1000;
  snack::HostPattern pattern = snack::cpu::sample(out, in, nnz, /*key=*/1, snack::default_threads());
  std::vector<float> values(nnz, 0.5f), x(batch * in, 1.0f), dy(batch * out, 1.0f);
  std::vector<float> y(batch * out), dx(batch * in), gradient(nnz);

  snack::cpu::Context cpu;  // threads and a workspace
  cpu.spmm({.pattern = pattern.view(), .values = values.data(), .x = snack::matrix(x.data(), batch, in), .y = y.data()});
  cpu.spmm_t({.pattern = pattern.view(), .values = values.data(), .dy = snack::matrix(dy.data(), batch, out), .dx = dx.data()});
  cpu.sddmm({.pattern = pattern.view(), .dy = snack::matrix(dy.data(), batch, out), .x = snack::matrix(x.data(), batch, in),
             .dvalues = gradient.data()});

  // An update of SET: the k smallest connections give way to k random ones, which start at 0.
  const std::vector<int64_t> drop = snack::cpu::select_smallest({.values = values.data(), .nnz = nnz, .k = k});
  const snack::Positions grow = snack::cpu::grow_uniform({pattern.view(), drop.data(), k}, k, /*key=*/2);
  const snack::RewireResult edit =
      snack::cpu::rewire({pattern.view(), drop.data(), k, grow.rows.data(), grow.cols.data(), k}, snack::default_threads());
  values = edit.carry(values);
  pattern = edit.pattern;

  float sum = 0;
  for (const float value : y) sum += value;
  std::printf("sum of y %.0f, gradient of slot 0 %.0f, %zu bytes of index\n", sum, gradient[0], pattern.index.size());
} catch (const snack::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
