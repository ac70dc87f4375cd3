// Shapes and strides become the fields of a Problem; what changes from call to call goes to the
// Run.
#include "torch/describe.h"

#include <algorithm>
#include <bit>

#include "torch/plans.h"
#include "torch/report.h"

namespace tea::torch_ops {
namespace {

struct Format {
  const char* name;
  Order order;
};
constexpr Format kFormats[] = {{"bhsd", {4, 0, 2, 1, 3}},
                               {"bshd", {4, 0, 1, 2, 3}},
                               {"sbhd", {4, 1, 0, 2, 3}},
                               {"thd", {3, -1, 0, 1, 2}}};

Order order_of(const std::string& format, const std::string& whole) {
  for (const Format& row : kFormats)
    if (format == row.name) return row.order;
  refuse("format", "\"" + whole + "\"",
         "bhsd, bshd, sbhd or thd, or one for q and one for k and v as in thd_bshd");
}

constexpr int64_t kFarthest = int64_t{1} << 62;  // of a window: the problem says one more

struct Mask {
  const char* name;
  int32_t causal, bottom_right;
};
constexpr Mask kMasks[] = {
    {"none", 0, 0}, {"causal", 1, 0}, {"bottom_right", 0, 1}, {"causal_bottom_right", 1, 1}};

// All zero means the default to the C API, so a tensor that truly has no strides cannot be said.
[[noreturn]] void refuse_expanded(const std::string& name) {
  refuse(name, "expanded in every dimension", "memory of its own (call .contiguous())");
}

tea_strides strides_of(const char* name, const View& t, const Order& order) {
  if (t.elements() == 0) return {};
  if (t.size[order.dim] > 1 && t.stride[order.dim] != 1)
    refuse(name,
           "a tensor with stride " + std::to_string(t.stride[order.dim]) + " in its last dimension",
           "1 (call .contiguous())");
  const auto size = [&](int d) { return d < 0 ? 1 : t.size[d]; };
  // The stride of a dimension of size 1 means nothing: take that of a contiguous tensor, so that
  // equal problems have equal keys.
  const auto stride = [&](int d, int64_t usual) { return size(d) > 1 ? t.stride[d] : usual; };
  const int64_t row = size(order.head) * size(order.dim);
  tea_strides out{};
  out.head = stride(order.head, size(order.dim));
  out.seq = stride(order.seq, row);
  if (order.batch >= 0) out.batch = stride(order.batch, size(order.seq) * row);
  if (!out.head && !out.seq && !out.batch) refuse_expanded(name);
  return out;
}

void require_rank(const char* name, const View& t, int rank, const std::string& format) {
  if (t.rank != rank)
    refuse(name, "of shape " + shape_text(t),
           std::to_string(rank) + " dimensions for format " + format);
}

void require_bound(const char* name, int64_t bound) {
  if (bound < -1) refuse(name, std::to_string(bound), "0 or more, or -1 for what the tensors say");
}

// `what` comes before the shape that is needed.
void require_shape(const char* name, const View& view, const Sizes& needed, const char* what = "") {
  if (view.rank != needed.rank || !std::equal(view.size, view.size + view.rank, needed.size))
    refuse(name, "of shape " + shape_text(view), what + shape_text(needed.rank, needed.size));
}

}  // namespace

Arguments::Arguments(Stack& in)
    : q(in.tensor()),
      k(in.tensor()),
      v(in.tensor()),
      format(in.text()),
      mask(in.text()),
      training(in.flag()),
      scale(in.maybe_number()),
      window_left(in.integer(-1)),
      window_right(in.integer(-1)),
      dropout(in.number()),
      rng_state(in.maybe_tensor()),
      bias(in.maybe_tensor()),
      sink(in.maybe_tensor()),
      cu_seqlens_q(in.maybe_tensor()),
      cu_seqlens_kv(in.maybe_tensor()),
      max_seqlen_q(in.integer(-1)),
      max_seqlen_kv(in.integer(-1)),
      table_k(in.maybe_tensor()),
      softcap(in.number()),
      slopes(in.maybe_tensor()),
      alibi(in.flag()),
      offsets_q(in.maybe_tensor()),
      offsets_kv(in.maybe_tensor()),
      table_v(in.maybe_tensor()),
      origin(in.maybe_tensor()),
      pre_scale_bias(in.flag()),
      off_by_one(in.flag()),
      max_logit(in.flag()),
      deterministic(in.flag()),
      engine(in.text()) {}

Work::Work(const Arguments& arguments)
    : in_(arguments), q_(in_.q), k_(in_.k), v_(in_.v), where_(where_is("q", in_.q)) {
  problem.struct_size = sizeof problem;
  problem.dtype = dtype_of(in_.q);
  if (!problem.dtype) refuse("q.dtype", dtype_text(in_.q), "float16, bfloat16, float32 or float64");
  problem.training = in_.training;
  problem.deterministic = in_.deterministic;
  problem.outputs = in_.max_logit ? TEA_OUTPUT_LSE | TEA_OUTPUT_MAX : TEA_OUTPUT_LSE;
  const size_t split = in_.format.find('_');
  const std::string format_q = in_.format.substr(0, split);
  order_q_ = order_of(format_q, in_.format);
  order_kv_ = split != std::string::npos ? order_of(in_.format.substr(split + 1), in_.format)
              : in_.table_k && order_q_.rank == 3 ? order_of("bshd", in_.format)
                                                  : order_q_;
  require_bound("max_seqlen_q", in_.max_seqlen_q);
  require_bound("max_seqlen_kv", in_.max_seqlen_kv);
  describe_queries();
  describe_keys();
  settle_sizes();
  describe_mask();
  describe_bias();
  describe_scores();
}

void Work::describe_queries() {
  require_rank("q", q_, order_q_.rank, in_.format);
  problem.heads_q = static_cast<int32_t>(q_.size[order_q_.head]);
  problem.dim_qk = static_cast<int32_t>(q_.size[order_q_.dim]);
  rows_q_ = q_.size[order_q_.seq];
  batch_ = size(q_, order_q_.batch);
  if (order_q_.batch < 0) {
    if (!in_.cu_seqlens_q)
      refuse("cu_seqlens_q", "None", "int32 [batch + 1] with format " + in_.format);
    problem.q_form = TEA_RAGGED;
    run_.tokens_q = rows_q_;
    if (in_.max_seqlen_q >= 0) rows_q_ = in_.max_seqlen_q;
    batch_ = std::max<int64_t>(in_.cu_seqlens_q->numel() - 1, 0);
  } else {
    problem.q_form = in_.cu_seqlens_q ? TEA_PADDED : TEA_DENSE;
    if (in_.max_seqlen_q >= 0)
      refuse("max_seqlen_q", std::to_string(in_.max_seqlen_q), "format thd: here q itself says it");
  }
  problem.q = add_rows(TEA_Q, "q", in_.q, q_);
  add_integers(TEA_CU_SEQLENS_Q, "cu_seqlens_q", in_.cu_seqlens_q);
  if (in_.offsets_q && order_q_.batch >= 0)
    refuse("offsets_q", "a tensor", "None: only thd has gaps");
  add_integers(TEA_OFFSETS_Q, "offsets_q", in_.offsets_q);
}

void Work::describe_keys() {
  require_rank("k", k_, order_kv_.rank, in_.format);
  require_rank("v", v_, order_kv_.rank, in_.format);
  problem.heads_kv = static_cast<int32_t>(k_.size[order_kv_.head]);
  problem.dim_v = static_cast<int32_t>(v_.size[order_kv_.dim]);
  rows_kv_ = k_.size[order_kv_.seq];
  if (!problem.dim_v) refuse("v", "of shape " + shape_text(v_), "a head dim from 8 to 512");
  const bool alike = v_.size[order_kv_.head] == problem.heads_kv &&
                     v_.size[order_kv_.seq] == rows_kv_ &&
                     (in_.table_k || size(v_, order_kv_.batch) == size(k_, order_kv_.batch));
  if (!alike)
    refuse("v", "of shape " + shape_text(v_), "the heads and rows of k " + shape_text(k_));
  if (k_.size[order_kv_.dim] != problem.dim_qk)
    refuse("k", "of shape " + shape_text(k_), "the head dim of q " + shape_text(q_));
  if (in_.table_k) {
    describe_pages();
  } else if (order_kv_.batch < 0) {
    if (!in_.cu_seqlens_kv)
      refuse("cu_seqlens_kv", "None", "int32 [batch + 1] with format " + in_.format);
    problem.kv_form = TEA_RAGGED;
    run_.tokens_kv = rows_kv_;
    if (in_.max_seqlen_kv >= 0) rows_kv_ = in_.max_seqlen_kv;
  } else {
    problem.kv_form = in_.cu_seqlens_kv ? TEA_PADDED : TEA_DENSE;
    if (k_.size[order_kv_.batch] != batch_)
      refuse("k", "of shape " + shape_text(k_), "a batch of " + std::to_string(batch_));
    if (in_.max_seqlen_kv >= 0)
      refuse("max_seqlen_kv", std::to_string(in_.max_seqlen_kv),
             "format thd or pages: here k itself says it");
  }
  problem.k = add_rows(TEA_K, "k", in_.k, k_);
  problem.v = add_rows(TEA_V, "v", in_.v, v_);
  add_integers(TEA_CU_SEQLENS_KV, "cu_seqlens_kv", in_.cu_seqlens_kv);
  if (in_.offsets_kv && (order_kv_.batch >= 0 || in_.table_k))
    refuse("offsets_kv", "a tensor", "None: only thd has gaps");
  add_integers(TEA_OFFSETS_KV, "offsets_kv", in_.offsets_kv);
}

void Work::describe_pages() {
  if (order_kv_.batch < 0)
    refuse("format", "\"" + in_.format + "\"",
           "pages as [page, slot, head, dim]: one of thd_bshd, bshd, bhsd");
  if (!in_.cu_seqlens_kv)
    refuse("cu_seqlens_kv", "None", "int32 [batch + 1]: the lengths of the paged sequences");
  problem.kv_form = TEA_PAGED;
  problem.page_size = static_cast<int32_t>(rows_kv_);
  run_.pages_k = k_.size[order_kv_.batch], run_.pages_v = v_.size[order_kv_.batch];
  const auto describe = [&](tea_tensor index, const char* name,
                            const std::optional<Tensor>& tensor) {
    if (!tensor) return int64_t{0};
    const View table(*tensor);
    if (table.rank != 2 || table.size[0] != batch_)
      refuse(name, "of shape " + shape_text(table),
             "[" + std::to_string(batch_) + ", pages of a sequence]");
    add_integers(index, name, tensor);
    return table.size[1];
  };
  const int64_t columns = describe(TEA_TABLE_K, "page_table", in_.table_k);
  const int64_t columns_v = describe(TEA_TABLE_V, "page_table_v", in_.table_v);
  if (in_.table_v && columns_v != columns)
    refuse("page_table_v", std::to_string(columns_v) + " pages wide",
           std::to_string(columns) + " as page_table");
  problem.table_k_stride = columns;
  problem.table_v_stride = in_.table_v ? columns : 0;
  const int64_t slots = columns * rows_kv_;
  if (in_.max_seqlen_kv > slots)
    refuse("max_seqlen_kv", std::to_string(in_.max_seqlen_kv),
           "at most the " + std::to_string(slots) + " slots of page_table");
  rows_kv_ = in_.max_seqlen_kv >= 0 ? in_.max_seqlen_kv : slots;
}

// What a ragged or paged side leaves open is said by the Run, the rest by the Problem.
void Work::settle_sizes() {
  run_.struct_size = sizeof run_;
  const bool open_q = problem.q_form == TEA_RAGGED;
  const bool open_kv = problem.kv_form == TEA_RAGGED || problem.kv_form == TEA_PAGED;
  (varies() ? run_.batch : problem.batch) = batch_;
  (open_q ? run_.max_q : problem.seqlen_q) = rows_q_;
  (open_kv ? run_.max_kv : problem.seqlen_kv) = rows_kv_;
  problem.gaps = in_.offsets_q || in_.offsets_kv;
  const bool both = problem.q_form == TEA_RAGGED && problem.kv_form == TEA_RAGGED;
  if (both && in_.offsets_q.has_value() != in_.offsets_kv.has_value())
    refuse(in_.offsets_q ? "offsets_kv" : "offsets_q", "None",
           std::string("a tensor, as ") + (in_.offsets_q ? "offsets_q" : "offsets_kv") +
               ": with gaps both sides say where they are");
}

void Work::describe_mask() {
  const Mask* found = nullptr;
  for (const Mask& row : kMasks)
    if (in_.mask == row.name) found = &row;
  if (!found)
    refuse("mask", "\"" + in_.mask + "\"", "none, causal, bottom_right or causal_bottom_right");
  problem.causal = found->causal;
  problem.bottom_right = found->bottom_right;
  for (const int64_t bound : {in_.window_left, in_.window_right})
    if (bound < -1 || bound > kFarthest)
      refuse("window", std::to_string(bound), "from 0 to 2^62, or -1 for no bound");
  problem.window_left = in_.window_left + 1;
  problem.window_right = in_.window_right + 1;
}

void Work::describe_bias() {
  if (!in_.bias) {
    if (in_.pre_scale_bias) refuse("bias_type", "\"pre_scale\"", "a bias");
    return;
  }
  const View bias(*in_.bias);
  const int64_t full[4] = {batch_, problem.heads_q, rows_q_, rows_kv_};
  bool fits = bias.rank == 4;
  for (int i = 0; fits && i < 4; ++i) fits = bias.size[i] == full[i] || bias.size[i] == 1;
  if (!fits)
    refuse("bias", "of shape " + shape_text(bias),
           "[" + std::to_string(full[0]) + ", " + std::to_string(full[1]) + ", " +
               std::to_string(full[2]) + ", " + std::to_string(full[3]) + "], each of them or 1");
  int64_t stride[4], usual = 1;
  for (int i = 3; i >= 0; --i) {
    if (bias.size[i] != full[i]) problem.bias_broadcast |= 1 << i;
    stride[i] = bias.size[i] > 1 ? bias.stride[i] : usual;
    usual *= bias.size[i];
  }
  if (bias.elements() && !stride[0] && !stride[1] && !stride[2] && !stride[3])
    refuse_expanded("bias");
  problem.bias = in_.pre_scale_bias ? TEA_BIAS_PRE_SCALE : TEA_BIAS_POST_SCALE;
  problem.bias_dtype = dtype_of(*in_.bias);
  const bool is_fp8 = problem.dtype == TEA_E4M3 || problem.dtype == TEA_E5M2;
  if (!problem.bias_dtype ||
      (!is_fp8 && problem.bias_dtype != problem.dtype && problem.bias_dtype != TEA_FP32))
    refuse("bias.dtype", dtype_text(*in_.bias),
           "that of q, or float32 (a boolean mask is torch.where(mask, 0.0, -torch.inf))");
  problem.bias_stride = {stride[0], stride[1], stride[2], stride[3]};
  add(TEA_BIAS, "bias", *in_.bias);
}

void Work::describe_scores() {
  const Place place(where_);
  if (in_.sink) {
    if (in_.off_by_one) refuse("sink", "a tensor and off_by_one", "one of the two");
    require_shape("sink", View(*in_.sink), {1, {problem.heads_q}}, "float32 ");
    pointers_[TEA_SINK] = place.fp32("sink", *in_.sink);
  }
  problem.softmax = in_.sink         ? TEA_SOFTMAX_LEARNABLE
                    : in_.off_by_one ? TEA_SOFTMAX_OFF_BY_ONE
                                     : TEA_SOFTMAX_VANILLA;
  if (in_.slopes) {
    const View slopes(*in_.slopes);
    const bool each = slopes.rank == 2 && slopes.size[0] == batch_;  // of the batch has its own
    if ((slopes.rank != 1 && !each) || slopes.size[slopes.rank - 1] != problem.heads_q)
      refuse("alibi", "of shape " + shape_text(slopes),
             "float32 [heads] or [batch, heads], here [" + std::to_string(problem.heads_q) +
                 "] or [" + std::to_string(batch_) + ", " + std::to_string(problem.heads_q) + "]");
    pointers_[TEA_SLOPES] = place.fp32("alibi", *in_.slopes);
    problem.slopes_stride = each && batch_ != 1 ? problem.heads_q : 0;  // none: no memory either
  }
  problem.alibi = in_.slopes ? TEA_ALIBI_SLOPES : in_.alibi ? TEA_ALIBI_STANDARD : TEA_ALIBI_NONE;
  problem.softcap = static_cast<float>(in_.softcap);
  problem.dropout = static_cast<float>(in_.dropout);
  problem.has_scale = in_.scale.has_value();
  problem.scale = static_cast<float>(in_.scale.value_or(0));
  if (in_.rng_state) {
    require_shape("rng_state", View(*in_.rng_state), {1, {2}}, "seed and offset, int64 ");
    pointers_[TEA_RNG_STATE] = place.int64("rng_state", *in_.rng_state);
  }
  if (in_.origin) {
    require_shape("origin", View(*in_.origin), {1, {4}}, "batch, head, row, column: int64 ");
    run_.origin_device = place.int64("origin", *in_.origin);
  }
}

void Work::add_integers(tea_tensor index, const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return;
  const bool is_table = index == TEA_TABLE_K || index == TEA_TABLE_V;
  if (!is_table) require_shape(name, View(*tensor), {1, {batch_ + 1}}, "int32 [batch + 1] ");
  pointers_[index] = Place(where_).int32(name, *tensor);
}

void Work::add(tea_tensor index, const char* name, const Tensor& tensor, const View& view) {
  require_device(name, tensor, where_.device);
  pointers_[index] = view.data;
  if (view.elements()) addresses_ |= reinterpret_cast<uintptr_t>(view.data);
}

// Only a tensor of that very shape and type: the engines trust the sizes of the problem.
tea_strides Work::add_rows(tea_tensor index, const char* name, const Tensor& tensor,
                           const View& view) {
  const bool is_k = index == TEA_K || index == TEA_DK, is_v = index == TEA_V || index == TEA_DV;
  const View& like = is_k ? k_ : is_v ? v_ : q_;
  const Order& order = is_k || is_v ? order_kv_ : order_q_;
  Sizes needed{like.rank, {}};
  std::copy_n(like.size, like.rank, needed.size);
  if (index == TEA_O || index == TEA_DOUT) needed.size[order.dim] = problem.dim_v;
  require_shape(name, view, needed);
  if (dtype_of(tensor) != type_of(index))
    refuse(std::string(name) + ".dtype", dtype_text(tensor),
           dtype_text(type_of(index)) + (type_of(index) == problem.dtype ? " as q" : ""));
  add(index, name, tensor, view);
  return strides_of(name, view, order);
}

int32_t Work::type_of(tea_tensor index) const {
  const auto or_else = [](int32_t type, int32_t usual) { return type ? type : usual; };
  const int32_t o = or_else(problem.o_dtype, problem.dtype);
  if (index == TEA_O) return o;
  if (index == TEA_DOUT) return or_else(problem.dout_dtype, o);
  const bool gradient = index == TEA_DQ || index == TEA_DK || index == TEA_DV;
  return gradient ? or_else(problem.dqkv_dtype, problem.dtype) : problem.dtype;
}

void Work::add_scale(tea_tensor index, const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return;
  if (tensor->numel() != 1) refuse(name, "of shape " + shape_text(View(*tensor)), "float32 [1]");
  pointers_[index] = Place(where_).fp32(name, *tensor);
}

void Work::add_per_row(tea_tensor index, const char* name, const Tensor& tensor) {
  require_shape(name, View(tensor), per_row());
  pointers_[index] = Place(where_).fp32(name, tensor);
}

// For bhsd too the rows of a token lie side by side: that is how the next layer reads them.
Work::Layout Work::layout_of_o() const {
  Layout out{};
  const Order& order = order_q_;
  const int64_t heads = problem.heads_q, dim = problem.dim_v;
  std::copy_n(q_.size, order.rank, out.size);
  out.size[order.dim] = dim;
  const int64_t rows = std::max<int64_t>(q_.size[order.seq], 1);
  const bool batch_inside = order.batch > order.seq;  // sbhd
  out.stride[order.dim] = 1;
  out.stride[order.head] = dim;
  out.stride[order.seq] = heads * dim * (batch_inside ? std::max<int64_t>(batch_, 1) : 1);
  if (order.batch >= 0) out.stride[order.batch] = heads * dim * (batch_inside ? 1 : rows);
  return out;
}

Tensor Work::new_o() {
  const Layout layout = layout_of_o();
  const Tensor o =
      empty(in_.q, torch_dtype(type_of(TEA_O)), order_q_.rank, layout.size, layout.stride);
  View view(order_q_.rank, layout.size, layout.stride);
  view.data = o.data_ptr();
  add(TEA_O, "o", o, view);
  problem.o = strides_of("o", view, order_q_);
  return o;
}

// One number for each row and head.
Sizes Work::per_row() const {
  const int64_t heads = problem.heads_q, rows = q_.size[order_q_.seq];
  return order_q_.batch >= 0 ? Sizes{3, {batch_, heads, rows}} : Sizes{2, {rows, heads}};
}

Tensor Work::new_per_row() const {
  const Sizes sizes = per_row();
  return empty(in_.q, torch_dtype(TEA_FP32), sizes.rank, sizes.size);
}

void Work::settle_alignment() {
  const int alignment = addresses_ ? 1 << std::min(std::countr_zero(addresses_), 4) : 16;
  problem.alignment = alignment == 16 ? 0 : alignment;
}

void Work::forward() { run(tea_forward, true); }
void Work::backward() { run(tea_backward, false); }

void Work::run(tea_status (*verb)(const tea_plan*, const tea_run*), bool is_forward) {
  settle_alignment();
  const Planned plan = planned(problem, varies() ? &run_ : nullptr, where_.device, in_.engine);
  const uint64_t bytes = is_forward ? plan.workspace_forward : plan.workspace_backward;
  constexpr uint64_t kAlignment = 256;
  std::optional<Tensor> workspace;
  if (bytes) {
    workspace = empty(in_.q, torch_byte(), {static_cast<int64_t>(bytes + kAlignment)});
    const auto start = reinterpret_cast<uintptr_t>(workspace->data_ptr());
    run_.workspace = reinterpret_cast<void*>((start + kAlignment - 1) / kAlignment * kAlignment);
    run_.workspace_bytes = bytes;
  }
  run_.tensors = pointers_.data();
  run_.tensor_count = TEA_TENSOR_COUNT;
  run_.stream = where_.stream;
  Report report(in_.q, where_);
  run_.status = report.word();
  require(verb(plan.plan, &run_));
  report.refuse_nonsense("cu_seqlens_q, cu_seqlens_kv or their offsets");
}

std::string Work::explain() {
  const Layout o = layout_of_o();
  problem.o = strides_of("o", View(order_q_.rank, o.size, o.stride), order_q_);
  settle_alignment();
  const auto text = [](const auto& print) {
    size_t needed = 0;
    require(print(nullptr, 0, &needed));
    std::string out(needed, '\0');
    require(print(out.data(), needed, &needed));
    out.resize(needed - 1);
    return out;
  };
  const std::string line = text([&](char* to, size_t n, size_t* needed) {
    return tea_problem_print(&problem, to, n, needed);
  });
  const std::string engines = text([&](char* to, size_t n, size_t* needed) {
    return tea_explain(&problem, where_.device, to, n, needed);
  });
  if (!in_.engine.empty() && ("\n" + engines).find("\n" + in_.engine + ":") == std::string::npos)
    refuse("engine", "\"" + in_.engine + "\"", "one of those that explain:\n" + engines);
  return line + "\n" + engines;
}

}  // namespace tea::torch_ops
