#include "data.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>

#include <zlib.h>

#include "snack/core/error.hpp"

namespace example {
namespace {

const char* const kFiles[] = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};

// The path of a file or of its compressed form; empty when there is neither.
std::string find(const std::string& folder, const std::string& file) {
  for (const char* suffix : {"", ".gz"}) {
    const std::string path = folder + "/" + file + suffix;
    if (std::filesystem::is_regular_file(path)) return path;
  }
  return "";
}

// A file's contents; zlib reads plain and compressed ones alike.
std::vector<uint8_t> read_all(const std::string& path) {
  const gzFile file = gzopen(path.c_str(), "rb");
  SNACK_CHECK(file != nullptr, path, " cannot be read; check its permissions.");
  std::vector<uint8_t> bytes;
  int count = 0;
  do {
    constexpr size_t kChunk = 1 << 20;
    const size_t before = bytes.size();
    bytes.resize(before + kChunk);
    count = gzread(file, bytes.data() + before, kChunk);
    bytes.resize(before + size_t(std::max(0, count)));
  } while (count > 0);
  const bool is_whole = count == 0 && gzclose_r(file) == Z_OK;
  if (count < 0) gzclose_r(file);
  SNACK_CHECK(is_whole, path, " is damaged or cut short; copy it again.");
  return bytes;
}

struct Idx {
  std::vector<int64_t> extents;
  std::vector<uint8_t> data;  // after the header
};

Idx read_idx(const std::string& folder, const std::string& file, int dimensions) {
  const std::string path = find(folder, file);
  SNACK_CHECK(!path.empty(), folder, " has neither ", file, " nor ", file, ".gz; give the folder of the four idx files with --data.");
  const std::vector<uint8_t> bytes = read_all(path);
  const size_t header = 4 + 4 * size_t(dimensions);
  SNACK_CHECK(bytes.size() >= header && bytes[0] == 0 && bytes[1] == 0 && bytes[2] == 8 && bytes[3] == dimensions, path,
              " is not an idx file of bytes with ", dimensions, " dimensions.");
  Idx idx;
  int64_t expected = 1;
  for (int d = 0; d < dimensions; ++d) {
    const uint8_t* at = bytes.data() + 4 + 4 * d;
    idx.extents.push_back(int64_t(at[0]) << 24 | at[1] << 16 | at[2] << 8 | at[3]);
    SNACK_CHECK(idx.extents.back() > 0 && idx.extents.back() <= int64_t(bytes.size()), path, " has an impossible extent of ", idx.extents.back(), ".");
    expected *= idx.extents.back();
    SNACK_CHECK(expected <= int64_t(bytes.size()), path, " is cut short; copy it again.");
  }
  SNACK_CHECK(int64_t(bytes.size() - header) == expected, path, " has ", bytes.size() - header, " bytes of data, its header says ",
              expected, "; copy it again.");
  idx.data.assign(bytes.begin() + int64_t(header), bytes.end());
  return idx;
}

Images read_images(const std::string& folder, const char* images_file, const char* labels_file, int64_t& features) {
  const Idx images = read_idx(folder, images_file, 3), labels = read_idx(folder, labels_file, 1);
  SNACK_CHECK(images.extents[0] == labels.extents[0], folder, ": ", images_file, " has ", images.extents[0], " images and ",
              labels_file, " has ", labels.extents[0], " labels; they must be the same number.");
  const int64_t pixels = images.extents[1] * images.extents[2];
  SNACK_CHECK(features == 0 || pixels == features, folder, ": test images have ", pixels, " pixels, training images ", features, ".");
  features = pixels;
  return {{images.data.begin(), images.data.end()}, labels.data};
}

void standardise(Dataset& set) {
  std::vector<double> mean(size_t(set.features), 0.0);
  const auto features = mean.size();
  const double count = double(set.train.count());
  for (size_t i = 0; i < set.train.pixels.size(); ++i) mean[i % features] += set.train.pixels[i];
  for (double& m : mean) m /= count;
  for (Images* part : {&set.train, &set.test})
    for (size_t i = 0; i < part->pixels.size(); ++i) part->pixels[i] -= float(mean[i % features]);
  double squares = 0;
  for (const float pixel : set.train.pixels) squares += double(pixel) * pixel;
  const float deviation = float(std::sqrt(squares / (count * double(features))));
  SNACK_CHECK(deviation > 0, set.folder, ": all training images are the same.");
  for (Images* part : {&set.train, &set.test})
    for (float& pixel : part->pixels) pixel /= deviation;
}

}  // namespace

bool has_idx(const std::string& folder) {
  return std::all_of(std::begin(kFiles), std::end(kFiles), [&](const char* file) { return !find(folder, file).empty(); });
}

Dataset load_idx(const std::string& folder) {
  Dataset set{.folder = folder};
  set.train = read_images(folder, kFiles[0], kFiles[1], set.features);
  set.test = read_images(folder, kFiles[2], kFiles[3], set.features);
  for (const Images* part : {&set.train, &set.test})
    set.classes = std::max<int64_t>(set.classes, 1 + *std::max_element(part->labels.begin(), part->labels.end()));
  standardise(set);
  return set;
}

}  // namespace example
