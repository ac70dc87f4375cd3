// The selector: it promises a backend exactly where both entry points accept the call, over every
// layout, mask, bias, softmax type and dtype and draws of everything else.
#include <gtest/gtest.h>

#include <cstdio>
#include <list>

#include "nvte/attention_call.h"
#include "nvte/backend.h"
#include "nvte/expect_error.h"

namespace tea::test {
namespace {

struct Selection {
  bool training;
  DType type;
  NVTE_QKV_Layout layout;
  NVTE_Bias_Type bias;
  NVTE_Mask_Type mask;
  NVTE_Softmax_Type softmax;
  float dropout;
  size_t heads, groups, rows_q, rows_kv, dim_qk, dim_v;
  int64_t left, right;
  bool max_logit;

  NVTE_Fused_Attn_Backend ask() const {
    const auto dtype = static_cast<NVTEDType>(type);
    return nvte_get_fused_attn_backend(training, dtype, dtype, layout, bias, mask, softmax, dropout,
                                       heads, groups, rows_q, rows_kv, dim_qk, dim_v, left, right,
                                       max_logit, false, false);
  }
  // Whether both queries of the sizes go through, with tensors without memory; or if `execute`,
  // both calls, on zeros.
  bool executor_accepts(bool execute = false) const;
  bool small() const { return rows_q <= 64 && rows_kv <= 64; }
};

// Zeros for the tensors of one call; NULL if there is to be no memory.
class Memory {
 public:
  explicit Memory(bool given) : given_(given) {}
  void* of(size_t bytes) {
    if (!given_) return nullptr;
    blocks_.emplace_back(bytes + 64);
    const auto address = reinterpret_cast<uintptr_t>(blocks_.back().data());
    return reinterpret_cast<void*>((address + 31) / 32 * 32);
  }
  void give(TensorWrapper& workspace) {
    workspace.set_rowwise_data(of(workspace.numel()), DType::kByte, workspace.shape());
  }
  void give(const NVTETensorPack& pack) {
    for (size_t i = 0; i < pack.size; ++i) {
      NVTETensor entry = pack.tensors[i];
      NVTEBasicTensor data = nvte_get_tensor_param(entry, kNVTERowwiseData);
      data.data_ptr = of(nvte_tensor_size_bytes(entry));
      nvte_set_tensor_param(&entry, kNVTERowwiseData, &data);
    }
  }

