// The epilogue of a work item: adds the results of the teams, and where several CTAs have a part of
// the tile, those of the CTAs; then normalises O and writes it with the row statistics.
//
// A CTA computes its items from the last to the first. So the beginning of a tile whose end another
// CTA computes comes first: the CTA writes the result to its slot in global memory and raises its
// flag. The CTA that computes the end of a tile does so last, and adds the slots of the other CTAs,
// whose numbers are lower. Waiting for CTAs of lower numbers cannot deadlock, because CTAs start in
// the order of their numbers. All sums are in a fixed order.
#pragma once
#include "hopper/decode/mainloop.cuh"
#include "hopper/decode/row_output.cuh"

namespace tea::hopper::decode {

template <KernelConfig C, bool kIsLast>  // whether the item is the CTA's last one
struct Epilogue {
  using T = Traits<C>;
  using RowState = typename T::RowState;
  static constexpr int kHalf = T::kPassColumns / 2, kGroups = kHalf / 4;
  // Parts that are read at once, because their latency adds up otherwise, as far as there are
  // registers: where there are several passes, O occupies some.
  static constexpr int kBatch = C.tile.passes > 1 ? 2 : kIsLast ? 12 : 4;

  // Unnormalised results of a row over some of its keys: four columns of each half of a pass.
  struct Part {
    RowState row;
    float4 o[2];
  };

  const KernelParams& p;
  typename T::SharedStorage& s;
  const WorkItem& item;
  const OtherParts others;

  TEA_DEVICE float* slot(int cta) const { return p.slots + cta * slot_floats(C.tile); }
  static TEA_DEVICE RowState* slot_rows(float* slot) {
    return reinterpret_cast<RowState*>(slot + T::kBlockM * T::kDimV);
  }

  TEA_DEVICE void add(Part& a, const Part& b) const {
    const float high = fmaxf(a.row.max, b.row.max);
    const float finite = high == kMinusInfinity ? 0.0f : high;  // -infinity - -infinity is NaN
    const float of_a = exp2_fast((a.row.max - finite) * p.scale_log2);
    const float of_b = exp2_fast((b.row.max - finite) * p.scale_log2);
    a.row = {high, a.row.sum * of_a + b.row.sum * of_b};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      a.o[i] = {a.o[i].x * of_a + b.o[i].x * of_b, a.o[i].y * of_a + b.o[i].y * of_b,
                a.o[i].z * of_a + b.o[i].z * of_b, a.o[i].w * of_a + b.o[i].w * of_b};
  }

