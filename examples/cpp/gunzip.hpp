// Decompression of gzip files (RFC 1951, RFC 1952), so that the example needs no library but snack.
#pragma once

#include <cstdint>
#include <vector>

namespace example {

/// The contents of a gzip file in memory. Throws snack::Error when it is damaged or cut short.
std::vector<uint8_t> gunzip(const std::vector<uint8_t>& file);

}  // namespace example
