// Rotary position embedding of one token's heads, in place (Su et al. 2021, arXiv:2104.09864),
// half-split (NeoX) or interleaved pairs, over the first rotary_dim elements of every head.
#pragma once
#include "vec.h"

namespace OCTAVO_NS {
namespace {

template <class X>
void rotate_halves(X *x, const float *cos, const float *sin, int half) {
  int i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, fma(a, c, -(b * s)));
    store(x + half + i, fma(b, c, a * s));
  }
  if (i < half) {
    const int n = half - i;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    const vf c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(x + i, fma(a, c, -(b * s)), n);
    store_part(x + half + i, fma(b, c, a * s), n);
  }
}

template <class X>
void rotate_pairs(X *x, const float *cos, const float *sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    from_float(x + 2 * i, a * cos[i] - b * sin[i]);
    from_float(x + 2 * i + 1, b * cos[i] + a * sin[i]);
  }
}

template <class X>
void rotate_heads(X *x, int heads, int head_size, const float *row, int half, int style) {
  for (int h = 0; h < heads; ++h) {
    X *head = x + int64_t(h) * head_size;
    if (style == OCTAVO_NEOX)
      rotate_halves(head, row, row + half, half);
    else
      rotate_pairs(head, row, row + half, half);
  }
}

}  // namespace
}  // namespace OCTAVO_NS