  // Writes the warp's results of one pass to shared memory.
  TEA_DEVICE void stage_pass(const Mainloop<C>& x, int pass) const {
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = x.first_row + 16 * m + lane() / 4 + 8 * r;
        const float sum = quad_sum(x.softmax[m].row_sum[r]);
        if (pass == 0 && lane() % 4 == 0) s.rows[x.team][row] = {x.softmax[m].row_max[r], sum};
        float* const to = &s.o[x.team][row * T::kPassPitch];
        if constexpr (C.has_fp8_kv) {  // of 16 columns, the even ones and the odd ones
#pragma unroll
          for (int n = 0; n < T::kDimV / 16; ++n)
            if (n / (T::kPassColumns / 16) == pass)
              *reinterpret_cast<float4*>(to + n % (T::kPassColumns / 16) * 16 + lane() % 4 * 4) =
                  float4{x.o[m][8 * n + 2 * r], x.o[m][8 * n + 4 + 2 * r],
                         x.o[m][8 * n + 2 * r + 1], x.o[m][8 * n + 4 + 2 * r + 1]};
        } else {
#pragma unroll
          for (int n = 0; n < T::kDimV / 8; ++n)
            if (n / (T::kPassColumns / 8) == pass)
              *reinterpret_cast<float2*>(to + n % (T::kPassColumns / 8) * 8 + lane() % 4 * 2) =
                  float2{x.o[m][4 * n + 2 * r], x.o[m][4 * n + 2 * r + 1]};
        }
      }
  }
  TEA_DEVICE Part add_teams(int row, int column) const {
    const auto read = [&](int team) {
      const float* const from = &s.o[team][row * T::kPassPitch + column];
      return Part{
          s.rows[team][row],
          {*reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + kHalf)}};
    };
    Part sum = read(0);
#pragma unroll
    for (int team = 1; team < T::kTeams; ++team) add(sum, read(team));
    return sum;
  }
  TEA_DEVICE void add_others(Part& sum, int row, int column) const {
#pragma unroll 1
    for (int n = 0; n < others.count; n += kBatch) {
      Part part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (n + i >= others.count) break;
        float* const from = slot(others.slot(n + i));
        const float2 state = __ldcg(reinterpret_cast<const float2*>(slot_rows(from) + row));
        part[i].row = {state.x, state.y};
        const float* const o = from + row * T::kDimV + column;
        part[i].o[0] = __ldcg(reinterpret_cast<const float4*>(o));
        part[i].o[1] = __ldcg(reinterpret_cast<const float4*>(o + kHalf));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (n + i < others.count) add(sum, part[i]);
    }
  }
  // Waits until the other CTAs have raised their flags, and lowers them for the next launch.
  TEA_DEVICE void wait_for_others() const {
    for (int n = static_cast<int>(threadIdx.x); n < others.count; n += T::kThreads) {
      uint64_t& flag = p.flags[others.slot(n)];
      while (load_acquire(flag) != p.launch_number) {
      }
      flag = 0;
    }
  }

  TEA_DEVICE void write_slot(const Part& sum, int row, int column) const {
    float* const to = slot(static_cast<int>(blockIdx.x));
    *reinterpret_cast<float4*>(to + row * T::kDimV + column) = sum.o[0];
    *reinterpret_cast<float4*>(to + row * T::kDimV + column + kHalf) = sum.o[1];
    if (column == 0) slot_rows(to)[row] = sum.row;
  }
  TEA_DEVICE void write_result(const Part& sum, int row, int column) const {
    const AttentionArguments& a = p.args;
    const RowOutput output =
        finish_row(p, item, item.head_kv(), row, sum.row.max, sum.row.sum, column == 0);
    float f = output.factor;
    if constexpr (C.has_fp8_kv) f *= kv_scale(a, a.fp8.v_inv, item.head_kv());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i * kHalf >= a.dim_v) break;
      float4 o = {sum.o[i].x * f, sum.o[i].y * f, sum.o[i].z * f, sum.o[i].w * f};
      if (output.factor == 0) o = {};
      const int64_t at = output.at + column + i * kHalf;
      if (a.o.dtype == TEA_FP32)
        *reinterpret_cast<float4*>(static_cast<float*>(a.o.data) + at) = o;
      else
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.o.data) + at) =
            uint2{pack<C.type>(o.x, o.y), pack<C.type>(o.z, o.w)};
    }
  }

  TEA_DEVICE void run(const Mainloop<C>& x) const {
    const int rows = item.bounds.seqlen_q * p.group;
#pragma unroll
    for (int pass = 0; pass < C.tile.passes; ++pass) {
      if (pass > 0) T::sync();  // the results of the pass before have been read
      stage_pass(x, pass);
      if (pass == 0) wait_for_others();
      T::sync();
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < rows * kGroups; i += T::kThreads) {
        const int row = i / kGroups, column = i % kGroups * 4;
        Part sum = add_teams(row, column);
        add_others(sum, row, pass * T::kPassColumns + column);
        if (item.ends_tile())
          write_result(sum, row, pass * T::kPassColumns + column);
        else
          write_slot(sum, row, pass * T::kPassColumns + column);
      }
    }
    if (item.ends_tile()) return;
    T::sync();  // the slot is complete
    if (threadIdx.x == 0) store_release(p.flags[blockIdx.x], p.launch_number);
  }
};

}  // namespace tea::hopper::decode
