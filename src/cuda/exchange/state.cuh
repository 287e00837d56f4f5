// What the kernels of an exchange tell each other, in device memory; begins as zeros.
#pragma once

#include "../choose/draw.cuh"
#include "snack/kernels/exchange.hpp"

namespace snack::cuda {

struct ExchangeState {
  Drawing drawing;             // wanted: connections dropped, and to grow
  int64_t error, number;       // an ExchangeError; from then on nothing is written where it belongs
  unsigned long long listed;   // grown positions in a list
  unsigned next_tile;          // of the tiles that blocks take
};

}  // namespace snack::cuda
