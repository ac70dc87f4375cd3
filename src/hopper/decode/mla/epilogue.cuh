// The epilogue of a work item of the MLA kernel: normalises O and writes it with the row
// statistics, or where other CTAs have parts of the tile, writes it to a slot (combine.cuh).
#pragma once
#include "hopper/decode/mla/mainloop.cuh"
#include "hopper/decode/row_output.cuh"

namespace tea::hopper::decode::mla {

template <Type kType, bool kSharedKvBoxes>
struct Epilogue {
  const LaunchParams& p;
  SharedStorage& s;
  const WorkItem& item;
  const Mainloop<kType, kSharedKvBoxes>& x;
  float sum[2] = {};  // of the thread's rows; their maxima are in x.softmax

  TEA_DEVICE void add_consumers() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = quad_sum(x.softmax.row_sum[r]);
      if (lane() % 4 == 0) s.sums[x.consumer][x.tile_row(r)] = own;
    }
    sync_consumers();
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = s.sums[0][x.tile_row(r)] + s.sums[1][x.tile_row(r)];
  }
  TEA_DEVICE int first_column() const { return x.consumer * kColumns + lane() % 4 * 2; }
  TEA_DEVICE bool writes_state() const { return x.consumer == 0 && lane() % 4 == 0; }
  TEA_DEVICE void write_slot() const {
    float* const to = p.slot(static_cast<int>(blockIdx.x), item.ends_tile());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const row = to + x.tile_row(r) * kDimV + first_column();
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
        *reinterpret_cast<float2*>(row + 8 * i) =
            float2{x.o[4 * i + 2 * r], x.o[4 * i + 2 * r + 1]};
      if (writes_state()) slot_rows(to)[x.tile_row(r)] = {x.softmax.row_max[r], sum[r]};
    }
  }
  TEA_DEVICE void write_row(int r) const {
    const AttentionArguments& a = p.args;
    const int row = p.first_row(item) + x.tile_row(r);
    if (row >= item.bounds.seqlen_q * p.group) return;
    const RowOutput output = finish_row<false>(p, item, p.head_kv(item), row, x.softmax.row_max[r],
                                               sum[r], writes_state());
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      if (first_column() + 8 * i >= a.dim_v) break;
      const int64_t at = output.at + first_column() + 8 * i;
      float2 o = {x.o[4 * i + 2 * r] * output.factor, x.o[4 * i + 2 * r + 1] * output.factor};
      if (output.factor == 0) o = {};
      if (a.o.dtype == TEA_FP32)
        *reinterpret_cast<float2*>(static_cast<float*>(a.o.data) + at) = o;
      else
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(a.o.data) + at) = pack<kType>(o.x, o.y);
    }
  }

  TEA_DEVICE void run() {
    add_consumers();
    if (!item.begins_tile() || !item.ends_tile()) return write_slot();
    write_row(0);
    write_row(1);
  }
};

}  // namespace tea::hopper::decode::mla
