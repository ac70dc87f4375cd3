// Drawing, placing, calling and comparing; see the header.
#include "nvte/attention_call.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tea::test {
namespace {

std::vector<int32_t> running_sum(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> cu = {0};
  for (const int64_t n : lengths) cu.push_back(cu.back() + static_cast<int32_t>(n));
  return cu;
}

// Where sequences start when `gap` unused tokens precede each; the last entry is the end of all.
std::vector<int32_t> spaced(const std::vector<int64_t>& lengths, int32_t gap) {
  std::vector<int32_t> starts = {gap};
  for (const int64_t n : lengths) starts.push_back(starts.back() + static_cast<int32_t>(n) + gap);
  return starts;
}

double published_slope(int64_t head, int64_t heads) {
  int64_t n = 1;
  while (2 * n <= heads) n *= 2;
  if (head < n) return std::pow(2, -8.0 * static_cast<double>(head + 1) / static_cast<double>(n));
  return std::pow(2, -4.0 * static_cast<double>(2 * (head - n) + 1) / static_cast<double>(n));
}

oracle::Case sized(const Question& s) {
  oracle::Case c;
  c.batch = 3, c.heads_q = 4, c.heads_kv = s.gqa ? 2 : 4;
  c.max_q = s.max_q, c.max_kv = s.order().packs_qkv() ? s.max_q : s.max_kv;
  c.dim_qk = s.dim_qk, c.dim_v = s.order().packs_kv() ? s.dim_qk : s.dim_v;
  return c;
}

void set_options(const Question& s, oracle::Case& c) {
  c.causal = is_causal(s.mask);
  c.bottom_right = c.causal ? is_bottom_right(s.mask) : s.bottom_right;
  c.window_left = s.window_left;
  c.window_right = c.causal ? -1 : s.window_right;
  c.bias_kind = s.bias == NVTE_PRE_SCALE_BIAS    ? oracle::Bias::kPreScale
                : s.bias == NVTE_POST_SCALE_BIAS ? oracle::Bias::kPostScale
                                                 : oracle::Bias::kNone;
  if (s.bias == NVTE_ALIBI)
    for (int64_t i = 0; i < c.batch * c.heads_q; ++i)
      c.slopes.push_back(published_slope(i % c.heads_q, c.heads_q));
  c.scale = 0.375f;
  c.dropout = s.training ? double{s.dropout} : 0;
  c.seed = 0x123456789abcdef0 + s.seed, c.offset = 0x300000007;
}

}  // namespace

void AttentionCall::sizes() {
  c = sized(s);
  set_options(s, c);
  if (s.softmax != NVTE_VANILLA_SOFTMAX) {
    c.sink.assign(static_cast<size_t>(c.heads_q), 0.0);
    if (s.softmax == NVTE_LEARNABLE_SOFTMAX)
      for (double& x : c.sink) x = static_cast<float>(normal());
  }
  sink.assign(c.sink.begin(), c.sink.end());
  dsink.assign(c.sink.size(), NAN);
  rng = {static_cast<int64_t>(c.seed), static_cast<int64_t>(c.offset)};
}

void AttentionCall::lengths() {
  c.length_q.assign(3, c.max_q), c.length_kv.assign(3, c.max_kv);
  // Ragged and paged sides have lengths with any mask.
  const Order order = s.order();
  const bool padding = is_padding(s.mask);
  if (padding || order.ragged_q()) c.length_q = {c.max_q, 2, c.max_q - 1};
  if (padding || order.ragged_kv() || order.paged) c.length_kv = {c.max_kv - 3, c.max_kv, 0};
  if ((padding || order.ragged_q()) && order.packs_qkv())
    c.length_kv = c.length_q = {c.max_q, 0, 3};
  cu_q = running_sum(c.length_q), cu_kv = running_sum(c.length_kv);
  const bool gaps_q = order.ragged_q() && s.gaps, gaps_kv = order.ragged_kv() && s.gaps;
  starts_q = gaps_q ? spaced(c.length_q, 2) : cu_q;
  starts_kv = gaps_kv ? spaced(c.length_kv, order.packs_qkv() ? 2 : 1) : cu_kv;
  // A tail that no sequence reaches.
  tokens_q = starts_q.back() + 3, tokens_kv = starts_kv.back() + (order.packs_qkv() ? 3 : 1);
  if (!order.paged) return;
  // Pages in random order, different for K and V, and two unused pages.
  columns = (c.max_kv + page_size - 1) / page_size;
  const int64_t used = c.batch * columns;
  pages = used + 2;
  for (std::vector<int32_t>* table : {&table_k, &table_v}) {
    table->resize(static_cast<size_t>(pages));
    std::iota(table->begin(), table->end(), 0);
    std::shuffle(table->begin(), table->end(), random_);
    table->resize(static_cast<size_t>(used));
  }
}

