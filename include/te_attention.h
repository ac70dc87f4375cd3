/* te_attention.h: fused attention. Describe a problem, plan it once, run the plan many times.
   Plain C11. No function throws; every function that can fail returns a status.

   Growth rules: a struct begins with its size in the caller's build. The library extends a shorter
   struct with zeros, and accepts a longer one if the bytes that it does not know are zero. Enum
   values and tensor indices are never renumbered. Zero always means "the default".

   A struct that a function writes also begins with its size, set by the caller and not changed. The
   function writes no more bytes than that, and zeros in fields that this library does not know. A
   size of 0 there is the size in version 0.1. A struct_size above 4096 is refused everywhere. */
#ifndef TE_ATTENTION_H_
#define TE_ATTENTION_H_
#include <stddef.h>
#include <stdint.h>

#if defined(TE_ATTENTION_STATIC)
#define TEA_API
#else
#define TEA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TEA_VERSION_MAJOR 0
#define TEA_VERSION_MINOR 1
#define TEA_VERSION_PATCH 0

typedef enum tea_status {
  TEA_OK = 0,
  TEA_INVALID =
      1, /* invalid argument: tea_error() has its name, the value seen and the value needed */
  TEA_UNSUPPORTED = 2, /* no engine accepts the problem, or the selected engine does not support
                          this run: tea_error() has every reason */
  TEA_FAILED = 3       /* failure of the machine: memory, driver */
} tea_status;

typedef enum tea_dtype {
  TEA_DTYPE_DEFAULT = 0,
  TEA_FP16 = 1,
  TEA_BF16 = 2,
  TEA_FP32 = 3,
  TEA_FP64 = 4,
  TEA_E4M3 = 5,
  TEA_E5M2 = 6
} tea_dtype;

/* The memory format of the rows of a side (queries, or keys and values). */
typedef enum tea_form {
  TEA_DENSE = 0,  /* [batch, seqlen], every row valid */
  TEA_PADDED = 1, /* [batch, seqlen], the first cu_seqlens[i+1] - cu_seqlens[i] rows valid */
  TEA_RAGGED = 2, /* [tokens], sequence i starts at cu_seqlens[i] (or at offsets[i] with `gaps`) */
  TEA_PAGED = 3   /* keys and values only: pages of page_size rows, addressed by a page table */
} tea_form;

typedef enum tea_bias {
  TEA_BIAS_NONE = 0,
  TEA_BIAS_PRE_SCALE = 1,
  TEA_BIAS_POST_SCALE = 2
} tea_bias;

/* Bits of bias_broadcast: the dimensions (batch, head, row, column) in which the bias has size 1.
 */
enum {
  TEA_BROADCAST_BATCH = 1,
  TEA_BROADCAST_HEAD = 2,
  TEA_BROADCAST_ROW = 4,
  TEA_BROADCAST_COL = 8
};

typedef enum tea_alibi {
  TEA_ALIBI_NONE = 0,
  TEA_ALIBI_STANDARD = 1, /* the published geometric slopes for heads_q heads */
  TEA_ALIBI_SLOPES = 2    /* slopes from the tensor TEA_SLOPES, [heads_q] or [batch, heads_q] */
} tea_alibi;

typedef enum tea_softmax {
  TEA_SOFTMAX_VANILLA = 0,
  TEA_SOFTMAX_OFF_BY_ONE = 1, /* an additional term exp(0) in the denominator */
  TEA_SOFTMAX_LEARNABLE = 2   /* an additional term exp(sink[head]); sink has a gradient */
} tea_softmax;

/* The shape of TEA_K_SCALE_INV and TEA_V_SCALE_INV with a kv_dtype. */
typedef enum tea_kv_scale {
  TEA_KV_SCALE_TENSOR = 0, /* [1] */
  TEA_KV_SCALE_HEAD = 1    /* [heads_kv] */
} tea_kv_scale;

