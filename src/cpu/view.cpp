// Addresses and scales of one execution.
#include "cpu/view.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/subnormals.h"
#include "math/bias.h"
#include "math/formats.h"
#include "math/load_store.h"

namespace tea::cpu {

View::View(const Problem& problem, const Run& r) : p(problem), run(r), size(r.size), rng{} {
  bool valid = true;
  const int64_t origins = run.origin_stride ? size.batch : 1;
  for (int64_t b = 0; b < origins; ++b) origin(b, &valid);
  if (!valid) report(TEA_STATUS_BAD_ORIGIN);
  if (p.is_fp8()) {
    const auto dropout = static_cast<float>(p.drops() ? p.dropout : 0);
    if (saturates(static_cast<float>(scalar(TEA_S_SCALE)), 1 / (1 - dropout),
                  p.dtype == TEA_E4M3 ? kE4M3.largest : kE5M2.largest))
      report(TEA_STATUS_SATURATED);
  }
  if (!p.drops()) return;
  const auto* state = run.as<const int64_t>(TEA_RNG_STATE);
  rng = {static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1])};
}

Origin View::origin(int64_t b, bool* valid) const {
  const int64_t* from = run.origin_device ? run.origin_device + b * run.origin_stride : run.origin;
  const auto at = [&](int i) { return clamp_origin(from[i], valid); };
  return {at(0), at(1), at(2), at(3), run.origin_stride ? clamp_shift(from[4], valid) : run.shift};
}

Origin View::origin(int64_t b) const {
  bool valid = true;
  return origin(b, &valid);
}

void View::report(int32_t bit) const {
  // Several threads may report at the same time, and several runs may share one word.
  if (run.status) std::atomic_ref(*run.status).fetch_or(bit, std::memory_order_relaxed);
}

Sequence View::checked(Sequence s) const {
  if (!s.valid) report(TEA_STATUS_BAD_LENGTHS);
  return s;
}

int64_t View::batch() const {
  const bool dense = p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE;
  return dense && size.max_q == 0 && size.max_kv == 0 ? 0 : size.batch;
}

Sequence View::queries(int64_t b) const {
  if (p.q_form == TEA_DENSE) return dense_sequence(size.max_q);
  const auto* cu = run.as<const int32_t>(TEA_CU_SEQLENS_Q);
  if (p.q_form == TEA_PADDED) return checked(padded_sequence(cu, b, size.max_q));
  const auto* offsets = p.gaps ? run.as<const int32_t>(TEA_OFFSETS_Q) : nullptr;
  return checked(ragged_sequence(cu, offsets, b, size.max_q, size.tokens_q));
}

Sequence View::keys(int64_t b) const {
  if (p.kv_form == TEA_DENSE) return dense_sequence(size.max_kv);
  const auto* cu = run.as<const int32_t>(TEA_CU_SEQLENS_KV);
  if (p.kv_form != TEA_RAGGED) return checked(padded_sequence(cu, b, size.max_kv));
  const auto* offsets = p.gaps ? run.as<const int32_t>(TEA_OFFSETS_KV) : nullptr;
  return checked(ragged_sequence(cu, offsets, b, size.max_kv, size.tokens_kv));
}

RowsOf View::rows(tea_tensor t) const {
  const auto of = [&](int32_t form, const tea_strides& stride) {
    return RowsOf{run.tensor[t], tensor_info(t).dtype(p), form, stride, nullptr, 0, p.page_size, 0};
  };
  const auto pool = [&](RowsOf rows, tea_tensor table, int64_t pitch, int64_t pages) {
    rows.table = run.as<const int32_t>(table);
    rows.table_stride = pitch, rows.pages = pages;
    return rows;
  };
  switch (t) {
    case TEA_Q:
      return of(p.q_form, size.q);
    case TEA_O:
      return of(p.q_form, size.o);
    case TEA_DOUT:
      return of(p.q_form, size.dout);
    case TEA_DQ:
      return of(p.q_form, size.dq);
    case TEA_DK:
      return of(p.kv_form, size.dk);
    case TEA_DV:
      return of(p.kv_form, size.dv);
    case TEA_K:
      return pool(of(p.kv_form, size.k), TEA_TABLE_K, size.table_k, size.pages_k);
    default:
      break;
  }
  const RowsOf v = of(p.kv_form, size.v);
  return run.tensor[TEA_TABLE_V] ? pool(v, TEA_TABLE_V, size.table_v, size.pages_v)
                                 : pool(v, TEA_TABLE_K, size.table_k, size.pages_v);
}

