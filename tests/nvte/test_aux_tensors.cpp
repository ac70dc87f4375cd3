// The contents of the pack for each backend, and their positions for backward.
#include <gtest/gtest.h>

#include "nvte/attention_call.h"
#include "nvte/aux_tensors.h"
#include "nvte/expect_error.h"

namespace tea::test {
namespace {

using nvte::Aux;

struct Entry {
  NVTEDType dtype;
  std::vector<size_t> shape;
};

void expect_pack(const Question& s, const std::vector<Entry>& want) {
  AttentionCall call(s);
  call.call_forward();
  ASSERT_EQ(call.pack.size, want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const NVTEBasicTensor entry = nvte_get_tensor_param(call.pack.tensors[i], kNVTERowwiseData);
    EXPECT_EQ(entry.data_ptr, nullptr) << i;
    EXPECT_EQ(entry.dtype, want[i].dtype) << i;
    const std::vector<size_t> shape(entry.shape.data, entry.shape.data + entry.shape.ndim);
    EXPECT_EQ(shape, want[i].shape) << i;
  }
}

const Entry kStats = {kNVTEFloat32, {3, 4, 5, 1}};
const Entry kState = {kNVTEInt64, {2}};
const Entry kOffset = {kNVTEFloat32, {1, 4, 1, 1}};
const Entry kBias = {kNVTEBFloat16, {1, 4, 5, 7}};

TEST(AuxTensors, ArbitraryHasStatsStateBiasOffset) {
  Question s;
  expect_pack(s, {kStats, kState});
  s.training = false;
  expect_pack(s, {kStats, kState});
  s.bias = NVTE_ALIBI;
  expect_pack(s, {kStats, kState});
  s.softmax = NVTE_OFF_BY_ONE_SOFTMAX;
  expect_pack(s, {kStats, kState, kOffset});
  s.bias = NVTE_POST_SCALE_BIAS, s.softmax = NVTE_VANILLA_SOFTMAX;
  expect_pack(s, {kStats, kState, kBias});
  s.bias = NVTE_PRE_SCALE_BIAS, s.softmax = NVTE_LEARNABLE_SOFTMAX;
  expect_pack(s, {kStats, kState, kBias, kOffset});
  s.bias_per_batch = true, s.bias_per_head = false;
  expect_pack(s, {kStats, kState, {kNVTEBFloat16, {3, 1, 5, 7}}, kOffset});
  s.bias_per_row = false;
  expect_pack(s, {kStats, kState, {kNVTEBFloat16, {3, 1, 1, 7}}, kOffset});
}

TEST(AuxTensors, MaximaAndSumsReplaceTheStats) {
  Question s;
  s.max_logit = true, s.softmax = NVTE_LEARNABLE_SOFTMAX;
  expect_pack(s, {kStats, kStats, kState, kOffset});
}

TEST(AuxTensors, RaggedQueriesHaveStatsByToken) {
  Question s;
  s.mask = NVTE_PADDING_MASK;
  for (const NVTE_QKV_Layout layout :
       {NVTE_THD_THD_THD, NVTE_THD_BSHD_BSHD, NVTE_THD_SBHD_SBHD, NVTE_THD_T2HD}) {
    s.layout = layout;
    AttentionCall call(s);
    expect_pack(s, {{kNVTEFloat32, {static_cast<size_t>(call.tokens_q), 4, 1}}, kState});
  }
  s.layout = NVTE_SBHD_SBHD_SBHD;
  expect_pack(s, {kStats, kState});
}

TEST(AuxTensors, Fp8HasThreeAndWhatIsMoreComesAfter) {
  Question s;
  s.type = DType::kFloat8E4M3;
  expect_pack(s, {kStats, kStats, kState});
  s.softmax = NVTE_LEARNABLE_SOFTMAX;
  expect_pack(s, {kStats, kStats, kState, kOffset});
}

// FP8's second tensor is neither read nor written.
TEST(AuxTensors, Fp8LeavesTheSecondTensorAlone) {
  Question s;
  s.type = DType::kFloat8E4M3, s.dout_type = s.dqkv_type = DType::kFloat8E5M2;
  AttentionCall call(s);
  call.forward();
  const std::vector<char> before = call.aux_memory[1];
  call.backward();
  EXPECT_EQ(call.aux_memory[1], before);
  EXPECT_EQ(before, std::vector<char>(before.size(), '\xff'));
}

TEST(AuxTensors, SizesThatCannotBeAreRefused) {
  const nvte::Work work{{}, {.batch = 1, .heads_q = 1}, {}, 0, false};
  const auto entries = nvte::aux_entries(work, NVTE_F16_arbitrary_seqlen);
  const auto fp8 = nvte::aux_entries(work, NVTE_FP8);
  const char* const text = "Unexpected Aux_CTX_Tensors->size.";
  NVTETensorPack pack;
  for (pack.size = 2; pack.size <= 10; ++pack.size)
    EXPECT_NO_THROW(nvte::check_aux_size(pack, entries, NVTE_F16_arbitrary_seqlen));
  pack.size = 11;
  EXPECT_NVTE_ERROR(nvte::check_aux_size(pack, entries, NVTE_F16_arbitrary_seqlen), text);
  pack.size = 2;
  EXPECT_NVTE_ERROR(nvte::check_aux_size(pack, fp8, NVTE_FP8), text);
  pack.size = 3;
  EXPECT_NO_THROW(nvte::check_aux_size(pack, fp8, NVTE_FP8));
}

TEST(AuxTensors, BackwardReadsByPosition) {
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  char memory[5];
  for (size_t i = 0; i < 5; ++i) {
    const NVTEBasicTensor entry = {&memory[i], kNVTEByte, {{1}, 1}};
    nvte_set_tensor_param(&pack.tensors[i], kNVTERowwiseData, &entry);
  }
  nvte::Work work{{}, {.batch = 1, .heads_q = 1}, {}, 0, false};
  work.options.bias = NVTE_POST_SCALE_BIAS, work.options.softmax = NVTE_LEARNABLE_SOFTMAX;
  nvte::BackwardAux aux = nvte::read_aux(pack, work, NVTE_F16_arbitrary_seqlen);
  EXPECT_EQ(aux.lse, &memory[0]);
  EXPECT_EQ(aux.rng_state, &memory[1]);
  EXPECT_EQ(aux.bias, &memory[2]);
  EXPECT_EQ(aux.softmax_offset, &memory[3]);
  aux = nvte::read_aux(pack, work, NVTE_FP8);
  EXPECT_EQ(aux.rng_state, &memory[2]);
  EXPECT_EQ(aux.bias, &memory[3]);
  EXPECT_EQ(aux.softmax_offset, &memory[4]);
  work.options.bias = NVTE_NO_BIAS;
  aux = nvte::read_aux(pack, work, NVTE_F16_arbitrary_seqlen);
  EXPECT_EQ(aux.bias, nullptr);
  EXPECT_EQ(aux.softmax_offset, &memory[2]);
  nvte_tensor_pack_destroy(&pack);
}

}  // namespace
}  // namespace tea::test
