#include "jax/fused_attn.h"

#include <stdexcept>
#include <string>

namespace transformer_engine::jax {
namespace {

using Shape = std::vector<size_t>;

size_t size(int64_t n) { return static_cast<size_t>(n); }

class AuxPack {
 public:
  AuxPack() { nvte_tensor_pack_create(&pack); }
  ~AuxPack() { nvte_tensor_pack_destroy(&pack); }
  AuxPack(const AuxPack&) = delete;
  AuxPack& operator=(const AuxPack&) = delete;
  NVTETensorPack pack;
};

void set(NVTETensor tensor, void* data, DType dtype, const Shape& shape) {
  const NVTEBasicTensor part{data, static_cast<NVTEDType>(dtype),
                             nvte_make_shape(shape.data(), shape.size())};
  nvte_set_tensor_param_v2(tensor, kNVTERowwiseData, &part, sizeof part);
}

void require(bool valid, const char* name, int64_t seen, const char* needed) {
  if (!valid)
    throw std::runtime_error(std::string(name) + " is " + std::to_string(seen) + "; needs " +
                             needed);
}

// The tensors that forward and backward share.
struct Tensors {
  TensorWrapper q, k, v, bias, softmax_offset, output;
  TensorWrapper cu_q, cu_kv, offsets_q, offsets_kv, workspace, none;

  Tensors(const FusedAttnConfig& c, DType dtype, const FusedAttnBuffers& b)
      : q(b.q, rows_q(c, c.qk_head_dim), dtype),
        k(b.k, rows_kv(c, c.qk_head_dim), dtype),
        v(b.v, rows_kv(c, c.v_head_dim), dtype),
        bias(b.bias, bias_shape(c), dtype),
        softmax_offset(b.softmax_offset, offset_shape(c), DType::kFloat32),
        output(b.output, rows_q(c, c.v_head_dim), dtype),
        cu_q(c.has_padding() ? b.q_cu_seqlens : nullptr, segments(c), DType::kInt32),
        cu_kv(c.has_padding() ? b.kv_cu_seqlens : nullptr, segments(c), DType::kInt32),
        offsets_q(c.is_ragged() ? b.q_seq_offsets : nullptr, offsets(c), DType::kInt32),
        offsets_kv(c.is_ragged() ? b.k_seq_offsets : nullptr, offsets(c), DType::kInt32),
        workspace(b.workspace, Shape{b.workspace_bytes}, DType::kByte),
        none(nullptr, Shape{0}, DType::kFloat32) {}

  // Without batch: JAX passes [batch * rows, heads, dim] for every layout.
  static Shape rows_q(const FusedAttnConfig& c, int64_t dim) {
    return {size(c.input_batch * c.q_max_seqlen), size(c.attn_heads), size(dim)};
  }
  static Shape rows_kv(const FusedAttnConfig& c, int64_t dim) {
    return {size(c.input_batch * c.kv_max_seqlen), size(c.num_gqa_groups), size(dim)};
  }
  static Shape bias_shape(const FusedAttnConfig& c) {
    if (!c.has_bias()) return {0};
    return {size(c.bias_batch), size(c.bias_heads), size(c.q_max_seqlen), size(c.kv_max_seqlen)};
  }
  static Shape offset_shape(const FusedAttnConfig& c) { return {1, size(c.attn_heads), 1, 1}; }

