// The paged cache and attention over it.
#include <algorithm>

#include "check.h"

namespace {

// A cache of random blocks, and a step of sequences over it.
struct Case {
  int q_heads = 4, kv_heads = 2, d = 64, dv = 64, block = 16, window = 0;
  int x_dtype = OCTAVO_F32, kv_dtype = OCTAVO_F32;
  double softcap = 0;
  bool sinks = false;
  std::vector<std::pair<int, int>> sequences;  // new rows, context (with them)
};

struct Step {
  std::vector<int32_t> tables, start, context;
  Array q, k, v, sinks;
  int64_t stride = 0, rows = 0;
  octavo_attention_step step;
  octavo_attention_layer layer;

  Step(const Case &c, Random &random) {
    int most = 0;
    for (auto [n, length] : c.sequences) most = std::max(most, length);
    stride = most / c.block + 2;
    const int64_t blocks = stride * static_cast<int64_t>(c.sequences.size()) + 1;
    std::vector<int32_t> ids(blocks);
    for (int64_t i = 0; i < blocks; ++i) ids[i] = static_cast<int32_t>(i);
    for (int64_t i = blocks - 1; i > 0; --i) std::swap(ids[i], ids[random.below(i + 1)]);
    start.push_back(0);
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      start.push_back(start.back() + c.sequences[s].first);
      context.push_back(c.sequences[s].second);
      for (int64_t i = 0; i < stride; ++i) tables.push_back(ids[s * stride + i]);
    }
    rows = start.back();
    q = Array::normal(random, rows * (c.q_heads * c.d + 8), c.x_dtype);
    k = Array::normal(random, blocks * c.kv_heads * c.d * c.block, c.kv_dtype);
    v = Array::normal(random, blocks * c.kv_heads * c.dv * c.block, c.kv_dtype);
    sinks = Array::normal(random, c.q_heads);
    step = {tables.data(), start.data(), context.data(), stride, int64_t(c.q_heads) * c.dv, c.q_heads * c.d + 8,
            static_cast<int32_t>(c.sequences.size()), c.x_dtype, c.kv_dtype, c.q_heads, c.kv_heads, c.d, c.dv,
            c.block, 0, 0};
    layer = {c.sinks ? sinks.floats() : nullptr, static_cast<float>(1 / std::sqrt(c.d)), static_cast<float>(c.softcap),
             c.window};
  }

  int run(Array &out) const { return octavo_paged_attention(&step, &layer, out.data(), q.data(), k.data(), v.data()); }

  // One head of one row, in double precision.
  std::vector<double> expect(const Case &c, size_t s, int64_t row, int head) const {
    const int position = context[s] - (start[s + 1] - start[s]) + static_cast<int>(row) - start[s];
    const int first = c.window ? std::max(0, position + 1 - c.window) : 0;
    const int kv = head / (c.q_heads / c.kv_heads);
    std::vector<double> score;
    double top = c.sinks ? sinks[head] : -INFINITY;
    for (int j = first; j <= position; ++j) {
      const int64_t page = int64_t(tables[s * stride + j / c.block]) * c.kv_heads + kv;
      double sum = 0;
      for (int i = 0; i < c.d; ++i)
        sum += q[row * step.q_row_stride + head * c.d + i] * k[(page * c.d + i) * c.block + j % c.block];
      sum *= layer.scale;
      if (c.softcap != 0) sum = c.softcap * std::tanh(sum / c.softcap);
      score.push_back(sum);
      top = std::max(top, sum);
    }
    double total = c.sinks ? std::exp(sinks[head] - top) : 0;
    std::vector<double> out(c.dv);
    for (int j = first; j <= position; ++j) {
      const int64_t page = int64_t(tables[s * stride + j / c.block]) * c.kv_heads + kv;
      const double weight = std::exp(score[j - first] - top);
      total += weight;
      for (int i = 0; i < c.dv; ++i) out[i] += weight * v[(page * c.block + j % c.block) * c.dv + i];
    }
    for (double &x : out) x /= total;
    return out;
  }
};

