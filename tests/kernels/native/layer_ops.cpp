// Norms, rotation, activations and element types.
#include "check.h"

namespace {

const int kFloats[] = {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16};

double norm_factor(const Array &x, size_t at, int64_t n, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[at + i] * x[at + i];
  return 1 / std::sqrt(sum / static_cast<double>(n) + eps);
}

double activated(int kind, double x) {
  if (kind == OCTAVO_SILU) return x / (1 + std::exp(-x));
  if (kind == OCTAVO_GELU) return x * std::erfc(-x / std::sqrt(2.0)) / 2;
  return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

}  // namespace

// Every 16-bit float through a load and a store: silu(64) is 64, so out = 64 * up.
void test_conversions(Report &r) {
  for (int dtype : {OCTAVO_BF16, OCTAVO_F16}) {
    const int64_t n = 1 << 16;
    Array x(2 * n, dtype), out(n, dtype);
    for (int64_t i = 0; i < n; ++i) {
      x.set(i, 64);
      const uint16_t pattern = static_cast<uint16_t>(i);
      std::memcpy(x.at(n + i), &pattern, 2);
    }
    r.that(!octavo_act_and_mul(out.data(), x.data(), 1, n, n, 2 * n, OCTAVO_SILU, dtype), "status");
    for (int64_t i = 0; i < n; ++i)
      r.near(out[i], rounded(64 * x[n + i], dtype), 0, 0, name_of(dtype), i);
    r.saw(out);
  }
  // float32 to 16 bits, by the cache's store: halfway cases, subnormals, overflow.
  Random random(1);
  for (int dtype : {OCTAVO_BF16, OCTAVO_F16}) {
    const int n = 4096;
    Array x(n), cache(n, dtype), other(n, dtype);
    for (int i = 0; i < n; ++i) {
      const double scale = std::ldexp(1, static_cast<int>(random.below(dtype == OCTAVO_F16 ? 44 : 250)) -
                                             (dtype == OCTAVO_F16 ? 26 : 125));
      const double value = round_to(random.normal(), 8 + static_cast<int>(random.below(8)), -200) * scale;
      x.floats()[i] = static_cast<float>(value);
    }
    const int64_t slot = 0;
    const octavo_write_step step = {&slot, 1, n, n, OCTAVO_F32, dtype, 1, n, n, 1, 0, 0};
    r.that(!octavo_write_kv(&step, cache.data(), other.data(), x.data(), x.data()), "status");
    for (int i = 0; i < n; ++i) r.near(cache[i], rounded(x[i], dtype), 0, 0, "stored", i);
    r.that(cache == other, "keys and values are stored alike");
  }
}

void test_norms(Report &r) {
  Random random(2);
  for (int dtype : kFloats)
    for (int weight_dtype : {int(OCTAVO_F32), dtype})
      for (int64_t n : {1, 7, 64, 100, 576}) {
        const int64_t rows = 5, heads = 2, stride = heads * n + 3;
        const Array x = Array::normal(random, rows * stride, dtype, 2);
        const Array weight = Array::normal(random, n, weight_dtype);
        Array out(rows * stride, dtype);
        const octavo_norm p = {rows, heads, n, stride, n, stride, n, dtype, weight_dtype, 1e-5f, 1.0f};
        r.that(!octavo_rms_norm(&p, out.data(), x.data(), weight.data()), "status");
        for (int64_t i = 0; i < rows * heads; ++i) {
          const int64_t at = i / heads * stride + i % heads * n;
          const double f = norm_factor(x, at, n, 1e-5f);
          for (int64_t j = 0; j < n; ++j)
            r.near(out[at + j], x[at + j] * f * (weight[j] + 1), slack(dtype), 1e-6, "norm", at + j);
        }
        r.saw(out);

        // With the residual: it is rounded to its type before it is normed.
        Array residual = Array::normal(random, rows * n, dtype), sum(rows * n, dtype);
        for (int64_t i = 0; i < rows * n; ++i) sum.set(i, residual[i] + x[i / n * stride + i % n]);
        const octavo_norm q = {rows, 1, n, n, n, stride, n, dtype, weight_dtype, 1e-5f, 0.0f};
        r.that(!octavo_add_rms_norm(&q, out.data(), residual.data(), n, x.data(), weight.data()), "status");
        for (int64_t i = 0; i < rows * n; ++i) {
          r.near(residual[i], sum[i], 0, 0, "residual", i);
          const double f = norm_factor(sum, i / n * n, n, 1e-5f);
          r.near(out[i], sum[i] * f * weight[i % n], slack(dtype), 1e-6, "norm", i);
        }
        r.saw(residual);
      }
}

void test_rotary(Report &r) {
  Random random(3);
  const int heads[] = {3, 2}, positions_n = 40;
  for (int dtype : kFloats)
    for (int style : {OCTAVO_NEOX, OCTAVO_INTERLEAVED})
      for (int rotary_dim : {6, 32, 64}) {
        const int64_t tokens = 9, d = 64, half = rotary_dim / 2;
        // Any numbers do for cosines and sines. (qemu's POWER8 ends at an instruction of glibc's sin.)
        const Array table = Array::normal(random, positions_n * rotary_dim);
        std::vector<int64_t> wide(tokens);
        std::vector<int32_t> narrow(tokens);
        for (int64_t t = 0; t < tokens; ++t)
          narrow[t] = static_cast<int32_t>(wide[t] = t == 4 ? -1 : random.below(positions_n));
        const int64_t strides[] = {heads[0] * d + 5, heads[1] * d};
        Array x[2] = {Array::normal(random, tokens * strides[0], dtype), Array::normal(random, tokens * strides[1], dtype)};
        Array want[2] = {x[0], x[1]};
        for (int which = 0; which < 2; ++which)
          for (int64_t t = 0; t < tokens; ++t)
            for (int64_t i = 0; wide[t] >= 0 && i < heads[which] * half; ++i) {
              const int64_t head = t * strides[which] + i / half * d, j = i % half;
              const int64_t a = head + (style == OCTAVO_NEOX ? j : 2 * j);
              const int64_t b = style == OCTAVO_NEOX ? a + half : a + 1;
              const double c = table[wide[t] * rotary_dim + j], s = table[wide[t] * rotary_dim + half + j];
              const double first = x[which][a], second = x[which][b];
              want[which].set(a, first * c - second * s);
              want[which].set(b, second * c + first * s);
            }
        Array again[2] = {x[0], x[1]};
        r.that(!octavo_rotary(x[0].data(), x[1].data(), wide.data(), 1, table.floats(), tokens, heads[0], heads[1], d,
                              rotary_dim, strides[0], strides[1], style, dtype), "status");
        r.that(!octavo_rotary(again[0].data(), again[1].data(), narrow.data(), 0, table.floats(), tokens, heads[0],
                              heads[1], d, rotary_dim, strides[0], strides[1], style, dtype), "status");
        for (int which = 0; which < 2; ++which) {
          for (size_t i = 0; i < x[which].size(); ++i)
            r.near(x[which][i], want[which][i], 2 * slack(dtype), 1e-6, "rotated", static_cast<int64_t>(i));
          r.that(x[which] == again[which], "32-bit positions give the same");
          r.saw(x[which]);
        }
      }
}

void test_activations(Report &r) {
  Random random(4);
  for (int kind : {OCTAVO_SILU, OCTAVO_GELU, OCTAVO_GELU_TANH}) {
    for (int dtype : kFloats)
      for (int64_t n : {3, 64, 100, 4100}) {
        const int64_t rows = n > 1000 ? 2 : 5, stride = 2 * n + 1;
        const Array x = Array::normal(random, rows * stride, dtype, 3);
        Array out(rows * n, dtype);
        r.that(!octavo_act_and_mul(out.data(), x.data(), rows, n, n, stride, kind, dtype), "status");
        for (int64_t i = 0; i < rows * n; ++i) {
          const size_t at = i / n * stride + i % n;
          r.near(out[i], activated(kind, x[at]) * x[at + n], slack(dtype),
                 dtype == OCTAVO_F16 ? 0x1p-24 /* its least subnormal */ : 1e-9, "gated", i);
        }
        r.saw(out);
      }
    // The whole range: tails, where subtracting from 1 would lose everything, and extremes.
    const int64_t n = 401;
    Array x(2 * n), out(n);
    for (int64_t i = 0; i < n; ++i) x.set(i, (i - 200) * 0.1), x.set(n + i, 1);
    x.set(0, -1e30), x.set(1, 1e30), x.set(2, NAN), x.set(3, -300), x.set(4, -0.0);
    r.that(!octavo_act_and_mul(out.data(), x.data(), 1, n, n, 2 * n, kind, OCTAVO_F32), "status");
    for (int64_t i = 0; i < n; ++i)
      r.near(out[i], i == 0 ? 0 : activated(kind, x[i]), std::fabs(x[i]) > 5 ? 4e-5 : 4e-6, 1e-37, "activation", i);
    r.that(octavo_act_and_mul(out.data(), x.data(), 1, n, n, 2 * n, 9, OCTAVO_F32) == OCTAVO_BAD_ARGUMENT,
           "an unknown activation is refused");
  }
}
