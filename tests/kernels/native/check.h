// What the native tests share: random numbers, arrays of any element type, checks, digests.
//
// The tests call the C ABI alone and hold it against plain loops in double precision, so they run
// where no Python or torch does: under an emulator of another CPU, or under a sanitizer.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "octavo_cpu.h"

// --- random numbers: the same on every machine ---

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Nearly normal: a sum of uniform numbers, which needs no libm.
  double normal() {
    double sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6;
  }

 private:
  uint64_t state_;
};

// --- element types, by arithmetic: nothing in common with the kernels' bit manipulations ---

// Nearest value with `digits` significant binary digits and exponents from `least` on, ties to even.
inline double round_to(double x, int digits, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int step = (exponent > least ? exponent : least) - digits;
  return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}

inline double rounded(double x, int dtype) {
  if (dtype == OCTAVO_BF16) {
    const double y = round_to(x, 8, -125);
    return std::fabs(y) >= 0x1p128 ? std::copysign(INFINITY, x) : y;
  }
  if (dtype == OCTAVO_F16) {
    const double y = round_to(x, 11, -13);
    return std::fabs(y) > 65504 ? std::copysign(INFINITY, x) : y;
  }
  return static_cast<float>(x);
}
inline size_t size_of(int dtype) { return dtype == OCTAVO_F32 ? 4 : 2; }
// How far a result rounded to dtype may be from the exact one, relative to it.
inline double slack(int dtype) {
  return dtype == OCTAVO_BF16 ? 0x1p-8 : dtype == OCTAVO_F16 ? 0x1p-10 : 4e-6;
}
inline const char *name_of(int dtype) {
  static const char *const names[] = {"float32", "bfloat16", "float16", "int8", "int4", "codes8", "codes4"};
  return names[dtype];
}

class Array {
 public:
  explicit Array(size_t n = 0, int dtype = OCTAVO_F32) : dtype_(dtype), n_(n), bytes_(n * size_of(dtype)) {}
  static Array normal(Random &random, size_t n, int dtype = OCTAVO_F32, double scale = 1) {
    Array a(n, dtype);
    for (size_t i = 0; i < n; ++i) a.set(i, random.normal() * scale);
    return a;
  }
  void *data() { return bytes_.data(); }
  const void *data() const { return bytes_.data(); }
  float *floats() { return reinterpret_cast<float *>(bytes_.data()); }
  const float *floats() const { return reinterpret_cast<const float *>(bytes_.data()); }
  void *at(size_t i) { return bytes_.data() + i * size_of(dtype_); }
  const void *at(size_t i) const { return bytes_.data() + i * size_of(dtype_); }
  size_t size() const { return n_; }
  size_t bytes() const { return bytes_.size(); }
  int dtype() const { return dtype_; }
  bool operator==(const Array &other) const { return bytes_ == other.bytes_; }

  double operator[](size_t i) const {
    if (dtype_ == OCTAVO_F32) return floats()[i];
    uint16_t b;
    std::memcpy(&b, bytes_.data() + 2 * i, 2);
    const int mantissa = dtype_ == OCTAVO_BF16 ? 7 : 10;
    const int bias = dtype_ == OCTAVO_BF16 ? 127 : 15;
    const int exponent = (b & 0x7fff) >> mantissa, fraction = b & ((1 << mantissa) - 1);
    double x = std::ldexp(fraction + (exponent ? 1 << mantissa : 0), (exponent ? exponent : 1) - bias - mantissa);
    if (exponent == 2 * bias + 1) x = fraction ? NAN : INFINITY;
    return b & 0x8000 ? -x : x;
  }
  void set(size_t i, double value) {
    const double x = rounded(value, dtype_);
    if (dtype_ == OCTAVO_F32) {
      floats()[i] = static_cast<float>(x);
      return;
    }
    const int mantissa = dtype_ == OCTAVO_BF16 ? 7 : 10;
    const int bias = dtype_ == OCTAVO_BF16 ? 127 : 15;
    uint32_t b = static_cast<uint32_t>(2 * bias + 1) << mantissa;
    if (std::isnan(x)) {
      b |= 1u << (mantissa - 1);
    } else if (std::isfinite(x)) {
      int exponent;
      std::frexp(x, &exponent);
      exponent = x == 0 || exponent < 2 - bias ? 2 - bias : exponent;
      const uint32_t digits = static_cast<uint32_t>(std::ldexp(std::fabs(x), mantissa + 1 - exponent));
      b = digits + (static_cast<uint32_t>(exponent - 2 + bias) << mantissa);
    }
    const uint16_t half = static_cast<uint16_t>(b | (std::signbit(x) ? 0x8000u : 0));
    std::memcpy(bytes_.data() + 2 * i, &half, 2);
  }

