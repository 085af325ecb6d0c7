// Pick the best variant this CPU can run, once, at load, and forward the C ABI to it.
#include <cstring>

#include "octavo_cpu.h"
#include "runtime.h"
#include "table.h"
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

// OCTAVO_VARIANTS is V(name) for every variant that was built, best first.
#define V(name) extern const KernelTable table_##name;
OCTAVO_VARIANTS
#undef V

namespace {

#if defined(__x86_64__)
// Asked of the CPU itself: __builtin_cpu_supports does not know "f16c" before GCC 11, and needs a
// runtime that not every clang brings. XCR0 says which registers the system saves.
struct Cpu {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, eax7_1 = 0, xcr0 = 0;
  Cpu() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &ecx1, &d) || !(ecx1 >> 27 & 1 /* OSXSAVE */)) return;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &ebx7, &ecx7, &d)) {
      ebx7 = ecx7 = 0;
    } else if (a >= 1) {
      __cpuid_count(7, 1, eax7_1, b, c, d);
    }
  }
};
#elif !defined(__linux__)
constexpr int AT_HWCAP = 0, AT_HWCAP2 = 0;
unsigned long getauxval(int) { return 0; }  // elsewhere only the baseline is offered
#endif

bool all(unsigned long word, unsigned long mask) { return (word & mask) == mask; }

// Whether this CPU and its system can run a variant. Bits by number: older headers lack the names.
struct Has {
  static bool baseline() { return true; }  // what the platform's ABI guarantees: SSE2, NEON, VSX
#if defined(__x86_64__)
  static bool avx2() {
    const Cpu cpu;
    return all(cpu.xcr0, 0x06) && all(cpu.ebx7, 1u << 5) &&
           all(cpu.ecx1, 1u << 12 /* FMA */ | 1u << 29 /* F16C */);
  }
  static bool avx2_vnni() { return avx2() && all(Cpu().eax7_1, 1u << 4 /* AVX-VNNI */); }
  static bool avx512() {
    const Cpu cpu;
    return avx2() && all(cpu.xcr0, 0xe6) &&
           all(cpu.ebx7, 1u << 16 /* F */ | 1u << 17 /* DQ */ | 1u << 30 /* BW */ |
                             1u << 31 /* VL */);
  }
  static bool avx512_vnni() { return avx512() && all(Cpu().ecx7, 1u << 11); }
#elif defined(__aarch64__)
  static bool dotprod() { return all(getauxval(AT_HWCAP), 1ul << 20 /* ASIMDDP */); }
  static bool i8mm() { return dotprod() && all(getauxval(AT_HWCAP2), 1ul << 13 /* I8MM */); }
#elif defined(__powerpc64__)
  static bool power9() { return all(getauxval(AT_HWCAP2), 0x00800000 /* ARCH_3_00 */); }
  static bool power10() { return all(getauxval(AT_HWCAP2), 0x00040000 /* ARCH_3_1 */ | 0x00020000 /* MMA */); }
#endif
};

const struct Variant {
  const KernelTable *table;
  bool (*ok)();
} variants[] = {
#define V(name) {&table_##name, Has::name},
    OCTAVO_VARIANTS
#undef V
};

struct Choice {
  const KernelTable *table = nullptr;
  char names[128] = "";
  Choice() {
    for (const Variant &v : variants) {
      if (!v.ok()) continue;
      if (!table) table = v.table;
      if (names[0]) std::strcat(names, " ");
      std::strcat(names, v.table->name);
    }
  }
} choice;

// A kernel that is a phase by itself; products and whole layers count their own.
template <class F, class... A>
auto timed(int phase, F kernel, A... arguments) {
  octavo::Laps laps;
  const auto result = kernel(arguments...);
  laps(phase);
  return result;
}

}  // namespace