void AttentionCall::draw() {
  const auto fill = [&](std::vector<double>& x, int64_t n) {
    x.resize(static_cast<size_t>(n));
    for (double& value : x)
      value = oracle::nearest(normal(), oracle::rounding(type_row(s.type).oracle));
  };
  fill(c.q, c.batch * c.heads_q * c.max_q * c.dim_qk);
  fill(c.k, c.batch * c.heads_kv * c.max_kv * c.dim_qk);
  fill(c.v, c.batch * c.heads_kv * c.max_kv * c.dim_v);
  fill(c.dout, c.batch * c.heads_q * c.max_q * c.dim_v);
  for (double& x : c.dout) x = oracle::nearest(x, oracle::rounding(type_row(dout_type()).oracle));
  if (!s.has_bias()) return;
  const DType type = s.fp8() ? DType::kFloat32 : s.type;
  const auto shape = bias_shape();
  const auto n = static_cast<int64_t>(shape[0] * shape[1] * shape[2] * shape[3]);
  bias = Buffer(type, n), dbias = Buffer(type, n);
  std::vector<double> values;
  fill(values, n);
  for (int64_t i = 0; i < n; ++i) bias.store(i, values[static_cast<size_t>(i)]);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t i = 0; i < c.max_q; ++i)
        for (int64_t j = 0; j < c.max_kv; ++j) c.bias.push_back(bias.load(bias_at(b, h, i, j)));
}

Stored AttentionCall::plain(DType type, int64_t dim) const {
  const Order order = s.order();
  const Letters sizes = {
      {'b', c.batch}, {'s', c.max_q}, {'t', tokens_q}, {'h', c.heads_q}, {'d', dim}};
  Stored tensor;
  tensor.place.strides = letter_strides(order.plain_q(), sizes);
  tensor.place.starts = order.ragged_q() ? &starts_q : nullptr;
  tensor.buffer = std::make_shared<Buffer>(type, tensor.place.strides.at('*'));
  for (const char letter : order.plain_q())
    tensor.shape.push_back(static_cast<size_t>(sizes.at(letter)));
  return tensor;
}

void AttentionCall::place() {
  const Order order = s.order();
  const auto tensor = [&](const std::string& letters, const Letters& sizes, int64_t index,
                          std::shared_ptr<Buffer> shared, DType type) {
    Stored t;
    t.place.strides = letter_strides(letters, sizes);
    t.place.index = index;
    t.buffer = shared ? shared : std::make_shared<Buffer>(type, t.place.strides.at('*'));
    for (const char letter : letters)
      if (letter != '3' && letter != '2') t.shape.push_back(static_cast<size_t>(sizes.at(letter)));
    return t;
  };
  const auto kv_sizes = [&](int64_t dim) {
    return Letters{{'b', order.paged ? pages : c.batch},
                   {'s', order.paged ? page_size : c.max_kv},
                   {'t', tokens_kv},
                   {'h', c.heads_kv},
                   {'d', dim}};
  };
  const auto three = [&](Stored& a, Stored& b, Stored& e, DType type) {
    const Letters q_sizes = {
        {'b', c.batch}, {'s', c.max_q}, {'t', tokens_q}, {'h', c.heads_q}, {'d', c.dim_qk}};
    a = tensor(order.of_q(), q_sizes, 0, nullptr, type);
    b = tensor(order.of_k(), kv_sizes(c.dim_qk), order.packs_qkv() ? 1 : 0,
               order.packs_qkv() ? a.buffer : nullptr, type);
    e = tensor(order.of_k(), kv_sizes(c.dim_v),
               order.packs_qkv()  ? 2
               : order.packs_kv() ? 1
                                  : 0,
               order.packs_kv() ? b.buffer : nullptr, type);
    a.place.starts = order.ragged_q() ? &starts_q : nullptr;
    for (Stored* x : {&b, &e}) x->place.starts = order.ragged_kv() ? &starts_kv : nullptr;
    if (!order.paged) return;
    b.place.table = &table_k, e.place.table = &table_v;
    for (Stored* x : {&b, &e}) x->place.page_size = page_size, x->place.columns = columns;
  };
  three(q, k, v, s.type);
  o = plain(o_type(), c.dim_v), dout = plain(dout_type(), c.dim_v);
  if (s.training) three(dq, dk, dv, dqkv_type());
}