 private:
  static Shape segments(const FusedAttnConfig& c) { return {size(c.num_segments() + 1)}; }
  static Shape offsets(const FusedAttnConfig& c) {
    return {c.is_ragged() ? size(c.num_segments() + 1) : 0};
  }
};

void* offset_of(const FusedAttnConfig& c, const FusedAttnBuffers& b) {
  return c.softmax_type == NVTE_LEARNABLE_SOFTMAX ? b.softmax_offset : nullptr;
}

void prepare_forward(NVTETensorPack& pack, const FusedAttnConfig& c, DType dtype,
                     NVTE_Fused_Attn_Backend backend, const FusedAttnBuffers& b) {
  PrepareFusedAttnForwardAuxTensors(&pack, size(c.input_batch), size(c.bias_batch),
                                    size(c.attn_heads), size(c.bias_heads), size(c.q_max_seqlen),
                                    size(c.kv_max_seqlen), dtype, c.bias(), backend, b.softmax_aux,
                                    b.rng_state, b.bias, offset_of(c, b));
}

void prepare_backward(NVTETensorPack& pack, const FusedAttnConfig& c, DType dtype,
                      NVTE_Fused_Attn_Backend backend, const FusedAttnBuffers& b) {
  PrepareFusedAttnBackwardAuxTensors(
      &pack, size(c.input_batch), size(c.bias_batch), size(c.attn_heads), size(c.bias_heads),
      size(c.q_max_seqlen), size(c.kv_max_seqlen), dtype, backend, b.softmax_aux, b.rng_state,
      c.bias() == NVTE_NO_BIAS ? nullptr : b.bias, offset_of(c, b));
}

NVTE_Fused_Attn_Backend supported(const FusedAttnConfig& c, DType dtype) {
  const NVTE_Fused_Attn_Backend backend = c.backend(dtype, dtype);
  if (backend != NVTE_F16_arbitrary_seqlen && backend != NVTE_F16_max512_seqlen)
    throw std::runtime_error("no fused attention for these attributes: GetFusedAttnBackend() is " +
                             std::to_string(backend) + "; needs 0 or 1");
  return backend;
}

size_t bytes_of(const TensorWrapper& workspace) { return workspace.ndim() ? workspace.numel() : 0; }

WorkspaceSize size_of(size_t bytes) { return {{bytes ? bytes : 1}, DType::kByte}; }

}  // namespace

// NOLINTBEGIN(readability-function-size): the signatures are TransformerEngine's.
NVTE_Fused_Attn_Backend GetFusedAttnBackend(
    bool is_training, DType q_dtype, DType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type,
    float dropout_probability, size_t q_attn_heads, size_t kv_attn_heads, size_t q_max_seqlen,
    size_t kv_max_seqlen, size_t qk_head_dim, size_t v_head_dim, int64_t window_size_left,
    int64_t window_size_right, bool deterministic) {
  return nvte_get_fused_attn_backend(
      is_training, static_cast<NVTEDType>(q_dtype), static_cast<NVTEDType>(kv_dtype), qkv_layout,
      bias_type, mask_type, softmax_type, dropout_probability, q_attn_heads, kv_attn_heads,
      q_max_seqlen, kv_max_seqlen, qk_head_dim, v_head_dim, window_size_left, window_size_right,
      /*return_max_logit=*/false, /*cuda_graph=*/false, deterministic);
}

void PrepareFusedAttnForwardAuxTensors(NVTETensorPack* tensor_pack, size_t input_batch,
                                       size_t bias_batch, size_t attn_heads, size_t bias_heads,
                                       size_t q_max_seqlen, size_t kv_max_seqlen, DType dtype,
                                       NVTE_Bias_Type bias_type, NVTE_Fused_Attn_Backend backend,
                                       void* softmax_buf, void* rng_state_buf, void* bias_buf,
                                       void* softmax_offset_buf) {
  NVTETensorPack& pack = *tensor_pack;
  if (backend == NVTE_F16_max512_seqlen) {
    set(pack.tensors[0], softmax_buf, dtype,
        {input_batch, attn_heads, q_max_seqlen, kv_max_seqlen});
    pack.size = 1;
    return;
  }
  set(pack.tensors[0], softmax_buf, DType::kFloat32, {input_batch, attn_heads, q_max_seqlen, 1});
  set(pack.tensors[1], rng_state_buf, DType::kInt64, {2});
  pack.size = 2;
  if (bias_type == NVTE_PRE_SCALE_BIAS || bias_type == NVTE_POST_SCALE_BIAS)
    set(pack.tensors[pack.size++], bias_buf, dtype,
        {bias_batch, bias_heads, q_max_seqlen, kv_max_seqlen});
  if (softmax_offset_buf)
    set(pack.tensors[pack.size++], softmax_offset_buf, DType::kFloat32, {1, attn_heads, 1, 1});
}

void PrepareFusedAttnBackwardAuxTensors(NVTETensorPack* tensor_pack, size_t input_batch,
                                        size_t bias_batch, size_t attn_heads, size_t bias_heads,
                                        size_t q_max_seqlen, size_t kv_max_seqlen, DType dtype,
                                        NVTE_Fused_Attn_Backend backend, void* softmax_buf,
                                        void* rng_state_buf, void* bias_buf,
                                        void* softmax_offset_buf) {
  const NVTE_Bias_Type bias_type = bias_buf ? NVTE_POST_SCALE_BIAS : NVTE_NO_BIAS;
  // Backward reads the random state and the bias from the pack, whatever the backend is.
  PrepareFusedAttnForwardAuxTensors(tensor_pack, input_batch, bias_batch, attn_heads, bias_heads,
                                    q_max_seqlen, kv_max_seqlen, dtype, bias_type,
                                    NVTE_F16_arbitrary_seqlen, softmax_buf, rng_state_buf, bias_buf,
                                    softmax_offset_buf);
  if (backend == NVTE_F16_max512_seqlen)
    set(tensor_pack->tensors[0], softmax_buf, dtype,
        {input_batch, attn_heads, q_max_seqlen, kv_max_seqlen});
}
// NOLINTEND(readability-function-size)

NVTE_Fused_Attn_Backend FusedAttnConfig::backend(DType dtype_q, DType dtype_kv) const {
  return GetFusedAttnBackend(is_training, dtype_q, dtype_kv, layout(), bias(), mask(), softmax(),
                             static_cast<float>(dropout_probability), size(attn_heads),
                             size(num_gqa_groups), size(q_max_seqlen), size(kv_max_seqlen),
                             size(qk_head_dim), size(v_head_dim), window_size_left,
                             window_size_right, deterministic);
}

void Require(const FusedAttnConfig& c) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } table[] = {{"input_batch", c.input_batch, 0, 1 << 30},
               {"bias_batch", c.bias_batch, 0, 1 << 30},
               {"q_max_seqlen", c.q_max_seqlen, 0, 1 << 30},
               {"kv_max_seqlen", c.kv_max_seqlen, 0, 1 << 30},
               {"attn_heads", c.attn_heads, 1, 1 << 20},
               {"num_gqa_groups", c.num_gqa_groups, 1, 1 << 20},
               {"bias_heads", c.bias_heads, 0, 1 << 20},
               {"qk_head_dim", c.qk_head_dim, 1, 1 << 16},
               {"v_head_dim", c.v_head_dim, 1, 1 << 16},
               {"max_segments_per_seq", c.max_segments_per_seq, 0, 1 << 30},
               {"bias_type", c.bias_type, NVTE_NO_BIAS, NVTE_POST_SCALE_BIAS},
               {"mask_type", c.mask_type, 0, NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK},
               {"softmax_type", c.softmax_type, 0, NVTE_LEARNABLE_SOFTMAX}};
  for (const auto& row : table)
    require(row.value >= row.least && row.value <= row.most, row.name, row.value,
            (std::to_string(row.least) + " to " + std::to_string(row.most)).c_str());
  const int64_t layout = c.qkv_layout;
  require(layout == NVTE_BS3HD || layout == NVTE_BSHD_BS2HD || layout == NVTE_BSHD_BSHD_BSHD ||
              layout == NVTE_T3HD || layout == NVTE_THD_T2HD || layout == NVTE_THD_THD_THD,
          "qkv_layout", layout, "5, 7, 9, 10, 12 or 14");
}

