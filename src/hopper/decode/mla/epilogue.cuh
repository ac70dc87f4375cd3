// The epilogue of a work item of the MLA kernel: adds the results of other CTAs that have a part of
// the tile, as decode/epilogue.cuh explains, then normalises O and writes it with the row
// statistics. A slot holds O in the order of the threads' registers.
#pragma once
#include "hopper/decode/mla/mainloop.cuh"
#include "hopper/decode/row_output.cuh"

namespace tea::hopper::decode::mla {

template <Type kType>
struct Epilogue {
  static constexpr int kVectors = kColumns / 2 / 4;  // of four elements of O, of a thread
  static constexpr int kBatch = 16;                  // vectors that are read at once

  const LaunchParams& p;
  SharedStorage& s;
  const WorkItem& item;
  const OtherParts others;
  Mainloop<kType>& x;
  float sum[2] = {};  // of the thread's rows; their maxima are in x.softmax

  TEA_DEVICE float4* slot(int cta) const {
    return reinterpret_cast<float4*>(p.slots + cta * kSlotFloats);
  }
  static TEA_DEVICE RowState* slot_rows(float4* slot) {
    return reinterpret_cast<RowState*>(slot + kBlockM * kDimV / 4);
  }

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
  // Waits until the other CTAs have raised their flags, and lowers them for the next launch.
  TEA_DEVICE void wait_for_others() const {
    if (others.count == 0) return;
    for (int n = static_cast<int>(threadIdx.x); n < others.count; n += kConsumerThreads) {
      uint64_t& flag = p.flags[others.slot(n)];
      while (load_acquire(flag) != p.launch_number) {
      }
      flag = 0;
    }
    sync_consumers();
  }
  TEA_DEVICE void add_slot(float4* from) {
    float of_own[2], of_other[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 other = __ldcg(reinterpret_cast<const float2*>(slot_rows(from) + x.tile_row(r)));
      const float own = x.softmax.row_max[r], high = fmaxf(own, other.x);
      const float finite = high == kMinusInfinity ? 0.0f : high;  // -infinity - -infinity is NaN
      of_own[r] = exp2_fast((own - finite) * p.scale_log2);
      of_other[r] = exp2_fast((other.x - finite) * p.scale_log2);
      x.softmax.row_max[r] = high;
      sum[r] = sum[r] * of_own[r] + other.y * of_other[r];
    }
#pragma unroll
    for (int i = 0; i < kVectors; i += kBatch) {
      float4 part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        part[j] = __ldcg(from + (i + j) * kConsumerThreads + threadIdx.x);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        float* const o = x.o + 4 * (i + j);
        o[0] = o[0] * of_own[0] + part[j].x * of_other[0];
        o[1] = o[1] * of_own[0] + part[j].y * of_other[0];
        o[2] = o[2] * of_own[1] + part[j].z * of_other[1];
        o[3] = o[3] * of_own[1] + part[j].w * of_other[1];
      }
    }
  }

  TEA_DEVICE void write_slot() const {
    float4* const to = slot(static_cast<int>(blockIdx.x));
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      to[i * kConsumerThreads + threadIdx.x] =
          float4{x.o[4 * i], x.o[4 * i + 1], x.o[4 * i + 2], x.o[4 * i + 3]};
    if (x.consumer == 0 && lane() % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) slot_rows(to)[x.tile_row(r)] = {x.softmax.row_max[r], sum[r]};
    sync_consumers();  // the slot is complete
    if (threadIdx.x == 0) store_release(p.flags[blockIdx.x], p.launch_number);
  }
  TEA_DEVICE void write_row(int r) const {
    const AttentionArguments& a = p.args;
    const int row = p.first_row(item) + x.tile_row(r);
    if (row >= item.bounds.seqlen_q * p.group) return;
    const RowOutput output = finish_row(p, item, p.head_kv(item), row, x.softmax.row_max[r], sum[r],
                                        x.consumer == 0 && lane() % 4 == 0);
    const int first_column = x.consumer * kColumns + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      if (first_column + 8 * i >= a.dim_v) break;
      const int64_t at = output.at + first_column + 8 * i;
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
    wait_for_others();
#pragma unroll 1
    for (int n = 0; n < others.count; ++n) add_slot(slot(others.slot(n)));
    if (!item.ends_tile()) return write_slot();
    write_row(0);
    write_row(1);
  }
};

}  // namespace tea::hopper::decode::mla