void AttentionCall::write(const Stored& tensor, const std::vector<double>& values, int64_t heads,
                          int64_t dim, const std::vector<int64_t>& length, int64_t rows) const {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < length[static_cast<size_t>(b)]; ++i)
        for (int64_t d = 0; d < dim; ++d)
          tensor.store(b, h, i, d,
                       values[static_cast<size_t>(((b * heads + h) * rows + i) * dim + d)]);
}

void AttentionCall::write_inputs() {
  write(q, c.q, c.heads_q, c.dim_qk, c.length_q, c.max_q);
  write(k, c.k, c.heads_kv, c.dim_qk, c.length_kv, c.max_kv);
  write(v, c.v, c.heads_kv, c.dim_v, c.length_kv, c.max_kv);
  write(dout, c.dout, c.heads_q, c.dim_v, c.length_q, c.max_q);
  if (!s.fp8()) return;
  Scales& x = scales;
  if (s.sharing != Sharing::kOwn) x.k_inv = x.v_inv = x.q_inv, x.dk = x.dv = x.dq;
  c.fp8 = {.s = type_row(s.type).oracle,
           .dp = type_row(dout_type()).oracle,
           .s_scale = x.s,
           .s_scale_inv = x.s_inv,
           .dp_scale = x.dp,
           .dp_scale_inv = x.dp_inv,
           .q_scale_inv = x.q_inv,
           .k_scale_inv = x.k_inv,
           .v_scale_inv = x.v_inv};
  const auto is_fp8 = [](DType t) { return t == DType::kFloat8E4M3 || t == DType::kFloat8E5M2; };
  if (is_fp8(o_type())) c.fp8.o_scale = x.o, c.fp8.o_scale_inv = x.o_inv;
  if (is_fp8(dout_type())) c.fp8.dout_scale_inv = x.dout_inv;
  if (is_fp8(dqkv_type())) c.fp8.dq_scale = x.dq, c.fp8.dk_scale = x.dk, c.fp8.dv_scale = x.dv;
}

TensorWrapper AttentionCall::virtual_tensor(float* amax, float* scale, float* scale_inv) const {
  if (!s.fp8()) return TensorWrapper();
  return {nullptr, std::vector<size_t>{0}, DType::kFloat32, amax, scale, scale_inv};
}

TensorWrapper AttentionCall::wrap_table(std::vector<int32_t>& t) const {
  if (t.empty()) return TensorWrapper();
  const std::vector<size_t> shape = {static_cast<size_t>(c.batch), static_cast<size_t>(columns)};
  return {t.data(), shape, DType::kInt32};
}

// Empty where there are no gaps, and for K and V packed with Q, which share its starts.
TensorWrapper AttentionCall::wrap_starts(std::vector<int32_t>& starts, bool on_q) const {
  const Order order = s.order();
  const bool given = on_q ? order.ragged_q() : order.ragged_kv() && !order.packs_qkv();
  return given && s.gaps ? wrap(starts) : TensorWrapper();
}

ForwardHandles AttentionCall::forward_handles() {
  Scales& x = scales;
  return {.q = wrap_scaled(q, nullptr, nullptr, &x.q_inv),
          .k = wrap_scaled(k, nullptr, nullptr, scalar(x.k_inv, x.q_inv)),
          .v = wrap_scaled(v, nullptr, nullptr, scalar(x.v_inv, x.q_inv)),
          .bias = wrap_bias(bias),
          .sink = wrap_sink(sink),
          .s = virtual_tensor(&x.s_amax, &x.s, &x.s_inv),
          .o = wrap_scaled(o, &x.o_amax, &x.o, nullptr),
          .cu_q = wrap(cu_q),
          .cu_kv = wrap(cu_kv),
          .starts_q = wrap_starts(starts_q, true),
          .starts_kv = wrap_starts(starts_kv, false),
          .table_k = wrap_table(table_k),
          .table_v = wrap_table(table_v),
          .rng = TensorWrapper(rng.data(), std::vector<size_t>{2}, DType::kInt64)};
}