/* Bits of outputs: the outputs of forward in addition to O. Training always writes LSE. */
enum { TEA_OUTPUT_LSE = 1, TEA_OUTPUT_MAX = 2, TEA_OUTPUT_SUM_EXP = 4 };

/* Strides in elements; the head dimension is contiguous. Every layout (bshd, sbhd, packed qkv, ...)
   is expressed by strides. All zero: the default of the field. */
typedef struct tea_strides {
  int64_t batch, seq, head;
} tea_strides;

typedef struct tea_bias_strides {
  int64_t batch, head, row, col;
} tea_bias_strides;

/* The description of an attention operation: no pointers, no padding bytes, zero means default. It
   is compared, hashed, printed, parsed and cached as a value. Quantities that change from step to
   step (token counts of ragged batches, seeds, lengths) are in tea_run. */
typedef struct tea_problem {
  uint32_t struct_size;  /* sizeof(tea_problem) in the caller's build */
  int32_t dtype;         /* of q, and of k and v (but see kv_dtype); required */
  int32_t o_dtype;       /* of o. Default: dtype. fp8 may give fp16, bf16 or fp32 here */
  int32_t dout_dtype;    /* of the gradient of o. Default: o_dtype */
  int32_t dqkv_dtype;    /* of dq, dk, dv. Default: dtype */
  int32_t bias_dtype;    /* of bias and dbias. Default: dtype, or fp32 where dtype is fp8 */
  int32_t training;      /* 1: the plan must do backward; turns dropout on */
  int32_t deterministic; /* 1: bitwise equal results from equal inputs */
  int32_t outputs;       /* bits TEA_OUTPUT_* */
  int32_t lse_gradient;  /* 1: backward also takes TEA_DLSE, the gradient of LSE */

  int32_t q_form, kv_form; /* tea_form */
  int32_t gaps;            /* 1: ragged sides read their start tokens from TEA_OFFSETS_Q / _KV */
  int32_t page_size;       /* rows of a page; only for TEA_PAGED */

  int32_t heads_q,
      heads_kv; /* heads_q is a multiple of heads_kv; query head h uses h / (hq / hkv) */
  /* Multiples of 8, at most 1024, or 512 if training. Default of dim_v: dim_qk. */
  int32_t dim_qk, dim_v;
  /* Sizes of dense and padded sides; zero is an empty tensor. If a side is ragged or paged, batch
     and that side's seqlen must be zero here and are given in tea_run. */
  int64_t batch, seqlen_q, seqlen_kv;

  int32_t causal;       /* 1: column <= row + delta */
  int32_t bottom_right; /* 1: delta = length_kv - length_q (actual lengths); 0: delta = 0 */
  int64_t window_left;  /* bound + 1: column >= row + delta - (window_left - 1). 0: no bound */
  int64_t window_right; /* bound + 1: column <= row + delta + (window_right - 1). 0: no bound */

  int32_t bias;           /* tea_bias */
  int32_t bias_broadcast; /* bits TEA_BROADCAST_* */
  int32_t alibi;          /* tea_alibi: adds -slope * |row + delta - column| */
  int32_t softmax;        /* tea_softmax */
  double softcap;         /* c > 0: score = c * tanh(score / c). 0: none */
  double dropout;         /* dropout probability in [0, 1); only when training */
  double scale;           /* of q.k; read when has_scale is 1. Default: 1 / sqrt(dim_qk) */
  int32_t has_scale;      /* 1: `scale` is given */
  int32_t alignment;      /* smallest alignment of any tensor pointer in bytes. Default: 16 */

  tea_strides q, k, v, o; /* default: dense [b,s,h,d], ragged [t,h,d], paged [page,slot,h,d] */
  tea_strides dout, dq, dk, dv;  /* default: as above */
  tea_strides lse;               /* of LSE, MAX, SUM_EXP, DLSE. Default: [b,h,s], ragged [t,h] */
  tea_bias_strides bias_stride;  /* default: contiguous over the dimensions not broadcast */
  tea_bias_strides dbias_stride; /* default: contiguous over the dimensions not broadcast */
  int64_t slopes_stride;         /* batch stride of TEA_SLOPES. Default: 0, shared by the batch */
  int64_t table_k_stride; /* batch stride of TEA_TABLE_K. Default: ceil(max_kv / page_size) */
  int64_t table_v_stride; /* batch stride of TEA_TABLE_V. Default: the same */
  int32_t kv_dtype;       /* of k, v: E4M3 or E5M2 with an fp16 or bf16 dtype, without training.
                             Default: dtype */
  int32_t kv_scale;       /* tea_kv_scale; only with a kv_dtype */
  /* 1: the bits that forward computes for a row depend on its query and on the keys that it attends
     to, but on no other row of the batch, nor on how the rows of a sequence are divided among
     calls. The problems must otherwise be equal, sizes and strides aside. */
  int32_t batch_invariant;
  /* GPUs: at most so many CTAs of a kernel that computes tiles at a time, so that kernels of other
     streams find SMs. 0: as many as have room. */
  int32_t max_ctas;
} tea_problem;

