// nvte_fused_attn_fwd and _bwd on a GPU's memory, end to end, against the oracle: the call of the
// host's tests, with every block of its memory copied to the GPU and back.
#include <gtest/gtest.h>

#include "kit/gpu.h"
#include "nvte/attention_call.h"

namespace tea::test {
namespace {

class GpuCall : public AttentionCall {
 public:
  using AttentionCall::AttentionCall;

  void call_forward() override {
    ForwardHandles h = forward_handles();
    on_gpu(h, {&h.q, &h.k, &h.v, &h.bias, &h.sink, &h.s, &h.o, &h.cu_q, &h.cu_kv, &h.starts_q,
               &h.starts_kv, &h.table_k, &h.table_v, &h.rng});
  }
  void call_backward() override {
    BackwardHandles h = backward_handles();
    on_gpu(h, {&h.q, &h.k, &h.v, &h.o, &h.dout, &h.s, &h.dp, &h.dq, &h.dk, &h.dv, &h.dbias,
               &h.dsink, &h.cu_q, &h.cu_kv, &h.starts_q, &h.starts_kv});
  }

 private:
  struct Block {
    char* host;
    size_t bytes;
    char* device;
  };

  template <class Handles>
  void on_gpu(Handles& handles, const std::vector<TensorWrapper*>& wrappers) {
    upload();
    for (TensorWrapper* wrapper : wrappers) move(wrapper->data(), true);
    move(workspace->data(), true);
    for (NVTETensor tensor : pack.tensors) move(tensor, true);
    run(handles, static_cast<cudaStream_t>(gpu_.stream()));
    move(workspace->data(), false);
    for (NVTETensor tensor : pack.tensors) move(tensor, false);
    download();
  }

  template <class T>
  void add(std::vector<T>& values) {
    if (!values.empty()) add(values.data(), values.size() * sizeof(T));
  }
  void add(void* data, size_t bytes) {
    blocks_.push_back({static_cast<char*>(data), bytes, nullptr});
  }
  void add(Buffer& buffer) {
    if (buffer.elements())
      add(buffer.data(), static_cast<size_t>(buffer.elements()) * type_row(buffer.type()).bytes);
  }

  // Everything that a handle may point at.
  void upload() {
    blocks_.clear();
    std::vector<Buffer*> seen;
    for (Stored* t : {&q, &k, &v, &o, &dout, &dq, &dk, &dv})
      if (t->buffer && std::find(seen.begin(), seen.end(), t->buffer.get()) == seen.end())
        seen.push_back(t->buffer.get()), add(*t->buffer);
    add(bias), add(dbias), add(&scales, sizeof scales);
    add(cu_q), add(cu_kv), add(starts_q), add(starts_kv), add(table_k), add(table_v);
    add(sink), add(dsink), add(rng), add(workspace_memory);
    for (std::vector<char>& memory : aux_memory) add(memory);
    // In memory of their own, as far from a multiple of 256 as they are on the host.
    size_t total = 0;
    for (const Block& b : blocks_) total += b.bytes + 1024;
    auto* at = reinterpret_cast<char*>(gpu_.scratch(total));
    for (Block& b : blocks_) {
      b.device = at + reinterpret_cast<uintptr_t>(b.host) % 256;
      gpu_.upload(reinterpret_cast<uint8_t*>(b.device), reinterpret_cast<uint8_t*>(b.host),
                  b.bytes);
      at += (b.bytes + 768) / 256 * 256;
    }
    gpu_.wait();
  }
  void download() {
    for (const Block& b : blocks_)
      gpu_.download(reinterpret_cast<uint8_t*>(b.host), reinterpret_cast<uint8_t*>(b.device),
                    b.bytes);
    gpu_.wait();
  }

  // Points a handle at the other side's memory.
  void move(NVTETensor tensor, bool to_device) {
    for (const NVTETensorParam part :
         {kNVTERowwiseData, kNVTEScale, kNVTEAmax, kNVTERowwiseScaleInv}) {
      NVTEBasicTensor p = nvte_get_tensor_param(tensor, part);
      if (!p.data_ptr) continue;
      for (const Block& b : blocks_) {
        char* const from = to_device ? b.host : b.device;
        const auto offset = static_cast<char*>(p.data_ptr) - from;
        if (offset < 0 || offset >= static_cast<int64_t>(b.bytes)) continue;
        p.data_ptr = (to_device ? b.device : b.host) + offset;
        nvte_set_tensor_param(&tensor, part, &p);
        break;
      }
    }
  }

