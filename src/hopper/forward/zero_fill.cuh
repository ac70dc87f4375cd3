// The zero-fill warps: zero the rows that belong to no sequence, and report invalid lengths and
// origins in device memory.
#pragma once
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

struct ZeroFillWarps {
  const AttentionArguments& args;
  const int first, step;  // this thread's share of the work; warps are complete

  TEA_DEVICE int num_sequences() const { return static_cast<int>(args.batch); }

  TEA_DEVICE void validate() const {
#pragma unroll 1  // here and below: these warps have few registers and time to spare
    for (int i = first; i < num_sequences(); i += step)
      if (!sequence_of(args.queries, i).valid || !sequence_of(args.keys, i).valid)
        report_status(args, TEA_STATUS_BAD_LENGTHS);
#pragma unroll 1
    for (int64_t i = first; i < num_origins(args); i += step)
      if (!is_origin_valid(args, i)) report_status(args, TEA_STATUS_BAD_ORIGIN);
  }

  // Clears one row of O, LSE, MAX and SUM_EXP, of all heads. Called by a warp.
  TEA_DEVICE void clear_row(int64_t batch, int64_t row) const {
    const int per_chunk = args.o.dtype == TEA_FP32 ? 4 : 8;  // elements of 16 bytes
    const int chunks = args.dim_v / per_chunk;
#pragma unroll 1
    for (int i = lane(); i < args.heads_q * chunks; i += 32) {
      const int64_t at = batch * args.o.batch + i / chunks * args.o.head + row * args.o.seq +
                         i % chunks * per_chunk;
      *reinterpret_cast<uint4*>(static_cast<char*>(args.o.data) + at * 16 / per_chunk) = uint4{};
    }
    const RowStatistics& statistics = args.statistics;
    const auto set = [&](float* to, int64_t head, float value) {
      if (to) to[batch * statistics.batch + head * statistics.head + row * statistics.seq] = value;
    };
#pragma unroll 1
    for (int h = lane(); h < args.heads_q; h += 32) {
      set(statistics.lse, h, kMinusInfinity);
      set(statistics.max, h, kMinusInfinity);
      set(statistics.sum_exp, h, 0);
    }
  }

  // Rows of a padded tensor past the end of their sequence. Where there are more warps than
  // sequences, several warps share a sequence.
  TEA_DEVICE void clear_padding() const {
    const int warps = step / 32, warp = first / 32;
    const int share = max(1, warps / max(1, num_sequences())), groups = warps / share;
    if (warp >= groups * share) return;
    const auto rows = static_cast<int>(args.queries.max_seqlen);
#pragma unroll 1
    for (int b = warp / share; b < num_sequences(); b += groups) {
      const auto length = static_cast<int>(sequence_of(args.queries, b).length);
#pragma unroll 1
      for (int row = length + warp % share; row < rows; row += share) clear_row(b, row);
    }
  }
  // Tokens of a ragged tensor that belong to no sequence.
  TEA_DEVICE void clear_gaps() const {
    const auto tokens = static_cast<int>(args.queries.tokens);
    for (int base = first - lane(); base < tokens; base += step) {
      const int mine = base + lane();
      const bool outside =
          mine < tokens && !is_in_some_sequence(args.queries, num_sequences(), mine);
      for (uint32_t left = __ballot_sync(0xffffffff, outside); left; left &= left - 1)
        clear_row(0, base + __ffs(static_cast<int>(left)) - 1);
    }
  }

  TEA_DEVICE void run() const {
    validate();
    if (args.queries.form == TEA_PADDED) clear_padding();
    if (args.queries.form == TEA_RAGGED) clear_gaps();
  }
};

}  // namespace tea::hopper
