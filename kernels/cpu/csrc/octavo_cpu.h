/* The whole C ABI of the CPU kernels: plain pointers and sizes, no Python, no torch.
 *
 * Strides count elements, not bytes. Functions that return int give 0, or a negative
 * octavo_status. Nothing here checks shapes: that is the caller's work, once per step. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define OCTAVO_CPU_ABI 5

#if defined(_WIN32)
#define OCTAVO_API __declspec(dllexport)
#else
#define OCTAVO_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* INT8 and INT4: quantised weights whose products quantise the activations too. CODES8 and CODES4: the same of a
 * checkpoint's codes, by float32 activations, as if the weight lay there in float32. */
enum octavo_dtype {
  OCTAVO_F32 = 0, OCTAVO_BF16 = 1, OCTAVO_F16 = 2, OCTAVO_INT8 = 3, OCTAVO_INT4 = 4, OCTAVO_CODES8 = 5, OCTAVO_CODES4 = 6
};
enum octavo_status { OCTAVO_OK = 0, OCTAVO_BAD_ARGUMENT = -1, OCTAVO_NO_MEMORY = -2 };
enum octavo_activation { OCTAVO_SILU = 0, OCTAVO_GELU = 1, OCTAVO_GELU_TANH = 2 };
enum octavo_rotary_style { OCTAVO_NEOX = 0, OCTAVO_INTERLEAVED = 1 };

/* --- the library itself --- */
OCTAVO_API int octavo_abi_version(void);
OCTAVO_API const char *octavo_isa(void);  /* the variant in use */
OCTAVO_API const char *octavo_isas(void); /* variants this CPU can run, best first */
OCTAVO_API int octavo_force_isa(const char *name);
/* Resizes the library's pool of threads, the caller included; spins: how often a waiter looks before it
 * sleeps, negative for the default. Returns the number of threads there are now. */
OCTAVO_API int octavo_set_threads(int threads, int spins);
OCTAVO_API int octavo_threads(void);

/* --- where the time goes, and what the machine could do --- */
enum octavo_phase { /* in a fused layer norms quantise what they make: that counts as norm */
  OCTAVO_LINEAR = 0, OCTAVO_ATTENTION, OCTAVO_NORM, OCTAVO_ROTARY_AND_KV, OCTAVO_ACTIVATION,
  OCTAVO_QUANTIZE, OCTAVO_EMBEDDING, OCTAVO_SAMPLE, OCTAVO_WAIT, OCTAVO_PHASES
};
/* Sets the counters to zero and switches them on or off. They belong to one calling thread. */
OCTAVO_API void octavo_profile(int enable);
OCTAVO_API void octavo_profile_read(double *seconds); /* [OCTAVO_PHASES] since octavo_profile */
enum octavo_peak_kind { OCTAVO_PEAK_F32 = 0, OCTAVO_PEAK_INT8 = 1 };
/* Multiplies and adds in registers alone, on all threads: `rounds` for each of many pieces. Returns how
 * many operations were done (a multiply-add is two), or negative for an unknown kind. */
OCTAVO_API double octavo_peak(int kind, int64_t rounds);
/* Reads memory front to back on all threads; bytes: a multiple of 64. Returns the XOR of its words. */
OCTAVO_API uint32_t octavo_read(const void *data, int64_t bytes);

/* --- KV cache: K [blocks, kv_heads, head_size, block_size],
 *               V [blocks, kv_heads, block_size, head_size_v]; from one block to the next are the
 *               step's k_block_stride and v_block_stride elements, 0 if they touch --- */
typedef struct {
  const int64_t *slots; /* [tokens]: block * block_size + offset; negative: skip */
  int64_t tokens, k_row_stride, v_row_stride;
  int32_t x_dtype, kv_dtype, kv_heads, head_size, head_size_v, block_size;
  int64_t k_block_stride, v_block_stride;
} octavo_write_step;
OCTAVO_API int octavo_write_kv(const octavo_write_step *step, void *k_cache, void *v_cache,
                               const void *k, const void *v);

/* Of each block `block_bytes` are moved; blocks of the cache are `stride` bytes apart, those of `out` and
 * `in` touch. */
OCTAVO_API void octavo_copy_blocks(void *cache, size_t block_bytes, size_t stride, const int64_t *pairs,
                                   int64_t count); /* pairs [count, 2]: source, destination */