  kit::Gpu& gpu_ = kit::gpu_of_thread(0);
  std::vector<Block> blocks_;
};

void expect_right(const Question& question, const std::string& what) {
  GpuCall call(question);
  call.forward();
  Mismatches m = call.check_forward(call.solve());
  if (question.training && !question.max_logit) {  // whose pack has no LSE for backward
    call.keep_o();
    call.backward();
    m += call.check_backward(call.solve());
  }
  EXPECT_GT(m.compared, 0) << what;
  EXPECT_EQ(m.wrong, 0) << what << ": " << m.first;
}

Question question(NVTE_QKV_Layout layout, NVTE_Mask_Type mask) {
  Question q;
  q.layout = layout, q.mask = mask, q.dim_v = 8;
  q.max_q = q.max_kv = 9;
  return q;
}

TEST(NvteAttention, EveryLayout) {
  for (int layout = NVTE_SB3HD; layout <= NVTE_Paged_KV_THD_SBHD_SBHD; ++layout) {
    Question q = question(static_cast<NVTE_QKV_Layout>(layout), NVTE_PADDING_CAUSAL_MASK);
    q.training = layout < NVTE_Paged_KV_BSHD_BSHD_BSHD;
    expect_right(q, "layout " + std::to_string(layout));
  }
}

TEST(NvteAttention, EveryKindOfAuxiliaryTensor) {
  Question q = question(NVTE_BSHD_BSHD_BSHD, NVTE_CAUSAL_MASK);
  q.max_logit = true;
  expect_right(q, "maxima");
  q = question(NVTE_THD_THD_THD, NVTE_PADDING_MASK);
  q.dropout = 0.3f;
  expect_right(q, "dropout");
  q = question(NVTE_BSHD_BS2HD, NVTE_NO_MASK);
  q.bias = NVTE_POST_SCALE_BIAS, q.type = DType::kFloat16;
  expect_right(q, "bias");
  q = question(NVTE_BSHD_BSHD_BSHD, NVTE_NO_MASK);
  q.softmax = NVTE_LEARNABLE_SOFTMAX;
  expect_right(q, "softmax offset");
  q = question(NVTE_BSHD_BSHD_BSHD, NVTE_PADDING_MASK);
  q.type = DType::kFloat8E4M3, q.dout_type = DType::kFloat8E5M2;
  q.o_type = q.dqkv_type = DType::kBFloat16;
  expect_right(q, "fp8");
}

// Without a query there is nothing on the GPU but what backward must fill with zeros.
TEST(NvteAttention, TensorsWithoutElementsDoNotHideWhereTheOthersAre) {
  kit::Gpu& gpu = kit::gpu_of_thread(0);
  constexpr int64_t kRows = 8, kElements = kRows * 16;
  uint8_t* const memory = gpu.scratch(1 << 16);
  gpu.fill(memory, ~0u, 1 << 16);
  const std::vector<size_t> none = {0, 1, 16}, rows = {kRows, 1, 16}, cu = {2}, two = {2},
                            one = {1};
  const int32_t lengths[] = {0, 0, 0, kRows};
  gpu.upload(memory, reinterpret_cast<const uint8_t*>(lengths), sizeof lengths);
  const TensorWrapper q(nullptr, none, DType::kBFloat16), kv(memory + 4096, rows, DType::kBFloat16),
      dkv(memory + 8192, rows, DType::kBFloat16), empty, s(nullptr, one, DType::kFloat32),
      cu_q(memory, cu, DType::kInt32), cu_kv(memory + 8, cu, DType::kInt32);
  TensorWrapper workspace;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  pack.size = 2;
  const auto backward = [&] {
    nvte_fused_attn_bwd(q.data(), kv.data(), kv.data(), q.data(), q.data(), s.data(), s.data(),
                        &pack, q.data(), dkv.data(), dkv.data(), empty.data(), empty.data(),
                        cu_q.data(), cu_kv.data(), empty.data(), empty.data(), 1, kRows, 1, 0,
                        NVTE_THD_THD_THD, NVTE_NO_BIAS, NVTE_PADDING_MASK, NVTE_VANILLA_SOFTMAX, -1,
                        -1, false, false, false, workspace.data(),
                        static_cast<cudaStream_t>(gpu.stream()));
  };
  backward();
  workspace.set_rowwise_data(memory + 16384, DType::kByte, workspace.shape());
  backward();
  nvte_tensor_pack_destroy(&pack);
  std::vector<uint16_t> got(kElements);
  gpu.download(reinterpret_cast<uint8_t*>(got.data()), memory + 8192, kElements * 2);
  gpu.wait();
  EXPECT_EQ(got, std::vector<uint16_t>(kElements));
}

}  // namespace
}  // namespace tea::test
