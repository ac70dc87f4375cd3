// Exact operation and byte counts of one execution.
#include "core/cost.h"

#include "core/error.h"
#include "math/lengths.h"

namespace tea {
namespace {

// The lengths of one side, from host memory.
struct Lengths {
  int32_t form;
  int64_t capacity;
  const int32_t* cu_seqlens;

  int64_t operator[](int64_t i) const {
    return form == TEA_DENSE ? capacity : padded_sequence(cu_seqlens, i, capacity).length;
  }
};

Lengths lengths(const char* name, int32_t form, int64_t capacity, const tea_run* run,
                tea_tensor t) {
  const bool has = run && run->tensors && run->tensor_count > static_cast<uint32_t>(t);
  const auto* cu = has ? static_cast<const int32_t*>(run->tensors[t]) : nullptr;
  TEA_REQUIRE(form == TEA_DENSE || cu, name, "NULL", "the lengths, in host memory");
  return {form, capacity, cu};
}

struct Totals {
  uint64_t visible = 0;  // per head, as the rows
  int64_t rows_q = 0, rows_kv = 0;
};

Totals count(const Problem& p, const Geometry& g, const tea_run* run) {
  const Lengths q = lengths("cu_seqlens_q", p.q_form, g.max_q, run, TEA_CU_SEQLENS_Q);
  const Lengths kv = lengths("cu_seqlens_kv", p.kv_form, g.max_kv, run, TEA_CU_SEQLENS_KV);
  Totals t;
  for (int64_t b = 0; b < g.batch; ++b) {
    const int64_t delta = diagonal(p.bottom_right, q[b], kv[b]) + (run ? run->shift : 0);
    const Band rule = band(p.mask(), delta, run ? run->origin[2] : 0, run ? run->origin[3] : 0);
    for (int64_t row = 0; row < q[b]; ++row) {
      const Columns c = visible_columns(rule, row, kv[b]);
      if (c.end > c.begin) t.visible += static_cast<uint64_t>(c.end - c.begin);
    }
    t.rows_q += q[b], t.rows_kv += kv[b];
  }
  return t;
}

// Outputs count every element. Inputs with rows of a side count their valid rows, which are those
// of a ragged problem of the same lengths without gaps.
uint64_t bytes(const Problem& p, const Geometry& g, const Totals& t, Direction d) {
  Problem valid = p;
  valid.q_form = valid.kv_form = TEA_RAGGED;
  Geometry rows = g;
  rows.tokens_q = t.rows_q, rows.tokens_kv = t.rows_kv;
  uint64_t sum = 0;
  for (const TensorInfo& info : tensor_table()) {
    if (info.use(p, d) != Use::kRequired) continue;
    const Shape shape = info.written(d) ? info.shape(p, g) : info.shape(valid, rows);
    sum += static_cast<uint64_t>(shape.elements()) * static_cast<uint64_t>(info.element_bytes(p));
  }
  return sum;
}

}  // namespace

tea_cost cost(const Problem& p, const tea_run* run) {
  const Geometry g = geometry(p, run);
  if (run) require_origin("run.", run->origin, run->origin_device);
  const Totals t = count(p, g, run);
  const auto qk = static_cast<uint64_t>(p.dim_qk), v = static_cast<uint64_t>(p.v_dim());
  tea_cost out{};
  out.struct_size = sizeof out;
  out.visible = t.visible * static_cast<uint64_t>(p.heads_q);
  out.forward_flops = 2 * out.visible * (qk + v);
  out.forward_bytes = bytes(p, g, t, Direction::kForward);
  if (!p.training) return out;
  out.backward_flops = 2 * out.visible * (3 * qk + 2 * v);
  out.backward_bytes = bytes(p, g, t, Direction::kBackward);
  return out;
}

}  // namespace tea
