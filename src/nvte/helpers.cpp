// KV cache and format conversion of the TransformerEngine C API, based on the operations of
// src/ops.
#include <algorithm>

#include "nvte/boundary.h"
#include "nvte/operands.h"
#include "ops/flash_prepare.h"
#include "ops/kv_cache.h"
#include "ops/thd.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {
namespace {

// The integers of nvte_copy_to_kv_cache, in its order.
struct CacheSizes {
  int64_t batch, max_ctx_len, max_seq_len, max_pages_per_seq;
};

struct CacheOperands {
  Operand new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens;

  bool any_without_data() const {
    return !new_k.tensor->has_data() || !new_v.tensor->has_data() || !k_cache.tensor->has_data() ||
           !v_cache.tensor->has_data();
  }
};

// max_ctx_len is only the row pitch of a BSHD batch; the tensors determine the number of rows.
void set_new_tokens(tea_kv_append& a, NVTE_QKV_Format format, int64_t rows, int64_t pitch) {
  const int64_t k_row = a.heads * a.dim_k, v_row = a.heads * a.dim_v;
  switch (format) {
    case NVTE_BSHD:
      a.new_form = TEA_DENSE;
      a.max_new = rows ? pitch : 0;
      a.batch_new = pitch > 0 ? std::min(a.batch, rows / pitch) : 0;
      if (!a.batch_new) a.max_new = 0;
      return;
    case NVTE_SBHD:
      a.new_form = TEA_DENSE;
      a.max_new = a.batch ? rows / a.batch : 0;
      a.new_k_stride = {k_row, a.batch * k_row, a.dim_k};
      a.new_v_stride = {v_row, a.batch * v_row, a.dim_v};
      return;
    case NVTE_THD:
      a.new_form = TEA_RAGGED;
      a.tokens_new = rows;
      return;
    default:
      refuse_argument("qkv_format", shown(static_cast<int>(format)),
                      "NVTE_SBHD, NVTE_BSHD or NVTE_THD");
  }
}

void check_types(const CacheOperands& o) {
  for (const Operand* other : {&o.new_v, &o.k_cache, &o.v_cache})
    if (other->type() != o.new_k.type())
      throw Error(TEA_INVALID, std::string("new_k and ") + other->name +
                                   " must be of the same data type. " + other->name + ".dtype is " +
                                   shown(static_cast<int>(other->type())) + "; needs " +
                                   shown(static_cast<int>(o.new_k.type())));
}

void check_sizes(const CacheSizes& s) {
  TEA_REQUIRE(s.batch >= 0, "b", s.batch, "0 or more");
  TEA_REQUIRE(s.max_ctx_len >= 0, "max_ctx_len", s.max_ctx_len, "0 or more");
  TEA_REQUIRE(s.max_pages_per_seq >= 1, "max_pages_per_seq", s.max_pages_per_seq, "1 or more");
  TEA_REQUIRE(s.max_seq_len >= s.max_pages_per_seq, "max_seq_len", s.max_seq_len,
              "max_pages_per_seq = " + shown(s.max_pages_per_seq) + " or more");
}

void copy_to_kv_cache(const CacheOperands& o, NVTE_QKV_Format format, const CacheSizes& s,
                      bool non_paged, cudaStream_t stream) {
  if (o.any_without_data()) return;
  check_types(o);
  check_sizes(s);
  tea_kv_append a{};
  a.dtype = required_dtype(o.new_k, kAnyDtype);
  a.reindex = non_paged;
  a.batch = s.batch, a.heads = o.new_k.size(-2);
  a.dim_k = o.new_k.size(-1), a.dim_v = o.new_v.size(-1);
  if (!a.heads || !a.dim_k || !a.dim_v) return;
  a.page_size = s.max_seq_len / s.max_pages_per_seq;
  a.pages_per_sequence = s.max_pages_per_seq;
  // The accesses are bounded by the memory that the shapes describe.
  const int64_t k_row = a.heads * a.dim_k, v_row = a.heads * a.dim_v;
  a.pages = std::min(o.k_cache.elements() / k_row, o.v_cache.elements() / v_row) / a.page_size;
  set_new_tokens(a, format, std::min(o.new_k.elements() / k_row, o.new_v.elements() / v_row),
                 s.max_ctx_len);
  a.new_k = o.new_k.data(), a.new_v = o.new_v.data();
  a.k_cache = o.k_cache.data(), a.v_cache = o.v_cache.data();
  a.page_table = int32_data(o.page_table, s.batch * (non_paged ? 1 : s.max_pages_per_seq));
  a.cu_new = int32_data(o.cu_new_lens, s.batch + 1);
  a.cu_cached = int32_data(o.cu_cached_lens, s.batch + 1);
  if (s.batch) require_pointers({{"page_table", a.page_table}});
  const Place place = place_of(
      {o.new_k, o.new_v, o.k_cache, o.v_cache, o.page_table, o.cu_new_lens, o.cu_cached_lens},
      stream);
  run(append_kv, a, place, "cu_new_lens, cu_cached_lens or page_table");
}

struct ConversionOperands {
  Operand thd, cu_seqlens, bshd;
};

// The sizes of the padded side; the input determines heads and dim.
tea_thd_convert conversion(const ConversionOperands& o, int64_t batch, int64_t seqlen,
                           const Operand& source) {
  tea_thd_convert a{};
  a.dtype = required_dtype(o.bshd, kAnyDtype);
  require_same_type(o.thd, o.bshd);
  a.batch = batch, a.seqlen = seqlen;
  a.heads = source.size(-2), a.dim = source.size(-1);
  const int64_t row = a.heads * a.dim;
  a.tokens = row ? o.thd.elements() / row : 0;
  require_elements(
      o.bshd, require_sizes({{"b", batch}, {"max_seq_len", seqlen}, {"h", a.heads}, {"d", a.dim}}));
  a.cu_seqlens = int32_data(o.cu_seqlens, batch + 1);
  return a;
}

tea_flash_prepare preparation(const Operand& shaped) {
  tea_flash_prepare a{};
  require_rank(shaped, 4, 4);
  a.dtype = required_dtype(shaped, 1u << TEA_FP16 | 1u << TEA_BF16);
  a.heads = shaped.size(2), a.dim = shaped.size(3);
  return a;
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::Operand;
using tea::nvte::place_of;

// NOLINTNEXTLINE(readability-function-size): the signature is TransformerEngine's.
void nvte_copy_to_kv_cache(NVTETensor new_k, NVTETensor new_v, NVTETensor k_cache,
                           NVTETensor v_cache, NVTETensor page_table, NVTETensor cu_new_lens,
                           NVTETensor cu_cached_lens, NVTE_QKV_Format qkv_format, int b,
                           int max_ctx_len, int max_seq_len, int max_pages_per_seq,
                           int is_non_paged, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const tea::nvte::CacheOperands operands = {{"new_k", new_k},
                                               {"new_v", new_v},
                                               {"k_cache", k_cache},
                                               {"v_cache", v_cache},
                                               {"page_table", page_table},
                                               {"cu_new_lens", cu_new_lens},
                                               {"cu_cached_lens", cu_cached_lens}};
    tea::nvte::copy_to_kv_cache(operands, qkv_format,
                                {b, max_ctx_len, max_seq_len, max_pages_per_seq}, is_non_paged != 0,
                                stream);
  });
}

