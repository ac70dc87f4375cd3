// The tasks of the preprocess kernel that write the row terms: kTermRows rows of a chunk of heads
// each, for one warp. Tiles may wait for the tasks of their own heads only.
#pragma once
#include <cstdint>

#include "gpu/arguments.h"
#include "hopper/backward/config.h"

namespace tea::hopper::backward {

// A team of at least four lanes shares a head, and has four of them in turn, whose loads are under
// way together.
inline constexpr int kHeadsPerTeam = 4;
inline constexpr int kTermRows = 8;

struct TermTasks {
  int team;         // lanes that share a row of a head, eight columns each
  int chunk_shift;  // log2 of the heads of a chunk
  int chunks;       // of a row
  // If tiles wait for single tasks, else 0: the tasks of a chunk of a sequence, or of a chunk of
  // all sequences of a ragged tensor.
  int per_chunk;
  int per_block;  // tasks of a row block of a ragged tensor, else 0

  TEA_HOST_DEVICE int chunk_heads() const { return 1 << chunk_shift; }
  // The number of the first task for a head of a sequence, whose first row block in the workspace
  // is `row_block`. The first tasks of a sequence write the terms of its row blocks.
  TEA_HOST_DEVICE int task_of(int batch, int head, int row_block) const {
    const int chunk = head >> chunk_shift;
    return per_block ? chunk * per_chunk + row_block * per_block
                     : (batch * chunks + chunk) * per_chunk;
  }
};

// Which warp does which tasks, if tiles wait for single ones, in rounds: the tasks of a round have
// higher numbers than those of the rounds before. The first tiles wait for the first tasks, which
// kSharers successive warps therefore share in the first rounds, so that they end earlier.
struct TermRounds {
  static constexpr int kSharers = 4, kSharedRows = kTermRows / kSharers;

  int count;   // tasks
  int warps;   // of the grid, a multiple of kSharers
  int shared;  // rounds whose tasks are shared

  // Two rounds are shared, unless they are not enough where one of whole tasks is: a round costs
  // about as much as two pairs of rows before it has loaded any.
  TEA_HOST_DEVICE TermRounds(int tasks, int warps_of_grid) : count(tasks), warps(warps_of_grid) {
    constexpr int kShared = 2;
    const bool one_is_enough = count <= warps && count > kShared * (warps / kSharers);
    shared = one_is_enough ? 0 : kShared;
  }
  // The rows of a task that a warp has in a round; none if `task` is not below `count`.
  struct Share {
    int task, first_row, rows;
  };
  TEA_HOST_DEVICE Share share(int round, int warp) const {
    const int first = (round < shared ? round : shared) * (warps / kSharers);
    if (round < shared)
      return {first + warp / kSharers, warp % kSharers * kSharedRows, kSharedRows};
    return {first + (round - shared) * warps + warp, 0, kTermRows};
  }
  // By what Workspace::terms_written has for a task, the rows that are done, or by that of several
  // tasks, joined by `and`: whether all are.
  static TEA_HOST_DEVICE bool is_complete(uint32_t rows_done) {
    return (rows_done & kTermRows) != 0;
  }
  static_assert((kTermRows & (kTermRows - 1)) == 0, "no smaller number has this bit");
};

// The first tasks of a sequence, which write the terms of its row blocks.
TEA_HOST_DEVICE int tasks_with_terms(int rows, int block_m) {
  return (rows + block_m - 1) / block_m * (block_m / kTermRows);
}
// The tasks of a chunk: of a dense sequence those of its row blocks, and as many as one row block
// has, for rows that take no part; of a ragged tensor those of all row blocks (make_blocks()).
inline int64_t tasks_per_chunk(const AttentionArguments& a, int block_m) {
  const int64_t blocks = a.queries.form == TEA_RAGGED
                             ? a.queries.tokens / block_m + a.batch + 1
                             : (a.queries.max_seqlen + block_m - 1) / block_m + 1;
  return blocks * (block_m / kTermRows);
}
// Whether single tasks have numbers that need no search: those of dense sequences, and those of
// ragged ones by their row blocks.
inline bool are_tasks_numbered(const AttentionArguments& a) {
  return a.queries.form == a.keys.form &&
         (a.queries.form == TEA_DENSE || a.queries.form == TEA_RAGGED);
}
// Of all sequences.
inline int64_t all_tasks(const AttentionArguments& a, int block_m, int chunks) {
  return tasks_per_chunk(a, block_m) * chunks * (a.queries.form == TEA_RAGGED ? 1 : a.batch);
}

// Tiles wait for single tasks where there are at least kFewestTermChunks chunks over all sequences,
// since with fewer the first ones are complete hardly earlier than the last ones; or where the
// tasks are so few that they end soon. A tile's heads must be in one chunk, and ragged sequences so
// few that each CTA can see whether their metadata is valid.
inline constexpr int kFewestTermChunks = 8, kFewTermTasks = 1024, kMostRaggedSequences = 256;
inline TermTasks term_tasks(const AttentionArguments& a, int block_m, int heads_per_tile) {
  TermTasks t{.team = 4, .chunk_shift = 5, .chunks = 0, .per_chunk = 0, .per_block = 0};
  for (; t.team * 8 < a.dim_v; t.team *= 2) --t.chunk_shift;
  t.chunks = (a.heads_q + t.chunk_heads() - 1) / t.chunk_heads();
  const int64_t all = all_tasks(a, block_m, t.chunks);
  if (!are_tasks_numbered(a) || heads_per_tile > 2 ||
      (a.queries.form == TEA_RAGGED && a.batch > kMostRaggedSequences) ||
      (a.batch * t.chunks < kFewestTermChunks && all > kFewTermTasks) || all > INT32_MAX / 2)
    return t;
  t.per_chunk = static_cast<int>(tasks_per_chunk(a, block_m));
  if (a.queries.form == TEA_RAGGED) t.per_block = block_m / kTermRows;
  return t;
}

// How many words Workspace::terms_written has: no fewer than there are tasks, and never fewer for
// longer or more sequences.
inline int64_t term_flags(const AttentionArguments& a, int block_m) {
  if (!are_tasks_numbered(a)) return 0;
  return all_tasks(a, block_m, term_tasks(a, block_m, 1).chunks);
}

}  // namespace tea::hopper::backward
