// Packing of weights whose codes are given: quantised before, or read from a quantised checkpoint.
// See linear.h for the layouts.
#include "linear.h"

namespace OCTAVO_NS {
namespace {

// Column c of a panel from one row of codes; row NULL: a column that does not exist.
void put_int8(char *panel, const int8_t *row, float scale, int64_t k, int c) {
  const int64_t inner = int8_inner(k);
  int8_t *codes = reinterpret_cast<int8_t *>(panel);
  for (int64_t i = 0; i < inner; ++i)
    codes[(i / kCodes * kPanel + c) * kCodes + i % kCodes] =
        static_cast<int8_t>((row && i < k ? row[i] : 0) + kOffset);
  reinterpret_cast<float *>(panel + inner * kPanel)[c] = row ? scale : 0;
}

void put_int4(char *panel, const uint8_t *row, const uint16_t *scales, const uint16_t *minima,
              int64_t k, int64_t group, int c) {
  for (int64_t g = 0; g < k / group; ++g) {
    char *at = panel + g * group_bytes(group);
    for (int64_t i = 0; i < group; i += 8)
      for (int b = 0; b < 4; ++b) {
        const int place = kStep == 4 ? b : (b & 1) * 2 + (b >> 1);
        const uint8_t *pair = row ? row + g * group + i + b : nullptr;
        at[(i / 8 * kPanel + c) * 4 + place] =
            static_cast<char>(pair ? (pair[0] & 15) | (pair[4] & 15) << 4 : 0);
      }
    uint16_t *halves = reinterpret_cast<uint16_t *>(at + group / 2 * kPanel);
    halves[c] = row ? scales[g] : 0;
    halves[kPanel + c] = row ? minima[g] : 0;
  }
}

void put_codes8(char *panel, const int8_t *row, const uint16_t *scales, int64_t k, int64_t group, int c) {
  for (int64_t g = 0; g < k / group; ++g) {
    char *at = panel + g * codes8_bytes(group);
    for (int64_t i = 0; i < group; ++i) at[i * kPanel + c] = static_cast<char>(row ? row[g * group + i] : 0);
    reinterpret_cast<uint16_t *>(at + group * kPanel)[c] = row ? scales[g] : 0;
  }
}

}  // namespace

int pack_codes(const octavo_weight *w, const void *codes, const void *scales, const void *minima) {
  if (!valid(*w) || !(is_integer(*w) || is_coded(*w))) return OCTAVO_BAD_ARGUMENT;
  const int64_t bytes = panel_bytes(*w), k = w->k;
  const int64_t groups = w->format == OCTAVO_INT8 ? 1 : k / w->group;
  parallel(panels(*w), 1, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      char *panel = static_cast<char *>(const_cast<void *>(w->data)) + p * bytes;
      for (int c = 0; c < kPanel; ++c) {
        const Column col = column(*w, p, c);
        const int64_t at = col.exists ? col.at : 0;
        const void *row = col.exists ? static_cast<const char *>(codes) + at * k : nullptr;
        const uint16_t *halves = static_cast<const uint16_t *>(scales) + at * groups;
        if (w->format == OCTAVO_INT8)
          put_int8(panel, static_cast<const int8_t *>(row), static_cast<const float *>(scales)[at], k, c);
        else if (w->format == OCTAVO_CODES8)
          put_codes8(panel, static_cast<const int8_t *>(row), halves, k, w->group, c);
        else
          put_int4(panel, static_cast<const uint8_t *>(row), halves,
                   static_cast<const uint16_t *>(minima) + at * groups, k, w->group, c);
      }
    }
  });
  return OCTAVO_OK;
}

}  // namespace OCTAVO_NS