int64_t View::offset(const RowsOf& of, const RowAt& at) const {
  const int64_t in_head = at.h * of.stride.head;
  if (of.form == TEA_RAGGED) return (at.sequence.start + at.i) * of.stride.seq + in_head;
  if (of.form != TEA_PAGED) return at.b * of.stride.batch + at.i * of.stride.seq + in_head;
  bool valid = true;
  const int32_t entry = of.table[at.b * of.table_stride + at.i / of.page_size];
  const int64_t page = clamp_page(entry, of.pages, &valid);
  if (!valid) report(TEA_STATUS_BAD_PAGE);
  return page * of.stride.batch + at.i % of.page_size * of.stride.seq + in_head;
}

void* View::address(const RowsOf& of, const RowAt& at) const {
  return static_cast<char*>(of.data) + offset(of, at) * dtype_bytes(of.dtype);
}

void View::load(const RowsOf& of, const RowAt& at, double scale, std::span<double> out) const {
  const int64_t first = offset(of, at);
  for (size_t d = 0; d < out.size(); ++d)
    out[d] = load_real(of.data, of.dtype, first + static_cast<int64_t>(d)) * scale;
}

void View::store(const RowsOf& of, const RowAt& at, double scale,
                 std::span<const double> values) const {
  const int64_t first = offset(of, at);
  for (size_t d = 0; d < values.size(); ++d)
    store_real(of.data, of.dtype, first + static_cast<int64_t>(d), values[d] * scale);
}

int64_t View::statistic_offset(const RowAt& at) const {
  const bool ragged = p.q_form == TEA_RAGGED;
  const int64_t row = ragged ? (at.sequence.start + at.i) * size.lse.seq
                             : at.b * size.lse.batch + at.i * size.lse.seq;
  return row + at.h * size.lse.head;
}

double View::statistic(tea_tensor t, const RowAt& at) const {
  return load_real(run.tensor[t], p.statistic_type(), statistic_offset(at));
}

void View::set_statistic(tea_tensor t, const RowAt& at, double value) const {
  store_real(run.tensor[t], p.statistic_type(), statistic_offset(at), value);
}

double View::sink(int64_t h) const {
  if (p.softmax == TEA_SOFTMAX_LEARNABLE)
    return load_real(run.tensor[TEA_SINK], p.statistic_type(), h);
  return p.softmax == TEA_SOFTMAX_OFF_BY_ONE ? 0 : -std::numeric_limits<double>::infinity();
}

void View::set_sink_gradient(std::span<const double> gradient) const {
  if (void* const to = run.tensor[TEA_DSINK])
    for (size_t h = 0; h < gradient.size(); ++h)
      store_real(to, p.statistic_type(), static_cast<int64_t>(h), gradient[h]);
}

double View::slope(int64_t b, int64_t h) const {
  if (p.alibi == TEA_ALIBI_STANDARD) return alibi_slope(h, p.heads_q);
  if (p.alibi == TEA_ALIBI_NONE) return 0;
  return load_real(run.tensor[TEA_SLOPES], p.statistic_type(), b * size.slopes + h);
}

double View::scalar(tea_tensor t) const {
  const float* const number = run.number(t);
  return number ? double{*number} : 1.0;
}

double View::kv_scale(tea_tensor t, int64_t kv_head) const {
  const float* const numbers = run.number(t);
  return numbers ? double{numbers[p.kv_scale == TEA_KV_SCALE_HEAD ? kv_head : 0]} : 1.0;
}

void View::raise(tea_tensor t, double value) const {
  if (float* const amax = run.number(t)) *amax = std::fmax(*amax, static_cast<float>(value));
}

void View::parallel_for(int64_t count, const std::function<void(int64_t)>& body) const {
  const auto exact = [&body](int64_t i) {
    const Subnormals kept(true);  // the thread may be another library's
    body(i);
  };
  cpu::parallel_for(count, exact, {run.parallel_for, run.parallel_context, run.threads});
}

void View::fill(tea_tensor t, double value) const {
  if (!run.tensor[t]) return;
  const TensorInfo& info = tensor_info(t);
  const Shape s = info.shape(p, size);
  const int64_t inner = s.stride[s.rank - 1] == 1 ? s.size[s.rank - 1] : 1;
  const auto bytes = static_cast<size_t>(info.element_bytes(p));
  for (int64_t flat = 0; flat < s.elements(); flat += inner) {
    const int64_t first = s.offset(flat);
    if (value == 0)  // zero has no bits set in any type
      std::memset(static_cast<char*>(run.tensor[t]) + static_cast<size_t>(first) * bytes, 0,
                  static_cast<size_t>(inner) * bytes);
    else
      for (int64_t i = 0; i < inner; ++i)
        store_real(run.tensor[t], info.dtype(p), first + i, value);
  }
}

}  // namespace tea::cpu
