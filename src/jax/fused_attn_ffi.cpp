// TransformerEngine's custom calls: te_fused_attn_forward_ffi and te_fused_attn_backward_ffi, with
// its operands, results and attributes. Random numbers: seed from the operand, offset 0, so that a
// program draws the same whenever it runs.
#include <limits>
#include <string>

#include "jax/extents.h"
#include "jax/ffi.h"
#include "jax/fused_attn.h"
#include "te_attention_ops.h"

namespace transformer_engine::jax {
namespace {

namespace ffi = xla::ffi;
using tea::jax::error_of;
using tea::jax::guarded;
using tea::jax::product;

struct Place {
  int device = -1;
  void* stream = nullptr;
};

template <class T>
T attribute(const ffi::Dictionary& attributes, const char* name) {
  const ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value.has_value())
    throw std::runtime_error(std::string("attribute ") + name + " is missing or of another type; " +
                             "needs " +
                             (std::is_same_v<T, bool>     ? "i1"
                              : std::is_same_v<T, double> ? "f64"
                                                          : "i64"));
  return value.value();
}

FusedAttnConfig config_of(const ffi::Dictionary& attributes) {
  FusedAttnConfig c{};
#define TEA_READ(name) c.name = attribute<decltype(c.name)>(attributes, #name);
  TEA_READ(input_batch)
  TEA_READ(bias_batch)
  TEA_READ(q_max_seqlen)
  TEA_READ(kv_max_seqlen)
  TEA_READ(attn_heads)
  TEA_READ(num_gqa_groups)
  TEA_READ(bias_heads)
  TEA_READ(qk_head_dim)
  TEA_READ(v_head_dim)
  TEA_READ(max_segments_per_seq)
  TEA_READ(window_size_left)
  TEA_READ(window_size_right)
  TEA_READ(scaling_factor)
  TEA_READ(dropout_probability)
  TEA_READ(bias_type)
  TEA_READ(mask_type)
  TEA_READ(qkv_layout)
  TEA_READ(is_training)
  TEA_READ(deterministic)
  TEA_READ(bottom_right_diagonal)
  if (attributes.contains("softmax_type")) TEA_READ(softmax_type)  // else vanilla, as there
#undef TEA_READ
  Require(c);
  return c;
}

DType dtype_of(const ffi::AnyBuffer& q) {
  switch (q.element_type()) {
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F32:
      return DType::kFloat32;
    default:
      throw std::runtime_error("q is of another dtype; needs f16, bf16 or f32");
  }
}

// The buffers of a call, each checked for its size.
class Buffers {
 public:
  Buffers(const FusedAttnConfig& c, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : config_(c), args_(args), rets_(rets) {
    require_count("operands", args.size(), 14);
    dtype = dtype_of(operand(0));
    element_ = dtype == DType::kFloat32 ? 4 : 2;
    const NVTE_QKV_Layout_Group group = nvte_get_qkv_layout_group(c.layout());
    packed_ = group == NVTE_3HD ? 3 : group == NVTE_HD_2HD ? 2 : 1;
    if (packed_ > 1 && c.v_head_dim != c.qk_head_dim) refuse_packed("v_head_dim", c.v_head_dim);
    if (packed_ == 3 && c.num_gqa_groups != c.attn_heads)
      refuse_packed("num_gqa_groups", c.num_gqa_groups);
    if (packed_ == 3 && c.kv_max_seqlen != c.q_max_seqlen)
      refuse_packed("kv_max_seqlen", c.kv_max_seqlen);
  }

  void require_count(const char* what, size_t seen, size_t least) const {
    if (seen < least)
      throw std::runtime_error(std::string(what) + ": " + std::to_string(seen) + "; needs " +
                               std::to_string(least));
  }

  // Memory of at least `bytes`; NULL if there are none.
  void* in(const char* name, size_t i, uint64_t bytes) const {
    return memory(name, operand(i), bytes);
  }
  void* out(const char* name, size_t i, uint64_t bytes) const {
    auto result = rets_.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) throw std::runtime_error(std::string(name) + " is no buffer");
    return memory(name, *result.value(), bytes);
  }
  size_t result_bytes(size_t i) const { return rets_.get<ffi::AnyBuffer>(i).value()->size_bytes(); }

  uint64_t rows_q(int64_t dim) const {
    return product(element_, {config_.input_batch, config_.q_max_seqlen, config_.attn_heads, dim});
  }
  uint64_t bias() const {
    if (!config_.has_bias()) return 0;
    return product(element_, {config_.bias_batch, config_.bias_heads, config_.q_max_seqlen,
                              config_.kv_max_seqlen});
  }
  uint64_t statistics() const {
    return product(4, {config_.input_batch, config_.q_max_seqlen, config_.attn_heads});
  }
  uint64_t offset() const {
    return config_.softmax_type == NVTE_LEARNABLE_SOFTMAX ? product(4, {config_.attn_heads}) : 0;
  }