BackwardHandles AttentionCall::backward_handles() {
  Scales& x = scales;
  return {.q = wrap_scaled(q, nullptr, nullptr, &x.q_inv),
          .k = wrap_scaled(k, nullptr, nullptr, scalar(x.k_inv, x.q_inv)),
          .v = wrap_scaled(v, nullptr, nullptr, scalar(x.v_inv, x.q_inv)),
          .o = wrap_scaled(o, nullptr, nullptr, &x.o_inv),
          .dout = wrap_scaled(dout, nullptr, nullptr, &x.dout_inv),
          .s = virtual_tensor(nullptr, &x.s, &x.s_inv),
          .dp = virtual_tensor(&x.dp_amax, &x.dp, &x.dp_inv),
          .dq = wrap_scaled(dq, &x.dq_amax, &x.dq, nullptr),
          .dk = wrap_scaled(dk, scalar(x.dk_amax, x.dq_amax), scalar(x.dk, x.dq), nullptr),
          .dv = wrap_scaled(dv, scalar(x.dv_amax, x.dq_amax), scalar(x.dv, x.dq), nullptr),
          .dbias = wrap_bias(dbias),
          .dsink = wrap_sink(dsink),
          .cu_q = wrap(cu_q),
          .cu_kv = wrap(cu_kv),
          .starts_q = wrap_starts(starts_q, true),
          .starts_kv = wrap_starts(starts_kv, false)};
}

void AttentionCall::call_forward() { run(forward_handles(), nullptr); }
void AttentionCall::call_backward() { run(backward_handles(), nullptr); }

void AttentionCall::run(const ForwardHandles& h, cudaStream_t stream) {
  nvte_fused_attn_fwd(
      h.q.data(), h.k.data(), h.v.data(), h.bias.data(), h.sink.data(), h.s.data(), h.o.data(),
      &pack, h.cu_q.data(), h.cu_kv.data(), h.starts_q.data(), h.starts_kv.data(), h.table_k.data(),
      h.table_v.data(), h.rng.data(), static_cast<size_t>(c.max_q), static_cast<size_t>(c.max_kv),
      s.training, s.max_logit, false, static_cast<float>(c.scale), s.dropout, s.layout, s.bias,
      s.mask, s.softmax, s.window_left, s.window_right, s.bottom_right, workspace->data(), stream);
}

void AttentionCall::run(const BackwardHandles& h, cudaStream_t stream) {
  nvte_fused_attn_bwd(h.q.data(), h.k.data(), h.v.data(), h.o.data(), h.dout.data(), h.s.data(),
                      h.dp.data(), &pack, h.dq.data(), h.dk.data(), h.dv.data(), h.dbias.data(),
                      h.dsink.data(), h.cu_q.data(), h.cu_kv.data(), h.starts_q.data(),
                      h.starts_kv.data(), static_cast<size_t>(c.max_q),
                      static_cast<size_t>(c.max_kv), static_cast<float>(c.scale), s.dropout,
                      s.layout, s.bias, s.mask, s.softmax, s.window_left, s.window_right,
                      s.bottom_right, true, false, workspace->data(), stream);
}

NVTE_Fused_Attn_Backend AttentionCall::backend() const {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const auto type = static_cast<NVTEDType>(s.type);
  return nvte_get_fused_attn_backend(s.training, type, type, s.layout, s.bias, s.mask, s.softmax,
                                     s.dropout, size(c.heads_q), size(c.heads_kv), size(c.max_q),
                                     size(c.max_kv), size(c.dim_qk), size(c.dim_v), s.window_left,
                                     s.window_right, s.max_logit, false, false);
}

void AttentionCall::give_memory() {
  give_workspace();
  aux_memory.clear();
  for (size_t i = 0; i < pack.size; ++i) {
    NVTEBasicTensor entry = nvte_get_tensor_param(pack.tensors[i], kNVTERowwiseData);
    // Empty tensors get memory too: allocators may hand out a pointer.
    aux_memory.emplace_back(nvte_tensor_size_bytes(pack.tensors[i]) + 64, '\xff');
    entry.data_ptr = aux_memory.back().data();
    nvte_set_tensor_param(&pack.tensors[i], kNVTERowwiseData, &entry);
  }
}

