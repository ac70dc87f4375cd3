// Forward and backward through the C API against the oracle: every layout with every mask, softmax
// type and bias, with one and with several query heads per KV head, dense, padded and ragged with
// gaps.
#include <gtest/gtest.h>

#include <cstdio>

#include "nvte/attention.h"
#include "nvte/attention_call.h"
#include "nvte/expect_error.h"

namespace tea::test {
namespace {

constexpr NVTE_Mask_Type kMasks[] = {NVTE_NO_MASK,
                                     NVTE_PADDING_MASK,
                                     NVTE_CAUSAL_MASK,
                                     NVTE_PADDING_CAUSAL_MASK,
                                     NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
                                     NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK};
constexpr NVTE_Softmax_Type kSoftmaxes[] = {NVTE_VANILLA_SOFTMAX, NVTE_OFF_BY_ONE_SOFTMAX,
                                            NVTE_LEARNABLE_SOFTMAX};
constexpr NVTE_Bias_Type kBiases[] = {NVTE_NO_BIAS, NVTE_PRE_SCALE_BIAS, NVTE_POST_SCALE_BIAS,
                                      NVTE_ALIBI};

std::string text(const Question& s) {
  return std::string(kLayoutNames[s.layout]) + " mask " + std::to_string(s.mask) + " softmax " +
         std::to_string(s.softmax) + " bias " + std::to_string(s.bias) + " gqa " +
         std::to_string(s.gqa) + " gaps " + std::to_string(s.gaps) + " window " +
         std::to_string(s.window_left) + "," + std::to_string(s.window_right) + " dropout " +
         std::to_string(s.dropout) + " seed " + std::to_string(s.seed);
}

struct Tally {
  int64_t calls = 0;
  Mismatches elements;
};

void run(const Question& s, Tally& tally) {
  SCOPED_TRACE(text(s));
  AttentionCall call(s);
  EXPECT_EQ(call.backend(), s.fp8() ? NVTE_FP8 : NVTE_F16_arbitrary_seqlen);
  call.forward();
  Mismatches m = call.check_forward(call.solve());
  if (s.training && !s.max_logit) {
    call.keep_o();
    call.backward();
    m += call.check_backward(call.solve());
  }
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
  ++tally.calls;
  tally.elements += m;
}

void print(const Tally& tally) {
  std::printf("%lld calls, %lld elements compared, %lld mismatches\n",
              static_cast<long long>(tally.calls), static_cast<long long>(tally.elements.compared),
              static_cast<long long>(tally.elements.wrong));
}

// Options that vary in addition to the product of layout, mask, softmax, bias, heads and gaps: each
// value of each meets every layout, though not every combination.
void vary(Question& s, uint64_t draw) {
  s.seed = draw;
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  s.type = kTypes[draw % 3];
  constexpr int64_t kWindows[][2] = {{-1, -1}, {2, 0}, {-1, 1}, {1, 2}, {0, -1}};
  s.window_left = kWindows[draw % 5][0], s.window_right = kWindows[draw % 5][1];
  s.bottom_right = is_bottom_right(s.mask) || (!is_causal(s.mask) && draw % 4 < 2);
  s.dropout = draw % 7 < 3 ? 0.3f : 0.0f;
  s.bias_per_batch = draw % 2, s.bias_per_head = draw / 2 % 2, s.bias_per_row = draw % 11 < 8;
  if (draw % 6 == 0) s.max_q = 9, s.max_kv = 6;  // more queries than keys
}

TEST(Attention, EveryCombinationMatchesTheOracle) {
  Tally tally;
  uint64_t draw = 0;
  for (int layout = 0; layout < kLayouts; ++layout)
    for (const NVTE_Mask_Type mask : kMasks)
      for (const NVTE_Softmax_Type softmax : kSoftmaxes)
        for (const NVTE_Bias_Type bias : kBiases)
          for (const bool gqa : {false, true}) {
            Question s;
            s.layout = static_cast<NVTE_QKV_Layout>(layout);
            s.mask = mask, s.softmax = softmax, s.bias = bias, s.gqa = gqa;
            const Order order = s.order();
            if (gqa && order.packs_qkv()) continue;  // one number of heads by construction
            vary(s, ++draw);
            s.training = !order.paged;
            const bool ragged = order.ragged_q() || order.ragged_kv();
            run(s, tally);
            if (ragged) s.gaps = false, run(s, tally);
          }
  print(tally);
  EXPECT_EQ(tally.elements.wrong, 0);
}

// The FP8 class. K, V, dK and dV have scalars of their own, none, or those of Q and dQ.
TEST(Attention, Fp8MatchesTheOracle) {
  Tally tally;
  uint64_t draw = 0;
  struct Outputs {
    DType o, dout, dqkv;
  };
  const Outputs outputs[] = {{DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat8E5M2},
                             {DType::kBFloat16, DType::kFloat8E5M2, DType::kBFloat16},
                             {DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E4M3}};
  for (int layout = 0; layout < kLayouts; ++layout)
    for (const NVTE_Mask_Type mask : kMasks)
      for (const Outputs& out : outputs) {
        Question s;
        s.layout = static_cast<NVTE_QKV_Layout>(layout);
        s.mask = mask, s.seed = ++draw;
        const Order order = s.order();
        s.training = !order.paged;
        s.type = draw % 2 ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
        s.o_type = out.o, s.dout_type = out.dout, s.dqkv_type = out.dqkv;
        s.softmax = kSoftmaxes[draw % 3], s.bias = kBiases[draw % 4];
        s.dropout = draw % 5 < 2 ? 0.25f : 0.0f;
        s.gqa = draw % 2 && !order.packs_qkv();
        if (draw % 3 == 0) s.window_left = 2, s.window_right = 1;
        s.bottom_right = is_bottom_right(mask);
        s.sharing = static_cast<Sharing>(draw / 5 % 3);
        run(s, tally);
      }
  print(tally);
  EXPECT_EQ(tally.elements.wrong, 0);
}

TEST(Attention, RowMaximaMatchTheOracleInTrainingToo) {
  Tally tally;
  uint64_t draw = 0;
  for (int layout = 0; layout < kLayouts; ++layout)
    for (const NVTE_Softmax_Type softmax : kSoftmaxes)
      for (const bool training : {false, true}) {
        Question s;
        s.layout = static_cast<NVTE_QKV_Layout>(layout);
        s.mask = NVTE_PADDING_CAUSAL_MASK, s.softmax = softmax, s.max_logit = true;
        s.training = training && !s.order().paged;
        s.seed = ++draw;
        run(s, tally);
      }
  print(tally);
}

// PyTorch takes the maximum over the whole tensor, which it does not initialise.
TEST(Attention, RowMaximaOfRowsThatDoNotExistAreMinusInfinity) {
  for (const NVTE_QKV_Layout layout :
       {NVTE_BSHD_BSHD_BSHD, NVTE_SBHD_SBHD_SBHD, NVTE_THD_THD_THD}) {
    Question s;
    s.layout = layout, s.mask = NVTE_PADDING_MASK, s.max_logit = true, s.training = false;
    AttentionCall call(s);
    call.forward();
    const auto n = static_cast<int64_t>(nvte_tensor_numel(call.pack.tensors[0]));
    std::vector<bool> exists(static_cast<size_t>(n));
    for (int64_t b = 0; b < call.c.batch; ++b)
      for (int64_t h = 0; h < call.c.heads_q; ++h)
        for (int64_t i = 0; i < call.c.length_q[static_cast<size_t>(b)]; ++i)
          exists[static_cast<size_t>(call.stats_at(b, h, i))] = true;
    int64_t absent = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (exists[static_cast<size_t>(i)]) continue;
      ++absent;
      EXPECT_EQ(call.aux_floats(0)[i], -INFINITY) << kLayoutNames[layout] << " " << i;
    }
    EXPECT_GT(absent, 0);
  }
}

// A causal mask and the window (-1, 0) are a causal mask: the same engine runs, with the same need.
TEST(Attention, SynonymousWindowsNeedTheSameWorkspace) {
  const std::vector<size_t> kv_heads = {32, 8};
  for (const size_t heads : kv_heads) {
    const auto bytes = [&](bool forward, int64_t window_right) {
      const TensorWrapper q(nullptr, std::vector<size_t>{2, 2048, 32, 128}, DType::kBFloat16),
          k(nullptr, std::vector<size_t>{2, 2048, heads, 128}, DType::kBFloat16), none,
          cu(nullptr, std::vector<size_t>{3}, DType::kInt32);
      const NVTETensor x = q.data(), y = k.data(), e = none.data(), n = cu.data();
      TensorWrapper workspace;
      NVTETensorPack pack;
      nvte_tensor_pack_create(&pack);
      if (forward)
        nvte_fused_attn_fwd(x, y, y, e, e, e, x, &pack, n, n, e, e, e, e, e, 2048, 2048, true,
                            false, false, 1, 0, NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_CAUSAL_MASK,
                            NVTE_VANILLA_SOFTMAX, -1, window_right, false, workspace.data(),
                            nullptr);
      else
        nvte_fused_attn_bwd(x, y, y, x, x, e, e, &pack, x, y, y, e, e, n, n, e, e, 2048, 2048, 1, 0,
                            NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_CAUSAL_MASK,
                            NVTE_VANILLA_SOFTMAX, -1, window_right, false, false, false,
                            workspace.data(), nullptr);
      nvte_tensor_pack_destroy(&pack);
      return workspace.numel();
    };
    for (const bool forward : {true, false})
      EXPECT_EQ(bytes(forward, 0), bytes(forward, -1)) << heads << " heads, forward " << forward;
  }
}

}  // namespace
}  // namespace tea::test
