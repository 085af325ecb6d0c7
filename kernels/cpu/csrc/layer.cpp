// A decoder layer of the Llama kind as one call: what a step spends on calling ops, and the passes
// over memory between them, are most of a small step.
//
// The residual is added where a product ends, the activation where gate and up end; norms are taken
// where their product's activations are made (and quantised, if its weights are integers); rotation
// and the cache's scatter share a pass. Every element is computed by the same instructions as by the
// single ops, so both ways give the same bits.
#include "layer.h"

#include "kv_cache.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"

namespace OCTAVO_NS {
namespace {

// f(slot, begin, end) over rows, in as many pieces for each thread: what is left over would be waited for.
// A few rows are not worth a region.
template <class F>
void over_rows(int64_t rows, int64_t work_per_row, F &&f) {
  constexpr int64_t kPiece = 8192;
  const int threads = octavo::max_threads();
  const int64_t worth = rows * work_per_row / kPiece;
  if (threads < 2 || worth < 2) return f(0, 0, rows);
  const int64_t pieces = worth < threads ? worth : (worth < 4 * threads ? worth : 4 * threads) / threads * threads;
  parallel(rows, (rows + pieces - 1) / pieces, threads,
           [&](int slot, int64_t begin, int64_t end) { f(slot, begin, end); });
}

struct Buffers {
  float *normed;  // all rows for float weights; for integer ones a row for each thread, of which rows has more
  float *qkv, *mixed, *middle;
  char *codes;
};

int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// The layer's product w of x, which is [rows, w.k] float32 with rows `apart`: quantised first if w is.
void product(const octavo_weight &w, const float *x, int64_t rows, char *codes, const Epilogue &e) {
  octavo::Laps laps;
  if (!is_integer(w)) {
    multiply(w, x, apart(w.k), nullptr, rows, e);
    return laps(OCTAVO_LINEAR);
  }
  const Quantized q = quantized_at(w, rows, codes);
  over_rows(rows, w.k, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) quantize_row(x + i * apart(w.k), w.k, q, i);
  });
  laps(OCTAVO_QUANTIZE);
  multiply(w, nullptr, 0, &q, rows, e);
  laps(OCTAVO_LINEAR);
}

// The same of norm(x): each row is normed and quantised in one go.
void normed_product(const octavo_layer &l, const float *norm, const octavo_weight &w, const float *x,
                    int64_t rows, const Buffers &b, const Epilogue &e) {
  octavo::Laps laps;
  const bool integer = is_integer(w);
  Quantized q = {};
  if (integer) q = quantized_at(w, rows, b.codes);
  over_rows(rows, w.k, [&](int slot, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float *normed = b.normed + (integer ? slot : i) * apart(w.k);
      norm_row(normed, x + i * w.k, norm, w.k, l.eps, l.norm_offset);
      if (integer) quantize_row(normed, w.k, q, i);
    }
  });
  laps(OCTAVO_NORM);
  multiply(w, b.normed, apart(w.k), integer ? &q : nullptr, rows, e);
  laps(OCTAVO_LINEAR);
}

void rotate_and_store(const octavo_layer &l, const octavo_layer_step &step, float *qkv) {
  const octavo_write_step &s = *step.write;
  const octavo_attention_step &a = *step.attention;
  float *k = qkv + int64_t(a.q_heads) * a.head_size, *v = k + int64_t(s.kv_heads) * s.head_size;
  with_kv_dtype(s.kv_dtype, [&](auto *type) {
    using C = decltype(type);
    over_rows(step.rows, l.qkv.n * 4, [&](int, int64_t begin, int64_t end) {
      write_tokens(s, static_cast<C>(l.k_cache), static_cast<C>(l.v_cache), k, v, begin, end,
                   [&](int64_t t, int64_t last) {
        for (; t < last; ++t) {
          const int64_t position = step.positions[t];
          if (position < 0) continue;
          const float *row = l.cos_sin + position * l.rotary_dim;
          const int half = l.rotary_dim / 2;
          rotate_heads(qkv + t * l.qkv.n, a.q_heads, a.head_size, row, half, l.rotary_style);
          rotate_heads(k + t * l.qkv.n, a.kv_heads, a.head_size, row, half, l.rotary_style);
        }
      });
    });
    return 0;
  });
}

// The rows that a step's tails name, one behind the other.
struct Tails {
  const octavo_attention_step &whole;
  const int32_t *tails;
  int32_t *start;  // [sequences + 1], of the rows here

  // f(row here, row in the step, how many)
  template <class F>
  void each(F &&f) const {
    for (int s = 0; s < whole.sequences; ++s)
      if (tails[s] > 0) f(start[s], whole.query_start[s + 1] - tails[s], tails[s]);
  }
  int64_t count() const {
    start[0] = 0;
    for (int s = 0; s < whole.sequences; ++s) start[s + 1] = start[s] + tails[s];
    return start[whole.sequences];
  }
};

void copy_rows(float *to, const float *from, int64_t rows, int64_t width) {
  __builtin_memcpy(to, from, size_t(rows * width) * sizeof(float));
}

