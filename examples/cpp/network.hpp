// A multilayer perceptron whose linear layers are sparse, and SET, the training method that moves their connections.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backend.hpp"

namespace example {

struct SparseLayer {
  snack::Geometry geometry;  // W is (out, in)
  Buffer<uint8_t> index;     // the packed pattern ...
  Buffer<int64_t> tile_ptr;
  Buffer<float> values, gradient, momentum;  // ... and one number a connection, in slot order
  Buffer<float> bias, bias_gradient, bias_momentum;

  snack::PatternView pattern() const { return {geometry, index.data(), tile_ptr.data()}; }
  int64_t weight_bytes() const { return values.bytes() + index.bytes() + tile_ptr.bytes(); }
};

class Network {
 public:
  /// widths: features of the input, the hidden layers and the output. Connections are shared out as in SET (Mocanu et al.
  /// 2018): density proportional to (out + in) / (out * in), together (1 - sparsity) of all positions.
  Network(Backend& backend, const std::vector<int64_t>& widths, double sparsity, int64_t largest_batch, uint64_t seed);

  /// Forward and backward pass and the update of all weights; x (batch, in) and labels on the host.
  void train(const float* x, const uint8_t* labels, int64_t batch, float rate, float decay);
  /// Forward pass alone.
  void test(const float* x, const uint8_t* labels, int64_t batch);
  /// Loss and hits since the last call.
  Score take_score();

  /// SET: in every layer the `fraction` of the connections that are smallest gives way to random new ones, which start at 0.
  /// Every other connection keeps its weight and its momentum. Returns how many moved.
  int64_t evolve(double fraction, uint64_t key);

  const std::vector<SparseLayer>& layers() const { return layers_; }
  /// A safetensors file that Python's snack.load reads into a torch.nn.Sequential of linear layers and ReLUs.
  void save(const std::string& path, const std::vector<std::pair<std::string, std::string>>& metadata) const;

 private:
  void forward(const float* x, const uint8_t* labels, int64_t batch);

  Backend& backend_;
  std::vector<SparseLayer> layers_;
  std::vector<Buffer<float>> activations_, gradients_;  // activations_[l] is the input of layer l; gradients_[l] belongs to it
  Buffer<uint8_t> labels_;
  Buffer<Score> score_;
};

}  // namespace example
