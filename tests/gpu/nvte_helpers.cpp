// The helpers of the TransformerEngine C API on a GPU's memory: one call each, the same results as
// on the host. The operations behind them have their own tests.
#include <gtest/gtest.h>

#include "kit/both.h"
#include "transformer_engine/fused_attn.h"
#include "transformer_engine/softmax.h"

namespace tea::kit {
namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

using Sizes = std::vector<size_t>;
constexpr size_t kBatch = 3, kHeads = 2, kDim = 8, kSeq = 6, kTokens = 12;

TensorWrapper half(Side& s, const Sizes& shape, bool written = false, Close close = {}) {
  int64_t count = 1;
  for (size_t size : shape) count *= static_cast<int64_t>(size);
  return {written ? s.fresh(TEA_BF16, count, close) : s.normal(TEA_BF16, count, close), shape,
          DType::kBFloat16};
}
TensorWrapper single(Side& s, const Sizes& shape, Close close = {}) {
  int64_t count = 1;
  for (size_t size : shape) count *= static_cast<int64_t>(size);
  return {s.normal(TEA_FP32, count, close), shape, DType::kFloat32};
}
TensorWrapper ints(Side& s, const std::vector<int32_t>& values, Sizes shape = {}) {
  if (shape.empty()) shape = {values.size()};
  return {s.numbers(values), shape, DType::kInt32};
}
const std::vector<int32_t> kCu = {0, 4, 4, 10};  // even lengths

template <class Call>
void run(Side& s, const Call& call) {
  s.run([&] {
    call(static_cast<cudaStream_t>(s.stream()));
    return TEA_OK;
  });
}

void kv_cache(Side& s) {
  const TensorWrapper k = half(s, {kBatch, kSeq, kHeads, kDim}),
                      v = half(s, {kBatch, kSeq, kHeads, kDim});
  const TensorWrapper kc = half(s, {8, 4, kHeads, kDim}), vc = half(s, {8, 4, kHeads, kDim});
  const TensorWrapper table = ints(s, {5, 1, 0, 7, 2, 3}, {kBatch, 2});
  const TensorWrapper fresh = ints(s, {0, 3, 3, 8}), cached = ints(s, {0, 5, 6, 14});
  run(s, [&](cudaStream_t stream) {
    nvte_copy_to_kv_cache(k.data(), v.data(), kc.data(), vc.data(), table.data(), fresh.data(),
                          cached.data(), NVTE_BSHD, kBatch, kSeq, 8, 2, 0, stream);
  });
}

void kv_cache_without_pages(Side& s) {
  const TensorWrapper k = half(s, {kBatch, kSeq, kHeads, kDim}),
                      v = half(s, {kBatch, kSeq, kHeads, kDim});
  const TensorWrapper kc = half(s, {5, 8, kHeads, kDim}), vc = half(s, {5, 8, kHeads, kDim});
  const TensorWrapper rows = ints(s, {1, 3, 4});
  const TensorWrapper fresh = ints(s, {0, 3, 3, 8}), cached = ints(s, {0, 5, 6, 14});
  run(s, [&](cudaStream_t stream) {
    nvte_copy_to_kv_cache(k.data(), v.data(), kc.data(), vc.data(), rows.data(), fresh.data(),
                          cached.data(), NVTE_BSHD, kBatch, kSeq, 8, 1, 1, stream);
  });
}

void conversion(Side& s) {
  const TensorWrapper thd = half(s, {kTokens, kHeads, kDim}), cu = ints(s, kCu);
  const TensorWrapper bshd = half(s, {kBatch, kSeq, kHeads, kDim}, true);
  const TensorWrapper back = half(s, {kTokens, kHeads, kDim}, true);
  run(s, [&](cudaStream_t stream) {
    nvte_convert_thd_to_bshd(thd.data(), cu.data(), bshd.data(), kBatch, kSeq, stream);
    nvte_convert_bshd_to_thd(bshd.data(), cu.data(), back.data(), kTokens, stream);
  });
}

void flash_prepare(Side& s) {
  const TensorWrapper mixed = half(s, {kSeq, kBatch, kHeads, 3 * kDim});
  const TensorWrapper view(mixed.dptr(), Sizes{kSeq, kBatch, kHeads, kDim}, DType::kBFloat16);
  const TensorWrapper apart = half(s, {3, kBatch, kSeq, kHeads, kDim}, true);
  const TensorWrapper q = half(s, {kBatch, kSeq, kHeads, kDim}),
                      k = half(s, {kBatch, kSeq, kHeads, kDim});
  const TensorWrapper v = half(s, {kBatch, kSeq, kHeads, kDim});
  const TensorWrapper joined = half(s, {kSeq, kBatch, kHeads, 3 * kDim}, true);
  run(s, [&](cudaStream_t stream) {
    nvte_prepare_flash_attn_fwd(view.data(), apart.data(), stream);
    nvte_prepare_flash_attn_bwd(q.data(), k.data(), v.data(), joined.data(), stream);
  });
}

void context_parallel(Side& s) {
  const Close close = {2.1, 40}, close_lse = {8, 1};
  const TensorWrapper cu = ints(s, kCu), whole = half(s, {kTokens, kHeads, kDim}, false, close);
  const TensorWrapper part = half(s, {kTokens / 2, kHeads, kDim}, true);
  const TensorWrapper lse = single(s, {kHeads, kTokens}, close_lse);
  const TensorWrapper step_lse = single(s, {kHeads, kTokens / 2}, close_lse);
  const TensorWrapper step = half(s, {kTokens / 2, kHeads, kDim});
  const TensorWrapper grad = half(s, {kTokens, kHeads, kDim}),
                      indices = ints(s, std::vector<int32_t>(6, -1));
  const TensorWrapper global = ints(s, {0, 4, 12});
  run(s, [&](cudaStream_t stream) {
    const NVTETensor cu_seqlens = cu.data(), tensor = whole.data(), lengths = global.data();
    const NVTETensor all = lse.data(), of_step = step_lse.data(), step_out = step.data();
    nvte_cp_thd_read_half_tensor(tensor, cu_seqlens, part.data(), 1, stream);
    nvte_cp_thd_out_correction(whole.data(), step_out, all, of_step, cu_seqlens, 1, 1, stream);
    nvte_cp_thd_second_half_lse_correction(lse.data(), of_step, cu_seqlens, 1, stream);
    nvte_cp_thd_read_second_half_lse(all, cu_seqlens, step_lse.data(), 1, kTokens / 2, stream);
    nvte_cp_thd_grad_correction(grad.data(), step_out, cu_seqlens, "none", "add", stream);
    nvte_cp_thd_get_partitioned_indices(lengths, indices.data(), 12, 2, 1, stream);
  });
}

void softmax(Side& s) {
  const Close close = {2.1, 0.1};
  const Sizes shape = {2, 3, 8, 8}, cube = {6, 8, 8};
  const TensorWrapper x = half(s, shape), dy = half(s, shape), x3 = half(s, cube),
                      dy3 = half(s, cube);
  const TensorWrapper y[3] = {half(s, shape, true, close), half(s, shape, true, close),
                              half(s, shape, true, close)};
  const TensorWrapper y3 = half(s, cube, true, close), dx3 = half(s, cube, true, close);
  const TensorWrapper dx[3] = {half(s, shape, true, close), half(s, shape, true, close),
                               half(s, shape, true, close)};
  std::vector<uint8_t> bytes;
  for (int i = 0; i < 128; ++i) bytes.push_back(static_cast<uint8_t>(s.pick(0, 1)));
  const TensorWrapper mask(s.bytes(bytes), Sizes{2, 1, 8, 8}, DType::kByte);
  run(s, [&](cudaStream_t t) {
    nvte_scaled_softmax_forward(x.data(), y[0].data(), 0.7f, t);
    nvte_scaled_masked_softmax_forward(x.data(), mask.data(), y[1].data(), 0.7f, t);
    nvte_scaled_aligned_causal_masked_softmax_forward(x.data(), y[2].data(), 0.7f, t);
    nvte_scaled_upper_triang_masked_softmax_forward(x3.data(), y3.data(), 0.7f, t);
    nvte_scaled_softmax_backward(dy.data(), x.data(), dx[0].data(), 0.7f, t);
    nvte_scaled_masked_softmax_backward(dy.data(), x.data(), dx[1].data(), 0.7f, t);
    nvte_scaled_aligned_causal_masked_softmax_backward(dy.data(), x.data(), dx[2].data(), 0.7f, t);
    nvte_scaled_upper_triang_masked_softmax_backward(dy3.data(), x3.data(), dx3.data(), 0.7f, t);
  });
}

void memory(Side& s) {
  const auto fill = [&](int64_t count) { return static_cast<uint8_t*>(s.fresh(TEA_E4M3, count)); };
  uint8_t* const small = fill(99);
  uint8_t* const large = fill(9001);
  TensorWrapper zeroed(s.fresh(TEA_BF16, 24), Sizes{2, 3, 4}, DType::kBFloat16, s.scalar(5),
                       s.scalar(6));
  run(s, [&](cudaStream_t stream) {
    nvte_memset(small + 1, 0x3ab, 97, stream);
    nvte_memset(large + 1, 7, 9000, stream);
    nvte_zero_tensor(zeroed.data(), stream);
  });
}

void rng(Side& s) {
  int64_t* const plain = s.numbers<int64_t>({0, 0});
  int64_t* const captured = s.numbers<int64_t>({0, 0});
  int64_t* const seed = s.numbers<int64_t>({-77});
  int64_t* const offset = s.numbers<int64_t>({int64_t{1} << 40});
  run(s, [&](cudaStream_t stream) {
    nvte_extract_seed_and_offset(plain, 0, nullptr, 5, nullptr, 6, 7, stream);
    nvte_extract_seed_and_offset(captured, 1, seed, 5, offset, 6, 7, stream);
  });
}

// Invalid metadata in device memory is skipped; the host throws.
void invalid(Side& s) {
  const TensorWrapper thd = half(s, {kTokens, kHeads, kDim}), cu = ints(s, {0, 4, 2000000000, -9});
  const TensorWrapper bshd = half(s, {kBatch, kSeq, kHeads, kDim}, true);
  run(s, [&](cudaStream_t stream) {
    const auto convert = [&] {
      nvte_convert_thd_to_bshd(thd.data(), cu.data(), bshd.data(), kBatch, kSeq, stream);
    };
    if (s.device() < 0)
      EXPECT_ANY_THROW(convert());
    else
      convert();
  });
}

constexpr OpCase kCases[] = {{"nvte_copy_to_kv_cache", kv_cache},
                             {"nvte_copy_to_kv_cache without pages", kv_cache_without_pages},
                             {"nvte_convert", conversion},
                             {"nvte_prepare_flash_attn", flash_prepare},
                             {"nvte_cp_thd", context_parallel},
                             {"nvte softmax", softmax},
                             {"nvte_memset, nvte_zero_tensor", memory},
                             {"nvte_extract_seed_and_offset", rng},
                             {"invalid", invalid}};

TEST(NvteHelpers, AsOnTheHost) {
  for (const OpCase& c : kCases)
    for (uint64_t seed = 1; seed <= 4; ++seed) EXPECT_EQ(host_and_gpu(c, seed), "");
}

TEST(NvteHelpers, SegmentsAreCountedAndWaitedFor) {
  Gpu& gpu = gpu_of_thread(0);
  const int32_t lengths[] = {0, 3, 0, -1, 7, 9, 5};
  uint8_t* const memory = gpu.scratch(4096);
  gpu.upload(memory, reinterpret_cast<const uint8_t*>(lengths), sizeof lengths);
  const auto stream = static_cast<cudaStream_t>(gpu.stream());
  EXPECT_EQ(nvte_get_runtime_num_segments(memory, memory + 256, 6, stream), 3u);
  EXPECT_EQ(nvte_get_runtime_num_segments(memory, memory + 256, 0, stream), 0u);
}

TEST(NvteHelpers, RefuseMemoryOfBothSidesInOneCall) {
  Gpu& gpu = gpu_of_thread(0);
  std::vector<uint16_t> host(64);
  const TensorWrapper x(gpu.scratch(4096), Sizes{1, 1, 8, 8}, DType::kBFloat16);
  const TensorWrapper y(host.data(), Sizes{1, 1, 8, 8}, DType::kBFloat16);
  try {
    nvte_scaled_softmax_forward(x.data(), y.data(), 1, nullptr);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& e) {
    EXPECT_NE(
        std::string(e.what()).find("softmax_results on device is -1; needs the device of input, 0"),
        std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace tea::kit