/* Bits of tea_run.accumulate: the results that are there already, of other keys or rows. */
typedef enum tea_accumulate {
  TEA_ACCUMULATE_ROWS = 1, /* forward: O and LSE, which are merged; backward: dQ is added */
  TEA_ACCUMULATE_KEYS = 2  /* backward: dK and dV are added */
} tea_accumulate;

/* The tensors of the operation, with one name and index in all layers. cu_seqlens, offsets and
   tables are int32; scales and amax are fp32 scalars; rng_state is int64 {seed, offset}. LSE, MAX,
   SUM_EXP, DLSE, SLOPES, SINK and DSINK [heads_q] are fp32, or fp64 if the problem's dtype is. */
typedef enum tea_tensor {
  TEA_Q = 0,
  TEA_K = 1,
  TEA_V = 2,
  TEA_O = 3,
  TEA_LSE = 4,     /* natural log of the softmax denominator; -inf for a row without keys */
  TEA_MAX = 5,     /* largest logit of the row, without the sink */
  TEA_SUM_EXP = 6, /* exp(LSE - MAX) */
  TEA_BIAS = 7,
  TEA_SINK = 8, /* backward needs it only with TEA_DSINK, else NULL */
  TEA_SLOPES = 9,
  TEA_CU_SEQLENS_Q = 10, /* int32 [batch + 1] */
  TEA_CU_SEQLENS_KV = 11,
  TEA_OFFSETS_Q = 12, /* int32 [batch + 1]: start token of each sequence in the buffer */
  TEA_OFFSETS_KV = 13,
  TEA_TABLE_K = 14, /* int32 [batch, pages of a sequence] */
  TEA_TABLE_V = 15,
  TEA_RNG_STATE = 16,
  TEA_DOUT = 17,
  TEA_DQ = 18,
  TEA_DK = 19,
  TEA_DV = 20,
  TEA_DBIAS = 21,
  TEA_DSINK = 22, /* [heads_q] */
  TEA_DLSE = 23,
  /* FP8. NULL scale: 1 (k, v: the scale of q; dk, dv: the scale of dq). NULL amax: not recorded
     (dk, dv: included in the amax of dq). amax becomes the maximum of its previous value and the
     largest magnitude before scaling. dP is cast to the type of dO, or to E5M2 if dO is not fp8.
     With a kv_dtype only the scales of k and v exist; NULL: 1. */
  TEA_Q_SCALE_INV = 24,
  TEA_K_SCALE_INV = 25,
  TEA_V_SCALE_INV = 26,
  TEA_S_SCALE = 27,
  TEA_S_SCALE_INV = 28,
  TEA_S_AMAX = 29,
  TEA_O_SCALE = 30,
  TEA_O_SCALE_INV = 31, /* backward only */
  TEA_O_AMAX = 32,
  TEA_DOUT_SCALE_INV = 33,
  TEA_DP_SCALE = 34,
  TEA_DP_SCALE_INV = 35,
  TEA_DP_AMAX = 36,
  TEA_DQ_SCALE = 37,
  TEA_DK_SCALE = 38,
  TEA_DV_SCALE = 39,
  TEA_DQ_AMAX = 40,
  TEA_DK_AMAX = 41,
  TEA_DV_AMAX = 42,
  TEA_TENSOR_COUNT = 43
} tea_tensor;

