// A decoder layer in one call against the same layer as single calls, to the last bit.
#include <cstdlib>

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
  for (int format : {OCTAVO_F32, OCTAVO_BF16, OCTAVO_F16, OCTAVO_INT8, OCTAVO_INT4})
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
                                               kv_dtype, kHeads, kKvHeads, kHead, kHead, kBlock};
      const octavo_write_step write = {slots.data(), rows, kQkv, kQkv, OCTAVO_F32, kv_dtype, kKvHeads, kHead, kHead, kBlock};
      const octavo_layer_step step = {&attention, &write, positions.data(), rows};
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