OCTAVO_API void octavo_gather_blocks(void *out, const void *cache, size_t block_bytes, size_t stride,
                                     const int64_t *ids, int64_t count);
OCTAVO_API void octavo_scatter_blocks(void *cache, const void *in, size_t block_bytes, size_t stride,
                                      const int64_t *ids, int64_t count);

/* --- attention --- */
typedef struct {                /* what holds for every layer of one step */
  const int32_t *block_tables;  /* [sequences, table_stride] */
  const int32_t *query_start;   /* [sequences + 1] */
  const int32_t *context_lens;  /* [sequences], the step's own rows included */
  int64_t table_stride, out_row_stride, q_row_stride;
  int32_t sequences, x_dtype, kv_dtype;
  int32_t q_heads, kv_heads, head_size, head_size_v, block_size;
  int64_t k_block_stride, v_block_stride; /* as in octavo_write_step */
} octavo_attention_step;
typedef struct {       /* what holds for one layer over all steps */
  const float *sinks;  /* [q_heads] extra logits in the denominator, or NULL */
  float scale, softcap; /* softcap 0: none */
  int32_t window;      /* 0: none; else each query sees this many positions, itself included */
} octavo_attention_layer;
OCTAVO_API int octavo_paged_attention(const octavo_attention_step *step,
                                      const octavo_attention_layer *layer, void *out,
                                      const void *q, const void *k_cache, const void *v_cache);

/* --- the rest of a layer --- */
typedef struct { /* rows x heads vectors of n elements, each normalised by itself */
  int64_t rows, heads, n, out_row_stride, out_head_stride, x_row_stride, x_head_stride;
  int32_t dtype, weight_dtype;
  float eps, weight_offset; /* weight_offset 1: weights are stored minus one (Gemma) */
} octavo_norm;
OCTAVO_API int octavo_rms_norm(const octavo_norm *p, void *out, const void *x, const void *weight);
/* residual += x, out = norm(residual); residual is laid out as x_* say for its own strides. */
OCTAVO_API int octavo_add_rms_norm(const octavo_norm *p, void *out, void *residual,
                                   int64_t residual_row_stride, const void *x, const void *weight);

OCTAVO_API int octavo_rotary(void *q, void *k, const void *positions, int positions_are_64,
                             const float *cos_sin, int64_t tokens, int q_heads, int kv_heads,
                             int head_size, int rotary_dim, int64_t q_row_stride,
                             int64_t k_row_stride, int style, int dtype);

OCTAVO_API int octavo_act_and_mul(void *out, const void *gate_up, int64_t rows, int64_t n,
                                  int64_t out_row_stride, int64_t x_row_stride, int kind,
                                  int dtype);

/* --- matrix products with packed weights --- */
#define OCTAVO_INT8_MAX_K 65536 /* up to here also sums of extreme codes are exact in float32 */
typedef struct {
  const void *data; /* packed, 64-byte aligned: see linear.h; its layout belongs to the variant in use */
  int64_t n, k;     /* outputs, inputs */
  int32_t format;   /* octavo_dtype */
  int32_t group;    /* int4, codes8, codes4: inputs that share a scale */
  int32_t gated;    /* n / 2 gate rows, then n / 2 up rows, laid side by side */
} octavo_weight;
/* Bytes that `data` needs, or negative for a size or format that cannot be packed. */
OCTAVO_API int64_t octavo_weight_bytes(const octavo_weight *w);
/* Fills w->data from parts [part_rows[i], k] of one float dtype, stacked to n rows. int8 and int4 are
 * quantised here: per row, and per row and group. codes8 and codes4 are refused: they have codes from the start. */
OCTAVO_API int octavo_pack_weight(const octavo_weight *w, const void *const *parts,
                                  const int64_t *part_rows, int dtype);
/* Fills w->data from given codes [n, k]. int8: int8 codes, float32 scales [n]. int4, codes4: a code a byte,
 * float16 scales and minima [n, k / group]. codes8: int8 codes, float16 scales [n, k / group].
 * Value = code * scale + minimum. */
OCTAVO_API int octavo_pack_codes(const octavo_weight *w, const void *codes, const void *scales,
                                 const void *minima);
