// One token per row of logits: temperature, top-k, top-p, min-p, then a Gumbel-max draw
// (argmax of logit/T + Gumbel noise is a sample from softmax(logit/T)).
//
// The random bits of token i are a function of (seed, counter, i) alone, in integer arithmetic that
// any other implementation can repeat; see uniform().
//
// Nothing is sorted: filters become one threshold on the logit. A histogram over the distance from
// the maximum finds the bin the threshold lies in, and a weighted quickselect finds it among the
// few logits in there. Of tokens whose logit ties with the threshold, top-k and min-p keep all, and
// top-p as many as reach its share, those with the lowest ids.
#include "vec.h"

namespace OCTAVO_NS {
namespace {

// Bins are the leading bits of the float32 distance: 128 to an octave, 2^-10 to 2^22 nats. So the
// resolution follows the scale of the logits, and a mask value of -1e9 does no harm.
constexpr int kBins = 4096, kBinShift = 16;
constexpr int32_t kBinBase = (127 - 10) << 7;

struct Row {
  const float *logits;
  int64_t vocab;
  float top;    // largest logit
  float scale;  // temperature
};

struct Memory {  // of one thread
  double *mass;
  int32_t *count;
  float *value, *weight;  // [vocab] each: the logits of one bin
};
constexpr int kSlots = kBins + 16;  // one more than the bins, padded
constexpr int64_t kHistogramBytes = kSlots * 12;
int64_t memory_bytes(int64_t vocab) { return kHistogramBytes + ((vocab + 31) & ~15) * 8; }

constexpr float kNegInf = -__builtin_inff();

// f(vector, mask of valid lanes as 0/-1, index) over a row; the last vector is padded with -inf.
template <class F>
OCTAVO_INLINE void each(const float *x, int64_t from, int64_t to, F &&f) {
  int64_t i = from;
  for (; i + W <= to; i += W) f(load(x + i), i);
  if (i < to) {
    const int n = int(to - i);
    const vf v = load_part(x + i, n);
    f(lanes() < n ? v : splat(kNegInf), i);
  }
}

// Index of the largest logit (the lowest such index), -1 if there is none or a NaN.
int64_t argmax(const float *x, int64_t n, float *top) {
  constexpr int64_t kSpan = 2048;
  float best = kNegInf;
  int64_t best_span = -1;
  vi bad = {};
  for (int64_t from = 0; from < n; from += kSpan) {
    const int64_t to = from + kSpan < n ? from + kSpan : n;
    vf a[4] = {splat(kNegInf), splat(kNegInf), splat(kNegInf), splat(kNegInf)};
    int64_t i = from;
    for (; i + 4 * W <= to; i += 4 * W)
      for (int j = 0; j < 4; ++j) {
        const vf v = load(x + i + j * W);
        bad |= v != v;
        a[j] = vmax(a[j], v);
      }
    each(x, i, to, [&](vf v, int64_t) {
      bad |= v != v;
      a[0] = vmax(a[0], v);
    });
    const float here = hmax(vmax(vmax(a[0], a[1]), vmax(a[2], a[3])));
    if (here > best) best = here, best_span = from;
  }
  *top = best;
  if (bits(bad) || best_span < 0) return -1;
  for (int64_t i = best_span;; ++i)
    if (x[i] == best) return i;
}

// The same of the logits whose bit is set, -1 also if it is infinite. Reads no word's logits that has none.
int64_t argmax_allowed(const float *x, int64_t n, const uint32_t *words) {
  constexpr int64_t kSpan = 2048;
  const vi lane = lanes(), lane_bit = splat_i(1) << lane;
  float best = kNegInf;
  int64_t best_span = -1;
  vi bad = {};
  for (int64_t from = 0; from < n; from += kSpan) {
    const int64_t to = from + kSpan < n ? from + kSpan : n;
    vf a = splat(kNegInf);
    for (int64_t v = from; v < to; v += 32) {
      const uint32_t word = words[v / 32];
      if (word == 0) continue;
      for (int j = 0; j < 32 && v + j < to; j += W) {
        const int left = int(to - v - j);
        vi keep = (splat_i(int32_t(word >> j)) & lane_bit) != 0;
        if (left < W) keep &= lane < left;
        const vf y = left < W ? load_part(x + v + j, left) : load(x + v + j);
        const vf kept = keep ? y : splat(kNegInf);
        bad |= kept != kept;
        a = vmax(a, kept);
      }
    }
    const float here = hmax(a);
    if (here > best) best = here, best_span = from;
  }
  if (bits(bad) || best_span < 0 || best == __builtin_inff()) return -1;
  for (int64_t i = best_span;; ++i)
    if ((words[i / 32] >> i % 32 & 1) && x[i] == best) return i;
}

OCTAVO_INLINE vf weight_of(const Row &r, vf logit) {
  return exp((logit - splat(r.top)) / splat(r.scale));
}
OCTAVO_INLINE vi bin_of(const Row &r, vf logit) {
  const vi b = ((vi)(splat(r.top) - logit) >> kBinShift) - kBinBase;
  const vi low = b < 0 ? splat_i(0) : b;
  return low > kBins - 1 ? splat_i(kBins - 1) : low;
}

void fill_histogram(const Row &r, const Memory &m, bool with_mass) {
  __builtin_memset(m.count, 0, kSlots * sizeof(int32_t));
  if (with_mass) __builtin_memset(m.mass, 0, kSlots * sizeof(double));
  // A few vectors at a time through memory, which costs less than taking vectors apart.
  constexpr int kSpan = 16 * W;
  alignas(64) int32_t bin[kSpan];
  alignas(64) float weight[kSpan];
  for (int64_t from = 0; from < r.vocab; from += kSpan) {
    const int64_t to = from + kSpan < r.vocab ? from + kSpan : r.vocab;
    each(r.logits, from, to, [&](vf v, int64_t i) {
      // A logit of -inf is no token: it goes to the bin that nobody reads.
      const vi b = v > kNegInf ? bin_of(r, v) : splat_i(kBins);
      __builtin_memcpy(bin + (i - from), &b, sizeof(b));
      if (with_mass) store(weight + (i - from), weight_of(r, v));
    });
    const int n = int(to - from);
    for (int i = 0; i < n; ++i) ++m.count[bin[i]];
    if (with_mass)
      for (int i = 0; i < n; ++i) m.mass[bin[i]] += double(weight[i]);
  }
}

// The logits of one bin that are at least `floor`, with their weights; returns how many.
int64_t collect(const Row &r, const Memory &m, int bin, float floor) {
  int64_t n = 0;
  each(r.logits, 0, r.vocab, [&](vf v, int64_t) {
    uint32_t hit = bits((bin_of(r, v) == bin) & (v >= floor) & (v > kNegInf));
    for (; hit; hit &= hit - 1) m.value[n++] = v[__builtin_ctz(hit)];
  });
  for (int64_t i = 0; i < n; i += W)  // both arrays are padded to whole vectors
    store(m.weight + i, weight_of(r, load(m.value + i)));
  return n;
}

void swap(float *a, int64_t i, int64_t j) {
  const float t = a[i];
  a[i] = a[j];
  a[j] = t;
}

// Largest t such that the weights of values >= t reach `need` (weight null: count them). If all
// together do not reach it, t is the smallest value. n > 0. *spare: how many of the values equal to t
// `need` can do without, one being left.
float select(float *value, float *weight, int64_t n, double need, int64_t *spare) {
  double above = 0;
  for (uint32_t random = 1;;) {
    random = random * 1664525u + 1013904223u;
    const float pivot = value[(uint64_t(random) * uint64_t(n)) >> 32];
    int64_t larger = 0, equal_end = 0, end = n;  // larger | equal | not seen | smaller
    double mass_larger = 0, mass_equal = 0;
    while (equal_end < end) {
      const float v = value[equal_end];
      const double w = weight ? double(weight[equal_end]) : 1;
      if (v < pivot) {
        --end;
        swap(value, equal_end, end);
        if (weight) swap(weight, equal_end, end);
      } else {
        if (v > pivot) {
          mass_larger += w;
          swap(value, equal_end, larger);
          if (weight) swap(weight, equal_end, larger);
          ++larger;
        } else {
          mass_equal += w;
        }
        ++equal_end;
      }
    }
    if (larger && above + mass_larger >= need) {
      n = larger;
    } else if (above + mass_larger + mass_equal >= need || end == n) {
      const int64_t equal = equal_end - larger;
      const double enough = __builtin_ceil((need - above - mass_larger) * double(equal) / mass_equal);
      *spare = enough < double(equal) ? equal - (enough > 1 ? int64_t(enough) : 1) : 0;
      return pivot;
    } else {
      above += mass_larger + mass_equal;
      value += end;
      if (weight) weight += end;
      n -= end;
    }
  }
}

// The smallest logit that passes top-k, top-p and min-p; of the tokens that have it, the `spare` with
// the highest ids do not.
float threshold(const Row &r, const Memory &m, int64_t top_k, float top_p, float min_p,
                int64_t *spare) {
  float floor = kNegInf;
  *spare = 0;
  const bool use_p = top_p < 1;
  const bool use_k = top_k > 0 && top_k < r.vocab;
  if (use_p || use_k) fill_histogram(r, m, use_p);
  int last_bin = kBins - 1;     // of what top-k leaves
  double last_mass = -1;        // mass that is left in it; -1: all
  if (use_k) {
    int64_t above = 0;
    int b = 0;
    while (b < kBins - 1 && above + m.count[b] < top_k) above += m.count[b++];
    const int64_t n = collect(r, m, b, kNegInf);
    if (n) {
      int64_t ties;
      floor = select(m.value, nullptr, n, double(top_k - above), &ties);
      last_bin = b;
      last_mass = 0;
      if (use_p)  // select() has moved the values, so weigh them again
        for (int64_t i = 0; i < n; ++i)
          if (m.value[i] >= floor) last_mass += double(weight_of(r, splat(m.value[i]))[0]);
    }
  }
  if (use_p) {
    if (last_mass >= 0) m.mass[last_bin] = last_mass;
    double total = 0;
    for (int b = 0; b <= last_bin; ++b) total += m.mass[b];
    const double need = double(top_p) * total;
    double above = 0;
    int b = 0;
    while (b < last_bin && above + m.mass[b] < need) above += m.mass[b++];
    while (b > 0 && m.count[b] == 0) above -= m.mass[--b];
    const int64_t n = collect(r, m, b, floor);
    if (n) floor = select(m.value, m.weight, n, need - above, spare);
  }
  if (min_p > 0) {
    // weight >= min_p, as a threshold on the logit: the smallest float32 not below it.
    const double limit = double(r.top) + double(r.scale) * __builtin_log(double(min_p));
    float f = float(limit);
    if (double(f) < limit) f = __builtin_nextafterf(f, __builtin_inff());
    if (f > r.top) f = r.top;
    if (f > floor) floor = f, *spare = 0;
  }
  return floor;
}

// The token before the last `spare` of those whose logit is `value`; there are more of them.
int64_t last_of(const Row &r, float value, int64_t spare) {
  int64_t i = r.vocab - 1;
  while (r.logits[i] != value || spare-- > 0) --i;
  return i;
}

uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
OCTAVO_INLINE vu fmix32(vu h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ h >> 16;
}
// In (0, 1), an odd multiple of 2^-24, for tokens i.
OCTAVO_INLINE vf uniform(vu i, uint64_t key) {
  const uint32_t lo = uint32_t(key), hi = uint32_t(key >> 32);
  vu h = fmix32((i * 0x9E3779B1u + lo) ^ hi);
  h = fmix32(h + hi);
  return (__builtin_convertvector((vi)(h >> 9), vf) + 0.5f) * 0x1p-23f;
}

constexpr float kLargestNoise = 16.7f;  // -log(-log(1 - 2^-24)) = 16.64

// argmax over logits >= floor of (logit - top) / T + noise; `start` is a token to begin with, and `last`
// the highest that may have a logit of just `floor`.
int64_t draw(const Row &r, float floor, int64_t last, uint64_t key, int64_t start) {
  const vf top = splat(r.top), scale = splat(r.scale);
  vf best = splat(kNegInf);
  vi where = splat_i(0);
  float bound = kNegInf;  // what (logit - top) / T must exceed to matter at all
  const auto visit = [&](vf v, int64_t i) {
    const vf x = (v - top) / scale;
    vi keep = (v >= floor) & (x > bound);
    if (!bits(keep)) return;
    const vi at = lanes() + int32_t(i);
    keep &= (v > floor) | (at <= int32_t(last));
    const vf noise = -log_normal(-log_normal(uniform((vu)at, key)));
    const vf y = x + noise;
    const vi better = keep & (y > best);
    best = better ? y : best;
    where = better ? at : where;
  };
  constexpr int64_t kSpan = 1024;
  // Looking first where the largest logit is makes the bound sharp; seeing those tokens again in
  // their turn changes nothing, since ties keep the lower id.
  vf y0 = -log_normal(-log_normal(uniform(splat_u(uint32_t(start)), key)));
  bound = y0[0] - kLargestNoise;
  for (int64_t from = 0; from < r.vocab; from += kSpan) {
    each(r.logits, from, from + kSpan < r.vocab ? from + kSpan : r.vocab, visit);
    const float now = hmax(best) - kLargestNoise;
    if (now > bound) bound = now;
  }
  int64_t token = -1;
  float most = kNegInf;
  for (int i = 0; i < W; ++i)
    if (best[i] > most || (best[i] == most && token >= 0 && where[i] < token))
      most = best[i], token = where[i];
  return token;
}

}  // namespace

int sample(int64_t *out, const float *logits, int64_t rows, int64_t vocab, int64_t row_stride,
           const float *temperature, const int32_t *top_k, const float *top_p, const float *min_p,
           const uint64_t *seed, const uint64_t *counter) {
  if (vocab <= 0 || vocab > 0x7fffffff - 64) return OCTAVO_BAD_ARGUMENT;
  const int threads = rows * vocab < 32768 ? 1 : octavo::max_threads();
  const bool filters = top_k || top_p;
  const int64_t bytes = filters ? memory_bytes(vocab) : 0;
  char *memory = filters ? static_cast<char *>(octavo::scratch(size_t(bytes * threads))) : nullptr;
  if (filters && !memory) return OCTAVO_NO_MEMORY;
  parallel(rows, 1, threads, [&](int slot, int64_t begin, int64_t end) {
    Memory m = {};
    if (filters) {
      char *mine = memory + slot * bytes;
      m.mass = reinterpret_cast<double *>(mine);
      m.count = reinterpret_cast<int32_t *>(mine + kSlots * 8);
      m.value = reinterpret_cast<float *>(mine + kHistogramBytes);
      m.weight = m.value + ((vocab + 31) & ~15);
    }
    for (int64_t b = begin; b < end; ++b) {
      Row r = {logits + b * row_stride, vocab, 0, temperature ? temperature[b] : 1.0f};
      out[b] = argmax(r.logits, vocab, &r.top);
      if (r.top == __builtin_inff()) out[b] = -1;
      if (out[b] < 0 || !(r.scale > 0)) continue;
      int64_t spare;
      const float floor = threshold(r, m, top_k ? top_k[b] : 0, top_p ? top_p[b] : 1.0f,
                                    min_p ? min_p[b] : 0.0f, &spare);
      const int64_t last = spare ? last_of(r, floor, spare) : vocab;
      const uint64_t key = splitmix64((seed ? seed[b] : 0) ^ splitmix64(counter ? counter[b] : 0));
      out[b] = draw(r, floor, last, key, out[b]);
    }
  });
  return OCTAVO_OK;
}

int best_allowed(int64_t *out, const float *logits, int64_t vocab, int64_t row_stride, const int64_t *rows,
                 const uint32_t *words, int64_t row_words, int64_t count) {
  const int threads = count * vocab < 131072 ? 1 : octavo::max_threads();
  parallel(count, 1, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      out[i] = argmax_allowed(logits + rows[i] * row_stride, vocab, words + i * row_words);
  });
  return OCTAVO_OK;
}

int token_logprobs(float *logprob, int64_t *rank, float *logsumexp, const float *logits,
                   const int64_t *ids, int64_t rows, int64_t vocab, int64_t row_stride) {
  const int threads = rows * vocab < 32768 ? 1 : octavo::max_threads();
  parallel(rows, 1, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const float *x = logits + b * row_stride, mine = x[ids[b]];
      float top;
      argmax(x, vocab, &top);
      double sum = 0;
      int64_t larger = 0;
      for (int64_t from = 0; from < vocab; from += 1024) {
        vf s = {};
        vi n = {};
        each(x, from, from + 1024 < vocab ? from + 1024 : vocab, [&](vf v, int64_t) {
          s = s + exp(v - splat(top));
          n = n - (v > splat(mine));
        });
        sum += double(hsum(s));
        for (int i = 0; i < W; ++i) larger += n[i];
      }
      logsumexp[b] = float(double(top) + __builtin_log(sum));
      logprob[b] = float(double(mine) - double(top) - __builtin_log(sum));
      rank[b] = larger + 1;
    }
  });
  return OCTAVO_OK;
}

}  // namespace OCTAVO_NS
