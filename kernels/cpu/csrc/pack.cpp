// Packing of weights from float numbers, quantised on the way if they are to be, and rows of them back.
// See linear.h for the layouts.
#include "linear.h"

namespace OCTAVO_NS {
namespace {

struct Source {
  const void *const *parts;
  const int64_t *part_rows;
  int64_t k;
};

// The k elements of row `at` of the stacked parts, as float32; `buffer` holds them if need be.
template <class S>
const float *source_row(const Source &s, int64_t at, float *buffer, S *) {
  int part = 0;
  while (at >= s.part_rows[part]) at -= s.part_rows[part++];
  const S *row = static_cast<const S *>(s.parts[part]) + at * s.k;
  if constexpr (sizeof(S) == 4) {
    return row;
  } else {
    for (int64_t i = 0; i < s.k; ++i) buffer[i] = to_float(row[i]);
    return buffer;
  }
}

template <class T>
void pack_floats(T *panel, const float *row, int64_t k, int c) {
  for (int64_t i = 0; i < k; ++i) from_float(panel + i * kPanel + c, row ? row[i] : 0.0f);
}

bool finite(const float *row, int64_t k) {
  float poison = 0;
  for (int64_t i = 0; i < k; ++i) poison += row[i] * 0.0f;
  return poison == 0;
}

int32_t nearest(float x) { return int32_t(as_bits(x + 12582912.0f)) - 0x4b400000; }
int32_t clamp(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

void pack_int8(char *panel, const float *row, int64_t k, int c) {
  const int64_t inner = int8_inner(k);
  int8_t *codes = reinterpret_cast<int8_t *>(panel);
  float most = 0;
  for (int64_t i = 0; row && i < k; ++i) {
    const float magnitude = __builtin_fabsf(row[i]);
    most = magnitude > most ? magnitude : most;
  }
  const bool good = !row || finite(row, k);
  const float inverse = good && most > 1e-30f ? 127.0f / most : 0;
  for (int64_t i = 0; i < inner; ++i) {
    const int32_t code = row && i < k && good ? nearest(row[i] * inverse) : 0;
    codes[(i / kCodes * kPanel + c) * kCodes + i % kCodes] = static_cast<int8_t>(code + kOffset);
  }
  reinterpret_cast<float *>(panel + inner * kPanel)[c] =
      !good ? __builtin_nanf("") : inverse > 0 ? most / 127.0f : 0;
}

// Scale and minimum of a group, as float16 holds them. Besides the plain range [min, max] / 15, a
// range that some steps wider or narrower may fit better: the one with the least squared error wins.
struct Range {
  float scale, low;
};
float error_of(const float *x, int64_t n, Range r) {
  const float inverse = r.scale > 0 ? 1.0f / r.scale : 0;
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float y = float(clamp(nearest((x[i] - r.low) * inverse), 0, 15)) * r.scale + r.low;
    sum += (x[i] - y) * (x[i] - y);
  }
  return sum;
}
float as_half(float x) {
  f16 h;
  from_float(&h, x);
  return to_float(h);
}
Range best_range(const float *x, int64_t n) {
  float low = x[0], high = x[0];
  for (int64_t i = 1; i < n; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  Range best = {as_half((high - low) / 15), as_half(low)};
  float least = error_of(x, n, best);
  for (int levels = 8; levels < 18 && least > 0; ++levels)
    for (int skip = 0; skip <= 2; ++skip) {
      const float step = as_half((high - low) / float(levels));
      const Range r = {step, as_half(low - float(levels < 15 ? skip : -skip) * 0.5f * step)};
      const float error = error_of(x, n, r);
      if (error < least) best = r, least = error;
    }
  return best;
}

void pack_int4(char *panel, const float *row, int64_t k, int64_t group, int c) {
  for (int64_t g = 0; g < k / group; ++g) {
    char *at = panel + g * group_bytes(group);
    const float *x = row ? row + g * group : nullptr;
    const bool good = !x || finite(x, group);
    const Range r = x && good ? best_range(x, group) : Range{0, 0};
    const float inverse = r.scale > 0 ? 1.0f / r.scale : 0;
    for (int64_t i = 0; i < group; i += 8)
      for (int b = 0; b < 4; ++b) {
        const int place = kStep == 4 ? b : (b & 1) * 2 + (b >> 1);
        uint8_t both = 0;
        for (int half = 0; half < 2 && x && good; ++half)
          both |= uint8_t(clamp(nearest((x[i + half * 4 + b] - r.low) * inverse), 0, 15) << (half * 4));
        at[(i / 8 * kPanel + c) * 4 + place] = static_cast<char>(both);
      }
    f16 *scales = reinterpret_cast<f16 *>(at + group / 2 * kPanel);
    from_float(scales + c, good ? r.scale : __builtin_nanf(""));
    from_float(scales + kPanel + c, r.low);
  }
}

template <class S>
int pack_panels(const octavo_weight &w, const Source &s, S *type) {
  const int64_t bytes = panel_bytes(w);
  const int threads = octavo::max_threads();
  float *rows =
      static_cast<float *>(octavo::scratch(size_t(threads) * size_t(w.k) * sizeof(float)));
  if (!rows) return OCTAVO_NO_MEMORY;
  parallel(panels(w), 1, threads, [&](int slot, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      char *panel = static_cast<char *>(const_cast<void *>(w.data)) + p * bytes;
      for (int c = 0; c < kPanel; ++c) {
        const Column col = column(w, p, c);
        const float *row = col.exists ? source_row(s, col.at, rows + slot * w.k, type) : nullptr;
        switch (w.format) {
          case OCTAVO_F32:
            pack_floats(reinterpret_cast<float *>(panel), row, w.k, c);
            break;
          case OCTAVO_BF16:
            pack_floats(reinterpret_cast<bf16 *>(panel), row, w.k, c);
            break;
          case OCTAVO_F16:
            pack_floats(reinterpret_cast<f16 *>(panel), row, w.k, c);
            break;
          case OCTAVO_INT8:
            pack_int8(panel, row, w.k, c);
            break;
          default:
            pack_int4(panel, row, w.k, w.group, c);
        }
      }
    }
  });
  return OCTAVO_OK;
}

}  // namespace

int64_t weight_bytes(const octavo_weight *w) { return valid(*w) ? panels(*w) * panel_bytes(*w) : -1; }

int pack_weight(const octavo_weight *w, const void *const *parts, const int64_t *part_rows,
                int dtype) {
  if (!valid(*w) || is_coded(*w)) return OCTAVO_BAD_ARGUMENT;
  const Source s = {parts, part_rows, w->k};
  return with_dtype(dtype, [&](auto *type) { return pack_panels(*w, s, type); });
}

// Row `r` of w as float32, from the packed form.
static void unpack_row(const octavo_weight &w, int64_t r, float *to) {
  const int64_t half = kPanel / 2;
  const int64_t at = w.gated ? r % (w.n / 2) : r;
  const int64_t panel = w.gated ? at / half : at / kPanel;
  const int64_t c = w.gated ? at % half + (r >= w.n / 2 ? half : 0) : at % kPanel;
  const char *b = static_cast<const char *>(w.data) + panel * panel_bytes(w);
  switch (w.format) {
    case OCTAVO_F32:
      for (int64_t i = 0; i < w.k; ++i) to[i] = reinterpret_cast<const float *>(b)[i * kPanel + c];
      break;
    case OCTAVO_BF16:
      for (int64_t i = 0; i < w.k; ++i) to[i] = to_float(reinterpret_cast<const bf16 *>(b)[i * kPanel + c]);
      break;
    case OCTAVO_F16:
      for (int64_t i = 0; i < w.k; ++i) to[i] = to_float(reinterpret_cast<const f16 *>(b)[i * kPanel + c]);
      break;
    case OCTAVO_INT8: {
      const float scale = reinterpret_cast<const float *>(b + int8_inner(w.k) * kPanel)[c];
      for (int64_t i = 0; i < w.k; ++i) {
        const uint8_t code = uint8_t(b[(i / kCodes * kPanel + c) * kCodes + i % kCodes]);
        to[i] = float(int8_t(uint8_t(code - kOffset))) * scale;
      }
      break;
    }
    case OCTAVO_CODES8:
      for (const float *end = to + w.k; to < end; to += w.group, b += codes8_bytes(w.group)) {
        const float scale = to_float(reinterpret_cast<const f16 *>(b + w.group * kPanel)[c]);
        for (int64_t i = 0; i < w.group; ++i) to[i] = float(int8_t(b[i * kPanel + c])) * scale;
      }
      break;
    default:
      for (const float *end = to + w.k; to < end; to += w.group, b += group_bytes(w.group)) {
        const f16 *scales = reinterpret_cast<const f16 *>(b + w.group / 2 * kPanel);
        const float scale = to_float(scales[c]), low = to_float(scales[kPanel + c]);
        for (int64_t i = 0; i < w.group; ++i) {
          const int64_t e = i % 4, place = kStep == 4 ? e : (e & 1) * 2 + (e >> 1);
          const uint8_t both = uint8_t(b[(i / 8 * kPanel + c) * 4 + place]);
          to[i] = float(i % 8 < 4 ? both & 15 : both >> 4) * scale + low;
        }
      }
  }
}

int unpack_rows(const octavo_weight *w, float *out, const int64_t *rows, int64_t count) {
  if (!valid(*w)) return OCTAVO_BAD_ARGUMENT;
  const int64_t grain = 1 + 8192 / (w->k + 1);
  parallel(count, grain, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) unpack_row(*w, rows[i], out + i * w->k);
  });
  return OCTAVO_OK;
}

}  // namespace OCTAVO_NS