/* Bits of the status word: invalid values in device-resident metadata. They were clamped to the
   capacity; no memory outside the tensors was accessed. SATURATED: the FP8 scale of S is larger
   than largest * (1 - dropout), so that the largest probabilities saturate and O is wrong. */
enum {
  TEA_STATUS_BAD_LENGTHS = 1,
  TEA_STATUS_BAD_PAGE = 2,
  TEA_STATUS_BAD_ORIGIN = 4,
  TEA_STATUS_SATURATED = 8
};

/* Calls body(argument, i) once for each i in [0, count), in any order, on any threads, concurrently
   or sequentially, and returns when all calls have returned. It must not throw or longjmp. */
typedef void (*tea_parallel_for)(void* context, int64_t count,
                                 void (*body)(void* argument, int64_t i), void* argument);

/* One execution: pointers, and the sizes that the problem does not specify. For host plans all
   pointers are host pointers and stream is ignored; for device plans they are device pointers (this
   struct and the array `tensors` are always on the host, and may be reused after the call). */
typedef struct tea_run {
  uint32_t struct_size;
  uint32_t tensor_count; /* length of `tensors`; missing entries are NULL */
  void* const* tensors;  /* indexed by tea_tensor */
  void* workspace;
  uint64_t workspace_bytes; /* at least the result of tea_plan_workspace() or of
                               tea_workspace_bound(); `workspace` is 256-byte aligned */
  void* stream;             /* CUstream_st*, or NULL */
  /* batch: if a side is ragged or paged, else zero. max_q / max_kv: upper bound of the lengths of a
     ragged or paged side, else zero. tokens_*: rows of a ragged buffer. pages_*: pages in a pool.
   */
  int64_t batch, max_q, max_kv, tokens_q, tokens_kv, pages_k, pages_v;
  /* The position of this shard in the global problem: batch, head, row, column. Rows and columns
     shift masks and ALiBi; all four shift dropout. From 0 to 2^40. */
  int64_t origin[4];
  const int64_t* origin_device; /* int64[4] on the device, replaces `origin` (then 0); or NULL */
  int32_t* status;              /* one word, bits are OR-ed in; or NULL */
  /* Host plans only: runs the engine's work on the caller's threads, with the same results. NULL:
     the library's own threads. It is called with `parallel_context`. */
  tea_parallel_for parallel_for;
  void* parallel_context;
  /* Host plans only: at most so many of the library's threads, the caller's included. 0: as many as
     OMP_NUM_THREADS says, else the cores of the process. TE_ATTENTION_THREADS overrides both. */
  int64_t threads;
  /* 0: `origin_device` is int64[4], the same for all sequences. Else int64s from the numbers of one
     sequence to those of the next, at least 5: batch, head, row, column, shift. */
  int64_t origin_stride;
  /* Added to column - row of the diagonal, from -2^40 to 2^40: moves causal masks, windows and
     ALiBi, but not dropout. 0 with an origin_stride. */
  int64_t shift;
  /* Backward: 1: O and LSE are of more keys than those of this run, whose results were merged. In
     fp64 dO . O is then taken from O, else from the probabilities of all keys. */
  int32_t partial;
  /* Bits of tea_accumulate, for a plan of which tea_plan_accumulates() is 1; else 0. */
  int32_t accumulate;
} tea_run;

/* Exact counts for one execution; a multiply and an add are two operations. */
typedef struct tea_cost {
  uint32_t struct_size;
  uint32_t reserved;      /* zero */
  uint64_t visible;       /* (row, column) pairs that the masks allow, over batch and query heads */
  uint64_t forward_flops; /* 2 * visible * (dim_qk + dim_v) */
  uint64_t backward_flops; /* 2 * visible * (3 * dim_qk + 2 * dim_v), recomputing the scores */
  uint64_t forward_bytes;  /* every input element read once, every output element written once */
  uint64_t backward_bytes;
} tea_cost;

