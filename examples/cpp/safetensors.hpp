// Writes safetensors files: the length of the header, the header as JSON, the tensors.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace example {

class Safetensors {
 public:
  void add(const std::string& name, const std::vector<float>& data) { add(name, "F32", {int64_t(data.size())}, data.data(), data.size() * 4); }
  void add(const std::string& name, const std::vector<int32_t>& data) { add(name, "I32", {int64_t(data.size())}, data.data(), data.size() * 4); }
  void add(const std::string& name, const std::vector<int64_t>& data) { add(name, "I64", {int64_t(data.size())}, data.data(), data.size() * 8); }
  void add_scalar(const std::string& name, int64_t value) { add(name, "I64", {}, &value, 8); }

  /// Throws snack::Error when a file could not be written there: to be asked before hours of training.
  static void check_writable(const std::string& path);
  /// Replaces the file only when the new one is complete. Throws snack::Error when it cannot be written.
  void write(const std::string& path, const std::vector<std::pair<std::string, std::string>>& metadata) const;

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
  };
  void add(const std::string& name, const char* dtype, const std::vector<int64_t>& shape, const void* data, size_t bytes);

  std::vector<Tensor> tensors_;
};

}  // namespace example
