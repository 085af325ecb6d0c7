// A decoder layer in one call against the same layer as single calls, to the last bit.
#include <cstdlib>
#include <memory>
#include <utility>

#include "check.h"

namespace {

constexpr int kHidden = 64, kMiddle = 96, kHeads = 4, kKvHeads = 2, kHead = 16, kBlock = 16, kBlocks = 12;
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHead, kRotary = 16;

// Weights stay packed in `memory`, which frees what posix_memalign gave.
struct Layer {
  octavo_layer l = {};
  std::vector<void *> memory;
  Array norm_1, norm_2, biases[4], cos_sin;

  Layer(Random &random, int format, int act, bool bias)
      : norm_1(Array::normal(random, kHidden)), norm_2(Array::normal(random, kHidden)),
        cos_sin(Array::normal(random, 300 * kRotary)) {
    const float **const at[] = {&l.qkv_bias, &l.out_bias, &l.gate_up_bias, &l.down_bias};
    octavo_weight *const w[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
    const int sizes[][2] = {{kQkv, kHidden}, {kHidden, kHeads * kHead}, {2 * kMiddle, kHidden}, {kHidden, kMiddle}};
    for (int i = 0; i < 4; ++i) {
      const auto [n, k] = sizes[i];
      // Formats may differ between the weights of a layer.
      *w[i] = {nullptr, n, k, i == 3 && format == OCTAVO_INT4 ? int32_t(OCTAVO_INT8) : format, 32, i == 2};
      void *data = nullptr;
      if (posix_memalign(&data, 64, static_cast<size_t>(octavo_weight_bytes(w[i])))) std::abort();
      memory.push_back(data);
      w[i]->data = data;
      const Array source = Array::normal(random, n * k, OCTAVO_F32, 0.2);
      const void *const parts[] = {source.data()};
      const int64_t rows[] = {n};
      if (has_codes(format))
        Codes(source, format, 32).pack(*w[i]);
      else
        octavo_pack_weight(w[i], parts, rows, OCTAVO_F32);
      biases[i] = Array::normal(random, n);
      if (bias) *at[i] = biases[i].floats();
    }
    l.norm_1 = norm_1.floats(), l.norm_2 = norm_2.floats(), l.cos_sin = cos_sin.floats();
    l.attention = {nullptr, 0.25f, 0, 0};
    l.eps = 1e-5f, l.rotary_dim = kRotary, l.rotary_style = OCTAVO_NEOX, l.act = act;
  }
  Layer(const Layer &) = delete;
  ~Layer() {
    for (void *p : memory) std::free(p);
  }
};

bool single_calls(const octavo_layer &l, const octavo_layer_step &s, Array &x, Array &k_cache, Array &v_cache) {
  const int64_t rows = s.rows;
  Array normed(rows * kHidden), qkv(rows * kQkv), mixed(rows * kHeads * kHead), y(rows * kHidden);
  Array wide(rows * 2 * kMiddle), middle(rows * kMiddle);
  const octavo_norm norm = {rows, 1, kHidden, kHidden, kHidden, kHidden, kHidden, OCTAVO_F32, OCTAVO_F32, l.eps, 0};
  float *k = qkv.floats() + kHeads * kHead, *v = k + kKvHeads * kHead;
  int bad = octavo_rms_norm(&norm, normed.data(), x.data(), l.norm_1);
  bad |= octavo_linear(&l.qkv, qkv.floats(), kQkv, normed.floats(), kHidden, rows, l.qkv_bias);
  bad |= octavo_rotary(qkv.data(), k, s.positions, 1, l.cos_sin, rows, kHeads, kKvHeads, kHead, kRotary, kQkv, kQkv,
                       l.rotary_style, OCTAVO_F32);
  bad |= octavo_write_kv(s.write, k_cache.data(), v_cache.data(), k, v);
  bad |= octavo_paged_attention(s.attention, &l.attention, mixed.data(), qkv.data(), k_cache.data(), v_cache.data());
  bad |= octavo_linear(&l.out, y.floats(), kHidden, mixed.floats(), kHeads * kHead, rows, l.out_bias);
  bad |= octavo_add_rms_norm(&norm, normed.data(), x.data(), kHidden, y.data(), l.norm_2);
  bad |= octavo_linear(&l.gate_up, wide.floats(), 2 * kMiddle, normed.floats(), kHidden, rows, l.gate_up_bias);
  bad |= octavo_act_and_mul(middle.data(), wide.data(), rows, kMiddle, kMiddle, 2 * kMiddle, l.act, OCTAVO_F32);
  bad |= octavo_linear(&l.down, y.floats(), kHidden, middle.floats(), kMiddle, rows, l.down_bias);
  for (int64_t i = 0; i < rows * kHidden; ++i) x.floats()[i] += y.floats()[i];
  return !bad;
}

}  // namespace

void test_decoder_layer(Report &r) {
  Random random(41);
  for (int format : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16, OCTAVO_INT8, OCTAVO_INT4, OCTAVO_CODES8, OCTAVO_CODES4})
    for (bool bias : {false, true}) {
      const Layer layer(random, format, format % 3, bias);
      const int kv_dtype = format % 3;
      // Two sequences: 9 rows of a prompt that begins, one row at position 37; and a row of padding.
      const int64_t rows = 11;
      std::vector<int64_t> positions, slots;
      const int32_t tables[] = {7, 2, 0, 4, 1, 9}, start[] = {0, 9, 10}, context[] = {9, 38};
      for (int t = 0; t < 9; ++t) positions.push_back(t), slots.push_back(7 * kBlock + t);
      positions.push_back(37), slots.push_back(9 * kBlock + 5);
      positions.push_back(-1), slots.push_back(-1);
      const octavo_attention_step attention = {tables, start, context, 3, kHeads * kHead, kQkv, 2, OCTAVO_F32,
                                               kv_dtype, kHeads, kKvHeads, kHead, kHead, kBlock, 0, 0};
      const octavo_write_step write = {slots.data(), rows, kQkv, kQkv, OCTAVO_F32, kv_dtype, kKvHeads, kHead, kHead, kBlock, 0, 0};
      const octavo_layer_step step = {&attention, &write, positions.data(), rows, nullptr};
      const size_t cache = size_t(kBlocks) * kKvHeads * kHead * kBlock;
      Array k[2] = {Array::normal(random, cache, kv_dtype), Array()}, v[2] = {Array::normal(random, cache, kv_dtype), Array()};
      Array x[2] = {Array::normal(random, rows * kHidden), Array()};
      k[1] = k[0], v[1] = v[0], x[1] = x[0];
      octavo_layer one_call = layer.l;
      one_call.k_cache = k[0].data(), one_call.v_cache = v[0].data();
      r.that(!octavo_decoder_layer(&one_call, &step, x[0].floats()), "status");
      r.that(single_calls(layer.l, step, x[1], k[1], v[1]), "status");
      const size_t meant = 10 * kHidden * 4;  // padding's row is nobody's
      r.that(!std::memcmp(x[0].data(), x[1].data(), meant), "%s: one call gives other bits", name_of(format));
      r.that(k[0] == k[1] && v[0] == v[1], "%s: one call writes another cache", name_of(format));
      r.saw(x[0].data(), meant);
      for (size_t i = 0; i < meant / 4; ++i) r.that(std::isfinite(x[0][i]), "a result is not finite");
      octavo_layer wrong = one_call;
      wrong.down.k = kMiddle / 2;
      r.that(octavo_decoder_layer(&wrong, &step, x[0].floats()) == OCTAVO_BAD_ARGUMENT, "a wrong shape is refused");
    }
}