typedef struct tea_cache_info {
  uint32_t struct_size;
  uint32_t reserved; /* zero */
  uint64_t hits, misses, entries, capacity;
} tea_cache_info;

typedef struct tea_plan tea_plan;

/* The plan of the first engine that accepts `problem` on `device` (-1: the host), or of the engine
   named `engine` (NULL or "": any). Plans are reference-counted: release each one. The cache holds
   references of its own. */
TEA_API tea_status tea_plan_create(const tea_problem* problem, int device, const char* engine,
                                   tea_plan** plan);
TEA_API void tea_plan_release(tea_plan* plan);
TEA_API const char* tea_plan_engine(const tea_plan* plan);
/* 1 if runs of a direction may have `accumulate`, else 0. backward: 0 or 1. */
TEA_API int32_t tea_plan_accumulates(const tea_plan* plan, int32_t backward);

/* Both functions neither allocate device memory nor synchronise, so they can be captured in a CUDA
   graph. Exception: the engine `cudnn`, selected explicitly, must first have run once with the same
   run-time sizes. */
TEA_API tea_status tea_forward(const tea_plan* plan, const tea_run* run);
TEA_API tea_status tea_backward(const tea_plan* plan, const tea_run* run);

/* Bytes of workspace that one run of this plan needs in each direction (0 for backward if the
   problem does not train; either result may be NULL). Only the sizes of `run` are read; it may be
   NULL for a dense problem. */
TEA_API tea_status tea_plan_workspace(const tea_plan* plan, const tea_run* run, uint64_t* forward,
                                      uint64_t* backward);
/* The maximum workspace of all plans of the problem, on any device, whose engine is not selected in
   tea_plan_create(): `cudnn`, selected explicitly, may need more. It depends only on the arguments
   and on the engine in TE_ATTENTION_ENGINE, and is linear in the sequence lengths (for `cudnn` also
   in a bias that trains). `run` as above. */
TEA_API tea_status tea_workspace_bound(const tea_problem* problem, const tea_run* run,
                                       uint64_t* forward, uint64_t* backward);

/* Text results: at most `capacity` bytes including the final zero are written; `needed` (may be
   NULL) receives the full size including the final zero. buffer may be NULL if capacity is 0. */
TEA_API tea_status tea_explain(const tea_problem* problem, int device, char* buffer,
                               size_t capacity, size_t* needed);
TEA_API tea_status tea_problem_print(const tea_problem* problem, char* buffer, size_t capacity,
                                     size_t* needed);
/* Sets all fields of `problem` except struct_size, which the caller has set. Refused if a field of
   the text lies outside that size. */
TEA_API tea_status tea_problem_parse(const char* text, tea_problem* problem);
/* Checks a problem without planning; tea_error() has the reason of a refusal. On success
   `normalised` (may be NULL or `problem`) receives the canonical form: synonyms removed, defaults
   as zeros. The caller sets its struct_size. */
TEA_API tea_status tea_problem_check(const tea_problem* problem, tea_problem* normalised);

/* Reads cu_seqlens from run->tensors, which must be host pointers here. */
TEA_API tea_status tea_problem_cost(const tea_problem* problem, const tea_run* run, tea_cost* cost);

TEA_API tea_status tea_cache_stats(tea_cache_info* info);
TEA_API tea_status tea_cache_limit(size_t capacity); /* 0: empty the cache and disable it */

TEA_API const char* tea_error(void); /* the last error of this thread; valid until its next call */
TEA_API const char* tea_version(void); /* "major.minor.patch" */
/* The value of an environment variable of docs/environment.md, read once per process; "" if it is
   not set. NULL: the library does not read a variable of this name. */
TEA_API const char* tea_setting(const char* variable);

#ifdef __cplusplus
}
#endif
#endif
