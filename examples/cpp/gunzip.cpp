#include "gunzip.hpp"

#include <array>

#include "snack/core/error.hpp"

namespace example {
namespace {

constexpr int kMaxLength = 15;  // bits of the longest code word

class Bits {
 public:
  Bits(const uint8_t* begin, const uint8_t* end) : next_(begin), end_(end) {}

  /// The next 15 bits, zeros beyond the end.
  uint32_t peek() {
    while (count_ <= 24) {
      word_ |= uint32_t(next_ < end_ ? *next_ : 0) << count_;
      past_end_ += next_ >= end_;
      next_ += next_ < end_;
      count_ += 8;
    }
    return word_ & ((1u << kMaxLength) - 1);
  }

  void skip(int bits) {
    peek();
    word_ >>= bits;
    count_ -= bits;
    SNACK_CHECK(8 * past_end_ <= count_, "gzip: the file is cut short; copy it again.");
  }

  uint32_t take(int bits) {
    const uint32_t value = peek() & ((1u << bits) - 1);
    skip(bits);
    return value;
  }

  void align() { skip(count_ % 8); }

 private:
  const uint8_t *next_, *end_;
  uint32_t word_ = 0;
  int count_ = 0, past_end_ = 0;
};

/// A canonical Huffman code as a table over the next 15 bits.
class Huffman {
 public:
  Huffman(const uint8_t* lengths, int symbols) : table_(size_t(1) << kMaxLength, 0) {
    int code = 0;
    for (int length = 1; length <= kMaxLength; ++length, code <<= 1) {
      for (int symbol = 0; symbol < symbols; ++symbol) {
        if (lengths[symbol] != length) continue;
        SNACK_CHECK(code < (1 << length), "gzip: the file is damaged; copy it again.");
        uint32_t reversed = 0;  // code words stand in the stream with their first bit lowest
        for (int bit = 0; bit < length; ++bit) reversed |= uint32_t(code >> bit & 1) << (length - 1 - bit);
        for (uint32_t at = reversed; at < table_.size(); at += 1u << length) table_[at] = uint16_t(symbol << 4 | length);
        ++code;
      }
    }
  }

  int decode(Bits& bits) const {
    const uint16_t entry = table_[bits.peek()];
    SNACK_CHECK(entry != 0, "gzip: the file is damaged; copy it again.");
    bits.skip(entry & 15);
    return entry >> 4;
  }

