#include "network.hpp"

#include <algorithm>
#include <cmath>

#include "safetensors.hpp"

namespace example {
namespace {

uint64_t stream_key(uint64_t seed, uint64_t update, uint64_t layer) { return snack::mix64(snack::mix64(seed + 1) + (update << 16) + layer); }

// Connections of every layer. A layer that would get more than it has positions is full, and the others share the rest.
std::vector<int64_t> share_connections(const std::vector<int64_t>& widths, double sparsity) {
  const size_t layers = widths.size() - 1;
  std::vector<int64_t> positions(layers), counts(layers);
  std::vector<bool> is_full(layers, false);
  double budget = 0;
  for (size_t l = 0; l < layers; ++l) budget += (1 - sparsity) * double(positions[l] = widths[l] * widths[l + 1]);
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    double weights = 0, left = budget;
    for (size_t l = 0; l < layers; ++l) {
      if (is_full[l]) left -= double(positions[l]);
      else weights += double(widths[l] + widths[l + 1]);
    }
    for (size_t l = 0; l < layers; ++l) {
      if (is_full[l]) continue;
      counts[l] = std::min<int64_t>(positions[l], std::llround(left * double(widths[l] + widths[l + 1]) / weights));
      is_full[l] = counts[l] == positions[l];
      has_changed |= is_full[l];
    }
  }
  return counts;
}

}  // namespace

Network::Network(Backend& backend, const std::vector<int64_t>& widths, double sparsity, int64_t largest_batch, uint64_t seed)
    : backend_(backend), labels_(backend, largest_batch), score_(backend, 1) {
  const std::vector<int64_t> connections = share_connections(widths, sparsity);
  for (size_t l = 0; l + 1 < widths.size(); ++l) {
    const int64_t in = widths[l], out = widths[l + 1], nnz = connections[l];
    const snack::HostPattern pattern = snack::cpu::sample(out, in, nnz, stream_key(seed, 0, 2 * l), snack::serial());
    // He et al. 2015, with the connections a row has on average as fan-in.
    const double bound = std::sqrt(6.0 * double(out) / double(std::max<int64_t>(1, nnz)));
    std::vector<float> values(static_cast<size_t>(nnz));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = float(bound * (double(snack::random_bits(stream_key(seed, 0, 2 * l + 1), i)) * 0x1p-63 - 1));
    const auto zeros = [&](int64_t count) { return Buffer<float>(backend, count); };
    layers_.push_back({pattern.geometry, {backend, pattern.index}, {backend, pattern.tile_ptr}, {backend, values}, zeros(nnz), zeros(nnz),
                       zeros(out), zeros(out), zeros(out)});
  }
  for (const int64_t width : widths) {
    activations_.emplace_back(backend, largest_batch * width);
    gradients_.emplace_back(backend, largest_batch * width);
  }
}

void Network::forward(const float* x, const uint8_t* labels, int64_t batch) {
  backend_.upload(activations_[0].data(), x, batch * layers_[0].geometry.in * int64_t(sizeof(float)));
  backend_.upload(labels_.data(), labels, batch);
  for (size_t l = 0; l < layers_.size(); ++l) {
    const SparseLayer& layer = layers_[l];
    float* y = activations_[l + 1].data();
    const int64_t in = layer.geometry.in, out = layer.geometry.out;
    backend_.spmm({.pattern = layer.pattern(), .values = layer.values.data(),
                   .x = snack::matrix(activations_[l].data(), batch, in), .bias = layer.bias.data(), .y = y});
    if (l + 1 < layers_.size()) backend_.relu(y, batch * out);
    else backend_.softmax(y, labels_.data(), batch, out, score_.data());
  }
}

void Network::test(const float* x, const uint8_t* labels, int64_t batch) { forward(x, labels, batch); }