/* out[i] = row rows[i] of w as float32 [count, k]: an embedding's lookup. */
OCTAVO_API int octavo_unpack_rows(const octavo_weight *w, float *out, const int64_t *rows,
                                  int64_t count);
/* out [rows, n] = x [rows, k] * w^T + bias (or NULL), all float32. Integer weights quantise x
 * by row, to a scale for 64 inputs (int8) or for the weight's group (int4). */
OCTAVO_API int octavo_linear(const octavo_weight *w, float *out, int64_t out_row_stride,
                             const float *x, int64_t x_row_stride, int64_t rows,
                             const float *bias);

/* --- a whole decoder layer in one call: norm, attention, norm, gated feed-forward, both added to x --- */
typedef struct { /* what one layer never changes */
  const float *norm_1, *norm_2; /* [hidden] */
  octavo_weight qkv, out, gate_up, down;
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias; /* or NULL */
  const float *cos_sin; /* [positions, rotary_dim] */
  octavo_attention_layer attention;
  void *k_cache, *v_cache;
  float eps, norm_offset;
  int32_t rotary_dim, rotary_style, act;
} octavo_layer;
typedef struct { /* what holds for every layer of one step; q, k and v are columns of one buffer */
  const octavo_attention_step *attention;
  const octavo_write_step *write;
  const int64_t *positions; /* [rows], negative for padding */
  int64_t rows;
  const int32_t *tails; /* [sequences] or NULL: of the last layer's x only so many last rows of each sequence
                           are wanted; the others, and padding's, are undefined then */
} octavo_layer_step;
/* x [rows, hidden], contiguous float32: the residual stream, in place. */
OCTAVO_API int octavo_decoder_layer(const octavo_layer *layer, const octavo_layer_step *step,
                                    float *x);
/* The same for `count` layers, one after the other; steps[i] belongs to layers[i]. */
OCTAVO_API int octavo_decoder_layers(const octavo_layer *const *layers,
                                     const octavo_layer_step *const *steps, int64_t count, float *x);

typedef struct { /* what stands before a model's layers and behind them */
  octavo_weight embedding, head;
  const float *norm; /* [hidden] */
  float eps, norm_offset;
} octavo_ends;
/* logits [count, head.n] of the residual stream's rows logits_rows (NULL: all in order), which begins as the
 * embedding's rows ids [steps[0]->rows]: that, all layers, norm and head. */
OCTAVO_API int octavo_decoder_logits(const octavo_layer *const *layers,
                                     const octavo_layer_step *const *steps, int64_t layer_count,
                                     const octavo_ends *ends, const int64_t *ids,
                                     const int64_t *logits_rows, int64_t count, float *logits,
                                     int64_t logits_stride);

/* --- sampling, from float32 logits [rows, vocab]; a NULL array means "off" for every row; -1 where no token
 * is allowed, the largest logit is infinite or one is a NaN --- */
OCTAVO_API int octavo_sample(int64_t *out, const float *logits, int64_t rows, int64_t vocab,
                             int64_t row_stride, const float *temperature, const int32_t *top_k,
                             const float *top_p, const float *min_p, const uint64_t *seed,
                             const uint64_t *counter);
/* Per row: log-probability of ids[row], 1 + number of tokens with a larger logit, logsumexp. */
OCTAVO_API int octavo_token_logprobs(float *logprob, int64_t *rank, float *logsumexp,
                                     const float *logits, const int64_t *ids, int64_t rows,
                                     int64_t vocab, int64_t row_stride);
/* out[i]: of row rows[i] the largest logit (the lowest such token) whose bit (v % 32 of word v / 32) in
   words[i * row_words ...] is 1; -1 if it is not finite, there is none, or one is a NaN. */
OCTAVO_API int octavo_best_allowed(int64_t *out, const float *logits, int64_t vocab,
                                   int64_t row_stride, const int64_t *rows, const uint32_t *words,
                                   int64_t row_words, int64_t count);
/* Logits that may not be drawn become -infinity: of rows[i] those whose bit (v % 32 of word v / 32) in
   words[i * row_words ...] is 0. */
OCTAVO_API void octavo_mask_logits(float *logits, int64_t vocab, int64_t row_stride,
                                   const int64_t *rows, const uint32_t *words, int64_t row_words,
                                   int64_t count);
#ifdef __cplusplus
}
#endif
