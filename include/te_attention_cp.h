/* te_attention_cp.h: the schedule of context parallelism. `world` ranks share the rows of every
   sequence; this header says which rank computes which block of (query, key) pairs and which rows
   of K and V travel, as a pure function of sizes: no tensors, no device, no communication.

   Sharding. A sequence of L rows is cut into chunks: `world` of them (contiguous; rank r holds
   chunk r) or 2 * world (zigzag; rank r holds chunks r and 2 * world - 1 - r, in that order). A
   chunk has L / chunks rows where that is exact, else L / chunks rounded up to a multiple of 16, so
   that the last chunks may be short or empty. The local rows of a rank are its chunks one after
   the other. Plain C11; nothing throws. */
#ifndef TE_ATTENTION_CP_H_
#define TE_ATTENTION_CP_H_
#include "te_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tea_cp_strategy {
  TEA_CP_RING = 0,       /* K and V of one rank after the other pass every rank */
  TEA_CP_ALL_GATHER = 1, /* every rank receives K and V of all ranks */
  TEA_CP_HALO = 2,       /* every rank receives only the rows that its queries attend to */
  TEA_CP_ALL_TO_ALL = 3  /* every rank receives all rows of some heads */
} tea_cp_strategy;

typedef enum tea_cp_sharding { TEA_CP_ZIGZAG = 0, TEA_CP_CONTIGUOUS = 1 } tea_cp_sharding;

/* The problem of one sequence. Lengths are global; masks as in tea_problem, window bounds plus one,
   0: none. */
typedef struct tea_cp_shape {
  uint32_t struct_size;
  int32_t world, rank;
  int32_t inner;     /* ring: consecutive ranks that exchange heads for rows first, so that a group
                        of `inner` ranks is one member of the ring. Default: 1 */
  int32_t strategy;  /* tea_cp_strategy */
  int32_t sharding;  /* tea_cp_sharding */
  int32_t positions; /* 1: more than the mask depends on positions (dropout, ALiBi, a bias), so that
                        no part may join rows that are not adjacent */
  int32_t causal, bottom_right;
  int32_t reserved; /* zero */
  int64_t window_left, window_right, seqlen_q, seqlen_kv;
} tea_cp_shape;

/* One block of attention: rows [q_begin, q_begin + q_count) of the local shard of queries against
   rows [kv_begin, kv_begin + kv_count) of the keys of `source`. The shard of a rank is that of its
   group where `inner` is more than 1. Parts with masked = 0 need no mask. For the others the mask
   is that of the problem, with diagonal `shift`, for the origin (origin_row, origin_col). */
typedef struct tea_cp_part {
  int32_t step;   /* parts of a later step read rows that arrive later */
  int32_t source; /* the member of the ring that owns the keys; -1: rows of the whole sequence */
  int32_t masked;
  int32_t
      launch; /* parts with the same number write different rows of O: one launch can run them */
  int64_t q_begin, q_count, kv_begin, kv_count;
  int64_t origin_row, origin_col; /* position of its first row and column in the sequence */
  int64_t shift;                  /* column - row on the diagonal of the whole problem */
  int64_t visible;                /* (row, column) pairs that the mask allows */
} tea_cp_part;

/* Rows [begin, begin + count) of the shard of `owner`, K and V, from one rank to another. With an
   exchange of heads: the rows of the heads of `to`; Q travels in the same way, and O back. A part
   may read the rows in a later step than that of the move. */
typedef struct tea_cp_move {
  int32_t step, from, to,
      owner; /* owner: as tea_cp_part.source, or a rank for exchanges of heads */
  int64_t begin, count;
} tea_cp_move;

/* The parts of shape->rank, and the moves that it takes part in, in order of steps. *parts_count
   and *moves_count hold the capacity of the arrays and become the number of entries that there are.
   If one of them exceeds its capacity nothing is written to its array. An array may be NULL where
   its capacity is 0. */
TEA_API tea_status tea_cp_schedule(const tea_cp_shape* shape, tea_cp_part* parts,
                                   size_t* parts_count, tea_cp_move* moves, size_t* moves_count);

#ifdef __cplusplus
}
#endif
#endif
