// Appending to a KV cache: checks, K and V, and moves of rows.
#include "ops/kv_cache.h"

#include <cstring>

#include "core/problem.h"

namespace tea {
namespace {

// Returns whether there is work.
bool check(const tea_kv_append& a) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  TEA_REQUIRE(a.new_form == TEA_DENSE || a.new_form == TEA_RAGGED, "new_form", a.new_form,
              "TEA_DENSE or TEA_RAGGED");
  require_flag("reindex", a.reindex);
  const bool ragged = a.new_form == TEA_RAGGED;
  TEA_REQUIRE(ragged || !a.tokens_new, "tokens_new", a.tokens_new, "0 with new_form TEA_DENSE");
  TEA_REQUIRE(!ragged || !a.batch_new, "batch_new", a.batch_new, "0 with new_form TEA_RAGGED");
  TEA_REQUIRE(a.batch_new >= 0 && a.batch_new <= a.batch, "batch_new", a.batch_new,
              "0 .. batch = " + shown(a.batch));
  TEA_REQUIRE(!ragged || !a.max_new, "max_new", a.max_new, "0 with new_form TEA_RAGGED");
  require_sizes({{"pages_per_sequence", a.pages_per_sequence}, {"page_size", a.page_size}});
  for (const NamedSize& dim : {NamedSize{"dim_k", a.dim_k}, NamedSize{"dim_v", a.dim_v}}) {
    require_sizes({{"pages", a.pages}, {"page_size", a.page_size}, {"heads", a.heads}, dim});
    require_sizes({{"batch", a.batch}, {"max_new", a.max_new}, {"heads", a.heads}, dim});
    require_sizes({{"tokens_new", a.tokens_new}, {"heads", a.heads}, dim});
  }
  const int64_t rows = ragged ? a.tokens_new : a.max_new;
  if (!a.batch || !a.heads || !(a.dim_k + a.dim_v) || (!rows && !a.reindex)) return false;
  TEA_REQUIRE(a.page_size > 0, "page_size", a.page_size, "1 or more");
  const bool own_page = a.reindex || !a.page_table;
  TEA_REQUIRE(!own_page || table_width(a) == 1, "pages_per_sequence", a.pages_per_sequence,
              "1 with reindex or without page_table");
  TEA_REQUIRE(!own_page || a.pages >= a.batch, "pages", a.pages,
              "batch = " + shown(a.batch) + " or more with reindex or without page_table");
  TEA_REQUIRE(!a.reindex || a.page_table, "page_table", a.page_table, "memory with reindex");
  const int bytes = dtype_bytes(a.dtype);
  require_pointers({{"cu_new", a.cu_new}, {"cu_cached", a.cu_cached}});
  if (a.dim_k) require_pointers({{"k_cache", a.k_cache, bytes}});
  if (a.dim_v) require_pointers({{"v_cache", a.v_cache, bytes}});
  if (rows && a.dim_k) require_pointers({{"new_k", a.new_k, bytes}});
  if (rows && a.dim_v) require_pointers({{"new_v", a.new_v, bytes}});
  return true;
}

struct Side {
  Rows fresh, cache;
};

Side side_k(const tea_kv_append& a) {
  const int bytes = dtype_bytes(a.dtype);
  const tea_strides from =
      strides_or_contiguous("new_k_stride", a.new_k_stride, a.max_new, a.heads, a.dim_k);
  const tea_strides to =
      strides_or_contiguous("k_cache_stride", a.k_cache_stride, a.page_size, a.heads, a.dim_k);
  return {rows_of(a.new_k, from, a.heads, a.dim_k, bytes),
          rows_of(a.k_cache, to, a.heads, a.dim_k, bytes)};
}

Side side_v(const tea_kv_append& a) {
  const int bytes = dtype_bytes(a.dtype);
  const tea_strides from =
      strides_or_contiguous("new_v_stride", a.new_v_stride, a.max_new, a.heads, a.dim_v);
  const tea_strides to =
      strides_or_contiguous("v_cache_stride", a.v_cache_stride, a.page_size, a.heads, a.dim_v);
  return {rows_of(a.new_v, from, a.heads, a.dim_v, bytes),
          rows_of(a.v_cache, to, a.heads, a.dim_v, bytes)};
}

void reindex_on_host(const Reindex& r) {
  int64_t live = r.a.batch;
  for (int64_t n = 0; n < r.a.batch; ++n)
    if (r.descends_after(n)) live = n + 1;
  for (int64_t n = 0; n < live; ++n) {
    const Reindex::Source from = r.source(n);
    for (int64_t t = 0; t < from.tokens; ++t)
      for (int64_t run = 0; run < r.runs.moves; ++run)
        std::memcpy(r.cache.at(n, t, run), r.cache.at(from.row, t, run),
                    static_cast<size_t>(r.runs.bytes));
  }
}

Reindex reindex(const tea_kv_append& a, const Rows& cache) {
  Reindex r{a, cache, {}};
  set_runs(r.runs, cache, cache);
  return r;
}

AppendMoves moves(const tea_kv_append& a, const Side& side) {
  AppendMoves m{};
  m.a = a, m.fresh = side.fresh, m.cache = side.cache;
  set_runs(m, m.fresh, m.cache);
  m.runs = m.moves;
  const int64_t dense = (a.batch_new ? a.batch_new : a.batch) * a.max_new;
  m.moves = (a.new_form == TEA_RAGGED ? a.tokens_new : dense) * m.runs;
  m.checks = a.batch;
  return m;
}

}  // namespace

void append_kv(const tea_kv_append& args, const Place& place) {
  const bool work = check(args);
  const Side sides[2] = {side_k(args), side_v(args)};
  const bool host = is_host(place);  // may throw, even if there is no work
  std::vector<Reindex> changes;
  std::vector<AppendMoves> appends;
  for (const Side& side : sides) {
    if (!work || !side.cache.head_bytes) continue;
    if (args.reindex) changes.push_back(reindex(args, side.cache));
    appends.push_back(moves(args, side));
  }
  if (host) {
    for (const Reindex& rows : changes) reindex_on_host(rows);
    for (const AppendMoves& side : appends) run_on_host(side);
  } else if constexpr (kGpuCode) {
    if (!changes.empty()) reindex_on_gpu(changes, place);
    if (!appends.empty()) append_on_gpu(appends, place);
  }
}

}  // namespace tea