void Network::train(const float* x, const uint8_t* labels, int64_t batch, float rate, float decay) {
  forward(x, labels, batch);
  const float* dy = activations_.back().data();  // softmax left the gradient there
  for (size_t l = layers_.size(); l-- > 0;) {
    const SparseLayer& layer = layers_[l];
    const int64_t in = layer.geometry.in, out = layer.geometry.out;
    const snack::MatrixView dy_view = snack::matrix(dy, batch, out), x_view = snack::matrix(activations_[l].data(), batch, in);
    backend_.sum_columns(dy, batch, out, layer.bias_gradient.data());
    if (l > 0) {
      dy = gradients_[l].data();
      backend_.spmm_t({.pattern = layer.pattern(), .values = layer.values.data(), .dy = dy_view, .dx = gradients_[l].data()});
      backend_.relu_backward(activations_[l].data(), gradients_[l].data(), batch * in);
    }
    backend_.sddmm({.pattern = layer.pattern(), .dy = dy_view, .x = x_view, .dvalues = layer.gradient.data()});
  }
  for (const SparseLayer& layer : layers_) {
    backend_.step(layer.values.data(), layer.gradient.data(), layer.momentum.data(), layer.values.count(), rate, decay);
    backend_.step(layer.bias.data(), layer.bias_gradient.data(), layer.bias_momentum.data(), layer.bias.count(), rate, 0);
  }
}

Score Network::take_score() {
  const Score score = score_.to_host(backend_)[0];
  const Score zero;
  backend_.upload(score_.data(), &zero, sizeof zero);
  return score;
}

int64_t Network::evolve(double fraction, uint64_t key) {
  int64_t moved = 0;
  for (size_t l = 0; l < layers_.size(); ++l) {
    SparseLayer& layer = layers_[l];
    const snack::Geometry& g = layer.geometry;
    const int64_t k = std::min(int64_t(fraction * double(g.nnz)), g.out * g.in - g.nnz);  // a full layer has nowhere to go
    if (k <= 0) continue;
    // The rules that choose run on the host, the edit where the network lives.
    const std::vector<float> values = layer.values.to_host(backend_);
    const snack::HostPattern pattern{g, layer.index.to_host(backend_), layer.tile_ptr.to_host(backend_)};
    const std::vector<int64_t> drop = snack::cpu::select_smallest({.values = values.data(), .nnz = g.nnz, .k = k});
    const snack::Positions grow = snack::cpu::grow_uniform({pattern.view(), drop.data(), k}, k, stream_key(key, 1, l));

    Buffer<uint8_t> index(backend_, layer.index.count());
    Buffer<int64_t> tile_ptr(backend_, layer.tile_ptr.count()), source(backend_, g.nnz);
    backend_.rewire({layer.pattern(), drop.data(), k, grow.rows.data(), grow.cols.data(), k}, index.data(), tile_ptr.data(), source.data());
    for (Buffer<float>* carried : {&layer.values, &layer.momentum}) {
      Buffer<float> fresh(backend_, g.nnz);
      backend_.move_slots(source.data(), carried->data(), fresh.data(), g.nnz);
      *carried = std::move(fresh);
    }
    layer.index = std::move(index);
    layer.tile_ptr = std::move(tile_ptr);
    moved += k;
  }
  return moved;
}

void Network::save(const std::string& path, const std::vector<std::pair<std::string, std::string>>& metadata) const {
  Safetensors file;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const SparseLayer& layer = layers_[l];
    const snack::Geometry& g = layer.geometry;
    const snack::HostPattern pattern{g, layer.index.to_host(backend_), layer.tile_ptr.to_host(backend_)};
    std::vector<int32_t> rows(static_cast<size_t>(g.nnz)), cols(rows);
    snack::unpack(pattern.view(), rows.data(), cols.data(), snack::serial());
    const std::string name = std::to_string(2 * l) + ".";  // ReLUs have the odd numbers
    file.add(name + "values", layer.values.to_host(backend_));
    file.add(name + "rows", rows);
    file.add(name + "cols", cols);
    file.add(name + "shape", std::vector<int64_t>{g.out, g.in});
    file.add_scalar(name + "slot_order", snack::kSlotOrderVersion);
    file.add(name + "bias", layer.bias.to_host(backend_));
  }
  file.write(path, metadata);
}

}  // namespace example
