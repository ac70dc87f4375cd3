// Heads and head dims are the last dimensions of Q, K and V, for any leading dimensions;
// cu_seqlens_q determines the batch. JAX relies on this: it passes [b * s, h, d] for every layout.
#include "nvte/work.h"

#include <initializer_list>

#include "core/error.h"
#include "nvte/layout.h"
#include "nvte/problem.h"

namespace tea::nvte {
namespace {

// The dimension `back` positions before the last one.
int64_t from_end(const char* name, const Tensor& tensor, size_t back) {
  const NVTEShape& shape = tensor.data.shape;
  TEA_REQUIRE(shape.ndim >= 3, std::string("shape of ") + name, text(shape),
              "at least 3 dimensions: [..., heads, head dim]");
  return signed_size(shape.data[shape.ndim - 1 - back]);
}

// All dimensions but heads and head dim.
int64_t rows_of(const Tensor& tensor) {
  size_t rows = 1;
  for (size_t i = 0; i + 2 < tensor.data.shape.ndim; ++i) rows *= tensor.data.shape.data[i];
  return signed_size(rows);
}

int64_t batch_of(const Tensor& cu_seqlens) {
  const NVTEShape& shape = cu_seqlens.data.shape;
  TEA_REQUIRE(shape.ndim == 1 && shape.data[0] > 0, "shape of cu_seqlens_q", text(shape),
              "[batch + 1]: the batch size comes from it, with and without padding");
  return signed_size(shape.data[0]) - 1;
}

Pages pages_of(NVTE_QKV_Format format, const Tensor& pool, const Tensor& table, int64_t batch,
               const char* name) {
  const NVTEShape &shape = pool.data.shape, &columns = table.data.shape;
  TEA_REQUIRE(shape.ndim == 4, std::string("shape of ") + name, text(shape),
              "4 dimensions: pages, slots, heads, head dim (for SBHD slots first)");
  TEA_REQUIRE(columns.ndim == 2 && signed_size(columns.data[0]) >= batch,
              std::string("shape of the page table of ") + name, text(columns),
              "[batch = " + shown(batch) + " or more, pages of a sequence]");
  const bool slots_first = format == NVTE_SBHD;
  return {signed_size(shape.data[slots_first ? 1 : 0]),
          signed_size(shape.data[slots_first ? 0 : 1]), signed_size(columns.data[1])};
}

Sizes sizes_of(const Call& call, const Tensor* table_k, const Tensor* table_v) {
  const Layout& layout = layout_of(call.options.layout);
  Sizes s;
  s.batch = batch_of(*call.cu_seqlens_q);
  s.max_q = call.max_q, s.max_kv = call.max_kv;
  s.heads_q = from_end("Q", *call.q, 1), s.dim_qk = from_end("Q", *call.q, 0);
  s.heads_kv = from_end("K", *call.k, 1), s.dim_v = from_end("V", *call.v, 0);
  TEA_REQUIRE(from_end("K", *call.k, 0) == s.dim_qk, "head dim of K", from_end("K", *call.k, 0),
              "that of Q, which is " + shown(s.dim_qk));
  TEA_REQUIRE(from_end("V", *call.v, 1) == s.heads_kv, "heads of V", from_end("V", *call.v, 1),
              "those of K, which are " + shown(s.heads_kv));
  if (layout.ragged_q()) s.tokens_q = rows_of(*call.q);
  if (layout.ragged_kv()) s.tokens_kv = rows_of(*call.k);
  if (!layout.paged()) return s;
  TEA_REQUIRE(table_k && table_v, "qkv_layout", "paged", "a layout without pages in backward");
  s.k = pages_of(layout.kv, *call.k, *table_k, s.batch, "K");
  s.v = pages_of(layout.kv, *call.v, *table_v, s.batch, "V");
  return s;
}

void check_rows(const char* name, const Tensor& tensor, int64_t needed) {
  TEA_REQUIRE(rows_of(tensor) >= needed, std::string("shape of ") + name, text(tensor.data.shape),
              shown(needed) + " rows, batch times max_seqlen");
}

void check_lengths(const char* name, const Tensor& cu_seqlens, int64_t batch, bool needed) {
  const NVTEShape& shape = cu_seqlens.data.shape;
  if (!needed) return;
  TEA_REQUIRE(shape.ndim == 1 && signed_size(shape.data[0]) > batch,
              std::string("shape of ") + name, text(shape), "[" + shown(batch + 1) + "]");
}

// Checks that all accesses are inside the shapes. The shapes of O and SoftmaxOffset are not
// checked: callers set O's to that of Q, and the offset's arbitrarily.
void check_extents(const Call& call, const Sizes& s) {
  const Layout& layout = layout_of(call.options.layout);
  const bool padding = mask_of(call.options.mask).padding;
  if (!layout.ragged_q()) check_rows("Q", *call.q, s.batch * s.max_q);
  if (!layout.ragged_kv() && !layout.paged()) {
    check_rows("K", *call.k, s.batch * s.max_kv);
    check_rows("V", *call.v, s.batch * s.max_kv);
  }
  if (layout.ragged_kv()) check_rows("V", *call.v, s.tokens_kv);
  check_lengths("cu_seqlens_kv", *call.cu_seqlens_kv, s.batch, padding);
  check_lengths("cu_seqlens_q_padded", *call.cu_seqlens_q_padded, s.batch,
                layout.ragged_q() && call.cu_seqlens_q_padded->data.data_ptr);
  check_lengths("cu_seqlens_kv_padded", *call.cu_seqlens_kv_padded, s.batch,
                layout.ragged_kv() && call.cu_seqlens_kv_padded->data.data_ptr);
}

struct Named {
  const char* name;
  const Tensor* tensor;
};

// dO and the gradients have correct shapes, and the layouts of O, Q, K and V.
void check_gradients(const BackwardCall& call, const Sizes& s) {
  const Layout& layout = layout_of(call.options.layout);
  const int64_t rows_q = layout.ragged_q() ? s.tokens_q : s.batch * s.max_q;
  const int64_t rows_kv = layout.ragged_kv() ? s.tokens_kv : s.batch * s.max_kv;
  const struct {
    Named of;
    int64_t rows, heads, dim;
  } table[] = {{{"dO", call.dout}, rows_q, s.heads_q, s.dim_v},
               {{"dQ", call.dq}, rows_q, s.heads_q, s.dim_qk},
               {{"dK", call.dk}, rows_kv, s.heads_kv, s.dim_qk},
               {{"dV", call.dv}, rows_kv, s.heads_kv, s.dim_v}};
  for (const auto& row : table) {
    const auto& [name, tensor] = row.of;
    const bool fits = from_end(name, *tensor, 1) == row.heads &&
                      from_end(name, *tensor, 0) == row.dim && rows_of(*tensor) >= row.rows;
    TEA_REQUIRE(fits, std::string("shape of ") + name, text(tensor->data.shape),
                "[..., " + shown(row.heads) + ", " + shown(row.dim) + "] with " + shown(row.rows) +
                    " rows");
  }
}

void check_label(const Named& of, NVTEDType needed, const char* needed_name) {
  TEA_REQUIRE(of.tensor->dtype() == needed, std::string("dtype of ") + of.name,
              static_cast<int>(of.tensor->dtype()),
              shown(static_cast<int>(needed)) + ", " + needed_name);
}

// Checks that a tensor that is read as int32 has this type. (The core refuses missing tensors.)
void check_int32(const Named& of, bool read) {
  if (read && of.tensor->has_data()) check_label(of, kNVTEInt32, "kNVTEInt32");
}

void check_lengths_types(const Call& call) {
  const Layout& layout = layout_of(call.options.layout);
  const bool padding = mask_of(call.options.mask).padding;
  check_int32({"cu_seqlens_q", call.cu_seqlens_q}, padding);
  check_int32({"cu_seqlens_kv", call.cu_seqlens_kv}, padding);
  check_int32({"cu_seqlens_q_padded", call.cu_seqlens_q_padded}, layout.ragged_q());
  check_int32({"cu_seqlens_kv_padded", call.cu_seqlens_kv_padded}, layout.ragged_kv());
}

// Only one fp32 scale per tensor is supported; other scaling modes store other data there.
void check_scaling(std::initializer_list<Named> tensors) {
  for (const auto& [name, tensor] : tensors) {
    TEA_REQUIRE(tensor->scaling_mode == NVTE_DELAYED_TENSOR_SCALING,
                std::string("scaling_mode of ") + name, static_cast<int>(tensor->scaling_mode),
                "0, NVTE_DELAYED_TENSOR_SCALING");
    const struct {
      const char* name;
      const NVTEBasicTensor& part;
    } parts[] = {
        {"scale_inv", tensor->scale_inv}, {"scale", tensor->scale}, {"amax", tensor->amax}};
    for (const auto& [part_name, part] : parts)
      TEA_REQUIRE(!part.data_ptr || part.dtype == kNVTEFloat32,
                  std::string("dtype of ") + part_name + " of " + name,
                  static_cast<int>(part.dtype), "4, kNVTEFloat32");
  }
}

void check_output_type(const char* name, NVTEDType type) {
  if (type == kNVTEFloat16 || type == kNVTEBFloat16 || is_fp8(type)) return;
  TEA_NVTE_ERROR("FP8 fused attention only supports ", name,
                 " tensor in kFloat16, kBFloat16, kFloat8E4M3 or kFloat8E5M2!");
}

void check_type(const char* name, NVTEDType type, const char* of, NVTEDType needed) {
  TEA_REQUIRE(type == needed, std::string("dtype of ") + name, static_cast<int>(type),
              std::string("that of ") + of + ", which is " + shown(static_cast<int>(needed)));
}

Work common_work(const Call& call, const Sizes& sizes) {
  check_same_type(call.q->dtype(), call.k->dtype());
  check_type("V", call.v->dtype(), "K", call.k->dtype());
  check_lengths_types(call);
  Work w;
  w.options = call.options;
  w.sizes = sizes;
  const NVTEDType q = call.q->dtype();
  w.types = {q, q, q, q, q};
  // The offsets of the sequences of a ragged side; packed Q, K and V share those of Q.
  w.gaps = call.cu_seqlens_q_padded->has_data() || call.cu_seqlens_kv_padded->has_data();
  if (call.workspace->data.data_ptr)
    w.gaps = call.cu_seqlens_q_padded->data.data_ptr || call.cu_seqlens_kv_padded->data.data_ptr;
  return w;
}

bool reads_bias(const Options& options) {
  return options.bias == NVTE_PRE_SCALE_BIAS || options.bias == NVTE_POST_SCALE_BIAS;
}

}  // namespace

void check_same_type(NVTEDType q, NVTEDType kv) {
  TEA_NVTE_CHECK(q == kv, "Q and KV must have the same data type. That of KV is ", kv,
                 "; needs that of Q, which is ", q, ".");
}

void check_rng_state(const Tensor& rng_state, const Options& options) {
  const bool read = options.training && options.dropout != 0 && rng_state.data.data_ptr;
  if (read) check_label({"rng_state", &rng_state}, kNVTEInt64, "kNVTEInt64");
}

int bias_broadcast(const char* name, const NVTEShape& shape, const Sizes& s) {
  const int64_t full[] = {s.batch, s.heads_q, s.max_q, s.max_kv};
  int broadcast = 0;
  bool fits = shape.ndim == 4 && signed_size(shape.data[3]) == s.max_kv;
  for (size_t i = 0; fits && i < 3; ++i) {
    const int64_t size = signed_size(shape.data[i]);
    fits = size == 1 || size == full[i];
    if (size == 1 && full[i] != 1) broadcast |= 1 << i;
  }
  TEA_REQUIRE(fits, std::string("shape of ") + name, text(shape),
              "[1 or " + shown(s.batch) + ", 1 or " + shown(s.heads_q) + ", 1 or " +
                  shown(s.max_q) + ", " + shown(s.max_kv) + "]");
  return broadcast;
}

Work work_of(const ForwardCall& call, const Sizes& sizes) {
  Work w = common_work(call, sizes);
  if (is_fp8(w.types.q)) {
    check_scaling({{"Q", call.q}, {"K", call.k}, {"V", call.v}, {"S", call.s}, {"O", call.o}});
    w.types.o = call.o->dtype();
    check_output_type("O", w.types.o);
    w.types.dout = w.types.o;
    w.types.bias = call.bias->dtype();
  } else {
    check_type("O", call.o->dtype(), "Q", w.types.q);
  }
  const bool paged = layout_of(call.options.layout).paged();
  check_int32({"page_table_k", call.table_k}, paged);
  check_int32({"page_table_v", call.table_v}, paged);
  check_rng_state(*call.rng_state, call.options);
  if (reads_bias(call.options))
    w.bias_broadcast = bias_broadcast("Bias", call.bias->data.shape, sizes);
  return w;
}

Work work_of(const BackwardCall& call, const Sizes& sizes) {
  Work w = common_work(call, sizes);
  const NVTEDType dqkv = call.dq->dtype();
  check_type("dK", call.dk->dtype(), "dQ", dqkv);
  check_type("dV", call.dv->dtype(), "dQ", dqkv);
  if (is_fp8(w.types.q)) {
    check_scaling({{"Q", call.q},
                   {"K", call.k},
                   {"V", call.v},
                   {"O", call.o},
                   {"dO", call.dout},
                   {"S", call.s},
                   {"dP", call.dp},
                   {"dQ", call.dq},
                   {"dK", call.dk},
                   {"dV", call.dv}});
    check_output_type("dQKV", dqkv);
    w.types.o = call.o->dtype(), w.types.dout = call.dout->dtype(), w.types.dqkv = dqkv;
    w.types.bias = call.dbias->dtype();
  } else {
    check_type("O", call.o->dtype(), "Q", w.types.q);
    check_type("dO", call.dout->dtype(), "Q", w.types.q);
    check_type("dQ", dqkv, "Q", w.types.q);
  }
  if (reads_bias(call.options))
    w.bias_broadcast = bias_broadcast("dBias", call.dbias->data.shape, sizes);
  return w;
}

Work work_of(const ForwardCall& call) {
  const Sizes sizes = sizes_of(call, call.table_k, call.table_v);
  check_extents(call, sizes);
  return work_of(call, sizes);
}

Work work_of(const BackwardCall& call) {
  const Sizes sizes = sizes_of(call, nullptr, nullptr);
  check_extents(call, sizes);
  check_gradients(call, sizes);
  return work_of(call, sizes);
}

}  // namespace tea::nvte