namespace {

constexpr int kLayers = 3, kManyBlocks = 64;

// A step of many rows: prompts that begin, prompts that go on behind what is cached, single tokens with long and
// short contexts, a row of padding. Every layer's K and V lie in one region, block by block.
struct ManyRows {
  static constexpr int kTable = 12;
  std::vector<int64_t> positions, slots;
  std::vector<int32_t> tables, start = {0}, context;
  octavo_attention_step attention;
  octavo_write_step write;
  octavo_layer_step step;
  int64_t k_elements, layer_elements, block_elements;

  ManyRows(Random &random, int kv_dtype, bool backwards) {
    std::vector<int32_t> free;
    for (int i = 0; i < kManyBlocks; ++i) free.push_back(i);
    for (int i = kManyBlocks - 1; i > 0; --i) std::swap(free[i], free[random.below(i + 1)]);
    auto add = [&](int rows, int seen) {
      std::vector<int32_t> table(kTable, -1);
      for (int i = 0; i * kBlock < seen; ++i) table[i] = free.back(), free.pop_back();
      for (int p = seen - rows; p < seen; ++p)
        positions.push_back(p), slots.push_back(int64_t(table[p / kBlock]) * kBlock + p % kBlock);
      tables.insert(tables.end(), table.begin(), table.end());
      start.push_back(static_cast<int32_t>(positions.size())), context.push_back(seen);
    };
    add(1, 150);
    add(70, 70);
    for (int i = 0; i < 9; ++i) add(1, 1 + 5 * i);
    add(45, 61);
    add(40, 75);
    for (int i = 0; i < 8; ++i) add(1, 17);
    if (backwards)  // the first sequence sees a block that the last one writes
      tables[0] = tables[(context.size() - 1) * kTable + 1] = free.back(), slots.back() = int64_t(free.back()) * kBlock;
    positions.push_back(-1), slots.push_back(-1);
    const int64_t rows = static_cast<int64_t>(positions.size());
    k_elements = kKvHeads * kHead * kBlock, layer_elements = 2 * k_elements;
    block_elements = kLayers * layer_elements + 32;
    attention = {tables.data(), start.data(), context.data(), kTable, kHeads * kHead, kQkv,
                 static_cast<int32_t>(context.size()), OCTAVO_F32, kv_dtype, kHeads, kKvHeads, kHead, kHead, kBlock,
                 block_elements, block_elements};
    write = {slots.data(), rows, kQkv, kQkv, OCTAVO_F32, kv_dtype, kKvHeads, kHead, kHead, kBlock,
             block_elements, block_elements};
    step = {&attention, &write, positions.data(), rows, nullptr};
  }
  ManyRows(const ManyRows &) = delete;

