// Resolves sizes and strides, and checks their consistency.
#include "core/geometry.h"

#include "core/error.h"
#include "core/tensors.h"

namespace tea {
namespace {

struct SideShape {
  int32_t form, heads, dim;
  int64_t rows;  // rows of a dense side
  int32_t page_size;
};

bool given(const tea_strides& s) { return s.batch || s.seq || s.head; }
bool given(const tea_bias_strides& s) { return s.batch || s.head || s.row || s.col; }

// a * b, or a stride that check_shapes refuses if the product overflows.
int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

tea_strides default_strides(const SideShape& side) {
  const int64_t row = int64_t{side.heads} * side.dim;
  switch (side.form) {
    case TEA_RAGGED:
      return {0, row, side.dim};
    case TEA_PAGED:
      return {times(side.page_size, row), row, side.dim};
    default:
      return {times(side.rows, row), row, side.dim};
  }
}

tea_strides resolve(const tea_strides& s, const SideShape& side) {
  return given(s) ? s : default_strides(side);
}

tea_strides resolve_lse(const Problem& p, int64_t rows) {
  if (given(p.lse)) return p.lse;
  if (p.q_form == TEA_RAGGED) return {0, p.heads_q, 1};
  return {times(p.heads_q, rows), 1, rows};
}

tea_bias_strides resolve_bias(const Problem& p, const tea_bias_strides& s, const Geometry& g) {
  const int broadcast = p.bias_broadcast;
  tea_bias_strides out = s;
  if (!given(s)) {
    int64_t next = 1;
    const auto dense = [&](int bit, int64_t size) {
      if (broadcast & bit) return int64_t{0};
      const int64_t stride = next;
      next = times(next, size);
      return stride;
    };
    out.col = dense(TEA_BROADCAST_COL, g.max_kv);
    out.row = dense(TEA_BROADCAST_ROW, g.max_q);
    out.head = dense(TEA_BROADCAST_HEAD, p.heads_q);
    out.batch = dense(TEA_BROADCAST_BATCH, g.batch);
  }
  if (broadcast & TEA_BROADCAST_BATCH) out.batch = 0;
  if (broadcast & TEA_BROADCAST_HEAD) out.head = 0;
  if (broadcast & TEA_BROADCAST_ROW) out.row = 0;
  if (broadcast & TEA_BROADCAST_COL) out.col = 0;
  return out;
}

void resolve_strides(const Problem& p, Geometry& g) {
  const SideShape q{p.q_form, p.heads_q, p.dim_qk, g.max_q, 0};
  const SideShape o{p.q_form, p.heads_q, p.v_dim(), g.max_q, 0};
  const SideShape k{p.kv_form, p.heads_kv, p.dim_qk, g.max_kv, p.page_size};
  const SideShape v{p.kv_form, p.heads_kv, p.v_dim(), g.max_kv, p.page_size};
  g.q = resolve(p.q, q), g.k = resolve(p.k, k), g.v = resolve(p.v, v), g.o = resolve(p.o, o);
  g.dout = resolve(p.dout, o), g.dq = resolve(p.dq, q);
  g.dk = resolve(p.dk, k), g.dv = resolve(p.dv, v);
  g.lse = resolve_lse(p, g.max_q);
  g.bias = resolve_bias(p, p.bias_stride, g);
  g.dbias = resolve_bias(p, p.dbias_stride, g);
  g.slopes = p.slopes_stride;
  g.table_k = p.table_k_stride ? p.table_k_stride : g.table_pages;
  g.table_v = p.table_v_stride ? p.table_v_stride : g.table_pages;
}

// One row per size of tea_run, which must be set if and only if the problem does not specify it.
void check_run_sizes(const Problem& p, const tea_run& run) {
  const bool paged = p.kv_form == TEA_PAGED;
  const struct {
    const char* name;
    int64_t value;
    bool open;
  } rows[] = {
      {"run.batch", run.batch, p.varies()},
      {"run.max_q", run.max_q, p.varies_q()},
      {"run.max_kv", run.max_kv, p.varies_kv()},
      {"run.tokens_q", run.tokens_q, p.varies_q()},
      {"run.tokens_kv", run.tokens_kv, p.kv_form == TEA_RAGGED},
      {"run.pages_k", run.pages_k, paged},
      {"run.pages_v", run.pages_v, paged},
  };
  for (const auto& row : rows) {
    TEA_REQUIRE(row.value >= 0, row.name, row.value, "0 or more");
    TEA_REQUIRE(row.open || row.value == 0, row.name, row.value,
                "0: the problem itself gives this size");
  }
  if (!paged || run.max_kv == 0) return;
  TEA_REQUIRE(run.pages_k > 0, "run.pages_k", run.pages_k, "at least 1 page");
  TEA_REQUIRE(run.pages_v > 0, "run.pages_v", run.pages_v, "at least 1 page");
}

// Whether two elements have the same address, so that writes would race. Dimensions are compared in
// the order of their strides: each stride must exceed the extent of all smaller ones.
bool overlaps(Shape s) {
  __int128 extent = 0;
  for (int done = 0; done < s.rank; ++done) {
    int next = done;
    for (int i = done; i < s.rank; ++i)
      if (s.stride[i] < s.stride[next]) next = i;
    std::swap(s.size[done], s.size[next]);
    std::swap(s.stride[done], s.stride[next]);
    if (s.size[done] <= 1) continue;
    if (s.stride[done] <= extent) return true;
    extent += static_cast<__int128>(s.size[done] - 1) * s.stride[done];
  }
  return false;
}

void check_shapes(const Problem& p, const Geometry& g) {
  constexpr tea_tensor strided[] = {
      TEA_Q,  TEA_K,  TEA_V,    TEA_O,    TEA_LSE,   TEA_MAX,    TEA_SUM_EXP, TEA_DQ,
      TEA_DK, TEA_DV, TEA_DOUT, TEA_BIAS, TEA_DBIAS, TEA_SLOPES, TEA_TABLE_K, TEA_TABLE_V};
  for (const tea_tensor t : strided) {
    const TensorInfo& info = tensor_info(t);
    const bool forward = info.forward(p) != Use::kUnused,
               backward = info.backward(p) != Use::kUnused;
    if (!forward && !(p.training && backward)) continue;
    const Shape shape = info.shape(p, g);
    __int128 span = 1;
    constexpr __int128 kLimit = __int128{1} << 60;
    for (int i = 0; i < shape.rank && span < kLimit; ++i)
      span += static_cast<__int128>(shape.size[i]) * shape.stride[i];
    TEA_REQUIRE(span < kLimit, std::string(info.name) + " with its strides",
                "larger than 2^60 elements", "a smaller extent");
    const bool written = (forward && info.written_forward) || (backward && info.written_backward);
    TEA_REQUIRE(!written || shape.elements() == 0 || !overlaps(shape), std::string(info.name),
                "a tensor whose strides map two elements to one address",
                "strides that keep the elements of an output apart");
  }
}

}  // namespace

Geometry default_geometry(const Problem& p) {
  Geometry g{};
  g.batch = p.batch, g.max_q = p.seqlen_q, g.max_kv = p.seqlen_kv;
  resolve_strides(p, g);
  return g;
}

void check_strides(const Problem& p) {
  for (const Field& f : problem_fields()) {
    if (f.kind != Kind::kInt64 || (f.count == 1 && !f.name.ends_with("_stride"))) continue;
    const auto* stride =
        reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(&p) + f.offset);
    for (int i = 0; i < f.count; ++i)
      TEA_REQUIRE(stride[i] >= 0, std::string(f.name), value_text(p, f), "strides of 0 or more");
  }
  const struct {
    const char* name;
    int64_t batch;
    int32_t form;
  } rows[] = {{"q", p.q.batch, p.q_form},       {"o", p.o.batch, p.q_form},
              {"dout", p.dout.batch, p.q_form}, {"dq", p.dq.batch, p.q_form},
              {"lse", p.lse.batch, p.q_form},   {"k", p.k.batch, p.kv_form},
              {"v", p.v.batch, p.kv_form},      {"dk", p.dk.batch, p.kv_form},
              {"dv", p.dv.batch, p.kv_form}};
  for (const auto& row : rows)
    TEA_REQUIRE(row.form != TEA_RAGGED || row.batch == 0, std::string(row.name) + ".batch",
                row.batch, "0: a ragged side has no batch stride");
}

Geometry geometry(const Problem& p, const tea_run* run) {
  Geometry g{};
  g.batch = p.batch, g.max_q = p.seqlen_q, g.max_kv = p.seqlen_kv;
  if (!run && p.varies())
    refuse_argument("run", "NULL", "the sizes that a ragged or paged problem leaves open");
  if (run) {
    check_run_sizes(p, *run);
    if (p.varies()) g.batch = run->batch;
    if (p.varies_q()) g.max_q = run->max_q;
    if (p.varies_kv()) g.max_kv = run->max_kv;
    g.tokens_q = run->tokens_q, g.tokens_kv = run->tokens_kv;
    g.pages_k = run->pages_k, g.pages_v = run->pages_v;
  }
  if (p.kv_form == TEA_PAGED)
    g.table_pages = g.max_kv / p.page_size + (g.max_kv % p.page_size != 0);
  resolve_strides(p, g);
  check_shapes(p, g);
  return g;
}

}  // namespace tea
