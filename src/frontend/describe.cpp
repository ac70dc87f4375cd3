// The tensors of a call and their lengths; describe_options.cpp has the other options.
#include "frontend/describe.h"

#include <algorithm>
#include <bit>

namespace tea::frontend {
namespace {

struct Format {
  const char* name;
  DimensionOrder order;
};
constexpr Format kFormats[] = {{"bhsd", {4, 0, 2, 1, 3}},
                               {"bshd", {4, 0, 1, 2, 3}},
                               {"sbhd", {4, 1, 0, 2, 3}},
                               {"thd", {3, -1, 0, 1, 2}}};

DimensionOrder order_of(const std::string& format, const std::string& whole) {
  for (const Format& row : kFormats)
    if (format == row.name) return row.order;
  refuse("format", "\"" + whole + "\"",
         "bhsd, bshd, sbhd or thd, or one for q and one for k and v as in thd_bshd");
}

constexpr int64_t kMostDim = 1024, kMostDimOfTraining = 512;

int64_t size_or_1(const Tensor& t, int dimension) { return dimension < 0 ? 1 : t.size[dimension]; }

tea_strides strides_of(const char* name, const Tensor& t, const DimensionOrder& order) {
  if (t.elements() == 0) return {};
  if (t.size[order.dim] > 1 && t.stride[order.dim] != 1)
    refuse(name,
           "a tensor with stride " + std::to_string(t.stride[order.dim]) + " in its last dimension",
           "1 (call .contiguous())");
  const auto size = [&](int d) { return size_or_1(t, d); };
  // The stride of a dimension of size 1 is arbitrary. That of a contiguous tensor is used, so that
  // equal problems have equal cache keys.
  const auto stride = [&](int d, int64_t usual) { return size(d) > 1 ? t.stride[d] : usual; };
  const int64_t row = size(order.head) * size(order.dim);
  tea_strides out{};
  out.head = stride(order.head, size(order.dim));
  out.seq = stride(order.seq, row);
  if (order.batch >= 0) out.batch = stride(order.batch, size(order.seq) * row);
  if (!out.head && !out.seq && !out.batch) refuse_expanded(name);
  return out;
}

void require_rank(const char* name, const Tensor& t, int rank, const std::string& format) {
  if (t.rank != rank)
    refuse(name, "of shape " + shape_text(t),
           std::to_string(rank) + " dimensions for format " + format);
}

void require_dim(const char* name, const Tensor& t, const DimensionOrder& order, bool training) {
  const int64_t dim = t.size[order.dim], most = training ? kMostDimOfTraining : kMostDim;
  if (dim < 1 || dim > most)
    refuse(name, "of shape " + shape_text(t) + " with head dim " + std::to_string(dim),
           "a head dim from 1 to " + std::to_string(most) + (training ? " with gradients" : ""));
}

void require_bound(const char* name, int64_t bound) {
  if (bound < -1) refuse(name, std::to_string(bound), "0 or more, or -1 for what the tensors say");
}

}  // namespace

Description::Description(const Options& options) : in_(options), q_(in_.q), k_(in_.k), v_(in_.v) {
  problem.dtype = q_.type < kInt32 ? q_.type : TEA_DTYPE_DEFAULT;
  if (!problem.dtype)
    refuse("q.dtype", type_text(q_.type), "float16, bfloat16, float32 or float64");
  if (in_.max_ctas < -1 || in_.max_ctas > INT32_MAX)
    refuse("max_ctas", std::to_string(in_.max_ctas), "1 to 2^31 - 1, or 0 for no limit");
  problem.max_ctas = static_cast<int32_t>(std::max<int64_t>(in_.max_ctas, 0));
  problem.outputs = in_.max_logit ? TEA_OUTPUT_LSE | TEA_OUTPUT_MAX : TEA_OUTPUT_LSE;
  problem.has_scale = in_.scale.has_value();
  problem.scale = in_.scale.value_or(0);
  const size_t split = in_.format.find('_');
  const std::string format_q = in_.format.substr(0, split);
  order_q_ = order_of(format_q, in_.format);
  order_kv_ = split != std::string::npos ? order_of(in_.format.substr(split + 1), in_.format)
              : in_.page_table && order_q_.rank == 3 ? order_of("bshd", in_.format)
                                                     : order_q_;
  require_bound("max_seqlen_q", in_.max_seqlen_q);
  require_bound("max_seqlen_kv", in_.max_seqlen_kv);
  describe_queries();
  describe_keys();
  describe_sizes();
  describe_mask();
  describe_bias();
  describe_softmax();
  describe_alibi();
  describe_plain();
  describe_origin();
}

void Description::describe_queries() {
  require_rank("q", q_, order_q_.rank, in_.format);
  problem.heads_q = static_cast<int32_t>(q_.size[order_q_.head]);
  problem.dim_qk = static_cast<int32_t>(q_.size[order_q_.dim]);
  require_dim("q", q_, order_q_, in_.training);
  rows_q_ = q_.size[order_q_.seq];
  batch_ = size_or_1(q_, order_q_.batch);
  if (order_q_.batch < 0) {
    if (!in_.cu_seqlens_q)
      refuse("cu_seqlens_q", "None", "int32 [batch + 1] with format " + in_.format);
    problem.q_form = TEA_RAGGED;
    run.tokens_q = rows_q_;
    if (in_.max_seqlen_q >= 0) rows_q_ = in_.max_seqlen_q;
    batch_ = std::max<int64_t>(in_.cu_seqlens_q->elements() - 1, 0);
  } else {
    problem.q_form = in_.cu_seqlens_q ? TEA_PADDED : TEA_DENSE;
    if (in_.max_seqlen_q >= 0)
      refuse("max_seqlen_q", std::to_string(in_.max_seqlen_q), "format thd: here q itself says it");
  }
  problem.q = add_rows(TEA_Q, "q", q_);
  add_integers(TEA_CU_SEQLENS_Q, "cu_seqlens_q", in_.cu_seqlens_q);
  if (in_.offsets_q && order_q_.batch >= 0)
    refuse("offsets_q", "a tensor", "None: only thd has gaps");
  add_integers(TEA_OFFSETS_Q, "offsets_q", in_.offsets_q);
}

void Description::describe_keys() {
  require_rank("k", k_, order_kv_.rank, in_.format);
  require_rank("v", v_, order_kv_.rank, in_.format);
  problem.heads_kv = static_cast<int32_t>(k_.size[order_kv_.head]);
  problem.dim_v = static_cast<int32_t>(v_.size[order_kv_.dim]);
  rows_kv_ = k_.size[order_kv_.seq];
  require_dim("v", v_, order_kv_, in_.training);
  const bool matches_k =
      v_.size[order_kv_.head] == problem.heads_kv && v_.size[order_kv_.seq] == rows_kv_ &&
      (in_.page_table || size_or_1(v_, order_kv_.batch) == size_or_1(k_, order_kv_.batch));
  if (!matches_k)
    refuse("v", "of shape " + shape_text(v_), "the heads and rows of k " + shape_text(k_));
  if (!problem.heads_kv || problem.heads_q % problem.heads_kv)
    refuse("k",
           "of shape " + shape_text(k_) + " with " + std::to_string(problem.heads_kv) + " heads",
           "a number of heads that divides the " + std::to_string(problem.heads_q) + " of q");
  if (k_.size[order_kv_.dim] != problem.dim_qk)
    refuse("k", "of shape " + shape_text(k_), "the head dim of q " + shape_text(q_));
  if (in_.page_table_v && !in_.page_table)
    refuse("page_table_v", "a tensor", "None without a page_table");
  if (in_.page_table) {
    describe_pages();
  } else if (order_kv_.batch < 0) {
    if (!in_.cu_seqlens_kv)
      refuse("cu_seqlens_kv", "None", "int32 [batch + 1] with format " + in_.format);
    problem.kv_form = TEA_RAGGED;
    run.tokens_kv = rows_kv_;
    if (in_.max_seqlen_kv >= 0) rows_kv_ = in_.max_seqlen_kv;
  } else {
    problem.kv_form = in_.cu_seqlens_kv ? TEA_PADDED : TEA_DENSE;
    if (k_.size[order_kv_.batch] != batch_)
      refuse("k", "of shape " + shape_text(k_), "a batch of " + std::to_string(batch_));
    if (in_.max_seqlen_kv >= 0)
      refuse("max_seqlen_kv", std::to_string(in_.max_seqlen_kv),
             "format thd or pages: here k itself says it");
  }
  describe_cache();
  problem.k = add_rows(TEA_K, "k", k_);
  problem.v = add_rows(TEA_V, "v", v_);
  add_integers(TEA_CU_SEQLENS_KV, "cu_seqlens_kv", in_.cu_seqlens_kv);
  if (in_.offsets_kv && (order_kv_.batch >= 0 || in_.page_table))
    refuse("offsets_kv", "a tensor", "None: only thd has gaps");
  add_integers(TEA_OFFSETS_KV, "offsets_kv", in_.offsets_kv);
}

// Keys and values in FP8 with 16-bit queries, and their scales.
void Description::describe_cache() {
  const bool is_cache = is_fp8(k_.type) && (problem.dtype == TEA_FP16 || problem.dtype == TEA_BF16);
  if (is_cache) problem.kv_dtype = k_.type;
  const struct {
    tea_tensor index;
    const char* name;
    const std::optional<Tensor>& tensor;
  } scales[] = {{TEA_K_SCALE_INV, "k_descale", in_.k_descale},
                {TEA_V_SCALE_INV, "v_descale", in_.v_descale}};
  int64_t numbers = 0;  // of the first that is given
  for (const auto& [index, name, tensor] : scales) {
    if (!tensor) continue;
    if (!is_cache)
      refuse(name, "a tensor", "None unless k and v are FP8 and q is float16 or bfloat16");
    numbers = require_cache_scales(name, *tensor, problem.heads_kv, numbers);
    pointers_[index] = memory(name, *tensor, TEA_FP32);
  }
  if (numbers > 1) problem.kv_scale = TEA_KV_SCALE_HEAD;
}

void Description::describe_pages() {
  if (order_kv_.batch < 0)
    refuse("format", "\"" + in_.format + "\"",
           "pages as [page, slot, head, dim]: one of thd_bshd, bshd, bhsd");
  if (!in_.cu_seqlens_kv)
    refuse("cu_seqlens_kv", "None", "int32 [batch + 1]: the lengths of the paged sequences");
  problem.kv_form = TEA_PAGED;
  problem.page_size = static_cast<int32_t>(rows_kv_);
  run.pages_k = k_.size[order_kv_.batch], run.pages_v = v_.size[order_kv_.batch];
  const auto describe = [&](tea_tensor index, const char* name,
                            const std::optional<Tensor>& tensor) {
    if (!tensor) return int64_t{0};
    const Tensor& table = *tensor;
    if (table.rank != 2 || table.size[0] != batch_)
      refuse(name, "of shape " + shape_text(table),
             "[" + std::to_string(batch_) + ", pages of a sequence]");
    add_integers(index, name, tensor);
    return table.size[1];
  };
  const int64_t columns = describe(TEA_TABLE_K, "page_table", in_.page_table);
  const int64_t columns_v = describe(TEA_TABLE_V, "page_table_v", in_.page_table_v);
  if (in_.page_table_v && columns_v != columns)
    refuse("page_table_v", std::to_string(columns_v) + " pages wide",
           std::to_string(columns) + " as page_table");
  problem.table_k_stride = columns;
  problem.table_v_stride = in_.page_table_v ? columns : 0;
  const int64_t slots = columns * rows_kv_;
  if (in_.max_seqlen_kv > slots)
    refuse("max_seqlen_kv", std::to_string(in_.max_seqlen_kv),
           "at most the " + std::to_string(slots) + " slots of page_table");
  rows_kv_ = in_.max_seqlen_kv >= 0 ? in_.max_seqlen_kv : slots;
}

// Sizes that ragged and paged layouts leave open go to the run, all others to the problem.
void Description::describe_sizes() {
  const bool open_q = problem.q_form == TEA_RAGGED;
  const bool open_kv = problem.kv_form == TEA_RAGGED || problem.kv_form == TEA_PAGED;
  (has_run_sizes() ? run.batch : problem.batch) = batch_;
  (open_q ? run.max_q : problem.seqlen_q) = rows_q_;
  (open_kv ? run.max_kv : problem.seqlen_kv) = rows_kv_;
  problem.gaps = in_.offsets_q || in_.offsets_kv;
  const bool both = problem.q_form == TEA_RAGGED && problem.kv_form == TEA_RAGGED;
  if (both && in_.offsets_q.has_value() != in_.offsets_kv.has_value())
    refuse(in_.offsets_q ? "offsets_kv" : "offsets_q", "None",
           std::string("a tensor, as ") + (in_.offsets_q ? "offsets_q" : "offsets_kv") +
               ": with gaps both sides say where they are");
}

void Description::add_integers(tea_tensor index, const char* name,
                               const std::optional<Tensor>& tensor) {
  if (!tensor) return;
  const bool is_table = index == TEA_TABLE_K || index == TEA_TABLE_V;
  if (!is_table) require_shape(name, *tensor, {1, {batch_ + 1}}, "int32 [batch + 1] ");
  pointers_[index] = memory(name, *tensor, kInt32);
}

void Description::add(tea_tensor index, const char* name, const Tensor& tensor) {
  require_device(name, tensor, device());
  pointers_[index] = tensor.data;
  if (tensor.elements()) addresses_ |= reinterpret_cast<uintptr_t>(tensor.data);
}

tea_strides Description::add_rows(tea_tensor index, const char* name, const Tensor& tensor) {
  const bool is_k = index == TEA_K || index == TEA_DK, is_v = index == TEA_V || index == TEA_DV;
  const Tensor& like = is_k ? k_ : is_v ? v_ : q_;
  const DimensionOrder& order = is_k || is_v ? order_kv_ : order_q_;
  Shape needed{like.rank, {}};
  std::copy_n(like.size, like.rank, needed.size);
  if (index == TEA_O || index == TEA_DOUT) needed.size[order.dim] = problem.dim_v;
  require_shape(name, tensor, needed);
  if (tensor.type != type_of(index))
    refuse(std::string(name) + ".dtype", type_text(tensor.type),
           type_text(type_of(index)) + (type_of(index) == problem.dtype ? " as q"
                                        : index == TEA_V                ? " as k"
                                                                        : ""));
  add(index, name, tensor);
  return strides_of(name, tensor, order);
}

void Description::add_scale(tea_tensor index, const char* name,
                            const std::optional<Tensor>& tensor) {
  if (!tensor) return;
  if (tensor->elements() != 1) refuse(name, "of shape " + shape_text(*tensor), "float32 [1]");
  pointers_[index] = memory(name, *tensor, TEA_FP32);
}

void Description::set_o_strides() {
  const Layout layout = o_layout();
  const Tensor o{nullptr, type_of(TEA_O), device(), layout.rank, layout.size, layout.stride};
  problem.o = strides_of("o", o, order_q_);
}

void Description::finish() {
  const int alignment = addresses_ ? 1 << std::min(std::countr_zero(addresses_), 4) : 16;
  problem.alignment = alignment == 16 ? 0 : alignment;  // 16 is the default
  run.tensors = pointers_.data();
  run.tensor_count = TEA_TENSOR_COUNT;
}

}  // namespace tea::frontend
