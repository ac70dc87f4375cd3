/* te_attention_ops.h: supporting operations, which a model runs before and after the operation of
   te_attention.h: KV caches, ragged and padded batches, random state, merging of partial results,
   context parallelism, softmax, fp8 casts. Plain C11; no function throws.

   Every function ends with (device, stream): device -1 is the host, where pointers are host
   pointers and stream is ignored; otherwise it is the index of a GPU, pointers are device pointers
   and the work is ordered on stream (CUstream_st*). The structs themselves are always on the host
   and may be reused after the call; they follow the growth rules of te_attention.h: struct_size
   first, zero means the default.

   TEA_INVALID: invalid argument; tea_error() has its name, the value seen and the value needed, and
   nothing has been written. TEA_UNSUPPORTED: this build cannot run on that device. The contents of
   cu_seqlens, offsets and tables are data: invalid values are skipped or clamped to the capacity,
   never lead to accesses outside a tensor, and are reported by bits TEA_STATUS_* OR-ed into *status
   (may be NULL).

   On a GPU no call allocates memory or synchronises, so that every call can be captured in a graph.
   The host computes in fp64 and rounds once; a GPU computes in fp32, for fp64 tensors in fp64.
   Copies, casts, counts and random numbers are bitwise equal on both (a NaN may lose its sign).

   Sizes count elements, rows or tokens unless a name ends in _bytes. Strides are in elements, the
   last dimension is contiguous; all zero means contiguous in the order stated at the field.
   Tensors of one call must not overlap except where a comment permits it. */
#ifndef TE_ATTENTION_OPS_H_
#define TE_ATTENTION_OPS_H_
#include "te_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- KV cache ------------------------------------------------------------------------------- */

/* Appends new tokens of K and V to their caches. Token i of sequence n goes to position
   p = cached_n - new_n + i, that is row p % page_size of page page_table[n, p / page_size]. */
typedef struct tea_kv_append {
  uint32_t struct_size;
  int32_t dtype;    /* of the caches, and of new_k and new_v (but see new_dtype) */
  int32_t new_form; /* TEA_DENSE: new_k is [batch, max_new, heads, dim_k]; TEA_RAGGED: [tokens_new,
                       heads, dim_k], sequence n starts at cu_new[n] */
  int32_t reindex;  /* 1: page_table is int32 [batch], the cache rows that contain the sequences.
                       Row page_table[n] moves to row n first (cached_n - new_n tokens), n ascending
                       up to the last descent of the list; then the new tokens go to row n.
                       Nothing moves if the list counts up from 0 by ones. */
  const void *new_k, *new_v;
  void *k_cache, *v_cache;   /* [pages, page_size, heads, dim_k] and [.., dim_v] */
  const int32_t* page_table; /* [batch, pages_per_sequence], for K and V. NULL: page of n is n */
  const int32_t* cu_new;     /* [batch + 1]: new_n = cu_new[n + 1] - cu_new[n] */
  const int32_t* cu_cached;  /* [batch + 1]: cached_n likewise, including the new tokens */
  int64_t batch, heads, dim_k, dim_v;
  int64_t max_new, tokens_new; /* rows of a sequence of a dense side; rows of a ragged one. The
                                  other is zero */
  int64_t batch_new; /* number of sequences in a dense new_k (the first ones). Default: batch */
  int64_t pages, page_size, pages_per_sequence; /* pages_per_sequence: default 1 */
  tea_strides new_k_stride, new_v_stride;
  tea_strides k_cache_stride, v_cache_stride; /* the batch stride is that of pages */
  int32_t* status;
  int32_t new_dtype; /* of new_k and new_v: fp16, bf16 or fp32 with caches of FP8. An element x is
                        stored as cast(x / scale_inv). Default: dtype, and elements are copied */
  int32_t kv_scale;  /* tea_kv_scale: the shape of k_scale_inv and v_scale_inv */
  const float *k_scale_inv, *v_scale_inv; /* [1] or [heads]; only with new_dtype. NULL: 1 */
} tea_kv_append;
TEA_API tea_status tea_kv_cache_append(const tea_kv_append* args, int device, void* stream);

/* ---- Ragged and padded batches -------------------------------------------------------------- */

/* Copies between thd [tokens, heads, dim] and bshd [batch, seqlen, heads, dim]. Sequence i has
   cu_seqlens[i + 1] - cu_seqlens[i] tokens; in thd it starts at offsets[i], or at cu_seqlens[i]
   without offsets. sbhd and packed buffers are a choice of strides. */