WorkspaceSize GetFusedAttnForwardWorkspaceSizes(const FusedAttnConfig& config, DType dtype) {
  Require(config);
  return size_of(Forward(config, dtype, {}, nullptr));
}

WorkspaceSize GetFusedAttnBackwardWorkspaceSizes(const FusedAttnConfig& config, DType dtype) {
  Require(config);
  return size_of(Backward(config, dtype, {}, nullptr));
}

size_t Forward(const FusedAttnConfig& c, DType dtype, const FusedAttnBuffers& b, void* stream) {
  const NVTE_Fused_Attn_Backend backend = supported(c, dtype);
  Tensors t(c, dtype, b);
  TensorWrapper rng_state(b.rng_state, Shape{2}, DType::kInt64);
  AuxPack aux;
  if (b.workspace) prepare_forward(aux.pack, c, dtype, backend, b);
  nvte_fused_attn_fwd(t.q.data(), t.k.data(), t.v.data(), t.bias.data(), t.softmax_offset.data(),
                      t.none.data(), t.output.data(), &aux.pack, t.cu_q.data(), t.cu_kv.data(),
                      t.offsets_q.data(), t.offsets_kv.data(), t.none.data(), t.none.data(),
                      rng_state.data(), size(c.q_max_seqlen), size(c.kv_max_seqlen), c.is_training,
                      /*return_max_logit=*/false, /*cuda_graph=*/false,
                      static_cast<float>(c.scaling_factor),
                      static_cast<float>(c.dropout_probability), c.layout(), c.bias(), c.mask(),
                      c.softmax(), c.window_size_left, c.window_size_right, c.bottom_right_diagonal,
                      t.workspace.data(), static_cast<cudaStream_t>(stream));
  return bytes_of(t.workspace);
}

size_t Backward(const FusedAttnConfig& c, DType dtype, const FusedAttnBuffers& b, void* stream) {
  const NVTE_Fused_Attn_Backend backend = supported(c, dtype);
  Tensors t(c, dtype, b);
  TensorWrapper doutput(b.doutput, Tensors::rows_q(c, c.v_head_dim), dtype);
  TensorWrapper dq(b.dq, Tensors::rows_q(c, c.qk_head_dim), dtype);
  TensorWrapper dk(b.dk, Tensors::rows_kv(c, c.qk_head_dim), dtype);
  TensorWrapper dv(b.dv, Tensors::rows_kv(c, c.v_head_dim), dtype);
  TensorWrapper dbias(b.dbias, Tensors::bias_shape(c), dtype);
  TensorWrapper doffset(b.dsoftmax_offset, Tensors::offset_shape(c), DType::kFloat32);
  AuxPack aux;
  prepare_backward(aux.pack, c, dtype, backend, b);
  nvte_fused_attn_bwd(
      t.q.data(), t.k.data(), t.v.data(), t.output.data(), doutput.data(), t.none.data(),
      t.none.data(), &aux.pack, dq.data(), dk.data(), dv.data(), dbias.data(), doffset.data(),
      t.cu_q.data(), t.cu_kv.data(), t.offsets_q.data(), t.offsets_kv.data(), size(c.q_max_seqlen),
      size(c.kv_max_seqlen), static_cast<float>(c.scaling_factor),
      static_cast<float>(c.is_training ? c.dropout_probability : 0), c.layout(), c.bias(), c.mask(),
      c.softmax(), c.window_size_left, c.window_size_right, c.bottom_right_diagonal,
      c.deterministic, /*cuda_graph=*/false, t.workspace.data(), static_cast<cudaStream_t>(stream));
  return bytes_of(t.workspace);
}

}  // namespace transformer_engine::jax