  // q, k and v or their gradients, from position `first`; packed ones are parts of one buffer.
  template <class At>
  void rows(const At& at, size_t first, void*& q, void*& k, void*& v) const {
    const FusedAttnConfig& c = config_;
    const uint64_t part_q = product(element_, {c.attn_heads, c.qk_head_dim});
    const uint64_t part_kv = product(element_, {c.num_gqa_groups, c.qk_head_dim});
    const auto rows_kv = [&](int64_t dim) {
      return product(element_, {c.input_batch, c.kv_max_seqlen, c.num_gqa_groups, dim});
    };
    const auto moved = [](void* base, uint64_t bytes) {
      return base ? static_cast<char*>(base) + bytes : nullptr;
    };
    q = at("q", first, (packed_ == 3 ? 3 : 1) * rows_q(c.qk_head_dim));
    if (packed_ == 3) {
      k = moved(q, part_q), v = moved(q, 2 * part_q);
      return;
    }
    k = at("k", first + 1, (packed_ == 2 ? 2 : 1) * rows_kv(c.qk_head_dim));
    v = packed_ == 2 ? moved(k, part_kv) : at("v", first + 2, rows_kv(c.v_head_dim));
  }

  // Lengths, read only with padding; offsets only for THD.
  void lengths(FusedAttnBuffers& b, size_t first) const {
    const uint64_t bytes = product(4, {config_.num_segments()}) + 4;
    const uint64_t lengths = config_.has_padding() ? bytes : 0;
    const uint64_t offsets = config_.is_ragged() ? bytes : 0;
    for (size_t i = 0; i < 4; ++i)
      if ((i < 2 ? lengths : offsets) && operand(first + i).element_type() != ffi::DataType::S32)
        throw std::runtime_error("cu_seqlens or offsets, operand " + std::to_string(first + i) +
                                 ", are of another dtype; need s32");
    b.q_cu_seqlens = in("q_cu_seqlens", first, lengths);
    b.kv_cu_seqlens = in("kv_cu_seqlens", first + 1, lengths);
    b.q_seq_offsets = in("q_seq_offsets", first + 2, offsets);
    b.k_seq_offsets = in("k_seq_offsets", first + 3, offsets);
  }

  DType dtype{};

 private:
  [[noreturn]] static void refuse_packed(const char* name, int64_t seen) {
    throw std::runtime_error(std::string(name) + " is " + std::to_string(seen) +
                             "; needs that of q: qkv_layout packs them");
  }
  ffi::AnyBuffer operand(size_t i) const {
    const auto buffer = args_.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value())
      throw std::runtime_error("operand " + std::to_string(i) + " is no buffer");
    return buffer.value();
  }
  // XLA passes any pointer for a buffer of size zero.
  static void* memory(const char* name, const ffi::AnyBuffer& buffer, uint64_t bytes) {
    if (buffer.size_bytes() < bytes)
      throw std::runtime_error(std::string(name) + " has " + std::to_string(buffer.size_bytes()) +
                               " bytes; needs " + std::to_string(bytes));
    return bytes ? buffer.untyped_data() : nullptr;
  }

  const FusedAttnConfig& config_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  uint64_t element_ = 2;
  int packed_ = 1;
};

void require_workspace(FusedAttnBuffers& b, const Buffers& buffers, size_t index, size_t needed) {
  const size_t bytes = buffers.result_bytes(index);
  if (bytes < needed || !bytes)
    throw std::runtime_error("workspace has " + std::to_string(bytes) + " bytes; needs " +
                             std::to_string(needed ? needed : 1));
  b.workspace = buffers.out("workspace", index, bytes);
  b.workspace_bytes = bytes;
}

ffi::Error FusedAttnForwardFFI(Place place, ffi::RemainingArgs args, ffi::RemainingRets rets,
                               ffi::Dictionary attributes) {
  return guarded([&] {
    const FusedAttnConfig c = config_of(attributes);
    const Buffers buffers(c, args, rets);
    buffers.require_count("results", rets.size(), 4);
    FusedAttnBuffers b{};
    buffers.rows([&](auto... a) { return buffers.in(a...); }, 0, b.q, b.k, b.v);
    b.bias = buffers.in("bias", 3, buffers.bias());
    b.softmax_offset = buffers.in("softmax_offset", 4, buffers.offset());
    buffers.lengths(b, 6);
    b.output = buffers.out("output", 0, buffers.rows_q(c.v_head_dim));
    b.softmax_aux = buffers.out("softmax_aux", 1, buffers.statistics());
    b.rng_state = buffers.out("rng_state", 2, 16);
    const auto* seed = static_cast<const int64_t*>(buffers.in("seed", 5, 8));
    if (const tea_status status = tea_rng_fill_captured(static_cast<int64_t*>(b.rng_state), seed,
                                                        nullptr, 0, place.device, place.stream))
      return error_of(status);
    require_workspace(b, buffers, 3, Forward(c, buffers.dtype, {}, place.stream));
    if (b.q) Forward(c, buffers.dtype, b, place.stream);
    return ffi::Error::Success();
  });
}