typedef struct tea_thd_convert {
  uint32_t struct_size;
  int32_t dtype;
  int32_t zero_fill; /* 1: output rows without a token become zero; 0: they are not written */
  int32_t reserved;  /* zero */
  const void* input;
  void* output;
  const int32_t* cu_seqlens; /* [batch + 1] */
  const int32_t* offsets;    /* [batch] or longer; or NULL */
  int64_t batch, seqlen, tokens, heads, dim;
  tea_strides bshd_stride, thd_stride; /* thd: batch is not read */
  int32_t* status;
} tea_thd_convert;
TEA_API tea_status tea_thd_to_bshd(const tea_thd_convert* args, int device, void* stream);
TEA_API tea_status tea_bshd_to_thd(const tea_thd_convert* args, int device, void* stream);

/* Cumulative lengths, starting at 0, from lengths or from a padding mask: exactly one of the two.
   A negative length counts as 0 and sums saturate at 2^31 - 1; both set TEA_STATUS_BAD_LENGTHS. */
typedef struct tea_cu_seqlens {
  uint32_t struct_size;
  int32_t mask_marks_tokens; /* 1: a non-zero mask byte is a token; 0: it is padding */
  const int32_t* lengths;    /* [batch] */
  const uint8_t* mask;       /* [batch, seqlen]; tokens count at any position of a row */
  int32_t* cu_seqlens;       /* written: [batch + 1] */
  int64_t batch, seqlen;     /* seqlen: only with mask */
  int32_t* status;
} tea_cu_seqlens;
TEA_API tea_status tea_cu_seqlens_fill(const tea_cu_seqlens* args, int device, void* stream);

/* ---- Random state ---------------------------------------------------------------------------
   rng_state is int64 [2] = {seed, offset}, read as unsigned; see TEA_RNG_STATE. */

TEA_API tea_status tea_rng_fill(int64_t* rng_state, uint64_t seed, uint64_t offset, int device,
                                void* stream);
/* For captured graphs: {*seed, *offset + offset_in_graph}, read when the graph runs. offset may be
   NULL: 0. */
TEA_API tea_status tea_rng_fill_captured(int64_t* rng_state, const int64_t* seed,
                                         const int64_t* offset, uint64_t offset_in_graph,
                                         int device, void* stream);
/* offset += increment, modulo 2^64. One forward uses one offset, so any increment above 0 selects a
   new dropout mask. */
TEA_API tea_status tea_rng_advance(int64_t* rng_state, uint64_t increment, int device,
                                   void* stream);

/* The dropout mask of forward and backward for this state and origin, one byte per element:
   1 keeps, 0 drops. */
typedef struct tea_dropout_mask {
  uint32_t struct_size;
  float dropout;            /* probability of dropping, in [0, 1) */
  uint8_t* keep;            /* written: [batch, heads, rows, cols] */
  const int64_t* rng_state; /* [2] */
  int64_t batch, heads, rows, cols;
  int64_t origin[4];            /* batch, head, row, column of this shard, 0 .. 2^40; see tea_run */
  const int64_t* origin_device; /* int64 [4], used instead of origin, clamped; or NULL */
} tea_dropout_mask;
TEA_API tea_status tea_dropout_keep(const tea_dropout_mask* args, int device, void* stream);

/* ---- Merging partial results ----------------------------------------------------------------
   O = sum_i exp(LSE_i - LSE) O_i and LSE = log sum_i exp(LSE_i), natural logs, for keys split over
   `parts` calls of forward (split KV, context parallelism). A part whose LSE is -inf is ignored,
   for any value of its O; if all are -inf, O = 0 and LSE = -inf. Only one part may have a sink. */
typedef struct tea_merge {
  uint32_t struct_size;
  int32_t part_dtype;              /* of every part_o */
  int32_t o_dtype;                 /* default: part_dtype */
  int32_t parts;                   /* at least 1; on a GPU at most 120 */
  const void* const* part_o;       /* host array [parts] of [batch, rows, heads, dim] */
  const void* const* part_lse;     /* host array [parts] of [batch, heads, rows]: fp32, and fp64
                                      where part_dtype is, as forward writes them */
  void* o;                         /* [batch, rows, heads, dim]; may be a part with equal strides
                                      and dtype */
  void* lse;                       /* [batch, heads, rows] of that type; may be a part likewise; or
                                      NULL */
  int64_t batch, rows, heads, dim; /* ragged: batch 1, rows = tokens */
  tea_strides part_o_stride, o_stride;
  tea_strides part_lse_stride, lse_stride; /* default: [batch, heads, rows] */
} tea_merge;
TEA_API tea_status tea_merge_parts(const tea_merge* args, int device, void* stream);