void check(Report &r, const Case &c, Random &random) {
  const Step step(c, random);
  Array out(step.rows * c.q_heads * c.dv, c.x_dtype);
  if (!r.that(!step.run(out), "status")) return;
  r.saw(out);
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t row = step.start[s]; row < step.start[s + 1]; ++row) {
      // Long contexts are slow to check in full: the last rows and some others see what is new.
      if (c.sequences[s].second > 300 && row + 1 < step.start[s + 1] && random.below(8)) continue;
      for (int head = 0; head < c.q_heads; ++head) {
        const std::vector<double> want = step.expect(c, s, row, head);
        for (int i = 0; i < c.dv; ++i) {
          const int64_t at = (row * c.q_heads + head) * c.dv + i;
          r.near(out[at], want[i], slack(c.x_dtype), 2e-6, "attention", at);
        }
      }
    }
}

const std::vector<std::pair<int, int>> kMixed = {{1, 33}, {5, 5}, {20, 70}, {1, 1}, {3, 129}};

}  // namespace

void test_write_kv(Report &r) {
  Random random(11);
  for (int x_dtype : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16})
    for (int kv_dtype : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16}) {
      const int heads = 2, d = 24, dv = 16, block = 16, blocks = 9, tokens = 40;
      const int64_t ks = heads * d + 3, vs = heads * dv;
      std::vector<int64_t> slots;
      for (int t = 0; t < tokens; ++t)  // a run, a block's end, padding, single places
        slots.push_back(t < 30 ? 23 + t : t == 30 ? -1 : (t - 30) * 7 % 16 + 96);
      Array k_cache = Array::normal(random, blocks * heads * d * block, kv_dtype);
      Array v_cache = Array::normal(random, blocks * heads * dv * block, kv_dtype);
      Array want_k = k_cache, want_v = v_cache;
      const Array k = Array::normal(random, tokens * ks, x_dtype), v = Array::normal(random, tokens * vs, x_dtype);
      for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads && slots[t] >= 0; ++h) {
          const int64_t page = slots[t] / block * heads + h, offset = slots[t] % block;
          for (int i = 0; i < d; ++i) want_k.set((page * d + i) * block + offset, k[t * ks + h * d + i]);
          for (int i = 0; i < dv; ++i) want_v.set((page * block + offset) * dv + i, v[t * vs + h * dv + i]);
        }
      const octavo_write_step step = {slots.data(), tokens, ks, vs, x_dtype, kv_dtype, heads, d, dv, block, 0, 0};
      r.that(!octavo_write_kv(&step, k_cache.data(), v_cache.data(), k.data(), v.data()), "status");
      r.that(k_cache == want_k, "keys of %s in %s", name_of(x_dtype), name_of(kv_dtype));
      r.that(v_cache == want_v, "values of %s in %s", name_of(x_dtype), name_of(kv_dtype));
    }
}

void test_blocks(Report &r) {
  Random random(12);
  for (size_t gap : {size_t(0), size_t(40)})
    for (size_t bytes : {size_t(1), size_t(300), size_t(200000)}) {
      const int blocks = 7;
      const size_t stride = bytes + gap;
      std::vector<unsigned char> cache(blocks * stride), want, host(3 * bytes);
      for (unsigned char &b : cache) b = static_cast<unsigned char>(random.bits());
      want = cache;
      const int64_t pairs[] = {2, 5, 5, 0, 1, 2};  // the second reads what the first wrote
      for (int i = 0; i < 3; ++i) std::memcpy(&want[pairs[2 * i + 1] * stride], &want[pairs[2 * i] * stride], bytes);
      octavo_copy_blocks(cache.data(), bytes, stride, pairs, 3);
      r.that(cache == want, "copies of %zu bytes", bytes);
      const int64_t from[] = {6, 0, 3}, to[] = {1, 6, 4};
      octavo_gather_blocks(host.data(), cache.data(), bytes, stride, from, 3);
      octavo_scatter_blocks(cache.data(), host.data(), bytes, stride, to, 3);
      std::vector<unsigned char> expected = want;
      for (int i = 0; i < 3; ++i) {
        r.that(!std::memcmp(&host[i * bytes], &want[from[i] * stride], bytes), "gathered block %d", i);
        std::memcpy(&expected[to[i] * stride], &want[from[i] * stride], bytes);
      }
      r.that(cache == expected, "scattered blocks of %zu bytes", bytes);
    }
}

