// Trains a sparse multilayer perceptron (784-300-100-10) with SET, without Python: ./train_mnist --help
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "data.hpp"
#include "network.hpp"
#include "safetensors.hpp"

namespace example {
namespace {

constexpr const char* kHelp =
    "Trains a 300-100 perceptron with sparse layers on images in idx files (MNIST), with SET.\n"
    "  --data DIR         folder of the four idx files, plain or .gz\n"
    "                     (default: $SNACK_DATA/mnist, ../shared/data/mnist, then the digits made with this program)\n"
    "  --device cpu|cuda  where it trains (default cpu)\n"
    "  --threads N        CPU threads (default: all this process may use)\n"
    "  --sparsity S       part of the connections left out, from 0 to below 1 (default 0.9)\n"
    "  --epochs N         passes over the training images (default 10; 60 for fewer than 10,000 images)\n"
    "  --seed N           of topology, weights and batches (default 0)\n"
    "  --save FILE        write the network as .safetensors; Python reads it with snack.load\n";

struct Options {
  std::string data, device = "cpu", save;
  double sparsity = 0.9;
  int64_t epochs = 0, seed = 0, threads = snack::available_processors();
};

double number(const std::string& option, const std::string& text, double low, double high, bool is_whole) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && *end == '\0' && std::isfinite(value) && (!is_whole || value == std::floor(value));
  SNACK_CHECK(is_number && value >= low && value <= high, option, ": ", text, " was given, expected a ", is_whole ? "whole " : "",
              "number from ", low, " to ", high, ".");
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string option = arguments[i];
    SNACK_CHECK(i + 1 < count, option, ": a value is missing; see --help.");
    const std::string value = arguments[i + 1];
    if (option == "--data") options.data = value;
    else if (option == "--device") options.device = value;
    else if (option == "--save") options.save = value;
    else if (option == "--sparsity") options.sparsity = number(option, value, 0, 0.9999, false);
    else if (option == "--epochs") options.epochs = int64_t(number(option, value, 1, 10000, true));
    else if (option == "--seed") options.seed = int64_t(number(option, value, 0, 1e15, true));
    else if (option == "--threads") options.threads = int64_t(number(option, value, 1, 1024, true));
    else snack::fail(option, " is unknown; see --help.");
  }
  SNACK_CHECK(options.device == "cpu" || options.device == "cuda", "--device: ", options.device, " was given, expected cpu or cuda.");
  return options;
}

std::string find_data() {
  const char* root = std::getenv("SNACK_DATA");
  for (const std::string& folder : {root ? std::string(root) + "/mnist" : "", std::string("../shared/data/mnist"), std::string(DIGITS_DIR)})
    if (!folder.empty() && has_idx(folder)) return folder;
  snack::fail("no data was found: give the folder of the four MNIST idx files with --data, or run digits.py to make the digits.");
}

std::vector<int64_t> shuffled(int64_t count, uint64_t key) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(order[size_t(i)], order[snack::bounded(snack::random_bits(key, uint64_t(i)), uint64_t(i) + 1)]);
  return order;
}

Score test(Network& network, const Dataset& set, int64_t batch) {
  for (int64_t b = 0; b < set.test.count(); b += batch)
    network.test(set.test.pixels.data() + b * set.features, set.test.labels.data() + b, std::min(batch, set.test.count() - b));
  return network.take_score();
}

void report_bytes(const Network& network) {
  int64_t sparse = 0, dense = 0, connections = 0;
  for (const SparseLayer& layer : network.layers()) {
    sparse += layer.weight_bytes();
    dense += layer.geometry.out * layer.geometry.in * int64_t(sizeof(float));
    connections += layer.geometry.nnz;
  }
  // Training holds a gradient and a momentum for every weight besides.
  const int64_t state = 2 * connections * int64_t(sizeof(float));
  std::printf("%lld of %lld connections; weights %.1f kB (dense: %.1f kB), with gradients and momentum %.1f kB (dense: %.1f kB)\n",
              static_cast<long long>(connections), static_cast<long long>(dense / 4), double(sparse) / 1e3, double(dense) / 1e3,
              double(sparse + state) / 1e3, 3 * double(dense) / 1e3);
}

void run(const Options& options) {
  constexpr int64_t kBatch = 100;
  constexpr float kRate = 0.1f, kDecay = 1e-4f;
  constexpr double kMoved = 0.3;  // zeta of SET
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };

  if (!options.save.empty()) Safetensors::check_writable(options.save);
  const std::unique_ptr<Backend> backend = options.device == "cuda" ? cuda_backend() : cpu_backend(int(options.threads));
  const Dataset set = load_idx(options.data.empty() ? find_data() : options.data);
  const int64_t epochs = options.epochs > 0 ? options.epochs : set.train.count() < 10000 ? 60 : 10;
  std::printf("%s: %lld training and %lld test images; device %s\n", set.folder.c_str(), static_cast<long long>(set.train.count()),
              static_cast<long long>(set.test.count()), options.device.c_str());
  Network network(*backend, {set.features, 300, 100, set.classes}, options.sparsity, kBatch, uint64_t(options.seed));
  report_bytes(network);

  std::vector<float> x(size_t(kBatch * set.features));
  std::vector<uint8_t> labels(static_cast<size_t>(kBatch));
  const int64_t steps = (set.train.count() + kBatch - 1) / kBatch;
  double accuracy = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    const std::vector<int64_t> order = shuffled(set.train.count(), snack::mix64(uint64_t(options.seed * 10007 + epoch)));
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t first = step * kBatch, batch = std::min(kBatch, set.train.count() - first);
      for (int64_t b = 0; b < batch; ++b) {
        const int64_t from = order[size_t(first + b)];
        std::copy_n(set.train.pixels.data() + from * set.features, set.features, x.data() + b * set.features);
        labels[size_t(b)] = set.train.labels[size_t(from)];
      }
      const double progress = double(epoch * steps + step) / double(epochs * steps);
      network.train(x.data(), labels.data(), batch, kRate * float(0.5 + 0.5 * std::cos(M_PI * progress)), kDecay);
    }
    const Score trained = network.take_score(), tested = test(network, set, kBatch);
    accuracy = double(tested.correct) / double(set.test.count());
    // The last quarter trains what was found.
    const int64_t moved = 4 * (epoch + 1) <= 3 * epochs ? network.evolve(kMoved, uint64_t(options.seed * 10007 + epoch)) : 0;
    std::printf("epoch %lld/%lld  loss %.4f  test accuracy %.2f %%  %lld connections moved  %.1f s\n", static_cast<long long>(epoch + 1),
                static_cast<long long>(epochs), trained.loss / double(set.train.count()), 100 * accuracy, static_cast<long long>(moved), seconds());
    std::fflush(stdout);
    SNACK_CHECK(std::isfinite(trained.loss), "the loss is not a number: training diverged; try another seed or sparsity.");
  }
  if (options.save.empty()) return;
  char text[32];
  std::snprintf(text, sizeof text, "%.6f", accuracy);
  network.save(options.save, {{"accuracy", text}, {"data", set.folder}, {"epochs", std::to_string(epochs)}, {"seed", std::to_string(options.seed)}});
  std::printf("saved %s\n", options.save.c_str());
}

}  // namespace
}  // namespace example

int main(int count, char** arguments) {
  try {
    if (count == 2 && std::string(arguments[1]) == "--help") return std::fputs(example::kHelp, stdout) < 0;
    example::run(example::parse(count, arguments));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_mnist: %s\n", error.what());
    return 2;
  }
}