/* ---- Context parallelism on ragged batches --------------------------------------------------
   cu_seqlens (int32 [batch + 1]) holds padded lengths. Load balance: each sequence is cut into
   2 * world chunks, and rank r owns chunks r and 2 * world - 1 - r, in that order, for each
   sequence. On a rank the two chunks are the first and the second half of the sequence, so lengths
   are even there, and a "half" tensor holds one half of every sequence: sequence i has its rows
   cu_seqlens[i] / 2 .. cu_seqlens[i + 1] / 2. Rows past the last sequence are not written. */

/* half[s, cu[i]/2 + c] = tensor[s, cu[i] + second * len_i/2 + c], for c < len_i/2. */
typedef struct tea_cp_half {
  uint32_t struct_size;
  int32_t second;     /* 0: first halves, 1: second halves */
  const void* tensor; /* [slabs, tokens, row_bytes] */
  void* half;         /* [slabs, tokens / 2, row_bytes] */
  const int32_t* cu_seqlens;
  int64_t batch, slabs, tokens, row_bytes; /* slabs: default 1 */
  int32_t* status;
} tea_cp_half;
TEA_API tea_status tea_cp_read_half(const tea_cp_half* args, int device, void* stream);

/* The LSE of the second halves. packed: lse [heads, lse_len >= tokens], half_lse [heads, half_len];
   else lse [batch, heads, lse_len] and half_lse [batch, heads, half_len], where the second half of
   sequence i starts at row len_i/2. fp32. */
typedef struct tea_cp_lse {
  uint32_t struct_size;
  int32_t packed;
  float *lse, *half_lse;
  const int32_t* cu_seqlens;
  int64_t batch, heads, lse_len, half_len;
  int32_t* status;
} tea_cp_lse;
/* lse = log(exp(lse) + exp(half_lse)) in place; -inf with -inf gives -inf. */
TEA_API tea_status tea_cp_lse_correct(const tea_cp_lse* args, int device, void* stream);
/* half_lse = lse of the second halves; other elements of half_lse are not written. */
TEA_API tea_status tea_cp_lse_read(const tea_cp_lse* args, int device, void* stream);

/* out += step_out * exp(step_lse - lse): the product is rounded to dtype, then the sum. A step_out
   of exactly 0 and a step_lse of -inf add 0. LSE as in tea_cp_lse, packed or not. */
typedef struct tea_cp_out {
  uint32_t struct_size;
  int32_t dtype;            /* of out and step_out: fp16, bf16, fp32, fp64 */
  int32_t only_second_half; /* 1: step_out and step_lse are half tensors of the second halves */
  int32_t packed;
  void* out;            /* [tokens, heads, dim] */
  const void* step_out; /* [tokens, heads, dim], or half the tokens */
  const float *lse, *step_lse;
  const int32_t* cu_seqlens;
  int64_t batch, tokens, heads, dim, lse_len, step_lse_len;
  int32_t* status;
} tea_cp_out;
TEA_API tea_status tea_cp_out_correct(const tea_cp_out* args, int device, void* stream);

typedef enum tea_cp_action { TEA_CP_NONE = 0, TEA_CP_ADD = 1, TEA_CP_COPY = 2 } tea_cp_action;

/* Applies `first` to the first half of every sequence of grad and `second` to the second. Exactly
   one is TEA_CP_NONE: step_grad is a half tensor of the other half; or one adds and one copies:
   step_grad has all rows. Sums are rounded to dtype. */
typedef struct tea_cp_grad {
  uint32_t struct_size;
  int32_t dtype;         /* fp16, bf16, fp32, fp64 */
  int32_t first, second; /* tea_cp_action */
  void* grad;            /* [slabs, tokens, row_elements] */
  const void* step_grad; /* [slabs, tokens or tokens / 2, row_elements] */
  const int32_t* cu_seqlens;
  int64_t batch, slabs, tokens, row_elements; /* slabs: default 1 */
  int32_t* status;
} tea_cp_grad;
TEA_API tea_status tea_cp_grad_correct(const tea_cp_grad* args, int device, void* stream);

/* indices[t] = global token of this rank's token t. For a dense sequence: batch 1, {0, seqlen}.
   A sequence whose bounds are not multiples of 2 * world is skipped and reported. */
typedef struct tea_cp_partition {
  uint32_t struct_size;
  int32_t world, rank;
  int32_t reserved;          /* zero */
  const int32_t* cu_seqlens; /* of the global sequences */
  int32_t* indices;          /* written: [tokens / world] */
  int64_t batch, tokens;     /* tokens: of all ranks, a multiple of 2 * world */
  int32_t* status;
} tea_cp_partition;
TEA_API tea_status tea_cp_partition_indices(const tea_cp_partition* args, int device, void* stream);