 private:
  bool given_;
  std::list<std::vector<char>> blocks_;
};

std::vector<size_t> shape(const std::string& letters, const std::map<char, size_t>& sizes) {
  std::vector<size_t> out;
  for (const char letter : letters)
    if (letter != '3' && letter != '2') out.push_back(sizes.at(letter));
  return out;
}

bool Selection::executor_accepts(bool execute) const {
  const Order order = order_of(layout);
  const size_t b = 2, pages = 5, page = 4;
  Memory memory(execute);
  const auto tensor = [&](const std::vector<size_t>& sizes, DType t) {
    size_t elements = 3;  // of packed buffers, of which each tensor gets one of its own
    for (const size_t size : sizes) elements *= size;
    return TensorWrapper(memory.of(elements * sizeof(float)), sizes, t);
  };
  const auto kv = [&](size_t dim) {
    return shape(order.of_k(), {{'b', order.paged ? pages : b},
                                {'s', order.paged ? page : rows_kv},
                                {'t', b * rows_kv},
                                {'h', groups},
                                {'d', dim}});
  };
  const auto on_q = [&](size_t dim) {
    return shape(order.plain_q(),
                 {{'b', b}, {'s', rows_q}, {'t', b * rows_q}, {'h', heads}, {'d', dim}});
  };
  const DType out = type;
  const TensorWrapper q = tensor(on_q(dim_qk), type), k = tensor(kv(dim_qk), type),
                      v = tensor(kv(dim_v), type), o = tensor(on_q(dim_v), out), none,
                      dq = tensor(on_q(dim_qk), type), dk = tensor(kv(dim_qk), type),
                      dv = tensor(kv(dim_v), type), rng = tensor({2}, DType::kInt64),
                      cu = tensor({b + 1}, DType::kInt32),
                      table = tensor({b, (rows_kv + page - 1) / page}, DType::kInt32),
                      sized_bias = tensor({1, heads, rows_q, rows_kv}, DType::kFloat32),
                      offset = tensor({1, heads, 1, 1}, DType::kFloat32);
  TensorWrapper workspace, workspace_2;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  const auto forward = [&] {
    nvte_fused_attn_fwd(q.data(), k.data(), v.data(), sized_bias.data(), offset.data(), none.data(),
                        o.data(), &pack, cu.data(), cu.data(), none.data(), none.data(),
                        table.data(), table.data(), rng.data(), rows_q, rows_kv, training,
                        max_logit, false, 1.0f, dropout, layout, bias, mask, softmax, left, right,
                        false, workspace.data(), nullptr);
  };
  const auto backward = [&] {
    nvte_fused_attn_bwd(q.data(), k.data(), v.data(), o.data(), o.data(), none.data(), none.data(),
                        &pack, dq.data(), dk.data(), dv.data(), sized_bias.data(), offset.data(),
                        cu.data(), cu.data(), none.data(), none.data(), rows_q, rows_kv, 1.0f,
                        dropout, layout, bias, mask, softmax, left, right, false, false, false,
                        workspace_2.data(), nullptr);
  };
  bool accepted = true;
  try {
    forward();
    if (execute) memory.give(workspace), memory.give(pack), forward();
    if (training && !max_logit) {
      backward();
      if (execute) memory.give(workspace_2), backward();
    }
  } catch (const std::runtime_error& e) {
    if (execute) std::printf("%s\n", e.what());
    accepted = false;
  }
  nvte_tensor_pack_destroy(&pack);
  return accepted;
}

// Draw number `n` of what is not enumerated; most draws are valid in each respect.
void draw(Selection& s, uint64_t n) {
  std::mt19937_64 random(n);
  const auto pick = [&](auto... values) {
    const std::common_type_t<decltype(values)...> all[] = {values...};
    return all[random() % sizeof...(values)];
  };
  s.dropout = pick(0.0f, 0.0f, 0.1f, 0.5f, 0.999f, 1.0f);
  s.heads = pick(4, 4, 6, 8, 1), s.groups = pick(s.heads, s.heads, size_t{1}, size_t{2}, size_t{4});
  s.rows_q = pick(1, 5, 64, 1000, 0);
  s.rows_kv = pick(s.rows_q, s.rows_q, size_t{7}, size_t{2000});
  s.dim_qk = pick(8, 64, 64, 128, 192, 256, 512, 12, 520, 1024, 1032);
  s.dim_v = pick(s.dim_qk, s.dim_qk, s.dim_qk, size_t{128});
  s.left = pick(-1, -1, 0, 3, -2), s.right = pick(-1, -1, 0, 2);
  if (random() % 4) s.left = std::max<int64_t>(s.left, -1);
}

TEST(Backend, PromisesWhatTheExecutorAccepts) {
  constexpr DType kTypes[] = {DType::kFloat16,    DType::kBFloat16,   DType::kFloat32,
                              DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt32};
  int64_t asked = 0, promised = 0, executed = 0, wrong = 0;
  for (int layout = 0; layout < kLayouts; ++layout)
    for (int mask = 0; mask < 6; ++mask)
      for (int bias = 0; bias < 4; ++bias)
        for (int softmax = 0; softmax < 3; ++softmax)
          for (const DType type : kTypes)
            for (int flags = 0; flags < 4; ++flags) {
              Selection s{};
              s.layout = static_cast<NVTE_QKV_Layout>(layout), s.type = type;
              s.mask = static_cast<NVTE_Mask_Type>(mask),
              s.bias = static_cast<NVTE_Bias_Type>(bias);
              s.softmax = static_cast<NVTE_Softmax_Type>(softmax);
              s.training = flags & 1, s.max_logit = flags & 2;
              draw(s, static_cast<uint64_t>(++asked));
              const bool promise = s.ask() != NVTE_No_Backend;
              promised += promise;
              const bool execute = promise && s.small() && promised % 8 == 0;
              executed += execute;
              if (promise == s.executor_accepts() && (!execute || s.executor_accepts(true)))
                continue;
              if (wrong++ == 0)
                ADD_FAILURE() << kLayoutNames[layout] << " mask " << mask << " bias " << bias
                              << " softmax " << softmax << " type " << static_cast<int>(type)
                              << " flags " << flags << " draw " << asked << " promise " << promise;
            }
  std::printf("%lld asked, %lld promised, %lld of them executed, %lld wrong\n",
              static_cast<long long>(asked), static_cast<long long>(promised),
              static_cast<long long>(executed), static_cast<long long>(wrong));
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(executed, promised / 40);
  EXPECT_GT(promised, asked / 10);
  EXPECT_LT(promised, asked);
}

Selection plain() {
  return {true,
          DType::kBFloat16,
          NVTE_BSHD_BSHD_BSHD,
          NVTE_NO_BIAS,
          NVTE_CAUSAL_MASK,
          NVTE_VANILLA_SOFTMAX,
          0,
          8,
          8,
          128,
          128,
          64,
          64,
          -1,
          -1,
          false};
}

TEST(Backend, ClassesFollowTheType) {
  Selection s = plain();
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);  // also where the short kernels would do
  s.type = DType::kFloat16;
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s.type = DType::kFloat8E4M3;
  EXPECT_EQ(s.ask(), NVTE_FP8);
  s.type = DType::kFloat8E5M2;
  EXPECT_EQ(s.ask(), NVTE_FP8);
  s.max_logit = true;
  EXPECT_EQ(s.ask(), NVTE_No_Backend);
  s.type = DType::kInt64;
  EXPECT_EQ(s.ask(), NVTE_No_Backend);
}

// Problems that TransformerEngine refuses or computes by another path, and this library supports.
TEST(Backend, LiftedLimits) {
  Selection s = plain();
  s.bias = NVTE_POST_SCALE_BIAS, s.mask = NVTE_PADDING_CAUSAL_MASK, s.dropout = 0.1f;
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s.bias = NVTE_PRE_SCALE_BIAS, s.left = 16;
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s.bias = NVTE_ALIBI, s.mask = NVTE_NO_MASK, s.right = 3;
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s = plain(), s.mask = NVTE_CAUSAL_BOTTOM_RIGHT_MASK, s.rows_q = 256;  // more queries than keys
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s = plain(), s.dim_qk = s.dim_v = 512;
  EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen);
  s = plain(), s.type = DType::kFloat8E4M3, s.layout = NVTE_THD_THD_THD, s.mask = NVTE_PADDING_MASK;
  EXPECT_EQ(s.ask(), NVTE_FP8);
}

