// How one training step changes one connection: the rules of torch.optim's SGD and AdamW, each written once for all backends.
//
// A rule is called with a connection's value, its gradient and its state, changes the state and returns the new value. A: the type
// it calculates in. Beside the rules of torch.optim nothing is rounded in between, so 16-bit results may differ in the last bit.
#pragma once

#include <math.h>  // not <cmath>: on a card the names without std:: are the ones that have code

#include <cstdint>

#ifdef __CUDACC__
#define SNACK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SNACK_HOST_DEVICE inline
#endif

namespace snack {

enum class Rule : int { kSgd, kAdamW };

/// Options of torch.optim.SGD. is_first: the momentum buffer holds nothing yet.
struct SgdNumbers {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false, is_first = false;
};

/// Options of torch.optim.AdamW. step: number of this step, from 1 on.
struct AdamWNumbers {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, step = 1;
  bool maximize = false;
};

/// state: the momentum buffer, where there is momentum.
template <class A, bool kHasMomentum>
struct SgdRule {
  static constexpr int kStates = kHasMomentum ? 1 : 0;
  A lr, momentum, rest, weight_decay;  // rest: 1 - dampening
  bool nesterov, maximize, is_first;

  explicit SgdRule(const SgdNumbers& n)
      : lr(A(n.lr)), momentum(A(n.momentum)), rest(A(1 - n.dampening)), weight_decay(A(n.weight_decay)), nesterov(n.nesterov),
        maximize(n.maximize), is_first(n.is_first) {}

  /// Learning rate and step as they are found in memory; null where the numbers hold.
  SNACK_HOST_DEVICE void read(const float* lr_now, const float*) {
    if (lr_now != nullptr) lr = A(*lr_now);
  }

  SNACK_HOST_DEVICE A operator()(A value, A gradient, A* state) const {
    if (maximize) gradient = -gradient;
    if (weight_decay != 0) gradient += weight_decay * value;
    if constexpr (kHasMomentum) {
      state[0] = is_first ? gradient : momentum * state[0] + rest * gradient;
      gradient = nesterov ? gradient + momentum * state[0] : state[0];
    }
    return value - lr * gradient;
  }
};

/// state: running averages of the gradient and of its square.
template <class A>
struct AdamWRule {
  static constexpr int kStates = 2;
  A decay, rest1, beta2, rest2, floor, size;            // rest: 1 - beta; floor, size: eps and lr, both corrected for the step
  A lr, step, weight_decay, log_beta1, log_beta2, eps;  // what `read` needs
  bool maximize;

  explicit AdamWRule(const AdamWNumbers& n)
      : rest1(A(1 - n.beta1)), beta2(A(n.beta2)), rest2(A(1 - n.beta2)), lr(A(n.lr)), step(A(n.step)), weight_decay(A(n.weight_decay)),
        log_beta1(A(log(n.beta1))), log_beta2(A(log(n.beta2))), eps(A(n.eps)), maximize(n.maximize) {
    correct(n.lr, n.step, n.weight_decay, log(n.beta1), log(n.beta2), n.eps);
  }

  SNACK_HOST_DEVICE void read(const float* lr_now, const float* step_now) {
    if (lr_now == nullptr && step_now == nullptr) return;
    correct(lr_now == nullptr ? lr : A(*lr_now), step_now == nullptr ? step : A(*step_now), weight_decay, log_beta1, log_beta2, eps);
  }

  SNACK_HOST_DEVICE A operator()(A value, A gradient, A* state) const {
    if (maximize) gradient = -gradient;
    state[0] += rest1 * (gradient - state[0]);
    state[1] = beta2 * state[1] + rest2 * gradient * gradient;
    return decay * value - size * (state[0] / (sqrt(state[1]) + floor));
  }

 private:
  // lr / c1 * m / (sqrt(v) / sqrt(c2) + eps) with both parts of the fraction times sqrt(c2), where c = 1 - beta^step, as
  // -expm1(step log beta): in float too it keeps its digits where beta is close to 1.
  template <class B>
  SNACK_HOST_DEVICE void correct(B rate, B number, B decay_by, B log1, B log2, B least) {
    const B root = sqrt(-expm1(number * log2));
    decay = A(1 - rate * decay_by);
    size = A(rate * root / -expm1(number * log1));
    floor = A(least * root);
  }
};

}  // namespace snack