/* Reorders the rows of all ranks. Let src(r, t) be the index from tea_cp_partition_indices. Rank
   order is output[r * tokens / world + t] = input[src(r, t)]; sequence order is the inverse. */
typedef struct tea_cp_order {
  uint32_t struct_size;
  int32_t world;
  const void* input;
  void* output; /* both [tokens, row_bytes] */
  const int32_t* cu_seqlens;
  int64_t batch, tokens, row_bytes;
  int32_t* status;
} tea_cp_order;
TEA_API tea_status tea_cp_to_rank_order(const tea_cp_order* args, int device, void* stream);
TEA_API tea_status tea_cp_to_sequence_order(const tea_cp_order* args, int device, void* stream);

/* output[p] = input[p] for the valid tokens p. The valid tokens of sequence i are the
   cu_seqlens[i + 1] - cu_seqlens[i] rows from cu_seqlens_padded[i]. */
typedef struct tea_cp_valid {
  uint32_t struct_size;
  int32_t reserved; /* zero */
  const void* input;
  void* output; /* both [tokens, row_bytes] */
  const int32_t *cu_seqlens_padded, *cu_seqlens;
  int64_t batch, tokens, row_bytes;
  int32_t* status;
} tea_cp_valid;
TEA_API tea_status tea_cp_copy_valid(const tea_cp_valid* args, int device, void* stream);

/* ---- Interleaved QKV ------------------------------------------------------------------------
   Forward: input[0] is [seqlen, batch, heads, 3 * dim], where each head has q, k and v adjacent;
   output is [3, batch, seqlen, heads, dim]. Backward is the inverse: input[0..2] are the gradients
   of q, k, v as [batch, seqlen, heads, dim], output is [seqlen, batch, heads, 3 * dim]. */
typedef struct tea_flash_prepare {
  uint32_t struct_size;
  int32_t dtype;
  const void* input[3]; /* forward: the last two are NULL */
  void* output;
  int64_t seqlen, batch, heads, dim;
} tea_flash_prepare;
TEA_API tea_status tea_flash_prepare_forward(const tea_flash_prepare* args, int device,
                                             void* stream);
TEA_API tea_status tea_flash_prepare_backward(const tea_flash_prepare* args, int device,
                                              void* stream);

/* ---- Fills ---------------------------------------------------------------------------------- */

/* Fills `bytes` bytes with the low byte of value; bytes may be 0. */
TEA_API tea_status tea_fill_bytes(void* data, int value, uint64_t bytes, int device, void* stream);
/* Fills `count` elements with value, rounded to dtype. */
TEA_API tea_status tea_fill(void* data, int32_t dtype, int64_t count, double value, int device,
                            void* stream);

/* ---- Scaled softmax -------------------------------------------------------------------------
   For attention with the scores in memory: y = softmax(scale * x) over columns, and its gradient
   dx = scale * (y * dy - y * sum(y * dy)). Any number of rows and columns. */
typedef enum tea_score_mask {
  TEA_SCORE_MASK_NONE = 0,
  TEA_SCORE_MASK_GIVEN = 1,  /* mask byte 1: the scaled score becomes -10000; a row whose largest
                                score is exactly -10000 gives zeros. Backward: as NONE */
  TEA_SCORE_MASK_CAUSAL = 2, /* visible: column <= row; masked elements become 0 and are not read */
  TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT = 3 /* visible: column <= row + cols - rows, likewise; a row
                                            without a visible column is 0 */
} tea_score_mask;

typedef struct tea_scaled_softmax {
  uint32_t struct_size;
  int32_t dtype;       /* of input and output: fp16, bf16, fp32, fp64 */
  int32_t kind;        /* tea_score_mask */
  float scale;         /* rounded to dtype before use, in forward only */
  const void* input;   /* forward: x. Backward: y. [batch, heads, rows, cols] */
  const void* dout;    /* backward: dy; else NULL */
  const uint8_t* mask; /* forward with GIVEN: [mask_batch, 1, rows, cols]; else NULL */
  void* output;        /* forward: y, may be x. Backward: dx, may be dy or y */
  int64_t batch, heads, rows, cols;
  int64_t mask_batch; /* 1 or batch. Default: batch, if there is a mask */
} tea_scaled_softmax;
TEA_API tea_status tea_scaled_softmax_forward(const tea_scaled_softmax* args, int device,
                                              void* stream);
TEA_API tea_status tea_scaled_softmax_backward(const tea_scaled_softmax* args, int device,
                                               void* stream);

