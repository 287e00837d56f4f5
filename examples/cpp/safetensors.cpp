#include "safetensors.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "snack/core/error.hpp"

namespace example {
namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\') json += {'\\', c};
    else if (static_cast<unsigned char>(c) < 0x20) json.append(escaped, size_t(std::snprintf(escaped, sizeof escaped, "\\u%04x", unsigned(c))));
    else json += c;
  }
  json += '"';
  return json;
}

}  // namespace

void Safetensors::add(const std::string& name, const char* dtype, const std::vector<int64_t>& shape, const void* data, size_t bytes) {
  const char* begin = static_cast<const char*>(data);
  tensors_.push_back({name, dtype, shape, std::vector<char>(begin, begin + bytes)});
}

void Safetensors::check_writable(const std::string& path) {
  const std::string part = path + ".part";
  SNACK_CHECK(std::ofstream(part).good() && !std::filesystem::is_directory(path), path, " cannot be written; check the folder and its permissions.");
  std::filesystem::remove(part);
}

void Safetensors::write(const std::string& path, const std::vector<std::pair<std::string, std::string>>& metadata) const {
  // Wider elements first, so that every tensor is aligned to its own size.
  std::vector<const Tensor*> order;
  for (const Tensor& tensor : tensors_) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const Tensor* a, const Tensor* b) { return (a->dtype == "I64") > (b->dtype == "I64"); });

  std::ostringstream text;
  text << R"({"__metadata__":{"format":"pt","snack":"1")";
  for (const auto& [key, value] : metadata) text << ',' << quoted(key) << ':' << quoted(value);
  text << '}';
  size_t offset = 0;
  for (const Tensor* tensor : order) {
    text << ',' << quoted(tensor->name) << R"(:{"dtype":")" << tensor->dtype << R"(","shape":[)";
    for (size_t d = 0; d < tensor->shape.size(); ++d) text << (d > 0 ? "," : "") << tensor->shape[d];
    text << R"(],"data_offsets":[)" << offset << ',' << offset + tensor->bytes.size() << "]}";
    offset += tensor->bytes.size();
  }
  text << '}';
  std::string header = text.str();
  header.resize((header.size() + 7) / 8 * 8, ' ');

  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::binary);
    for (int byte = 0; byte < 8; ++byte) file.put(char(uint64_t(header.size()) >> 8 * byte & 255));
    file << header;
    for (const Tensor* tensor : order) file.write(tensor->bytes.data(), std::streamsize(tensor->bytes.size()));
    file.close();
    SNACK_CHECK(!file.fail(), path, " cannot be written; check the space on the disk.");
  }
  std::error_code error;
  std::filesystem::rename(part, path, error);
  SNACK_CHECK(!error, path, " cannot be written: ", error.message(), ".");
}

}  // namespace example
