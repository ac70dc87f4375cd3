// Layouts as strides.
#include "kit/layout.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "kit/codec.h"
#include "kit/random.h"

namespace tea::kit {
namespace {

int64_t longest(const std::vector<int64_t>& lens) {
  return lens.empty() ? 0 : *std::max_element(lens.begin(), lens.end());
}

std::vector<int64_t> lengths(const std::vector<int64_t>& given, int64_t batch, int64_t full) {
  return given.empty() ? std::vector<int64_t>(static_cast<size_t>(batch), full) : given;
}

std::vector<int64_t> starts(const std::vector<int64_t>& lens, int64_t gap) {
  std::vector<int64_t> out;
  int64_t row = gap;
  for (const int64_t length : lens) {
    out.push_back(row);
    row += length + gap;
  }
  out.push_back(row - (lens.empty() ? 0 : gap));
  return out;
}

// Every page that is needed once, in random places of a pool with some to spare.
std::vector<int32_t> page_table(const Case& c, const Extents& e, uint64_t stream) {
  std::vector<int32_t> pool(static_cast<size_t>(e.pages));
  std::iota(pool.begin(), pool.end(), 0);
  Random random(c.seed, stream);
  for (size_t i = pool.size(); i > 1; --i)
    std::swap(pool[i - 1], pool[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  std::vector<int32_t> table(static_cast<size_t>(e.batch * e.table_pages), -1);
  size_t next = 0;
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t i = 0; i * c.problem.page_size < e.len_kv[static_cast<size_t>(b)]; ++i)
      table[static_cast<size_t>(b * e.table_pages + i)] =
          c.shared_first && i == 0 ? pool.back() : pool[next++];
  return table;
}

void lay_out_pages(const Case& c, Extents& e) {
  const int64_t size = std::max(c.problem.page_size, 1);
  e.table_pages = (e.max_kv + size - 1) / size;
  for (const int64_t length : e.len_kv) e.pages += (length + size - 1) / size;
  e.pages += c.spare_pages + (e.max_kv > 0 ? 1 : 0);
  e.table_k = page_table(c, e, 101);
  e.table_v = c.one_table ? e.table_k : page_table(c, e, 102);
}

int64_t rounded(int64_t elements, int32_t dtype) {
  const int64_t unit = std::max(16 / bytes_of(dtype), 1);
  return (elements + unit - 1) / unit * unit;
}

// One row of a packed storage; every part begins on a multiple of 16 bytes.
struct Row {
  int64_t q, k, v;          // where the parts begin
  int64_t head_q, head_kv;  // from head to head
  int64_t length;
};
Row packed_row(const Case& c) {
  const Problem& p = c.problem;
  const int32_t type = p.kv_dtype ? p.kv_dtype : p.dtype;  // Q is packed only with K of its type
  const int64_t dqk = rounded(p.dim_qk, type), dv = rounded(p.v_dim(), type);
  switch (c.layout) {
    case Layout::kPacked3:
      return {0,
              p.heads_q * dqk,
              (p.heads_q + p.heads_kv) * dqk,
              dqk,
              0,
              (p.heads_q + p.heads_kv) * dqk + p.heads_kv * dv};
    case Layout::kPacked2:
      return {0, 0, p.heads_kv * dqk, 0, 0, p.heads_kv * (dqk + dv)};
    case Layout::kInterleaved3:
      return {0, dqk, 2 * dqk, 2 * dqk + dv, 2 * dqk + dv, p.heads_q * (2 * dqk + dv)};
    default:
      return {0, 0, dqk, 0, dqk + dv, p.heads_kv * (dqk + dv)};
  }
}

void check_packing(const Case& c) {
  const Problem& p = c.problem;
  if (!packs_q(c.layout)) return;
  TEA_REQUIRE(p.q_form == p.kv_form && p.seqlen_q == p.seqlen_kv && c.lens_q == c.lens_kv &&
                  c.max_q == c.max_kv,
              "case word layout", "q, k, v packed", "the same form and lengths on both sides");
  TEA_REQUIRE(c.layout != Layout::kInterleaved3 || p.heads_q == p.heads_kv, "case word layout",
              "interleaved3", "as many heads of k and v as of q");
}

struct Side {
  int64_t rows, heads, dim;
  int32_t form, page_size;
};

// Batch, sequence and head from the outside in, each clearing what is inside it plus `hole`.
tea_strides ordered(const Side& s, Layout layout, int64_t hole) {
  const bool ragged = s.form == TEA_RAGGED, paged = s.form == TEA_PAGED;
  const int64_t rows = paged ? s.page_size : s.rows, dim = s.dim + hole;
  switch (layout) {
    case Layout::kSbhd:  // a pool of pages and a ragged buffer have no such order
      if (ragged || paged) return {paged ? rows * s.heads * dim : 0, s.heads * dim, dim};
      return {s.heads * dim, 0, dim};  // seq is set by the caller, who knows the batch
    case Layout::kBhsd:
      return {ragged ? 0 : s.heads * rows * dim, dim, rows * dim};
    default:
      return {ragged ? 0 : rows * (s.heads * dim + hole) + hole, s.heads * dim + hole, dim};
  }
}

void apply_sbhd(Problem& p, const Extents& e) {
  for (tea_strides* s : {&p.q, &p.o, &p.dout, &p.dq})
    if (p.q_form != TEA_RAGGED) s->seq = e.batch * s->batch;
  for (tea_strides* s : {&p.k, &p.v, &p.dk, &p.dv})
    if (p.kv_form == TEA_DENSE || p.kv_form == TEA_PADDED) s->seq = e.batch * s->batch;
}

void apply_ordered(Problem& p, const Extents& e, Layout layout) {
  const int64_t rows_q = p.q_form == TEA_RAGGED ? e.tokens_q : e.max_q;
  const int64_t rows_kv = p.kv_form == TEA_RAGGED ? e.tokens_kv : e.max_kv;
  const Side q{rows_q, p.heads_q, p.dim_qk, p.q_form, 0};
  const Side o{rows_q, p.heads_q, p.v_dim(), p.q_form, 0};
  const Side k{rows_kv, p.heads_kv, p.dim_qk, p.kv_form, p.page_size};
  const Side v{rows_kv, p.heads_kv, p.v_dim(), p.kv_form, p.page_size};
  const struct {
    tea_strides* strides;
    const Side* side;
  } rows[] = {{&p.q, &q},    {&p.k, &k},  {&p.v, &v},  {&p.o, &o},
              {&p.dout, &o}, {&p.dq, &q}, {&p.dk, &k}, {&p.dv, &v}};
  int64_t hole = 0;
  for (const auto& row : rows) {
    hole += layout == Layout::kOdd ? 16 : 0;
    *row.strides = ordered(*row.side, layout, hole);
  }
  if (layout == Layout::kSbhd) apply_sbhd(p, e);
}

void apply_odd(Problem& p, const Extents& e) {
  const int64_t rows = p.q_form == TEA_RAGGED ? 0 : e.max_q + 3;
  if (p.outputs || p.training)
    p.lse = p.q_form == TEA_RAGGED ? tea_strides{0, p.heads_q + 5, 1}
                                   : tea_strides{p.heads_q * rows + 7, 1, rows};
  if (p.alibi == TEA_ALIBI_SLOPES) p.slopes_stride = p.heads_q + 3;
  if (p.kv_form == TEA_PAGED && e.table_pages > 0) {
    p.table_k_stride = e.table_pages + 3;
    p.table_v_stride = e.table_pages + 2;
  }
  if (!p.bias) return;
  const int64_t col = 1, row = e.max_kv + 8, head = (e.max_q + 1) * row;
  p.bias_stride = {p.heads_q * head + 8, head, row, col};
  if (p.training) p.dbias_stride = {(p.heads_q + 1) * head, head, row, col};
}

void apply_packed(const Case& c, Problem& p, const Extents& e) {
  const Row row = packed_row(c);
  const bool ragged = p.kv_form == TEA_RAGGED;
  const int64_t rows = p.kv_form == TEA_PAGED ? p.page_size : e.max_kv;
  const int32_t type = p.kv_dtype ? p.kv_dtype : p.dtype;  // Q is packed only with K of its type
  const int64_t dqk = rounded(p.dim_qk, type), dv = rounded(p.v_dim(), type);
  const int64_t batch = ragged ? 0 : rows * row.length;
  if (packs_q(c.layout)) p.q = {batch, row.length, row.head_q};
  p.k = {batch, row.length, row.head_kv ? row.head_kv : dqk};
  p.v = {batch, row.length, row.head_kv ? row.head_kv : dv};
  if (!p.training) return;
  if (packs_q(c.layout)) p.dq = p.q;
  p.dk = p.k, p.dv = p.v;
}

void apply_shared(Problem& p, const Extents& e) {
  p.k = resolved(p, e, p.k, false, p.dim_qk), p.v = resolved(p, e, p.v, false, p.v_dim());
  if (p.kv_form == TEA_DENSE || p.kv_form == TEA_PADDED) p.k.batch = p.v.batch = 0;
  if (p.training) {
    p.dout = resolved(p, e, p.dout, true, p.v_dim());
    p.dout.batch = 0;
  }
}

}  // namespace

bool packs_q(Layout l) { return l == Layout::kPacked3 || l == Layout::kInterleaved3; }
bool packs_kv(Layout l) {
  return packs_q(l) || l == Layout::kPacked2 || l == Layout::kInterleaved2;
}

Offsets packed_offsets(const Case& c) {
  if (!packs_kv(c.layout)) return {};
  const Row row = packed_row(c);
  return {row.k, row.v};
}

Extents extents(const Case& c) {
  const Problem& p = c.problem;
  Extents e{};
  e.batch =
      p.varies() ? static_cast<int64_t>(std::max(c.lens_q.size(), c.lens_kv.size())) : p.batch;
  e.max_q = !p.varies_q() ? p.seqlen_q : c.max_q ? c.max_q : longest(c.lens_q);
  e.max_kv = !p.varies_kv() ? p.seqlen_kv : c.max_kv ? c.max_kv : longest(c.lens_kv);
  e.len_q = lengths(c.lens_q, e.batch, e.max_q);
  e.len_kv = lengths(c.lens_kv, e.batch, e.max_kv);
  e.start_q = starts(e.len_q, c.gap);
  e.start_kv = starts(e.len_kv, c.gap);
  if (p.q_form == TEA_RAGGED) e.tokens_q = e.start_q.back() + c.tail;
  if (p.kv_form == TEA_RAGGED) e.tokens_kv = e.start_kv.back() + c.tail;
  if (p.kv_form == TEA_PAGED) lay_out_pages(c, e);
  return e;
}

Problem placed(const Case& c, const Extents& e) {
  Problem p = c.problem;
  check_packing(c);
  switch (c.layout) {
    case Layout::kDefault:
      break;
    case Layout::kShared:
      apply_shared(p, e);
      break;
    case Layout::kOdd:
      apply_ordered(p, e, c.layout);
      apply_odd(p, e);
      break;
    case Layout::kBshd:
    case Layout::kSbhd:
    case Layout::kBhsd:
      apply_ordered(p, e, c.layout);
      break;
    default:
      apply_packed(c, p, e);
  }
  if (!p.training) p.dout = p.dq = p.dk = p.dv = {};
  return p;
}

tea_strides resolved(const Problem& p, const Extents& e, const tea_strides& given, bool query,
                     int64_t dim) {
  if (given.batch || given.seq || given.head) return given;
  const int64_t row = dim * (query ? p.heads_q : p.heads_kv);
  const int32_t form = query ? p.q_form : p.kv_form;
  if (form == TEA_RAGGED) return {0, row, dim};
  if (form == TEA_PAGED) return {p.page_size * row, row, dim};
  return {(query ? e.max_q : e.max_kv) * row, row, dim};
}

tea_strides resolved_lse(const Problem& p, const Extents& e) {
  if (p.lse.batch || p.lse.seq || p.lse.head) return p.lse;
  if (p.q_form == TEA_RAGGED) return {0, p.heads_q, 1};
  return {p.heads_q * e.max_q, 1, e.max_q};
}

tea_bias_strides resolved_bias(const Problem& p, const Extents& e, const tea_bias_strides& given) {
  const bool any = given.batch || given.head || given.row || given.col;
  const int64_t sizes[4] = {e.batch, p.heads_q, e.max_q, e.max_kv};
  int64_t strides[4] = {given.batch, given.head, given.row, given.col};
  int64_t next = 1;
  for (int i = 3; i >= 0; --i) {
    const bool lacks = p.bias_broadcast >> i & 1;
    if (lacks) strides[i] = 0;
    if (any || lacks) continue;
    strides[i] = next;
    next *= sizes[i];
  }
  return {strides[0], strides[1], strides[2], strides[3]};
}

}  // namespace tea::kit
