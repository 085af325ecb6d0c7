// RMS normalisation of one row (Zhang & Sennrich 2019, arXiv:1910.07467).
// Sums run in float32 in one order, whatever the batch; the result is rounded once.
#pragma once
#include "vec.h"

namespace OCTAVO_NS {
namespace {

// Sum of squares of n elements in four running vectors; `each` gives vector i, `part` the tail.
template <class X>
float sum_squares(const X *x, int64_t n) {
  vf a[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * W);
      a[j] = fma(v, v, a[j]);
    }
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j)  // an index that the compiler cannot see would put the sums in memory
    if (i + W <= n) {
      const vf v = load(x + i);
      a[j] = fma(v, v, a[j]);
      i += W;
    }
  if (i < n) {
    const vf v = load_part(x + i, int(n - i));
    a[3] = fma(v, v, a[3]);
  }
  return hsum((a[0] + a[1]) + (a[2] + a[3]));
}

template <class X, class Wt>
void norm_row(X *out, const X *x, const Wt *weight, int64_t n, float eps, float offset) {
  const float mean = sum_squares(x, n) / float(n);
  const vf scale = splat(1.0f / __builtin_sqrtf(mean + eps)), add = splat(offset);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * scale * (load(weight + i) + add));
  if (i < n) {
    const int m = int(n - i);
    store_part(out + i, load_part(x + i, m) * scale * (load_part(weight + i, m) + add), m);
  }
}

}  // namespace
}  // namespace OCTAVO_NS