 private:
  std::vector<uint16_t> table_;  // symbol << 4 | length; 0: no code word begins like this
};

constexpr uint16_t kLengthBase[] = {3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr uint8_t kLengthBits[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr uint16_t kDistanceBase[] = {1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr uint8_t kDistanceBits[] = {0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

void read_stored(Bits& bits, std::vector<uint8_t>& out) {
  bits.align();
  const uint32_t length = bits.take(8) | bits.take(8) << 8;
  const uint32_t complement = bits.take(8) | bits.take(8) << 8;
  SNACK_CHECK(length == (complement ^ 0xffffu), "gzip: the file is damaged; copy it again.");
  for (uint32_t i = 0; i < length; ++i) out.push_back(uint8_t(bits.take(8)));
}

void read_codes(Bits& bits, const Huffman& literals, const Huffman& distances, std::vector<uint8_t>& out) {
  for (int symbol; (symbol = literals.decode(bits)) != 256;) {
    if (symbol < 256) {
      out.push_back(uint8_t(symbol));
      continue;
    }
    SNACK_CHECK(symbol < 257 + 29, "gzip: the file is damaged; copy it again.");
    const uint32_t length = kLengthBase[symbol - 257] + bits.take(kLengthBits[symbol - 257]);
    const int d = distances.decode(bits);
    SNACK_CHECK(d < 30, "gzip: the file is damaged; copy it again.");
    const size_t distance = kDistanceBase[d] + bits.take(kDistanceBits[d]);
    SNACK_CHECK(distance <= out.size(), "gzip: the file is damaged; copy it again.");
    for (uint32_t i = 0; i < length; ++i) out.push_back(out[out.size() - distance]);
  }
}

void read_fixed(Bits& bits, std::vector<uint8_t>& out) {
  uint8_t lengths[288 + 30];
  for (int s = 0; s < 288; ++s) lengths[s] = s < 144 ? 8 : s < 256 ? 9 : s < 280 ? 7 : 8;
  for (int s = 0; s < 30; ++s) lengths[288 + s] = 5;
  read_codes(bits, Huffman(lengths, 288), Huffman(lengths + 288, 30), out);
}

void read_dynamic(Bits& bits, std::vector<uint8_t>& out) {
  constexpr uint8_t kOrder[] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  const int literals = int(bits.take(5)) + 257, distances = int(bits.take(5)) + 1, codes = int(bits.take(4)) + 4;
  uint8_t code_lengths[19] = {}, lengths[288 + 32] = {};
  for (int i = 0; i < codes; ++i) code_lengths[kOrder[i]] = uint8_t(bits.take(3));
  const Huffman code(code_lengths, 19);
  for (int i = 0; i < literals + distances;) {
    const int symbol = code.decode(bits);
    if (symbol < 16) {
      lengths[i++] = uint8_t(symbol);
      continue;
    }
    SNACK_CHECK(symbol != 16 || i > 0, "gzip: the file is damaged; copy it again.");
    const uint8_t repeated = symbol == 16 ? lengths[i - 1] : uint8_t(0);
    int times = symbol == 16 ? 3 + int(bits.take(2)) : symbol == 17 ? 3 + int(bits.take(3)) : 11 + int(bits.take(7));
    SNACK_CHECK(i + times <= literals + distances, "gzip: the file is damaged; copy it again.");
    while (times-- > 0) lengths[i++] = repeated;
  }
  read_codes(bits, Huffman(lengths, literals), Huffman(lengths + literals, distances), out);
}

uint32_t crc32(const std::vector<uint8_t>& data) {
  std::array<uint32_t, 256> table;
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320u : 0);
  }
  uint32_t crc = ~0u;
  for (const uint8_t byte : data) crc = crc >> 8 ^ table[(crc ^ byte) & 255];
  return ~crc;
}

// Offset of the compressed data: ten bytes, and what the flags say.
size_t header_bytes(const std::vector<uint8_t>& file) {
  SNACK_CHECK(file.size() >= 18 && file[0] == 0x1f && file[1] == 0x8b && file[2] == 8, "gzip: this is not a gzip file.");
  const auto is_set = [&](int bit) { return (file[3] >> bit & 1) != 0; };
  size_t at = 10;
  if (is_set(2)) at += 2 + file[10] + 256 * size_t(file[11]);
  for (const int bit : {3, 4})  // name and comment end with a zero
    if (is_set(bit)) {
      while (at < file.size() && file[at] != 0) ++at;
      ++at;
    }
  if (is_set(1)) at += 2;
  SNACK_CHECK(at + 8 <= file.size(), "gzip: the file is cut short; copy it again.");
  return at;
}

}  // namespace

std::vector<uint8_t> gunzip(const std::vector<uint8_t>& file) {
  Bits bits(file.data() + header_bytes(file), file.data() + file.size());
  std::vector<uint8_t> out;
  for (bool is_last = false; !is_last;) {
    is_last = bits.take(1) != 0;
    switch (bits.take(2)) {
      case 0: read_stored(bits, out); break;
      case 1: read_fixed(bits, out); break;
      case 2: read_dynamic(bits, out); break;
      default: snack::fail("gzip: the file is damaged; copy it again.");
    }
  }
  bits.align();
  uint32_t crc = 0, size = 0;
  for (int byte = 0; byte < 4; ++byte) crc |= bits.take(8) << 8 * byte;
  for (int byte = 0; byte < 4; ++byte) size |= bits.take(8) << 8 * byte;
  SNACK_CHECK(size == uint32_t(out.size()) && crc == crc32(out), "gzip: the checksum is wrong; the file is damaged, copy it again.");
  return out;
}

}  // namespace example
