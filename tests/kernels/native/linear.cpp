// Products with packed weights.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "check.h"

namespace {

const int kFormats[] = {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16, OCTAVO_INT8, OCTAVO_INT4, OCTAVO_CODES8, OCTAVO_CODES4};
bool integer(int format) { return format == OCTAVO_INT8 || format == OCTAVO_INT4; }
bool grouped(int format) { return format == OCTAVO_INT4 || has_codes(format); }

struct Packed {
  octavo_weight w;
  std::unique_ptr<void, decltype(&std::free)> memory{nullptr, std::free};

  Packed(const Array &source, int64_t n, int64_t k, int format, bool gated = false, int group = 32) {
    w = {nullptr, n, k, format, group, gated};
    const int64_t bytes = octavo_weight_bytes(&w);
    void *data = nullptr;
    // Exactly what was asked for, so that a checker of memory sees a read or write beyond it.
    if (bytes > 0 && !posix_memalign(&data, 64, static_cast<size_t>(bytes))) memory.reset(data);
    w.data = data;
    if (has_codes(format)) {
      status = bytes > 0 ? Codes(source, format, group).pack(w) : OCTAVO_BAD_ARGUMENT;
      return;
    }
    const int64_t first = n / 3, rows[] = {first, n - first};
    const void *const parts[] = {source.at(0), source.at(first * k)};
    status = bytes > 0 ? octavo_pack_weight(&w, parts, rows, source.dtype()) : OCTAVO_BAD_ARGUMENT;
  }
  Array rows() const {
    Array out(w.n * w.k);
    std::vector<int64_t> all(w.n);
    for (int64_t i = 0; i < w.n; ++i) all[i] = i;
    octavo_unpack_rows(&w, out.floats(), all.data(), w.n);
    return out;
  }
  Array times(const Array &x, int64_t rows, const Array *bias = nullptr, int64_t x_stride = 0) const {
    Array out(rows * w.n);
    octavo_linear(&w, out.floats(), w.n, x.floats(), x_stride ? x_stride : w.k, rows, bias ? bias->floats() : nullptr);
    return out;
  }
  int status;
};

float largest(const Array &x, int64_t at, int64_t n) {
  float top = 0;
  for (int64_t i = 0; i < n; ++i) top = std::fmax(top, std::fabs(x.floats()[at + i]));
  return top;
}

}  // namespace

void test_packing(Report &r) {
  Random random(21);
  for (int dtype : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16})
    for (int format : kFormats)
      for (bool gated : {false, true}) {
        const int64_t n = 38, k = 96;
        const Array source = Array::normal(random, n * k, dtype);
        const Packed packed(source, n, k, format, gated);
        r.that(!packed.status, "status");
        const Array back = packed.rows();
        const Codes codes(source, has_codes(format) ? format : OCTAVO_CODES8, 32);
        for (int64_t i = 0; i < n * k; ++i) {
          if (has_codes(format)) {
            r.near(back[i], codes.value(i, format), 0, 0, "unpacked codes", i);
            continue;
          }
          if (!integer(format)) {
            r.near(back[i], rounded(source[i], format), 0, 0, "unpacked", i);
            continue;
          }
          double low = 0, high = 0;  // of the row, or of the group
          const int64_t span = format == OCTAVO_INT8 ? k : 32, from = i / span * span;
          for (int64_t j = from; j < from + span; ++j)
            low = std::fmin(low, source[j]), high = std::fmax(high, source[j]);
          const double step = format == OCTAVO_INT8 ? std::fmax(-low, high) / 127 : (high - low) / 7;
          r.near(back[i], source[i], 0, step * (format == OCTAVO_INT8 ? 0.5001 : 1), "unpacked", i);
        }
        r.saw(back);
      }
  octavo_weight bad = {nullptr, 10, 48, OCTAVO_INT4, 32, 0};
  r.that(octavo_weight_bytes(&bad) < 0, "groups have to fill a row");
  for (int format : {OCTAVO_CODES8, OCTAVO_CODES4}) {
    bad = {nullptr, 10, 48, format, 32, 0};
    r.that(octavo_weight_bytes(&bad) < 0, "groups of codes have to fill a row");
    const Array source = Array::normal(random, 32 * 32), room(4096);
    const void *const parts[] = {source.data()};
    const int64_t rows[] = {32};
    const octavo_weight w = {room.data(), 32, 32, format, 32, 0};
    r.that(octavo_pack_weight(&w, parts, rows, OCTAVO_F32) == OCTAVO_BAD_ARGUMENT, "nothing is quantised to codes");
  }
  bad = {nullptr, 10, OCTAVO_INT8_MAX_K + 1, OCTAVO_INT8, 0, 0};
  r.that(octavo_weight_bytes(&bad) < 0, "int8 rows that could overflow are refused");
}