void nvte_convert_thd_to_bshd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor,
                              int b, int max_seq_len, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const tea::nvte::ConversionOperands o = {
        {"tensor", tensor}, {"cu_seqlens", cu_seqlens}, {"new_tensor", new_tensor}};
    require_rank(o.thd, 3, 3);
    tea_thd_convert a = conversion(o, b, max_seq_len, o.thd);
    a.input = o.thd.data(), a.output = o.bshd.data();
    tea::nvte::run(tea::thd_to_bshd, a, place_of({o.thd, o.cu_seqlens, o.bshd}, stream));
  });
}

void nvte_convert_bshd_to_thd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor, int,
                              cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const tea::nvte::ConversionOperands o = {
        {"new_tensor", new_tensor}, {"cu_seqlens", cu_seqlens}, {"tensor", tensor}};
    require_rank(o.bshd, 4, 4);
    tea_thd_convert a = conversion(o, o.bshd.size(0), o.bshd.size(1), o.bshd);
    a.input = o.bshd.data(), a.output = o.thd.data();
    tea::nvte::run(tea::bshd_to_thd, a, place_of({o.thd, o.cu_seqlens, o.bshd}, stream));
  });
}

void nvte_prepare_flash_attn_fwd(NVTETensor qkvi, NVTETensor qkv, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    // qkvi has the shape of the Q view of the interleaved buffer that begins at its pointer.
    const Operand interleaved("qkvi", qkvi);
    const Operand separate("qkv", qkv);
    tea_flash_prepare a = tea::nvte::preparation(interleaved);
    require_same_type(separate, interleaved);
    a.seqlen = interleaved.size(0), a.batch = interleaved.size(1);
    a.input[0] = interleaved.data(), a.output = separate.data();
    tea::flash_prepare_forward(a, place_of({interleaved, separate}, stream));
  });
}

void nvte_prepare_flash_attn_bwd(NVTETensor q, NVTETensor k, NVTETensor v, NVTETensor qkv,
                                 cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand inputs[3] = {{"q", q}, {"k", k}, {"v", v}};
    const Operand interleaved("qkv", qkv);
    tea_flash_prepare a = tea::nvte::preparation(inputs[0]);
    for (const Operand* operand : {&inputs[1], &inputs[2]}) {
      require_same_type(*operand, inputs[0]);
      require_elements(*operand, inputs[0].elements());
    }
    require_same_type(interleaved, inputs[0]);
    require_elements(interleaved, 3 * inputs[0].elements());
    a.batch = inputs[0].size(0), a.seqlen = inputs[0].size(1);
    for (int i = 0; i < 3; ++i) a.input[i] = inputs[i].data();
    a.output = interleaved.data();
    tea::flash_prepare_backward(a,
                                place_of({inputs[0], inputs[1], inputs[2], interleaved}, stream));
  });
}
