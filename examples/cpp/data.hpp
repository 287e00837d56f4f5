// Labelled images from idx files, the format of MNIST.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace example {

struct Images {
  std::vector<float> pixels;    // (count, features)
  std::vector<uint8_t> labels;  // (count)
  int64_t count() const { return int64_t(labels.size()); }
};

struct Dataset {
  std::string folder;
  Images train, test;
  int64_t features = 0, classes = 0;
};

/// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, each plain or with .gz, and standardises the pixels as Python's
/// snack.data does: every pixel centred on its mean, all divided by one deviation, both of the training images. Throws
/// snack::Error on files that are missing, damaged or do not belong together.
Dataset load_idx(const std::string& folder);

/// Whether the folder holds such a set.
bool has_idx(const std::string& folder);

}  // namespace example