Mismatches AttentionCall::compare(const char* name, const Stored& tensor,
                                  const oracle::Tensor& want, int64_t heads, int64_t dim,
                                  bool on_q) const {
  Mismatches m;
  const int64_t rows = on_q ? c.max_q : c.max_kv;
  const bool ragged = on_q ? s.order().ragged_q() : s.order().ragged_kv();
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t length = (on_q ? c.length_q : c.length_kv)[static_cast<size_t>(b)];
          if (ragged && i >= length) continue;  // there is no such row in memory
          const auto at = static_cast<size_t>(((b * heads + h) * rows + i) * dim + d);
          const double got = tensor.load(b, h, i, d);
          m.add(name, want.accepts(at, got),
                "[" + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(i) + "," +
                    std::to_string(d) + "] is " + std::to_string(got) + ", needs " +
                    std::to_string(want.value[at]));
        }
  return m;
}

void AttentionCall::keep_o() {
  c.o_stored.assign(c.dout.size(), 0.0);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t i = 0; i < c.length_q[static_cast<size_t>(b)]; ++i)
        for (int64_t d = 0; d < c.dim_v; ++d)
          c.o_stored[static_cast<size_t>(((b * c.heads_q + h) * c.max_q + i) * c.dim_v + d)] =
              o.load(b, h, i, d);
}

Mismatches AttentionCall::check_forward(const oracle::Result& r) {
  Mismatches m = compare("O", o, r.o, c.heads_q, c.dim_v, true);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t i = 0; i < c.length_q[static_cast<size_t>(b)]; ++i) {
        const auto at = static_cast<size_t>((b * c.heads_q + h) * c.max_q + i);
        const auto place = static_cast<size_t>(stats_at(b, h, i));
        const auto check = [&](const char* name, const oracle::Tensor& want, const float* got) {
          m.add(name, want.accepts(at, double{got[place]}),
                "[" + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(i) +
                    "] is " + std::to_string(got[place]) + ", needs " +
                    std::to_string(want.value[at]));
        };
        if (s.max_logit) {
          check("Max", r.max, aux_floats(0));
          check("Sum_Exp", r.sum_exp, aux_floats(1));
        } else {
          check("LSE", r.lse, aux_floats(0));
        }
      }
  if (!s.fp8()) return m;
  compare_one(m, "S.amax", r.s_amax, double{scales.s_amax});
  compare_one(m, "O.amax", r.o_amax, double{scales.o_amax});
  return m;
}

Mismatches AttentionCall::check_backward(const oracle::Result& r) {
  Mismatches m = compare("dQ", dq, r.dq, c.heads_q, c.dim_qk, true);
  m += compare("dK", dk, r.dk, c.heads_kv, c.dim_qk, false);
  m += compare("dV", dv, r.dv, c.heads_kv, c.dim_v, false);
  for (size_t h = 0; h < dsink.size(); ++h)
    m.add("dSoftmaxOffset", r.dsink.accepts(h, double{dsink[h]}),
          "[" + std::to_string(h) + "] is " + std::to_string(dsink[h]) + ", needs " +
              std::to_string(r.dsink.value[h]));
  if (s.has_bias()) {
    const bool lacks[4] = {!s.bias_per_batch, !s.bias_per_head, !s.bias_per_row, false};
    const oracle::Tensor want = oracle::reduce(c, r.dbias, lacks, precision());
    for (size_t i = 0; i < want.value.size(); ++i) {
      const double got = dbias.load(static_cast<int64_t>(i));
      m.add("dBias", want.accepts(i, got),
            "[" + std::to_string(i) + "] is " + std::to_string(got) + ", needs " +
                std::to_string(want.value[i]));
    }
  }
  if (!s.fp8()) return m;
  compare_one(m, "dP.amax", r.dp_amax, double{scales.dp_amax});
  if (s.sharing == Sharing::kOwn) {
    compare_one(m, "dQ.amax", r.dq_amax, double{scales.dq_amax});
    compare_one(m, "dK.amax", r.dk_amax, double{scales.dk_amax});
    compare_one(m, "dV.amax", r.dv_amax, double{scales.dv_amax});
    return m;
  }
  const oracle::Tensor* largest = &r.dq_amax;
  for (const oracle::Tensor* other : {&r.dk_amax, &r.dv_amax})
    if (other->value[0] > largest->value[0]) largest = other;
  compare_one(m, "dQ.amax of all three", *largest, double{scales.dq_amax});
  return m;
}

}  // namespace tea::test
