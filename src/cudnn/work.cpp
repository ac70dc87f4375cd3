// Fills the parameters of the kernels from Problem and Run.
#include "cudnn/work.h"

#include <algorithm>
#include <span>

namespace tea::cudnn {
namespace {

constexpr uint64_t kPiece = 256;  // alignment of the pieces of the workspace
constexpr float kNothing = -__builtin_huge_valf();

Side queries(const Problem& p, const Run& run) {
  const bool gaps = p.gaps && p.q_form == TEA_RAGGED;
  return {run.as<const int32_t>(TEA_CU_SEQLENS_Q),
          gaps ? run.as<const int32_t>(TEA_OFFSETS_Q) : nullptr, run.size.max_q, run.size.tokens_q,
          p.q_form};
}
Side keys(const Problem& p, const Run& run) {
  const bool gaps = p.gaps && p.kv_form == TEA_RAGGED;
  return {run.as<const int32_t>(TEA_CU_SEQLENS_KV),
          gaps ? run.as<const int32_t>(TEA_OFFSETS_KV) : nullptr, run.size.max_kv,
          run.size.tokens_kv, p.kv_form};
}

template <class T>
T* at(const Pointers& slots, int slot) {
  return static_cast<T*>(slots[static_cast<size_t>(slot)]);
}

Starts starts(const Pointers& slots, bool ragged, int slot, int64_t stride) {
  return ragged ? Starts{at<int64_t>(slots, slot), stride} : Starts{};
}

PrepareSide prepare_queries(const Problem& p, const Run& run, const Pointers& slots) {
  const Geometry& g = run.size;
  const bool ragged = p.q_form == TEA_RAGGED;
  return {
      queries(p, run),
      is_dense(p) ? nullptr : at<int32_t>(slots, kLengthsQ),
      {starts(slots, ragged, kStartsQ, g.q.seq), starts(slots, ragged, kStartsO, g.o.seq),
       starts(slots, ragged, kStartsLse, g.lse.seq), starts(slots, ragged, kStartsDout, g.dout.seq),
       starts(slots, ragged, kStartsDq, g.dq.seq)}};
}

PrepareSide prepare_keys(const Problem& p, const Run& run, const Pointers& slots) {
  const Geometry& g = run.size;
  const bool ragged = p.kv_form == TEA_RAGGED;
  return {keys(p, run),
          is_dense(p) ? nullptr : at<int32_t>(slots, kLengthsKv),
          {starts(slots, ragged, kStartsK, g.k.seq), starts(slots, ragged, kStartsV, g.v.seq),
           starts(slots, ragged, kStartsDk, g.dk.seq), starts(slots, ragged, kStartsDv, g.dv.seq)}};
}

void add_tables(Prepare& out, const Problem& p, const Run& run, const Capacity& capacity,
                const Pointers& slots) {
  if (p.kv_form != TEA_PAGED) return;
  const Geometry& g = run.size;
  const bool own = run.tensor[TEA_TABLE_V] != nullptr;
  out.k_table = {run.as<const int32_t>(TEA_TABLE_K), at<int32_t>(slots, kPagesK), g.table_k,
                 g.pages_k};
  out.v_table = {run.as<const int32_t>(own ? TEA_TABLE_V : TEA_TABLE_K),
                 at<int32_t>(slots, kPagesV), own ? g.table_v : g.table_k, g.pages_v};
  out.given_columns = g.table_pages, out.columns = capacity.table_pages;
  out.page_size = p.page_size;
}

// The numbers of LSE, holes of its strides among them.
int64_t lse_span(const Problem& p, const Geometry& size) {
  return tensor_info(TEA_LSE).shape(p, size).span();
}

Cleared rows_of(const Problem& p, const Run& run, tea_tensor t, const tea_strides& s, int32_t heads,
                int32_t dim) {
  const int bytes = tensor_info(t).element_bytes(p);
  return {run.tensor[t], s.batch, s.seq, s.head, heads, dim, bytes, 0, nullptr};
}

Cleared per_row(const Problem& p, const Run& run, tea_tensor t, bool written, float value) {
  const tea_strides& s = run.size.lse;
  return {
      written ? run.tensor[t] : nullptr, s.batch, s.seq, s.head, p.heads_q, 1, 4, value, nullptr};
}

}  // namespace

Layout layout(const Problem& p, const Geometry& size, const Capacity& n, Direction d) {
  Layout out;
  const auto place = [&out](int slot, int64_t bytes) {
    out.offset[slot] = out.library;
    out.library += (static_cast<uint64_t>(bytes) + kPiece - 1) / kPiece * kPiece;
  };
  for (int slot = kOne; p.is_fp8() && slot <= kDvAmax; ++slot) place(slot, kPiece);
  if (p.softmax == TEA_SOFTMAX_OFF_BY_ONE) place(kZeroSink, 4 * p.heads_q);
  if (d == Direction::kBackward && leaves_rows(p)) place(kFiniteLse, 4 * lse_span(p, size));
  for (const int slot : {max_slot(p), sum_exp_slot(p)})
    if (d == Direction::kForward && by_parts(p) && slot >= TEA_TENSOR_COUNT)
      place(slot, 4 * lse_span(p, size));
  if (is_dense(p)) return out;
  place(kLengthsQ, 4 * n.batch), place(kLengthsKv, 4 * n.batch);
  for (int slot = kStartsQ; slot <= kStartsDv; ++slot) place(slot, 8 * (n.batch + 1));
  place(kPagesK, 4 * n.batch * n.table_pages), place(kPagesV, 4 * n.batch * n.table_pages);
  return out;
}

// cuDNN's workspace. Forward: if the keys of a single query are split, O in fp32, a
// maximum and a sum of each part. Backward: dQ in fp32, once on sm_90, and on sm_100 but for fp8,
// and twice elsewhere; four numbers of a row, and where heads share keys the gradients of K and V
// by query head. The frontend declares those: of fp8 in fp32, of 16 bits as Q is stored, but with
// room for fp32 where they are ragged. Then they lie as far apart as the tensors' own rows, or have
// room for every sequence's longest. For the gradient of a bias it stores as much again in 16 bits,
// in tiles of 128.
uint64_t library_bound(const Problem& p, const Geometry& size, const Capacity& n, Direction d,
                       Passes passes) {
  constexpr uint64_t kSlack = 1 << 20, kMostParts = 64;
  if (d == Direction::kForward) {
    const int64_t part = n.batch * p.heads_q * (p.v_dim() + 2);
    return kSlack + (n.max_q == 1 ? 4 * kMostParts * static_cast<uint64_t>(part) : 0);
  }
  const auto count = [&](int64_t tokens, int64_t rows, int64_t heads, int64_t dim, int64_t stride) {
    const int64_t packed = heads * dim;
    if (!heads) return uint64_t{0};
    if (!tokens) return static_cast<uint64_t>(n.batch * rounded_up(rows, 128) * packed);
    return static_cast<uint64_t>(
        std::max(tokens * std::max(packed, stride), n.batch * rows * packed));
  };
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t shared = group > 1 ? p.heads_q : 0;  // K and V: a sum for each query head
  const uint64_t each = n.tokens_kv || p.is_fp8() ? 4 : 2;
  const int64_t biased = p.bias && !p.bias_broadcast ? p.heads_q : 0;
  const uint64_t sums = passes == Passes::kBackward ? 1 : 2;
  return 4 * sums * count(n.tokens_q, n.max_q, p.heads_q, p.dim_qk, size.dq.seq) +
         4 * count(n.tokens_q, n.max_q, p.heads_q, 4, size.lse.seq) +
         each * count(n.tokens_kv, n.max_kv, shared, p.dim_qk, group * size.dk.seq) +
         each * count(n.tokens_kv, n.max_kv, shared, p.v_dim(), group * size.dv.seq) +
         2 * count(0, n.max_q, biased, rounded_up(n.max_kv, 128), 0) + kSlack;
}

Pointers pointers(const Run& run, const Layout& layout) {
  Pointers out;
  for (int slot = 0; slot < kSlots; ++slot)
    out[static_cast<size_t>(slot)] = slot < TEA_TENSOR_COUNT
                                         ? run.tensor[slot]
                                         : static_cast<char*>(run.workspace) + layout.offset[slot];
  if (void* const rng = run.tensor[TEA_RNG_STATE])
    out[kSeed] = rng, out[kOffset] = static_cast<int64_t*>(rng) + 1;
  for (const tea_tensor scale :
       {TEA_Q_SCALE_INV, TEA_K_SCALE_INV, TEA_V_SCALE_INV, TEA_S_SCALE, TEA_S_SCALE_INV,
        TEA_O_SCALE, TEA_O_SCALE_INV, TEA_DOUT_SCALE_INV, TEA_DP_SCALE, TEA_DP_SCALE_INV,
        TEA_DQ_SCALE, TEA_DK_SCALE, TEA_DV_SCALE}) {
    float* const number = run.number(scale);
    out[scale] = number ? number : out[kOne];
  }
  return out;
}

bool is_empty(const Problem& p, const Geometry& g) {
  const bool no_q = g.batch == 0 || g.max_q == 0 || (p.varies_q() && g.tokens_q == 0);
  return no_q || g.max_kv == 0 || (p.kv_form == TEA_RAGGED && g.tokens_kv == 0);
}

std::optional<Prepare> preparation(const Problem& p, const Run& run, const Capacity& capacity,
                                   const Pointers& slots, Direction direction) {
  const bool zeros = p.softmax == TEA_SOFTMAX_OFF_BY_ONE;
  const bool finite = direction == Direction::kBackward && leaves_rows(p);
  if (is_dense(p) && !zeros && !p.is_fp8() && !finite) return std::nullopt;
  Prepare out = {};
  out.q = prepare_queries(p, run, slots), out.kv = prepare_keys(p, run, slots);
  add_tables(out, p, run, capacity, slots);
  if (zeros) out.zero_sink = at<float>(slots, kZeroSink);
  if (p.is_fp8()) out.scalars = at<float>(slots, kOne), out.zeros = kDvAmax - kOne;
  if (finite)
    out.lse = {run.as<const float>(TEA_LSE), at<float>(slots, kFiniteLse), lse_span(p, run.size)};
  out.heads = p.heads_q;
  out.batch = run.size.batch, out.graph_batch = capacity.batch;
  out.status = run.status;
  return out;
}

std::optional<Finish> finishing(const Problem& p, const Run& run, const Pointers& slots) {
  if (!by_parts(p)) return std::nullopt;
  const bool ragged = p.q_form == TEA_RAGGED;
  const tea_strides& s = run.size.lse;
  return Finish{at<float>(slots, max_slot(p)),
                at<const float>(slots, sum_exp_slot(p)),
                p.writes_lse() ? run.as<float>(TEA_LSE) : nullptr,
                ragged ? 0 : s.batch,
                s.seq,
                s.head,
                ragged ? 1 : run.size.batch,
                ragged ? run.size.tokens_q : run.size.max_q,
                p.heads_q};
}

std::optional<Raise> raising(const Run& run, const Pointers& slots, Direction direction,
                             bool exact) {
  struct AmaxSlot {
    int from;
    tea_tensor to;
  };
  constexpr AmaxSlot kForward[] = {{kSAmax, TEA_S_AMAX}, {kOAmax, TEA_O_AMAX}};
  constexpr AmaxSlot kBackward[] = {{kDpAmax, TEA_DP_AMAX},
                                    {kDqAmax, TEA_DQ_AMAX},
                                    {kDkAmax, TEA_DK_AMAX},
                                    {kDvAmax, TEA_DV_AMAX}};
  const bool back = direction == Direction::kBackward;
  Raise out = {};
  bool any = false;
  size_t i = 0;
  for (const AmaxSlot& slot :
       back ? std::span<const AmaxSlot>(kBackward) : std::span<const AmaxSlot>(kForward)) {
    out.from[i] = at<float>(slots, exact && slot.from == kSAmax ? kOne : slot.from);
    out.to[i] = run.number(slot.to);
    any |= out.to[i++] != nullptr;
  }
  return any ? std::optional(out) : std::nullopt;
}

Clear clearing(const Problem& p, const Run& run, const Pointers& slots, Direction direction) {
  const Geometry& g = run.size;
  Clear out{queries(p, run), keys(p, run), false, {}, p.mask(), g.batch};
  if (direction == Direction::kBackward) {
    out.tensor[0] = rows_of(p, run, TEA_DQ, g.dq, p.heads_q, p.dim_qk);
    return out;
  }
  Cleared lse = per_row(p, run, TEA_LSE, p.writes_lse(), kNothing);
  if (p.softmax == TEA_SOFTMAX_LEARNABLE) lse.sink = run.as<const float>(TEA_SINK);
  if (p.softmax == TEA_SOFTMAX_OFF_BY_ONE) lse.sink = at<const float>(slots, kZeroSink);
  out.tensor[0] = rows_of(p, run, TEA_O, g.o, p.heads_q, p.v_dim());
  out.tensor[1] = lse;
  out.tensor[2] = per_row(p, run, TEA_MAX, p.outputs & TEA_OUTPUT_MAX, kNothing);
  out.tensor[3] = per_row(p, run, TEA_SUM_EXP, p.outputs & TEA_OUTPUT_SUM_EXP, 0);
  return out;
}

Clear clearing_of_keys(const Problem& p, const Run& run) {
  const Geometry& g = run.size;
  Clear out{keys(p, run), queries(p, run), true, {}, p.mask(), g.batch};
  out.tensor[0] = rows_of(p, run, TEA_DK, g.dk, p.heads_kv, p.dim_qk);
  out.tensor[1] = rows_of(p, run, TEA_DV, g.dv, p.heads_kv, p.v_dim());
  return out;
}

}  // namespace tea::cudnn
