// From the products of a block to P: score modification, masking, online softmax, and the
// conversion to 16 bits, in which P is the A operand of P V.
#pragma once
#include "hopper/device/wgmma.cuh"
#include "hopper/forward/load.cuh"

namespace tea::hopper {

// The registers of a consumer warpgroup that persist from block to block.
template <KernelConfig C>
struct ConsumerState {
  float o[C.tile.dim_v / 2];
  float scores[C.tile.block_n / 2];
  uint32_t p[C.tile.block_n / 16][4];
  OnlineSoftmax softmax;
  float rescale[2];  // of O, from the last update of the row maximum
};

template <KernelConfig C>
struct SoftmaxStep {
  using T = Traits<C>;
  using State = ConsumerState<C>;
  using Scores = float[T::kBlockN / 2];
  static constexpr int kBlockN = T::kBlockN;

  const KernelParams& params;
  typename T::SharedStorage& s;
  const int consumer;
  PipelineState<1> bias_state{};

  TEA_DEVICE int first_row(const WorkTile& w) { return w.first_row + 64 * consumer; }

  // Calls use() with the bias of a block when it has arrived, then releases its memory.
  // rows: bias_rows_of().
  template <class Use>
  TEA_DEVICE void with_bias(int rows, Use&& use) {
    if constexpr (C.bias())
      if (rows) {
        s.pipeline_bias[consumer].consumer_wait(bias_state);
        use(BiasTile{s.bias[consumer], rows});
        __syncwarp();  // lane 0 releases the memory for the whole warp
        if (lane() == 0) s.pipeline_bias[consumer].consumer_release(bias_state);
        return bias_state.advance();
      }
    use(BiasTile{});
  }
  TEA_DEVICE void skip_bias(int rows) {
    with_bias(rows, [](const BiasTile&) {});
  }

  // The thread's elements of a block that are visible: see column_mask().
  TEA_DEVICE void find_visible(uint32_t (&visible)[2], const WorkTile& w, int block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Range keys = w.visible_keys(first_row(w) + accumulator_row(2 * r));
      visible[r] = column_mask<kBlockN>(keys.begin - block * kBlockN, keys.end - block * kBlockN);
    }
  }
  static TEA_DEVICE void apply_mask(Scores& scores, const uint32_t (&visible)[2]) {
    // The order of mask_columns() made ptxas move a wait in the loop without a mask of the other
    // configurations, before wait_after() was there; it has not been measured since.
    if constexpr (C.tile.staggered || C.tile.half_first_block) {
      mask_columns(scores, visible);
    } else {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i)
        if (!(visible[row_slot(i)] >> index_in_row(i) & 1)) scores[i] = kMinusInfinity;
    }
  }
  // Applies score modifications and the mask. `highest` is set to the maximum of the thread's
  // visible scores in each row. unmasked: the blocks that are visible to all rows.
  TEA_DEVICE void modify_and_mask(Scores& scores, const WorkTile& w, int block, Range unmasked,
                                  float (&highest)[2]) {
    const bool all_visible = block >= unmasked.begin && block < unmasked.end;
    uint32_t visible[2] = {~0u, ~0u};
    if (!all_visible) find_visible(visible, w, block);
    if constexpr (C.general())
      if (modifies_scores(params.args)) {
        const int row = first_row(w) + accumulator_row(0);
        const int key = block * kBlockN + accumulator_column(0);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (row + 8 * r >= w.seqlen_q) visible[r] = 0;  // a bias has no such row
        with_bias(bias_rows_of(params, w), [&](const BiasTile& bias) {
          modify_scores<C.type, C.bias()>(scores, params.args, w, {row, key}, visible, bias,
                                          highest);
        });
      }
    if (!all_visible) apply_mask(scores, visible);
    if (!C.general() || !softcap_is_last(params.args)) thread_row_max(scores, highest);
  }

  // Replaces the products of a block by unnormalised P in fp32. kMayMask: some row may not attend
  // to all keys. wait_for_pv() is called where the wait for the P V of the block before is hidden
  // best.
  template <bool kMayMask, class WaitForPv>
  TEA_DEVICE void softmax(State& x, const WorkTile& w, int block, Range unmasked,
                          WaitForPv&& wait_for_pv) {
    if constexpr (C.softcap()) return softmax_softcap<kMayMask>(x, w, block, unmasked, wait_for_pv);
    float highest[2];
    if constexpr (kMayMask)
      modify_and_mask(x.scores, w, block, unmasked, highest);
    else
      thread_row_max(x.scores, highest);
    x.softmax.update(x.scores, highest, params.scale_log2, x.rescale);
    wait_for_pv();
  }
  // softmax() for the first block of a tile, whose visible elements are known. half: a causal mask
  // hides the second half of the block from all rows of the warp, so that no exponentials are
  // computed for it.
  TEA_DEVICE void softmax_first(State& x, const uint32_t (&visible)[2], bool half) {
    float highest[2];
    if (half) {
      float part[kBlockN / 4];
#pragma unroll
      for (int i = 0; i < kBlockN / 4; ++i) part[i] = x.scores[i];
      mask_columns(part, visible);
      thread_row_max(part, highest);
      x.softmax.update(part, highest, params.scale_log2, x.rescale);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i)
        x.scores[i] = i < kBlockN / 4 ? part[i % (kBlockN / 4)] : 0;
    } else {
      mask_columns(x.scores, visible);
      thread_row_max(x.scores, highest);
      x.softmax.update(x.scores, highest, params.scale_log2, x.rescale);
    }
  }
  // The same with a soft cap and no other modification. O is rescaled before the exponentials,
  // which hide it; ptxas cannot move it there, because they are in branches.
  template <bool kMayMask, class WaitForPv>
  TEA_DEVICE void softmax_softcap(State& x, const WorkTile& w, int block, Range unmasked,
                                  WaitForPv&& wait_for_pv) {
    uint32_t visible[2] = {~0u, ~0u};
    if (kMayMask && !(block >= unmasked.begin && block < unmasked.end)) {
      find_visible(visible, w, block);
      apply_mask(x.scores, visible);
    }
    SoftcapSoftmax capped;
    capped.update_max(params.softcap, x.softmax, x.scores, visible, params.scale_log2, x.rescale);
    wait_for_pv();
    capped.exponentials(params.softcap, x.scores, visible);
    thread_row_sum(x.scores, x.softmax.row_sum);
  }
  // Rounds P to 16 bits. Dropout applies after the row sum, which includes the dropped elements.
  TEA_DEVICE void convert_p(State& x, const WorkTile& w, int block) {
    const ElementOrigin at = {first_row(w) + accumulator_row(0),
                              block * kBlockN + accumulator_column(0)};
    if constexpr (C.general())
      if (params.args.has_dropout) apply_dropout(x.scores, params.args, w, at);
#pragma unroll
    for (int c = 0; c < kBlockN / 16; ++c) accumulator_as_operand<C.type>(x.p[c], x.scores, c);
    if constexpr (C.dropout()) apply_dropout(x.p, params.args, w, at);
  }
};

}  // namespace tea::hopper