void test_attention(Report &r) {
  Random random(13);
  Case c;
  c.sequences = kMixed;
  for (int x_dtype : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16})
    for (int kv_dtype : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16})
      if (x_dtype == OCTAVO_F32 || kv_dtype == OCTAVO_F32 || x_dtype == kv_dtype) {
        Case mixed = c;
        mixed.x_dtype = x_dtype, mixed.kv_dtype = kv_dtype;
        check(r, mixed, random);
      }
  for (auto [d, dv] : {std::pair(8, 8), {40, 24}, {128, 64}}) {
    Case sizes = c;
    sizes.d = d, sizes.dv = dv, sizes.sequences = {{1, 20}, {4, 66}};
    check(r, sizes, random);
  }
  for (auto [q, kv] : {std::pair(1, 1), {9, 3}, {7, 1}, {2, 2}}) {
    Case heads = c;
    heads.q_heads = q, heads.kv_heads = kv, heads.d = heads.dv = 32;
    check(r, heads, random);
  }
  for (int window : {1, 16, 40}) {
    Case windows = c;
    windows.window = window, windows.kv_dtype = window == 16 ? OCTAVO_F16 : OCTAVO_F32, windows.block = 2 * 16;
    check(r, windows, random);
  }
  Case odd = c;
  odd.softcap = 1.5, odd.sinks = true;
  check(r, odd, random);
  // Beyond one chunk of positions: partial results are merged, also across threads.
  Case longer;
  longer.q_heads = 2, longer.kv_heads = 1, longer.d = longer.dv = 32;
  longer.sequences = {{1, 1300}, {16, 540}, {1, 3}};
  check(r, longer, random);
  longer.window = 600, longer.sinks = true, longer.kv_dtype = OCTAVO_BF16;
  check(r, longer, random);
}

// The same sequence alone and among others, whole and in pieces, to the last bit.
void test_attention_company(Report &r) {
  for (int kv_dtype : {OCTAVO_F32, OCTAVO_F16}) {
    Random random(14);
    Case c;
    c.kv_dtype = kv_dtype, c.window = kv_dtype == OCTAVO_F16 ? 50 : 0, c.d = c.dv = 32;
    c.sequences = {{9, 40}, {1, 530}, {30, 30}, {1, 77}};
    const Step all(c, random);
    const int64_t width = int64_t(c.q_heads) * c.dv;
    Array together(all.rows * width);
    r.that(!all.run(together), "status");
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t n = all.start[s + 1] - all.start[s], context = all.context[s];
      Array alone(n * width);
      for (int32_t begin = 0; begin < n;) {  // in pieces of 1, 2, 3, ..
        const int32_t count = std::min(begin / 2 + 1, n - begin);
        const int32_t start[] = {0, count}, seen = context - n + begin + count;
        octavo_attention_step one = all.step;
        one.block_tables = &all.tables[s * all.stride], one.query_start = start, one.context_lens = &seen;
        one.sequences = 1;
        r.that(!octavo_paged_attention(&one, &all.layer, alone.at(begin * width),
                                       all.q.at((all.start[s] + begin) * all.step.q_row_stride), all.k.data(),
                                       all.v.data()), "status");
        begin += count;
      }
      r.that(!std::memcmp(alone.data(), together.at(all.start[s] * width), alone.bytes()),
             "sequence %zu has other bits alone, with a cache of %s", s, name_of(kv_dtype));
    }
  }
}
