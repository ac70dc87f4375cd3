// The epilogue: normalises O, writes it and the row statistics, and the store warp.
#pragma once
#include "hopper/forward/load.cuh"

namespace tea::hopper {

template <KernelConfig C>
struct Epilogue {
  using T = Traits<C>;
  using Output = float[T::kDimV / 2];
  static constexpr int kSlabBytes = T::kSlabBytes;
  static constexpr int kLoadsAtOnce = T::kDimV % 64 ? 4 : 8;  // of O, in registers
  static_assert(T::kDimV % (8 * kLoadsAtOnce) == 0);

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int consumer;
  PipelineState<1> o_state{};

  TEA_DEVICE int first_row(const WorkTile& w) { return w.first_row + 64 * consumer; }

  // The offset of a row of the tile's sequence in O, or in the row statistics.
  template <class Strides>
  TEA_DEVICE int64_t row_offset(const Strides& x, const WorkTile& w, int row) {
    return T::batch_of(p.args.queries, w) * x.batch + w.head * x.head +
           int64_t{w.start_q + row} * x.seq;
  }
  // Writes one value for each of the thread's two rows.
  TEA_DEVICE void write_statistic(float* to, const WorkTile& w, float first, float second) {
    if (!to) return;
    const int row = first_row(w) + accumulator_row(0);
    float* const at = to + row_offset(p.args.statistics, w, row);
    if (row < w.seqlen_q) at[0] = first;
    if (row + 8 < w.seqlen_q) at[8 * p.args.statistics.seq] = second;
  }
  // Of the thread's rows. kept: the factors of O that is there.
  struct Result : OnlineSoftmax::Result {
    float kept[2] = {0, 0};
  };
  // Merges the rows with those of other keys, whose O and LSE are there.
  TEA_DEVICE void merge(Result& result, const WorkTile& w) {
    const int row = first_row(w) + accumulator_row(0);
    const float* const lse = p.args.statistics.lse + row_offset(p.args.statistics, w, row);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= w.seqlen_q) continue;
      auto& own = result.row[r];
      const float before = lse[8 * r * p.args.statistics.seq], high = fmaxf(before, own.lse);
      if (high == kMinusInfinity) continue;  // no key is visible
      const float kept = exp2_fast((before - high) * kLog2E);
      const float added = exp2_fast((own.lse - high) * kLog2E);
      const float share = reciprocal_fast(kept + added);
      result.kept[r] = kept * share;
      own.factor *= added * share;
      own.lse = fmaf(log2_fast(kept + added), kLn2, high);
    }
    __syncwarp();  // one lane of a quad overwrites LSE, which the others have read
  }
  TEA_DEVICE Result write_statistics(const OnlineSoftmax& softmax, const WorkTile& w) {
    Result result{softmax.finalize(p.unit, w.sink)};
    if (p.args.accumulate) merge(result, w);
    if (lane() % 4 == 0) {
      write_statistic(p.args.statistics.lse, w, result.row[0].lse, result.row[1].lse);
      write_statistic(p.args.statistics.max, w, result.row[0].max, result.row[1].max);
      write_statistic(p.args.statistics.sum_exp, w, result.row[0].sum_exp, result.row[1].sum_exp);
    }
    return result;
  }

  // Two adjacent elements of a row. A row without a visible key is 0 even if O is NaN, which masked
  // keys of other rows may have caused.
  static TEA_DEVICE uint32_t normalized_pair(const Output& o, int at, float factor) {
    uint32_t pair = pack<C.type>(o[at] * factor, o[at + 1] * factor);
    if (factor == 0) pair = 0;
    return pair;
  }
  // Stores one of the thread's rows to global memory. Adjacent lanes exchange pairs of columns, so
  // that each has four consecutive columns and a quad has the 32 bytes of a sector.
  TEA_DEVICE void store_row(const Output& o, const WorkTile& w, int r, float factor) {
    const int row = first_row(w) + accumulator_row(2 * r);
    const bool odd = lane() % 2;
    uint16_t* const to = static_cast<uint16_t*>(p.args.o.data) + row_offset(p.args.o, w, row) +
                         odd * 8 + lane() / 2 % 2 * 4;
#pragma unroll
    for (int c = 0; c < T::kDimV / 16; ++c) {
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) pair[i] = normalized_pair(o, 8 * c + 4 * i + 2 * r, factor);
      const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? pair[0] : pair[1], 1);
      if (row < w.seqlen_q && 16 * c + odd * 8 < p.args.dim_v)
        *reinterpret_cast<uint2*>(to + 16 * c) = uint2{odd ? got : pair[0], odd ? pair[1] : got};
    }
  }
  // The same in fp32: a quad has the 32 bytes of a sector as it is. O that is there is loaded ahead
  // of the stores, past which the compiler moves no load.
  TEA_DEVICE void store_fp32_row(const Output& o, const WorkTile& w, int r, float factor,
                                 float kept) {
    const int row = first_row(w) + accumulator_row(2 * r);
    float* const to =
        static_cast<float*>(p.args.o.data) + row_offset(p.args.o, w, row) + lane() % 4 * 2;
    if (row >= w.seqlen_q) return;
#pragma unroll
    for (int first = 0; first < T::kDimV / 8; first += kLoadsAtOnce) {
      float2 before[kLoadsAtOnce] = {};
      if (kept != 0)
#pragma unroll
        for (int i = 0; i < kLoadsAtOnce; ++i)
          if (8 * (first + i) < p.args.dim_v)
            before[i] = *reinterpret_cast<const float2*>(to + 8 * (first + i));
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const int n = first + i;
        float2 pair = {o[4 * n + 2 * r] * factor, o[4 * n + 2 * r + 1] * factor};
        if (8 * n >= p.args.dim_v) continue;
        if (factor == 0) pair = {};
        if (kept != 0) pair = {fmaf(before[i].x, kept, pair.x), fmaf(before[i].y, kept, pair.y)};
        *reinterpret_cast<float2*>(to + 8 * n) = pair;
      }
    }
  }
  // Writes O to shared memory, from which the store warp stores it.
  TEA_DEVICE void stage_for_store_warp(const Output& o, const float (&factor)[2]) {
    Pipeline<1>& pipeline = s.pipeline_o[consumer];
    const int row = 16 * warp_in_warpgroup() + lane() % 16;
    pipeline.producer_acquire(o_state);
#pragma unroll
    for (int c = 0; c < T::kDimV / 16; ++c) {
      const int slab = c * 32 / kSlabBytes, at = c * 32 % kSlabBytes;
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = normalized_pair(o, 8 * c + 2 * i, factor[i % 2]);
      stmatrix_x4(shared_address(s.o[consumer]) + slab * 64 * kSlabBytes +
                      swizzled(T::kSwizzle, row, at + lane() / 16 * 16),
                  a);
    }
    fence_proxy_async();  // by each writing thread, before the barrier that lets TMA read
    __syncwarp();
    if (lane() == 0) arrive(pipeline.full[o_state.stage]);
    o_state.advance();
  }
  TEA_DEVICE void store(const Output& o, const Result& result, const WorkTile& w) {
    const float kept = C.general() || C.dropout() ? p.args.keep_factor : 1;
    const float factor[2] = {result.row[0].factor * kept, result.row[1].factor * kept};
    if (p.args.o.dtype == TEA_FP32) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_fp32_row(o, w, r, factor[r], result.kept[r]);
    } else if constexpr (C.tile.tma_store) {
      stage_for_store_warp(o, factor);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_row(o, w, r, factor[r]);
    }
  }
};

