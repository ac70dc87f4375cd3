// The mainloop of a warp: S = Q K^T, softmax and O += P V over its team's key blocks of a work
// item.
#pragma once
#include "gpu/kv_scale.cuh"
#include "gpu/mma.cuh"
#include "hopper/decode/load.cuh"
#include "hopper/decode/score_mod.cuh"
#include "hopper/decode/widen.cuh"
#include "hopper/device/pipeline.cuh"

namespace tea::hopper::decode {

template <KernelConfig C>
struct Mainloop {
  using T = Traits<C>;
  using Stage = typename T::Stage;
  static constexpr Type kOperand = C.operand_type();
  static constexpr bool kIsBf16 = kOperand == Type::kBf16;
  static constexpr int kMmaM = T::kMmaM, kSteps = T::kDim / 16;
  // The fragments of Q stay in registers where O leaves room for them.
  static constexpr bool kQInRegisters = kMmaM * T::kDim <= 128;

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int team = warp() / T::kTeamWarps;
  const int first_row = warp() % T::kTeamWarps * 16 * kMmaM;  // of the tile
  PipelineState<T::kStages> state{};                          // of the next block

  float o[kMmaM][T::kDimV / 2];
  OnlineSoftmax softmax[kMmaM];
  uint32_t q[kQInRegisters ? kMmaM : 1][kQInRegisters ? kSteps : 1][4];
  int unmasked_begin, unmasked_end;  // the keys that all rows attend to
  float k_scale;                     // of K in FP8
  float q_scale[kMmaM][2];           // of the thread's rows, where Q is scaled

  // The addresses of a lane in the 16 x 16 elements of an operand that ldmatrix_x4() reads: the 8 x
  // 8 matrices right, then below; or below, then right. The first is of the first columns of K or
  // V; swizzled_columns() moves to others.
  static TEA_DEVICE uint32_t right_then_below(const void* base) {
    const uint32_t matrix = lane() / 8, row = lane() % 8 + matrix / 2 * 8;
    return shared_address(base) + swizzled(T::kSwizzle, row, matrix % 2 * 16);
  }
  static TEA_DEVICE uint32_t below_then_right(const void* base) {
    return shared_address(base) + swizzled(T::kSwizzle, lane() % 16, lane() / 16 * 16);
  }
  // 32 * n bytes behind `address`: the swizzle exchanges columns within a slab.
  static TEA_DEVICE uint32_t swizzled_columns(uint32_t address, int n) {
    constexpr int kPerSlab = width(T::kSwizzle) / 32;
    return (address ^ n % kPerSlab * 32) + n / kPerSlab * T::kSlabBytes;
  }
  TEA_DEVICE void load_q_fragment(uint32_t (&a)[4], int m, int step) const {
    const uint32_t base = shared_address(s.q + (first_row + 16 * m) * T::kPitchQ);
    ldmatrix_x4(a, base + lane() % 16 * T::kPitchQ + lane() / 16 * 16 + 32 * step);
  }

  // Q has been loaded.
  TEA_DEVICE void start_item() {
    const SequenceBounds& b = s.work.item.bounds;
    unmasked_begin = max(b.seqlen_q - 1 + b.lo, 0);
    unmasked_end = min(b.hi + 1, b.seqlen_kv);
    if constexpr (C.has_fp8_kv) k_scale = kv_scale(p.args, p.args.fp8.k_inv, s.work.item.head_kv());
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      softmax[m].start();
      if constexpr (C.scales_q())
#pragma unroll
        for (int r = 0; r < 2; ++r)
          q_scale[m][r] = s.q_scale[first_row + 16 * m + lane() / 4 + 8 * r];
#pragma unroll
      for (int i = 0; i < T::kDimV / 2; ++i) o[m][i] = 0;
      if constexpr (kQInRegisters)
#pragma unroll
        for (int k = 0; k < kSteps; ++k) load_q_fragment(q[m][k], m, k);
    }
  }
  // The thread's row r of 16 rows m; instead of rows past the last one, the last one.
  TEA_DEVICE int thread_row(int m, int r) const {
    const int last = s.work.item.bounds.seqlen_q * p.group - 1;
    return min(first_row + 16 * m + lane() / 4 + 8 * r, last);
  }