// A layer from the keys and values in the cache on: attention, and the feed-forward, added to x.
int finish_layer(const octavo_layer &l, octavo_attention_step a, float *x, int64_t rows, const Buffers &b) {
  octavo::Laps laps;
  a.out_row_stride = apart(l.out.k);
  const int status = paged_attention(&a, &l.attention, b.mixed, b.qkv, l.k_cache, l.v_cache);
  if (status) return status;
  laps(OCTAVO_ATTENTION);
  Epilogue e = {x, l.qkv.k};
  e.bias = l.out_bias;
  e.add = true;
  product(l.out, b.mixed, rows, b.codes, e);

  e = {b.middle, apart(l.down.k)};
  e.bias = l.gate_up_bias;
  e.act = l.act;
  normed_product(l, l.norm_2, l.gate_up, x, rows, b, e);
  e = {x, l.qkv.k};
  e.bias = l.down_bias;
  e.add = true;
  product(l.down, b.middle, rows, b.codes, e);
  return OCTAVO_OK;
}

}  // namespace

int run_layer(const octavo_layer &l, const octavo_layer_step &step, float *x, const Turn *turn, bool last) {
  const octavo_attention_step &a = *step.attention;
  const int64_t rows = step.rows, hidden = l.qkv.k;
  if (!valid(l.qkv) || !valid(l.out) || !valid(l.gate_up) || !valid(l.down) || !l.gate_up.gated ||
      l.qkv.gated || l.out.n != hidden || l.gate_up.k != hidden || l.down.n != hidden ||
      l.down.k * 2 != l.gate_up.n || a.x_dtype != OCTAVO_F32 || a.q_row_stride != l.qkv.n ||
      a.out_row_stride != l.out.k ||
      l.qkv.n != int64_t(a.q_heads + a.kv_heads) * a.head_size + int64_t(a.kv_heads) * a.head_size_v)
    return OCTAVO_BAD_ARGUMENT;
  if (rows <= 0) return OCTAVO_OK;
  int64_t codes = 0;
  const octavo_weight *const weights[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
  for (const octavo_weight *w : weights)
    if (is_integer(*w)) codes = max(codes, quantized_bytes(*w, rows));
  // q, k and v are dead when the feed-forward's middle is made.
  const int64_t shared = max(l.qkv.n, apart(l.down.k));
  const int64_t normed = rows * apart(hidden), mixed = rows * apart(l.out.k);
  auto floats = [](int64_t n) { return (n + 15) & ~int64_t(15); };
  const bool some = last && step.tails;
  const int64_t kept = some ? floats(rows * hidden) + floats(a.sequences + 1) : 0;
  char *memory = static_cast<char *>(octavo::scratch(
      size_t(codes + 4 * (normed + floats(rows * shared) + mixed + kept)), 1));
  if (!memory) return OCTAVO_NO_MEMORY;
  Buffers b;
  b.codes = memory;
  b.normed = reinterpret_cast<float *>(memory + codes);
  b.qkv = b.middle = b.normed + normed;
  b.mixed = b.qkv + floats(rows * shared);

  Epilogue e = {b.qkv, l.qkv.n};
  e.bias = l.qkv_bias;
  normed_product(l, l.norm_1, l.qkv, x, rows, b, e);
  octavo::Laps laps;
  rotate_and_store(l, step, b.qkv);
  if (turn) turn->wrote();
  laps(OCTAVO_ROTARY_AND_KV);
  if (!some) return finish_layer(l, a, x, rows, b);

  float *const mine = b.mixed + mixed;
  const Tails tails = {a, step.tails, reinterpret_cast<int32_t *>(mine + floats(rows * hidden))};
  const int64_t count = tails.count();
  if (count == 0) return OCTAVO_OK;
  octavo_attention_step few = a;
  few.query_start = tails.start;
  // Rows only move to the front, in order. Keys and values are in the cache: queries alone go along.
  const int64_t queries = int64_t(a.q_heads) * a.head_size;
  tails.each([&](int64_t to, int64_t from, int64_t n) {
    copy_rows(mine + to * hidden, x + from * hidden, n, hidden);
    for (int64_t i = 0; i < n && to != from; ++i)
      copy_rows(b.qkv + (to + i) * l.qkv.n, b.qkv + (from + i) * l.qkv.n, 1, queries);
  });
  const int status = finish_layer(l, few, mine, count, b);
  tails.each([&](int64_t at, int64_t row, int64_t n) { copy_rows(x + row * hidden, mine + at * hidden, n, hidden); });
  return status;
}

bool tails_fit(const octavo_layer_step &step) {
  const octavo_attention_step &a = *step.attention;
  for (int s = 0; step.tails && s < a.sequences; ++s)
    if (step.tails[s] < 0 || step.tails[s] > a.query_start[s + 1] - a.query_start[s]) return false;
  return true;
}

int decoder_layer(const octavo_layer *layer, const octavo_layer_step *step, float *x) {
  if (!tails_fit(*step)) return OCTAVO_BAD_ARGUMENT;
  return run_layer(*layer, *step, x, nullptr, true);
}

}  // namespace OCTAVO_NS