constexpr int64_t kShared = 64;  // activations that share a scale beside int8 weights

void test_products(Report &r) {
  Random random(22);
  const int64_t shapes[][3] = {{1, 33, 64}, {2, 1, 32}, {3, 16, 8}, {7, 40, 200}, {13, 50, 96}, {17, 130, 64}, {115, 24, 160}};
  for (int format : kFormats)
    for (bool gated : {false, true})
      for (const auto &[rows, outputs, inner] : shapes) {
        const int64_t n = outputs + (gated && outputs % 2), group = grouped(format) && inner % 32 ? 8 : 32;
        const int64_t k = grouped(format) ? inner : inner + rows % 5;
        const Array source = Array::normal(random, n * k, OCTAVO_F32, 0.1);
        const Packed packed(source, n, k, format, gated, static_cast<int>(group));
        if (!r.that(!packed.status, "status")) continue;
        const Array back = packed.rows(), bias = Array::normal(random, n), x = Array::normal(random, rows * k);
        const Array out = packed.times(x, rows, &bias);
        r.saw(out);
        const int64_t share = format == OCTAVO_INT4 ? group : kShared;
        for (int64_t m = 0; m < rows; ++m) {
          const double most = largest(x, m * k, k) / 127;
          for (int64_t c = 0; c < n; ++c) {
            double sum = bias[c], weight = 0;
            for (int64_t i = 0; i < k; ++i) {
              const double a = x[m * k + i];
              const int64_t from = i / share * share;
              const double scale = largest(x, m * k + from, std::min(share, k - from)) / 127;
              sum += (integer(format) ? std::nearbyint(a / scale) * scale : a) * back[c * k + i];
              weight = std::fmax(weight, std::fabs(back[c * k + i]));
            }
            // A code on the edge between two neighbours may fall to either side.
            r.near(out[m * n + c], sum, 4e-6, integer(format) ? 1.01 * most * weight : 4e-5, "product", m * n + c);
          }
        }
      }
  // Rows that are not next to each other.
  const Array source = Array::normal(random, 40 * 64), wide = Array::normal(random, 6 * 90);
  const Packed packed(source, 40, 64, OCTAVO_F32);
  Array dense(6 * 64);
  for (int64_t i = 0; i < 6 * 64; ++i) dense.set(i, wide[i / 64 * 90 + i % 64]);
  r.that(packed.times(dense, 6) == packed.times(wide, 6, nullptr, 90), "strided rows");
}

// Products with codes have the bits of those with the numbers that the codes stand for.
void test_products_of_codes(Report &r) {
  Random random(26);
  for (int format : {OCTAVO_CODES8, OCTAVO_CODES4})
    for (bool gated : {false, true})
      for (int64_t rows : {1, 2, 5, 8, 12, 13, 14, 15, 29, 64, 113, 300}) {
        const int64_t n = 70, k = rows % 2 ? 96 : 160;
        const Array source = Array::normal(random, n * k, OCTAVO_F32, 0.1), x = Array::normal(random, rows * k);
        const Packed packed(source, n, k, format, gated);
        r.that(!packed.status, "status");
        const Packed plain(packed.rows(), n, k, OCTAVO_F32, gated);
        r.that(packed.times(x, rows) == plain.times(x, rows), "%lld rows by %s have other bits than by float32",
               static_cast<long long>(rows), name_of(format));
      }
}