  // Even and odd steps have accumulators of their own, so that fewer products depend on each other.
  TEA_DEVICE void gemm_qk(float (&scores)[kMmaM][8], const Stage& from) {
    float odd[kMmaM][8];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[m][i] = odd[m][i] = 0;
    const uint32_t address = right_then_below(from.k);
    uint32_t codes[4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[4];
      if constexpr (C.has_fp8_kv) {  // 16 keys by 32 columns at a time
        if (k % 2 == 0) ldmatrix_x4(codes, swizzled_columns(address, k / 2));
        widen(b[0], b[1], codes[k % 2]);
        widen(b[2], b[3], codes[2 + k % 2]);
      } else {
        ldmatrix_x4(b, swizzled_columns(address, k));
      }
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        float* const to = k % 2 ? odd[m] : scores[m];
        uint32_t a[4];
        if constexpr (kQInRegisters) {
          mma_m16n8k16<kIsBf16>(to, q[m][k], b[0], b[1]);
          mma_m16n8k16<kIsBf16>(to + 4, q[m][k], b[2], b[3]);
        } else {
          load_q_fragment(a, m, k);
          mma_m16n8k16<kIsBf16>(to, a, b[0], b[1]);
          mma_m16n8k16<kIsBf16>(to + 4, a, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kMmaM; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scores[m][i] += odd[m][i];
        if constexpr (C.scales_q()) scores[m][i] *= q_scale[m][row_slot(i)];
        if constexpr (C.has_fp8_kv) scores[m][i] *= k_scale;
      }
  }
  // Four codes as two pairs of operands.
  TEA_DEVICE void widen(uint32_t& low, uint32_t& high, uint32_t codes) const {
    widen_fp8(low, high, codes, p.args.k.dtype);
  }

  // O += P V. With V in FP8 each load has 16 keys by 32 columns, and of each 16 columns the even
  // ones and the odd ones make a product: see Epilogue::stage_pass().
  TEA_DEVICE void gemm_pv(const uint32_t (&probabilities)[kMmaM][4], const Stage& from) {
    const uint32_t address = below_then_right(from.v);
    uint32_t codes[4];
#pragma unroll
    for (int n = 0; n < T::kDimV / 16; ++n) {
      uint32_t b[4];
      if constexpr (C.has_fp8_kv) {
        if (n % 2 == 0) ldmatrix_x4_trans(codes, swizzled_columns(address, n / 2));
        constexpr uint32_t kByColumn = 0x3120;  // of two keys by two columns
        widen(b[0], b[2], __byte_perm(codes[n % 2 * 2], 0, kByColumn));
        widen(b[1], b[3], __byte_perm(codes[n % 2 * 2 + 1], 0, kByColumn));
      } else {
        ldmatrix_x4_trans(b, swizzled_columns(address, n));
      }
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        mma_m16n8k16<kIsBf16>(o[m] + 8 * n, probabilities[m], b[0], b[1]);
        mma_m16n8k16<kIsBf16>(o[m] + 8 * n + 4, probabilities[m], b[2], b[3]);
      }
    }
  }

  TEA_DEVICE void modify(float (&x)[8], int m, int key, const uint32_t (&visible)[2],
                         float (&highest)[2]) const {
    ScoreModRow rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const WorkItem& item = s.work.item;
      const int row = thread_row(m, r), query = row / p.group;
      const int head = item.head_kv() * p.group + row % p.group;
      rows[r] = score_mod_row(p.args, item, query, head, key, s.slopes[row]);
    }
    modify_packed_scores<C.type>(x, p.args, rows, visible, highest);
  }
  // Replaces the products of 16 rows by unnormalised P and rescales O.
  TEA_DEVICE void update(float (&x)[8], int m, int key) {
    const bool masked = key < unmasked_begin || key + kBlockN > unmasked_end;
    uint32_t visible[2] = {~0u, ~0u};
    float highest[2], rescale[2];
    if (masked)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const SequenceBounds& b = s.work.item.bounds;
        const int query = thread_row(m, r) / p.group;
        visible[r] =
            column_mask<kBlockN>(query + b.lo - key, min(query + b.hi + 1, b.seqlen_kv) - key);
      }
    const bool modifies = has_modified_scores<T::kIsPlain>(p);
    if (modifies) modify(x, m, key, visible, highest);
    if (masked) mask_columns(x, visible);
    if (!modifies || !softcap_is_last(p.args)) thread_row_max(x, highest);
    softmax[m].update(x, highest, p.scale_log2, rescale);
    if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) scale_rows(o[m], rescale);
  }

  TEA_DEVICE void compute(const Stage& from, int block) {
    float scores[kMmaM][8];
    uint32_t probabilities[kMmaM][4];
    gemm_qk(scores, from);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      update(scores[m], m, block * kBlockN);
      accumulator_as_operand<kOperand>(probabilities[m], scores[m], 0);
    }
    gemm_pv(probabilities, from);
  }

  // The warps of a team have reached the same point, and their writes are visible to each other.
  TEA_DEVICE void sync_team() const {
    if constexpr (T::kTeamWarps == 1)
      __syncwarp();
    else
      named_barrier_sync(1 + team, 32 * T::kTeamWarps);
  }

  // The team's share of an item. refill(stage) is called when all warps of the team have computed
  // its block.
  template <class Refill>
  TEA_DEVICE void run(Refill&& refill) {
    const int end = s.work.item.end_of_keys();
    for (int block = s.work.item.first + team; block < end; block += T::kTeams) {
      wait(s.full[team][state.stage], state.parity);
      compute(s.stages[team][state.stage], block);
      sync_team();
      refill(state.stage);
      state.advance();
    }
  }
};

}  // namespace tea::hopper::decode
