// The activations of gated feed-forwards (Shazeer 2020, arXiv:2002.05202).
#pragma once
#include "vec.h"

namespace OCTAVO_NS {
namespace {

struct Silu {
  OCTAVO_INLINE vf operator()(vf x) const { return x / (1.0f + exp(-x)); }
};
struct Gelu {  // x * Phi(x), by the complementary error function: no cancellation in the left tail
  OCTAVO_INLINE vf operator()(vf x) const {
    const vf a = (vf)((vu)x & 0x7fffffffu);
    const vf tail = half_erfc(a * 0.70710678f);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};
struct GeluTanh {  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u): no cancellation either
  OCTAVO_INLINE vf operator()(vf x) const {
    const vf u2 = x * 1.59576912f * fma(x * x, splat(0.044715f), splat(1.0f));
    return x / (1.0f + exp(-u2));
  }
};

OCTAVO_INLINE vf activate(int kind, vf x) {
  return kind == OCTAVO_SILU ? Silu{}(x) : kind == OCTAVO_GELU ? Gelu{}(x) : GeluTanh{}(x);
}

}  // namespace
}  // namespace OCTAVO_NS