// Codes whose scale is 1 give integers: no instruction may saturate or wrap.
void test_exact_products(Report &r) {
  Random random(23);
  const auto exact = [&](int64_t rows, int64_t n, int64_t k, const std::function<double(int64_t, bool)> &code) {
    Array source(n * k), x(rows * k);
    for (int64_t i = 0; i < n * k; ++i) source.set(i, i % k ? code(i, true) : 127);
    for (int64_t i = 0; i < rows * k; ++i) x.set(i, k > 300 || i % k % kShared ? code(i, false) : -127);
    const Packed packed(source, n, k, OCTAVO_INT8);
    const Array out = packed.times(x, rows);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t c = 0; c < n; ++c) {
        int64_t sum = 0;
        for (int64_t i = 0; i < k; ++i)
          sum += static_cast<int64_t>(x.floats()[m * k + i]) * static_cast<int64_t>(source.floats()[c * k + i]);
        r.near(out[m * n + c], static_cast<float>(sum), 0, 0, "exact product", m * n + c);
      }
    r.saw(out);
  };
  for (int64_t rows : {1, 2, 5, 14, 21})
    for (int64_t k : {1, 5, 61, 300}) exact(rows, 35, k, [&](int64_t, bool) { return double(random.below(255) - 127); });
  for (double a : {127.0, -127.0})
    for (double b : {127.0, -127.0}) {
      exact(9, 17, 1536, [&](int64_t, bool weight) { return weight ? a : b; });
      exact(1, 5, OCTAVO_INT8_MAX_K, [&](int64_t, bool weight) { return weight ? a : b; });
      exact(2, 3, OCTAVO_INT8_MAX_K, [&](int64_t i, bool weight) { return weight && i % 2 ? -a : b; });
    }
}

// A row's bits do not depend on the rows beside it, for every height of a register tile.
void test_product_company(Report &r) {
  Random random(24);
  for (int format : kFormats)
    for (bool gated : {false, true}) {
      const int64_t n = 70, k = 96, rows = 120;
      const Packed packed(Array::normal(random, n * k), n, k, format, gated);
      const Array x = Array::normal(random, rows * k);
      const Array together = packed.times(x, rows);
      for (int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 29, 113})
        r.that(!std::memcmp(packed.times(x, count).data(), together.data(), count * n * 4),
               "%lld rows of %s have other bits", static_cast<long long>(count), name_of(format));
      r.saw(together);
    }
}

// What is not finite stays so, in its own row and column alone.
void test_odd_numbers(Report &r) {
  Random random(25);
  for (int format : kFormats) {
    const int64_t n = 40, k = 64, rows = 5;
    const Array source = Array::normal(random, n * k);
    const Packed packed(source, n, k, format);
    Array x = Array::normal(random, rows * k);
    const Array clean = packed.times(x, rows);
    x.set(k + 7, NAN), x.set(3 * k, INFINITY);
    const Array out = packed.times(x, rows);
    for (int64_t i = 0; i < rows * n; ++i)
      r.that(i / n % 2 ? !std::isfinite(out[i]) : out.floats()[i] == clean.floats()[i], "%s[%lld] is %g", name_of(format),
             static_cast<long long>(i), out[i]);
    for (double tiny : {0.0, 1e-42}) {
      for (int64_t i = 0; i < rows * k; ++i) x.set(i, tiny);
      const Array small = packed.times(x, rows);
      for (int64_t i = 0; i < rows * n; ++i) r.near(small[i], 0, 0, tiny * 1000, "of next to nothing", i);
    }
    Array spoilt = source;
    spoilt.set(5 * k + 6, NAN), spoilt.set(6 * k + 7, INFINITY);
    const Array odd = Packed(spoilt, n, k, format).times(Array::normal(random, k), 1);
    for (int64_t i = 0; i < n; ++i)
      r.that(std::isfinite(odd[i]) == (i != 5 && i != 6), "%s: output %lld is %g", name_of(format), static_cast<long long>(i),
             odd[i]);
  }
}