  void place(octavo_layer &l, int i, Array &region) const {
    l.k_cache = region.at(i * layer_elements), l.v_cache = region.at(i * layer_elements + k_elements);
  }
};

// Where only the last rows of sequences are wanted, those are the ones of all rows, and so is the cache.
void test_tails(Report &r, const octavo_layer *const *all, const octavo_layer_step *const *steps, ManyRows &many,
                std::vector<octavo_layer> &own, const Array &x, const Array &cache, const Array &all_x,
                const Array &all_cache, Array &region) {
  const int sequences = many.attention.sequences;
  Array out;
  auto run = [&](const std::vector<int32_t> &tails) {
    out = x, region = cache;
    for (int i = 0; i < kLayers; ++i) many.place(own[i], i, region);
    many.step.tails = tails.data();
    const int status = octavo_decoder_layers(all, steps, kLayers, out.floats());
    many.step.tails = nullptr;
    return status;
  };
  for (int kind = 0; kind < 4; ++kind) {  // none, the last of each, all of each, any number of some
    std::vector<int32_t> tails;
    for (int s = 0; s < sequences; ++s) {
      const int rows = many.start[s + 1] - many.start[s];
      tails.push_back(kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? rows : s * 7 % (rows + 1));
    }
    r.that(!run(tails), "status");
    r.that(region == all_cache, "tails of kind %d write another cache", kind);
    for (int s = 0; s < sequences; ++s) {
      const int64_t from = int64_t(many.start[s + 1] - tails[s]) * kHidden;
      r.that(!std::memcmp(out.floats() + from, all_x.floats() + from, size_t(tails[s]) * kHidden * 4),
             "tails of kind %d: other bits in sequence %d", kind, s);
    }
  }
  std::vector<int32_t> wrong(sequences, 1);
  for (int number : {-1, 2}) {
    wrong[0] = number;
    r.that(run(wrong) == OCTAVO_BAD_ARGUMENT, "a tail of %d rows of one is refused", number);
  }
}

// From ids to logits in one call: the bits of its parts one after the other. Of all rows, and of some in any order.
void test_logits(Report &r, Random &random, int format, const octavo_layer *const *layers,
                 const octavo_layer_step *const *steps, const Array &cache, Array &used) {
  constexpr int kVocab = 70;
  const int64_t rows = steps[0]->rows;
  std::vector<void *> memory;
  const auto packed = [&](int64_t n) {
    octavo_weight w = {nullptr, n, kHidden, format, 32, 0};
    void *data = nullptr;
    if (posix_memalign(&data, 64, static_cast<size_t>(octavo_weight_bytes(&w)))) std::abort();
    memory.push_back(data);
    w.data = data;
    const Array source = Array::normal(random, n * kHidden, OCTAVO_F32, 0.2);
    const void *const parts[] = {source.data()};
    if (has_codes(format))
      Codes(source, format, 32).pack(w);
    else
      octavo_pack_weight(&w, parts, &n, OCTAVO_F32);
    return w;
  };
  const Array norm = Array::normal(random, kHidden);
  octavo_ends ends = {packed(kVocab), packed(kVocab + 3), norm.floats(), 1e-5f, 1.0f};
  std::vector<int64_t> ids(rows), wanted = {rows - 2, 0, 3, 3};
  for (int64_t &id : ids) id = random.below(kVocab);

  Array x(rows * kHidden), normed(rows * kHidden), all(rows * ends.head.n), some(rows * ends.head.n);
  used = cache;
  octavo_unpack_rows(&ends.embedding, x.floats(), ids.data(), rows);
  r.that(!octavo_decoder_layers(layers, steps, kLayers, x.floats()), "status");
  const octavo_norm how = {rows, 1, kHidden, kHidden, kHidden, kHidden, kHidden, OCTAVO_F32, OCTAVO_F32, 1e-5f, 1.0f};
  octavo_rms_norm(&how, normed.data(), x.data(), norm.floats());
  octavo_linear(&ends.head, all.floats(), ends.head.n, normed.floats(), kHidden, rows, nullptr);

  const size_t bytes = size_t(ends.head.n) * 4;
  const auto run = [&](const int64_t *which, int64_t count) {
    used = cache;
    return octavo_decoder_logits(layers, steps, kLayers, &ends, ids.data(), which, count, some.floats(), ends.head.n);
  };
  r.that(!run(nullptr, rows), "status");
  r.that(!std::memcmp(some.data(), all.data(), size_t(rows - 1) * bytes), "%s: logits in one call have other bits",
         name_of(format));
  r.that(!run(wanted.data(), int64_t(wanted.size())), "status");
  for (size_t i = 0; i < wanted.size(); ++i)
    r.that(!std::memcmp(some.at(i * ends.head.n), all.at(wanted[i] * ends.head.n), bytes),
           "%s: logits of a wanted row have other bits", name_of(format));
  r.that(!run(nullptr, 0), "no logits at all");
  ends.head.k = kHidden / 2;
  r.that(run(nullptr, rows) == OCTAVO_BAD_ARGUMENT, "a head of another width is refused");
  for (void *each : memory) std::free(each);
}

}  // namespace

