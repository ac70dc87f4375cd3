// Causal attention with padding through TransformerEngine's C API, on host memory.
#include <transformer_engine/fused_attn.h>

#include <cstdint>
#include <cstdio>
#include <list>
#include <vector>

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

int main() {
  const size_t b = 2, s = 8, h = 4, d = 16;
  const std::vector<size_t> shape{b, s, h, d};
  std::vector<uint16_t> q(b * s * h * d), k(q), v(q.size(), 0x3F80), o(q);  // bf16: 0x3F80 is 1
  int32_t cu_seqlens[b + 1] = {0, 8, 13};                                   // 8 and 5 tokens
  int64_t rng_state[2] = {1234, 0};                                         // seed, offset

  TensorWrapper Q(q.data(), shape, DType::kBFloat16), K(k.data(), shape, DType::kBFloat16),
      V(v.data(), shape, DType::kBFloat16), O(o.data(), shape, DType::kBFloat16),
      lengths(cu_seqlens, std::vector<size_t>{b + 1}, DType::kInt32),
      rng(rng_state, std::vector<size_t>{2}, DType::kInt64), bias, S, workspace;
  NVTETensorPack aux;
  nvte_tensor_pack_create(&aux);
  const auto forward = [&] {
    nvte_fused_attn_fwd(Q.data(), K.data(), V.data(), bias.data(), S.data(), O.data(), &aux,
                        lengths.data(), lengths.data(), rng.data(), s, s, /*is_training=*/true,
                        /*attn_scale=*/0.25f, /*dropout=*/0.0f, NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS,
                        NVTE_PADDING_CAUSAL_MASK, /*window_size_left=*/-1,
                        /*window_size_right=*/0, workspace.data(), /*stream=*/nullptr);
  };

  forward();  // without memory for workspace and aux: asks for their sizes
  std::list<std::vector<std::byte>> memory;
  const auto provide = [&](NVTETensor tensor) {
    NVTEBasicTensor data = nvte_get_tensor_param(tensor, kNVTERowwiseData);
    data.data_ptr = memory.emplace_back(nvte_tensor_size_bytes(tensor)).data();
    nvte_set_tensor_param(&tensor, kNVTERowwiseData, &data);
  };
  for (size_t i = 0; i < aux.size; ++i) provide(aux.tensors[i]);
  provide(workspace.data());
  forward();  // runs

  size_t ones = 0;
  for (const uint16_t x : o) ones += x == 0x3F80;
  std::printf("%zu of %zu outputs are 1, the others are padding\n", ones, o.size());
  nvte_tensor_pack_destroy(&aux);
}
