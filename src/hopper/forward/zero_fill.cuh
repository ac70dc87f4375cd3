// The zero-fill warps: zero the rows that belong to no sequence, and report invalid lengths and
// origins in device memory.
#pragma once
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

struct ZeroFillWarps {
  const ForwardArguments& args;
  const int first, step;  // this thread's share of the work; warps are complete

  TEA_DEVICE void report(int bit) const {
    if (args.status) atomicOr(args.status, bit);
  }
  TEA_DEVICE void validate() const {
#pragma unroll 1  // here and below: these warps have few registers and time to spare
    for (int i = first; i < args.batch; i += step)
      if (!args.queries.at(i).valid || !args.keys.at(i).valid) report(TEA_STATUS_BAD_LENGTHS);
    bool valid = true;
#pragma unroll 1
    for (int i = first; i < 4; i += step) origin_of(args, i, &valid);
    if (!valid) report(TEA_STATUS_BAD_ORIGIN);
  }

  TEA_DEVICE bool contains(int batch, int64_t token) const {
    const Sequence s = args.queries.at(batch);
    return token >= s.start && token < s.start + s.length;
  }
  // If starts ascend, as they do unless the caller permuted the sequences, the binary search finds
  // the right one.
  TEA_DEVICE bool in_some_sequence(int64_t token) const {
    const int32_t* starts = args.queries.offsets ? args.queries.offsets : args.queries.cu_seqlens;
    const auto likely = static_cast<int>(find_sequence(starts, args.batch, token));
    if (likely >= 0 && contains(likely, token)) return true;
#pragma unroll 1
    for (int i = 0; i < args.batch; ++i)
      if (contains(i, token)) return true;
    return false;
  }

  // Clears one row of O, LSE, MAX and SUM_EXP, of all heads. Called by a warp.
  TEA_DEVICE void clear_row(int64_t batch, int64_t row) const {
    const int chunks = args.dim_v / 8;  // of 16 bytes
#pragma unroll 1
    for (int i = lane(); i < args.heads * chunks; i += 32) {
      const int64_t at =
          batch * args.o.batch + i / chunks * args.o.head + row * args.o.seq + i % chunks * 8;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.o.data) + at) = uint4{};
    }
    const auto set = [&](const StridedTensor& x, int64_t head, float value) {
      if (x.data)
        static_cast<float*>(x.data)[batch * x.batch + head * x.head + row * x.seq] = value;
    };
#pragma unroll 1
    for (int h = lane(); h < args.heads; h += 32) {
      set(args.lse, h, kMinusInfinity);
      set(args.max, h, kMinusInfinity);
      set(args.sum_exp, h, 0);
    }
  }

  TEA_DEVICE void run() const {
    validate();
    if (args.queries.form == Form::kDense) return;
    const bool ragged = args.queries.form == Form::kRagged;
    const int64_t rows = ragged ? args.queries.tokens : args.queries.max_seqlen;
    const int64_t count = ragged ? rows : rows * args.batch;
    for (int64_t base = first - lane(); base < count; base += step) {
      const int64_t mine = base + lane();
      bool outside = false;
      if (mine < count)
        outside = ragged ? !in_some_sequence(mine)
                         : !contains(static_cast<int>(mine / rows), mine % rows);
      for (uint32_t left = __ballot_sync(0xffffffff, outside); left; left &= left - 1) {
        const int64_t row = base + __ffs(static_cast<int>(left)) - 1;
        clear_row(ragged ? 0 : row / rows, ragged ? row : row % rows);
      }
    }
  }
};

}  // namespace tea::hopper