 private:
  int dtype_;
  size_t n_;
  std::vector<unsigned char> bytes_;
};

// --- weights as a checkpoint has them in codes ---

inline bool has_codes(int format) { return format == OCTAVO_CODES8 || format == OCTAVO_CODES4; }

// Codes near `source` [n, k], with a scale and perhaps a minimum for `group` inputs. Something that is not finite
// makes its group's scale so.
struct Codes {
  int group;
  std::vector<uint8_t> codes;
  Array scales, minima;

  Codes(const Array &source, int format, int group_)
      : group(group_), codes(source.size()), scales(source.size() / group_, OCTAVO_F16),
        minima(source.size() / group_, OCTAVO_F16) {
    const bool four = format == OCTAVO_CODES4;
    for (size_t g = 0; g < scales.size(); ++g) {
      double low = 0, high = 0, odd = 0;
      for (int i = 0; i < group; ++i) {
        const double x = source[g * group + i];
        low = std::fmin(low, x), high = std::fmax(high, x), odd += x * 0;
      }
      scales.set(g, (four ? (high - low) / 15 : std::fmax(-low, high) / 127) + odd);
      minima.set(g, four ? low : 0);
      for (int i = 0; i < group; ++i) {
        const double steps = (source[g * group + i] - minima[g]) / scales[g];
        const double code = std::isfinite(steps) ? std::nearbyint(steps) : 0;
        codes[g * group + i] = static_cast<uint8_t>(static_cast<int>(four ? std::fmin(std::fmax(code, 0), 15) : code));
      }
    }
  }
  // What element i stands for, rounded once.
  float value(size_t i, int format) const {
    const double code = format == OCTAVO_CODES4 ? codes[i] : static_cast<int8_t>(codes[i]);
    return static_cast<float>(code * scales[i / group] + minima[i / group]);
  }
  int pack(const octavo_weight &w) const {
    return octavo_pack_codes(&w, codes.data(), scales.data(), w.format == OCTAVO_CODES4 ? minima.data() : nullptr);
  }
};

// --- checks ---

// Counts checks; a failed one is printed (the first 20). Digests collect result bits, so that two
// runs that must agree to the last bit (other numbers of threads) can be compared.
class Report {
 public:
  int64_t checks = 0, failures = 0;
  inline static int printed = 0;
  uint64_t digest = 0, tokens = 0;  // tokens: of what the sampler drew, the same on every CPU

  void start(const char *test) { test_ = test; }
  __attribute__((format(printf, 3, 4))) bool that(bool good, const char *format, ...) {
    ++checks;
    if (good) return true;
    ++failures;
    if (++printed <= 20) {
      std::printf("FAILED on %s with %d threads, %s: ", octavo_isa(), octavo_threads(), test_);
      va_list arguments;
      va_start(arguments, format);
      std::vprintf(format, arguments);
      va_end(arguments);
      std::printf("\n");
    }
    return false;
  }
  // |got - want| <= absolute + relative * |want|; the same infinity or both NaN also agree.
  bool near(double got, double want, double relative, double absolute, const char *what, int64_t i) {
    const bool same = got == want || (std::isnan(got) && std::isnan(want)) ||
                      std::fabs(got - want) <= absolute + relative * std::fabs(want);
    return that(same, "%s[%lld] is %.9g, not %.9g", what, static_cast<long long>(i), got, want);
  }
  void saw(const void *data, size_t bytes) { mix(digest, data, bytes); }
  void saw(const Array &a) { saw(a.data(), a.bytes()); }
  void drew(const std::vector<int64_t> &ids) {
    saw(ids.data(), ids.size() * 8);
    mix(tokens, ids.data(), ids.size() * 8);
  }

 private:
  static void mix(uint64_t &into, const void *data, size_t bytes) {
    const unsigned char *p = static_cast<const unsigned char *>(data);
    for (size_t i = 0; i < bytes; ++i) into = (into ^ p[i]) * 0x100000001B3u;
  }
  const char *test_ = "";
};

// --- the tests ---

void test_conversions(Report &);
void test_norms(Report &);
void test_rotary(Report &);
void test_activations(Report &);
void test_write_kv(Report &);
void test_blocks(Report &);
void test_attention(Report &);
void test_attention_company(Report &);
void test_packing(Report &);
void test_products(Report &);
void test_products_of_codes(Report &);
void test_exact_products(Report &);
void test_product_company(Report &);
void test_odd_numbers(Report &);
void test_sample(Report &);
void test_sample_distribution(Report &);
void test_logprobs(Report &);
void test_decoder_layer(Report &);
void test_decoder_layers(Report &);
void test_threads(Report &);
