// Gated activations: out = act(gate) * up, for rows [gate | up].
#include "activation.h"

namespace OCTAVO_NS {
namespace {

template <class X, class Act>
void act_row(X *out, const X *gate, const X *up, int64_t n, Act act) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, act(load(gate + i)) * load(up + i));
  if (i < n) {
    const int m = int(n - i);
    store_part(out + i, act(load_part(gate + i, m)) * load_part(up + i, m), m);
  }
}

template <class X, class Act>
int act_rows(X *out, X *x, int64_t rows, int64_t n, int64_t out_stride, int64_t x_stride,
             Act act) {
  // Pieces are (row, column block), so that one long row also uses every thread.
  const int64_t width = 4096, blocks = (n + width - 1) / width;
  const int64_t grain = n < width ? 1 + width / (n + 1) : 1;
  parallel(rows * blocks, grain, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / blocks, from = i % blocks * width;
      const X *gate = x + row * x_stride + from;
      act_row(out + row * out_stride + from, gate, gate + n, n - from < width ? n - from : width,
              act);
    }
  });
  return OCTAVO_OK;
}

}  // namespace

int act_and_mul(void *out, const void *gate_up, int64_t rows, int64_t n, int64_t out_row_stride,
                int64_t x_row_stride, int kind, int dtype) {
  return with_dtype(dtype, [&](auto *type) {
    using X = decltype(type);
    X o = static_cast<X>(out), x = static_cast<X>(const_cast<void *>(gate_up));
    switch (kind) {
      case OCTAVO_SILU:
        return act_rows(o, x, rows, n, out_row_stride, x_row_stride, Silu{});
      case OCTAVO_GELU:
        return act_rows(o, x, rows, n, out_row_stride, x_row_stride, Gelu{});
      case OCTAVO_GELU_TANH:
        return act_rows(o, x, rows, n, out_row_stride, x_row_stride, GeluTanh{});
      default:
        return int(OCTAVO_BAD_ARGUMENT);
    }
  });
}

}  // namespace OCTAVO_NS
