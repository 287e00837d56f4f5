// Errors of the C++ layer: one type, one sentence (what was given, what was expected, what to do).
#pragma once

#include <sstream>
#include <stdexcept>

namespace snack {

/// What every refused call throws, before it writes anything. Running out of memory is std::bad_alloc instead.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws snack::Error with the parts joined into one sentence.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace snack

/// The parts are only evaluated when the condition does not hold.
#define SNACK_CHECK(condition, ...)             \
  do {                                          \
    if (!(condition)) ::snack::fail(__VA_ARGS__); \
  } while (false)
