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
  static constexpr int kBatch = C.tile.passes > 1 ? 2 : 15;

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

  // By what the results of a part are multiplied if `row_max` is the row's maximum over all parts.
  TEA_DEVICE float rescale_factor(const RowState& row, float row_max) const {
    const float finite =
        row_max == kMinusInfinity ? 0.0f : row_max;  // -infinity - -infinity is NaN
    return exp2_fast((row.max - finite) * p.scale_log2);
  }
  // Rescales a part to `row_max`, which is not below its own maximum.
  TEA_DEVICE void rescale_to(Part& x, float row_max) const {
    const float f = rescale_factor(x.row, row_max);
    x.row = {row_max, x.row.sum * f};
#pragma unroll
    for (float4& o : x.o) o = {o.x * f, o.y * f, o.z * f, o.w * f};
  }
  static TEA_DEVICE void add(Part& to, const Part& x, float f) {
    to.row.sum = fmaf(x.row.sum, f, to.row.sum);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to.o[i] = {fmaf(x.o[i].x, f, to.o[i].x), fmaf(x.o[i].y, f, to.o[i].y),
                 fmaf(x.o[i].z, f, to.o[i].z), fmaf(x.o[i].w, f, to.o[i].w)};
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
    float row_max = s.rows[0][row].max;
#pragma unroll
    for (int team = 1; team < T::kTeams; ++team) row_max = fmaxf(row_max, s.rows[team][row].max);
    Part sum = read(0);
    rescale_to(sum, row_max);
#pragma unroll
    for (int team = 1; team < T::kTeams; ++team) {
      const Part x = read(team);
      add(sum, x, rescale_factor(x.row, row_max));
    }
    return sum;
  }
  // Reads parts of other CTAs: four columns of each half of a row.
  struct OtherReader {
    const float *rows, *o;  // in slot 0
    int slot, shares_left;  // of the next part; parts of single shares from there on
    // From a slot to the next one: of another share, from the last share to a group, of another
    // group.
    int share_step, to_groups, group_step;

    TEA_DEVICE OtherReader(const Epilogue& x, int row, int column)
        : rows(x.slot(0) + T::kBlockM * T::kDimV + 2 * row),
          o(x.slot(0) + row * T::kDimV + column),
          slot(x.others.slot(0)),
          shares_left(x.others.adjacent),
          share_step(-x.others.step),
          to_groups(x.others.last_group - x.others.slot(x.others.adjacent - 1)),
          group_step(-x.others.group_step) {}
    TEA_DEVICE const float* in_slot(const float* from) const {
      return from + int64_t{slot} * slot_floats(C.tile);
    }
    TEA_DEVICE void advance() {
      slot += shares_left > 1 ? share_step : shares_left == 1 ? to_groups : group_step;
      --shares_left;
    }
    TEA_DEVICE RowState row() const {
      const float2 x = __ldcg(reinterpret_cast<const float2*>(in_slot(rows)));
      return {x.x, x.y};
    }
    // Starts to read `count` parts, or as many as fit.
    TEA_DEVICE void read(Part (&parts)[kBatch], int count) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) parts[i].row = {kMinusInfinity, 0};
#pragma unroll
      for (int i = 0; i < kBatch; ++i, advance()) {
        if (i >= count) break;
        parts[i].row = row();
        parts[i].o[0] = __ldcg(reinterpret_cast<const float4*>(in_slot(o)));
        parts[i].o[1] = __ldcg(reinterpret_cast<const float4*>(in_slot(o) + kHalf));
      }
    }
  };
  // Adds the other parts. The row maximum over those that are read at once is computed before any
  // is added: the rescale factors are then independent. Where there are more, the maximum over all
  // comes first, so that the bits do not depend on kBatch.
  TEA_DEVICE void add_others(Part& sum, OtherReader& reader) const {
    if (others.count > kBatch) {
      OtherReader ahead = reader;
      float row_max = sum.row.max;
#pragma unroll 4
      for (int n = 0; n < others.count; ++n, ahead.advance())
        row_max = fmaxf(row_max, ahead.row().max);
      rescale_to(sum, row_max);
    }
#pragma unroll 1
    for (int count = others.count; count > 0; count -= kBatch) {
      Part parts[kBatch];
      float factors[kBatch], row_max = sum.row.max;
      reader.read(parts, count);
#pragma unroll
      for (const Part& x : parts) row_max = fmaxf(row_max, x.row.max);
      rescale_to(sum, row_max);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) factors[i] = rescale_factor(parts[i].row, row_max);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= count) break;
        add(sum, parts[i], factors[i]);
      }
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
    const RowOutput output = finish_row<T::kIsPlain>(p, item, item.head_kv(), row, sum.row.max,
                                                     sum.row.sum, column == 0);
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
    const int count = item.bounds.seqlen_q * p.group * kGroups;
    bool waits = kIsLast && others.count > 0;
#pragma unroll
    for (int pass = 0; pass < C.tile.passes; ++pass) {
      if (pass > 0) T::sync();  // the results of the pass before have been read
      stage_pass(x, pass);
      T::sync();
#pragma unroll 1
      for (int first = 0; first < count; first += T::kThreads) {
        const int i = min(first + static_cast<int>(threadIdx.x), count - 1);
        const int row = i / kGroups, column = i % kGroups * 4;
        Part sum = add_teams(row, column);
        if (kIsLast && others.count > 0) {
          OtherReader reader(*this, row, pass * T::kPassColumns + column);
          if (waits) wait_for_others(), T::sync();
          waits = false;
          add_others(sum, reader);
        }
        if (first + static_cast<int>(threadIdx.x) >= count) break;
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