/* ---- FP8 casts, one scale per tensor --------------------------------------------------------
   scale multiplies before the cast, scale_inv after the load; both, and amax, are fp32 scalars on
   the device of the tensors. Casts round to nearest even and saturate; NaN stays NaN and is ignored
   in amax. The product with the scale is computed in fp32. */
typedef struct tea_fp8_cast {
  uint32_t struct_size;
  int32_t input_dtype, output_dtype; /* to fp8: output is E4M3 or E5M2. From fp8: input is */
  int32_t power_of_two; /* current scaling: 1 rounds the scale down to a power of two */
  float amax_floor;     /* current scaling: amax is at least this in the scale. Default: 0 */
  int32_t amax_given;   /* current scaling: 1 reads *amax instead of finding it. Default: 0 */
  const void* input;    /* [count] */
  void* output;         /* [count] */
  int64_t count;
  float* scale;     /* delayed: read; NULL is 1. Current: written; may be NULL */
  float* scale_inv; /* quantise: written 1 / scale; may be NULL. Dequantise: read; NULL is 1 */
  float* amax;      /* delayed: maximum of its previous value and of |input|; may be NULL.
                       Current: written, or read with amax_given; required on a GPU */
} tea_fp8_cast;
/* Delayed scaling: the scale is an input. */
TEA_API tea_status tea_fp8_quantize(const tea_fp8_cast* args, int device, void* stream);
/* Current scaling: scale = largest / amax of this input; 1 if amax is 0 or infinite. With
   amax_given several tensors share the scale of one amax; a count of 0 writes the scale alone. */
TEA_API tea_status tea_fp8_quantize_current(const tea_fp8_cast* args, int device, void* stream);
TEA_API tea_status tea_fp8_dequantize(const tea_fp8_cast* args, int device, void* stream);
/* *amax = maximum of *amax and |data|, any dtype. */
TEA_API tea_status tea_amax(const void* data, int32_t dtype, int64_t count, float* amax, int device,
                            void* stream);

/* Tensors under one scale, cast by one kernel on a GPU, or by two with current scaling. */
enum { TEA_FP8_TENSORS = 4, TEA_FP8_MAXIMA = 512 };
typedef struct tea_fp8_joint_cast {
  uint32_t struct_size;
  int32_t input_dtype, output_dtype; /* of all tensors, as in tea_fp8_cast */
  int32_t tensors;                   /* their number, 1 to TEA_FP8_TENSORS */
  int32_t power_of_two;              /* as in tea_fp8_cast */
  float amax_floor;                  /* as in tea_fp8_cast */
  const void* input[TEA_FP8_TENSORS];
  void* output[TEA_FP8_TENSORS];
  int64_t count[TEA_FP8_TENSORS];
  float *scale, *scale_inv, *amax; /* as in tea_fp8_cast, but amax may be NULL */
  float* maxima; /* current scaling on a GPU: memory for TEA_FP8_MAXIMA elements */
  /* Quantise: scales of other tensors, of which a copy and the inverse are written to copy[i][0]
     and copy[i][1], so that a later change of the scale does not matter. NULL: none */
  const float* copied[2];
  float* copy[2];
} tea_fp8_joint_cast;
TEA_API tea_status tea_fp8_quantize_joint(const tea_fp8_joint_cast* args, int device, void* stream);
TEA_API tea_status tea_fp8_quantize_joint_current(const tea_fp8_joint_cast* args, int device,
                                                  void* stream);
TEA_API tea_status tea_fp8_dequantize_joint(const tea_fp8_joint_cast* args, int device,
                                            void* stream);

/* The step of delayed scaling: scales for the next iteration from a history of amaxes. */
enum { TEA_AMAX_MAX = 0, TEA_AMAX_MOST_RECENT = 1 };
typedef struct tea_fp8_scales {
  uint32_t struct_size;
  int32_t dtype;         /* of the tensors that are scaled: E4M3 or E5M2 */
  int32_t algorithm;     /* TEA_AMAX_MAX: the largest amax of the history; MOST_RECENT: row 0 */
  float margin;          /* scale = largest / amax / 2^margin */
  int64_t length, count; /* rows of the history; scales */
  const float* amax;     /* [count] replaces row 0 first, as a reduction over ranks does; or NULL */
  float* amax_history;   /* [length, count]: row 0 collects the current iteration */
  float* scale;          /* [count]; unchanged where the amax is 0, infinite or NaN */
} tea_fp8_scales;
/* Then the history moves by one: row i becomes row i - 1, row 0 the last one; row 0 becomes 0. */
TEA_API tea_status tea_fp8_update_scales(const tea_fp8_scales* args, int device, void* stream);

#ifdef __cplusplus
}
#endif
#endif