extern "C" {
int octavo_abi_version(void) { return OCTAVO_CPU_ABI; }
const char *octavo_isa(void) { return choice.table->name; }
const char *octavo_isas(void) { return choice.names; }
int octavo_force_isa(const char *name) {
  for (const Variant &v : variants)
    if (!std::strcmp(v.table->name, name) && v.ok()) {
      choice.table = v.table;
      return OCTAVO_OK;
    }
  return OCTAVO_BAD_ARGUMENT;
}
int octavo_write_kv(const octavo_write_step *step, void *k_cache, void *v_cache, const void *k,
                    const void *v) {
  return timed(OCTAVO_ROTARY_AND_KV, choice.table->write_kv, step, k_cache, v_cache, k, v);
}
int octavo_paged_attention(const octavo_attention_step *step, const octavo_attention_layer *layer,
                           void *out, const void *q, const void *k_cache, const void *v_cache) {
  return timed(OCTAVO_ATTENTION, choice.table->paged_attention, step, layer, out, q, k_cache, v_cache);
}
int octavo_rms_norm(const octavo_norm *p, void *out, const void *x, const void *weight) {
  return timed(OCTAVO_NORM, choice.table->rms_norm, p, out, x, weight);
}
int octavo_add_rms_norm(const octavo_norm *p, void *out, void *residual,
                        int64_t residual_row_stride, const void *x, const void *weight) {
  return timed(OCTAVO_NORM, choice.table->add_rms_norm, p, out, residual, residual_row_stride, x, weight);
}
int octavo_rotary(void *q, void *k, const void *positions, int positions_are_64,
                  const float *cos_sin, int64_t tokens, int q_heads, int kv_heads, int head_size,
                  int rotary_dim, int64_t q_row_stride, int64_t k_row_stride, int style,
                  int dtype) {
  return timed(OCTAVO_ROTARY_AND_KV, choice.table->rotary, q, k, positions, positions_are_64, cos_sin, tokens, q_heads,
                              kv_heads, head_size, rotary_dim, q_row_stride, k_row_stride, style,
                              dtype);
}
int octavo_act_and_mul(void *out, const void *gate_up, int64_t rows, int64_t n,
                       int64_t out_row_stride, int64_t x_row_stride, int kind, int dtype) {
  return timed(OCTAVO_ACTIVATION, choice.table->act_and_mul, out, gate_up, rows, n, out_row_stride, x_row_stride, kind,
                                   dtype);
}
int octavo_sample(int64_t *out, const float *logits, int64_t rows, int64_t vocab,
                  int64_t row_stride, const float *temperature, const int32_t *top_k,
                  const float *top_p, const float *min_p, const uint64_t *seed,
                  const uint64_t *counter) {
  return timed(OCTAVO_SAMPLE, choice.table->sample, out, logits, rows, vocab, row_stride, temperature, top_k, top_p,
                              min_p, seed, counter);
}
int octavo_token_logprobs(float *logprob, int64_t *rank, float *logsumexp, const float *logits,
                          const int64_t *ids, int64_t rows, int64_t vocab, int64_t row_stride) {
  return timed(OCTAVO_SAMPLE, choice.table->token_logprobs, logprob, rank, logsumexp, logits, ids, rows, vocab,
                                      row_stride);
}
int octavo_best_allowed(int64_t *out, const float *logits, int64_t vocab, int64_t row_stride,
                        const int64_t *rows, const uint32_t *words, int64_t row_words,
                        int64_t count) {
  return timed(OCTAVO_SAMPLE, choice.table->best_allowed, out, logits, vocab, row_stride, rows, words, row_words,
                                      count);
}
int64_t octavo_weight_bytes(const octavo_weight *w) { return choice.table->weight_bytes(w); }
int octavo_pack_weight(const octavo_weight *w, const void *const *parts, const int64_t *part_rows,
                       int dtype) {
  return choice.table->pack_weight(w, parts, part_rows, dtype);
}
int octavo_pack_codes(const octavo_weight *w, const void *codes, const void *scales,
                      const void *minima) {
  return choice.table->pack_codes(w, codes, scales, minima);
}
int octavo_unpack_rows(const octavo_weight *w, float *out, const int64_t *rows, int64_t count) {
  return timed(OCTAVO_EMBEDDING, choice.table->unpack_rows, w, out, rows, count);
}
int octavo_linear(const octavo_weight *w, float *out, int64_t out_row_stride, const float *x,
                  int64_t x_row_stride, int64_t rows, const float *bias) {
  return choice.table->linear(w, out, out_row_stride, x, x_row_stride, rows, bias);
}
int octavo_decoder_layer(const octavo_layer *layer, const octavo_layer_step *step, float *x) {
  return choice.table->decoder_layer(layer, step, x);
}
int octavo_decoder_layers(const octavo_layer *const *layers, const octavo_layer_step *const *steps,
                          int64_t count, float *x) {
  return choice.table->decoder_layers(layers, steps, count, x);
}
int octavo_decoder_logits(const octavo_layer *const *layers, const octavo_layer_step *const *steps,
                          int64_t layer_count, const octavo_ends *ends, const int64_t *ids,
                          const int64_t *logits_rows, int64_t count, float *logits,
                          int64_t logits_stride) {
  return choice.table->decoder_logits(layers, steps, layer_count, ends, ids, logits_rows, count, logits,
                                      logits_stride);
}
double octavo_peak(int kind, int64_t rounds) { return choice.table->peak(kind, rounds); }
uint32_t octavo_read(const void *data, int64_t bytes) { return choice.table->read(data, bytes); }
}