void test_decoder_layers(Report &r) {
  Random random(42);
  for (int format : {OCTAVO_F32, OCTAVO_INT8, OCTAVO_INT4, OCTAVO_CODES8, OCTAVO_CODES4})
    for (bool backwards : {false, true}) {
      const int kv_dtype = format == OCTAVO_INT8 ? OCTAVO_F16 : OCTAVO_F32;
      std::vector<std::unique_ptr<Layer>> layers;
      for (int i = 0; i < kLayers; ++i) layers.push_back(std::make_unique<Layer>(random, format, OCTAVO_SILU, i > 0));
      layers[1]->l.attention.window = 33;
      ManyRows many(random, kv_dtype, backwards);
      // The same step described twice: layers of different KV groups have one each.
      const octavo_attention_step also_attention = many.attention;
      octavo_layer_step also = {&also_attention, &many.write, many.positions.data(), many.step.rows, nullptr};
      const octavo_layer_step *const steps[] = {&many.step, &also, &many.step};
      const int64_t rows = many.step.rows;
      Array region[2] = {Array::normal(random, kManyBlocks * many.block_elements, kv_dtype), Array()};
      Array x[2] = {Array::normal(random, rows * kHidden), Array()};
      region[1] = region[0], x[1] = x[0];
      for (int i = 0; i < kLayers; ++i) {
        octavo_layer l = layers[i]->l;
        many.place(l, i, region[1]);
        r.that(!octavo_decoder_layer(&l, &many.step, x[1].floats()), "status");
      }
      std::vector<octavo_layer> own;
      for (int i = 0; i < kLayers; ++i) own.push_back(layers[i]->l), many.place(own[i], i, region[0]);
      const octavo_layer *const all[] = {&own[0], &own[1], &own[2]};
      const Array first = x[0], cache = region[0];
      for (int spins : {0, 1, 200, 200}) {  // waiters that sleep at once, nearly at once, and hardly ever
        octavo_set_threads(octavo_threads(), spins);
        x[0] = first, region[0] = cache;
        for (int i = 0; i < kLayers; ++i) many.place(own[i], i, region[0]);
        r.that(!octavo_decoder_layers(all, steps, kLayers, x[0].floats()), "status");
        const size_t meant = size_t(rows - 1) * kHidden * 4;  // padding's row is nobody's
        r.that(!std::memcmp(x[0].data(), x[1].data(), meant), "%s: all layers in one call give other bits", name_of(format));
        r.that(region[0] == region[1], "%s: all layers in one call write another cache", name_of(format));
      }
      r.saw(x[0].data(), size_t(rows - 1) * kHidden * 4);
      test_tails(r, all, steps, many, own, first, cache, x[1], region[1], region[0]);
      for (int i = 0; i < kLayers; ++i) many.place(own[i], i, region[0]);
      test_logits(r, random, format, all, steps, cache, region[0]);
      // A layer that cannot be run: nobody waits for it.
      own[1].down.k = kMiddle / 2;
      r.that(octavo_decoder_layers(all, steps, kLayers, x[0].floats()) == OCTAVO_BAD_ARGUMENT, "a wrong shape is refused");
    }
}