// As TransformerEngine's from cuDNN 9.7 on; here the call runs, too. The lengths are those of
// cu_seqlens, as with a padding mask.
TEST(Backend, RaggedAndPagedSidesNeedNoPaddingMask) {
  for (const NVTE_QKV_Layout layout : {NVTE_THD_THD_THD, NVTE_THD_BSHD_BSHD,
                                       NVTE_Paged_KV_THD_BSHD_BSHD, NVTE_Paged_KV_BSHD_BSHD_BSHD})
    for (const NVTE_Mask_Type mask :
         {NVTE_NO_MASK, NVTE_CAUSAL_MASK, NVTE_CAUSAL_BOTTOM_RIGHT_MASK}) {
      Selection s = plain();
      s.training = false, s.layout = layout, s.mask = mask;
      EXPECT_EQ(s.ask(), NVTE_F16_arbitrary_seqlen) << layout << " " << mask;
      EXPECT_TRUE(s.executor_accepts()) << layout << " " << mask;
    }
}

TEST(Backend, ArgumentsThatMakeNoSenseThrow) {
  const auto ask = [](NVTEDType q, NVTEDType kv, int layout, int bias, int mask, int softmax) {
    return nvte_get_fused_attn_backend(
        true, q, kv, static_cast<NVTE_QKV_Layout>(layout), static_cast<NVTE_Bias_Type>(bias),
        static_cast<NVTE_Mask_Type>(mask), static_cast<NVTE_Softmax_Type>(softmax), 0, 8, 8, 128,
        128, 64, 64, -1, -1, false, false, false);
  };
  constexpr NVTEDType h = kNVTEFloat16;
  EXPECT_NVTE_ERROR(ask(h, kNVTEBFloat16, 9, 0, 0, 0), "Q and KV must have the same data type.");
  EXPECT_NVTE_ERROR(ask(h, h, 25, 0, 0, 0), "qkv_layout not supported! It is 25; needs 0 to 24.");
  // NVTE_Bias_Type holds no value but its four.
  EXPECT_NVTE_ERROR(ask(h, h, 9, 0, 6, 0), "attn_mask_type is 6; needs a value from 0 to 5");
  EXPECT_NVTE_ERROR(ask(h, h, 9, 0, 0, 3), "softmax_type is 3; needs a value from 0 to 2");
}

TEST(Backend, TheExecutorThrowsWhatTheSelectorReports) {
  nvte::Work work{};
  work.sizes = {
      .batch = 1, .heads_q = 2, .heads_kv = 2, .max_q = 4, .max_kv = 4, .dim_qk = 8, .dim_v = 8};
  const NVTEDType h = kNVTEFloat16;
  work.types = {h, h, h, h, h};
  EXPECT_EQ(nvte::backend_of(work), NVTE_F16_arbitrary_seqlen);
  EXPECT_EQ(nvte::accepted_backend(work), NVTE_F16_arbitrary_seqlen);
  work.sizes.dim_qk = 7;
  EXPECT_EQ(nvte::backend_of(work), NVTE_No_Backend);
  EXPECT_NVTE_ERROR(nvte::accepted_backend(work), "dim_qk is 7; needs a multiple of 8");
}

}  // namespace
}  // namespace tea::test