// The store warp: copies O from shared to global memory by TMA, each consumer's rows as soon as
// they are complete. Run by one thread.
template <KernelConfig C>
struct StoreWarp {
  using T = Traits<C>;

  const KernelParams& p;
  typename T::SharedStorage& s;
  PipelineState<2> work_state{};
  PipelineState<1> o_state{};

  TEA_DEVICE void store_rows(const RowBox& b, int consumer) {
#pragma unroll
    for (int slab = 0; slab < T::kDimV / T::kSlabDim; ++slab)
      if (slab * T::kSlabDim < p.args.dim_v)
        tma_store<5>(p.o, s.o[consumer] + slab * 64 * T::kSlabBytes,
                     {slab * T::kSlabDim, b.y, b.head, b.z, b.batch});
    bulk_commit();
    bulk_wait_read<0>();  // the memory may be written again
  }
  TEA_DEVICE void run() {
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head < 0) return;
      const int first_row = w.first_row, rows = w.seqlen_q, start = w.start_q, head = w.head;
      const int batch = T::batch_of(p.args.queries, w);
      // Before the tile is complete: otherwise the scheduler warp could not publish the next one.
      s.work.pipeline.consumer_release(work_state);
      work_state.advance();
      if (p.args.o.dtype == TEA_FP32) continue;  // the consumers store O
#pragma unroll
      for (int c = 0; c < T::kConsumers; ++c) {
        const int row = first_row + 64 * c;
        s.pipeline_o[c].consumer_wait(o_state);
        if (row < rows) store_rows({64, start + row, rows - row, head, batch}, c);
        s.pipeline_o[c].consumer_release(o_state);
      }
      o_state.advance();
    }
  }
};

}  // namespace tea::hopper