ffi::Error FusedAttnBackwardFFI(Place place, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                ffi::Dictionary attributes) {
  return guarded([&] {
    const FusedAttnConfig c = config_of(attributes);
    const Buffers buffers(c, args, rets);
    buffers.require_count("operands", args.size(), 17);
    buffers.require_count("results", rets.size(), 6);
    FusedAttnBuffers b{};
    const auto out = [&](auto... a) { return buffers.out(a...); };
    buffers.rows([&](auto... a) { return buffers.in(a...); }, 0, b.q, b.k, b.v);
    b.bias = buffers.in("bias", 3, buffers.bias());
    b.softmax_offset = buffers.in("softmax_offset", 4, buffers.offset());
    b.softmax_aux = buffers.in("softmax_aux", 5, buffers.statistics());
    b.rng_state = buffers.in("rng_state", 6, 16);
    b.output = buffers.in("output", 7, buffers.rows_q(c.v_head_dim));
    b.doutput = buffers.in("doutput", 8, buffers.rows_q(c.v_head_dim));
    buffers.lengths(b, 9);
    buffers.rows(out, 0, b.dq, b.dk, b.dv);
    b.dbias = buffers.out("dbias", 3, buffers.bias());
    b.dsoftmax_offset = buffers.out("dsoftmax_offset", 4, buffers.offset());
    require_workspace(b, buffers, 5, Backward(c, buffers.dtype, {}, place.stream));
    if (const size_t bytes = buffers.result_bytes(4); bytes && !b.dsoftmax_offset) {
      void* const zeros = buffers.out("dsoftmax_offset", 4, bytes);  // no learnable offset
      const tea_status status = tea_fill_bytes(zeros, 0, bytes, place.device, place.stream);
      if (status) return error_of(status);
    }
    if (b.q) Backward(c, buffers.dtype, b, place.stream);
    return ffi::Error::Success();
  });
}

// TransformerEngine creates cuDNN's handle in the prepare stage. Nothing is needed here.
// NOLINTNEXTLINE(readability-identifier-naming): TransformerEngine's name.
ffi::Error CudnnHandleInitFFI(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::Success();
}

auto described(auto binding) { return std::move(binding).RemainingArgs().RemainingRets().Attrs(); }
auto on_host() { return described(ffi::Ffi::Bind()); }
auto on_cuda() { return described(tea::jax::bind_cuda()); }
auto on_prepare() { return described(ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()); }

}  // namespace
}  // namespace transformer_engine::jax

#define TEA_HANDLER(function)                                                              \
  TEA_JAX_HANDLER(                                                                         \
      function##Handler,                                                                   \
      [](auto... a) { return transformer_engine::jax::function##FFI({}, a...); },          \
      transformer_engine::jax::on_host());                                                 \
  TEA_JAX_HANDLER(function##Handler_cuda,                                                  \
                  [](int32_t device, void* stream, auto... a) {                            \
                    return transformer_engine::jax::function##FFI({device, stream}, a...); \
                  },                                                                       \
                  transformer_engine::jax::on_cuda(), {xla::ffi::Traits::kCmdBufferCompatible})
TEA_HANDLER(FusedAttnForward);
TEA_HANDLER(FusedAttnBackward);
TEA_JAX_HANDLER(CudnnHandleInitHandler, transformer_engine::jax::CudnnHandleInitFFI,
                transformer_engine::jax::on_prepare());

// For Python: as the functions of fused_attn.h. Texts of errors go to `error`.
namespace {

template <class Query>
int answer(char* error, size_t capacity, const Query& query) {
  try {
    query();
    return 0;
  } catch (const std::exception& e) {
    const std::string text = e.what();
    text.copy(error, capacity - 1);
    error[std::min(text.size(), capacity - 1)] = 0;
    return 1;
  }
}

}  // namespace

using transformer_engine::DType;
using transformer_engine::jax::FusedAttnConfig;

// `dtypes`: of q and of k and v. 0, or 1 with the text of the error.
extern "C" __attribute__((visibility("default"))) int te_fused_attn_backend(
    const FusedAttnConfig* config, const int32_t* dtypes, int32_t* backend, char* error,
    size_t capacity) {
  return answer(error, capacity, [&] {
    *backend = config->backend(static_cast<DType>(dtypes[0]), static_cast<DType>(dtypes[1]));
  });
}

// `bytes`: of the workspace, forward and backward.
extern "C" __attribute__((visibility("default"))) int te_fused_attn_workspace(
    const FusedAttnConfig* config, int32_t dtype, uint64_t* bytes, char* error, size_t capacity) {
  return answer(error, capacity, [&] {
    using namespace transformer_engine::jax;  // NOLINT(google-build-using-namespace)
    bytes[0] = GetFusedAttnForwardWorkspaceSizes(*config, static_cast<DType>(dtype)).shape[0];
    bytes[1] = config->is_training
                   ? GetFusedAttnBackwardWorkspaceSizes(*config, static_cast<DType>(dtype)).shape[0]
                   : 1;
  });
}
