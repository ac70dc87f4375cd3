// Appending to a KV cache: checks, K and V, and moves of rows.
#include "ops/kv_cache.h"

#include <cstring>

#include "core/problem.h"
#include "math/load_store.h"

namespace tea {
namespace {

bool casts(const tea_kv_append& a) { return a.new_dtype && a.new_dtype != a.dtype; }
int32_t new_type(const tea_kv_append& a) { return a.new_dtype ? a.new_dtype : a.dtype; }

void check_cast(const tea_kv_append& a) {
  if (casts(a)) {
    require_dtype("new_dtype", a.new_dtype, 1u << TEA_FP16 | 1u << TEA_BF16 | 1u << TEA_FP32);
    TEA_REQUIRE(is_fp8(a.dtype), "new_dtype", dtype_name(a.new_dtype),
                "dtype, " + std::string(dtype_name(a.dtype)) + ": only FP8 caches are cast to");
  }
  TEA_REQUIRE(a.kv_scale == TEA_KV_SCALE_TENSOR || a.kv_scale == TEA_KV_SCALE_HEAD, "kv_scale",
              a.kv_scale, "TEA_KV_SCALE_TENSOR or TEA_KV_SCALE_HEAD");
  const bool scaled = a.kv_scale || a.k_scale_inv || a.v_scale_inv;
  TEA_REQUIRE(!scaled || casts(a), "k_scale_inv, v_scale_inv or kv_scale", "given",
              "new_dtype: elements of the caches' type are copied");
}

// Returns whether there is work.
bool check(const tea_kv_append& a) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  TEA_REQUIRE(a.new_form == TEA_DENSE || a.new_form == TEA_RAGGED, "new_form", a.new_form,
              "TEA_DENSE or TEA_RAGGED");
  require_flag("reindex", a.reindex);
  check_cast(a);
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
  const int new_bytes = dtype_bytes(new_type(a));
  if (rows && a.dim_k) require_pointers({{"new_k", a.new_k, new_bytes}});
  if (rows && a.dim_v) require_pointers({{"new_v", a.new_v, new_bytes}});
  return true;
}

struct CacheSide {
  Rows fresh, cache;
  int64_t dim;
  const float* scale_inv;
};

CacheSide side_k(const tea_kv_append& a) {
  const int bytes = dtype_bytes(a.dtype);
  const tea_strides from =
      strides_or_contiguous("new_k_stride", a.new_k_stride, a.max_new, a.heads, a.dim_k);
  const tea_strides to =
      strides_or_contiguous("k_cache_stride", a.k_cache_stride, a.page_size, a.heads, a.dim_k);
  return {rows_of(a.new_k, from, a.heads, a.dim_k, dtype_bytes(new_type(a))),
          rows_of(a.k_cache, to, a.heads, a.dim_k, bytes), a.dim_k, a.k_scale_inv};
}

CacheSide side_v(const tea_kv_append& a) {
  const int bytes = dtype_bytes(a.dtype);
  const tea_strides from =
      strides_or_contiguous("new_v_stride", a.new_v_stride, a.max_new, a.heads, a.dim_v);
  const tea_strides to =
      strides_or_contiguous("v_cache_stride", a.v_cache_stride, a.page_size, a.heads, a.dim_v);
  return {rows_of(a.new_v, from, a.heads, a.dim_v, dtype_bytes(new_type(a))),
          rows_of(a.v_cache, to, a.heads, a.dim_v, bytes), a.dim_v, a.v_scale_inv};
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

void cast_on_host(const AppendMoves& m) {
  for (int64_t n = 0; n < m.checks; ++n) m.check(n);
  for (int64_t i = 0; i < m.moves; ++i) {
    const Move move = m.at(i);
    for (int64_t d = 0; move.to && d < m.dim; ++d) {
      const auto x = static_cast<float>(load_real(move.from, m.a.new_dtype, d));
      store_real(move.to, m.a.dtype, d, static_cast<double>(x / m.scale_of(i)));
    }
  }
}

AppendMoves moves(const tea_kv_append& a, const CacheSide& side) {
  AppendMoves m{};
  m.a = a, m.fresh = side.fresh, m.cache = side.cache;
  set_runs(m, m.fresh, m.cache);
  if (casts(a)) m.moves = a.heads;
  m.runs = m.moves, m.dim = side.dim, m.scale_inv = side.scale_inv;
  const int64_t dense = (a.batch_new ? a.batch_new : a.batch) * a.max_new;
  m.moves = (a.new_form == TEA_RAGGED ? a.tokens_new : dense) * m.runs;
  m.checks = a.batch;
  return m;
}

}  // namespace

void append_kv(const tea_kv_append& args, const Place& place) {
  const bool work = check(args);
  const CacheSide sides[2] = {side_k(args), side_v(args)};
  const bool host = is_host(place);  // may throw, even if there is no work
  std::vector<Reindex> changes;
  std::vector<AppendMoves> appends;
  for (const CacheSide& side : sides) {
    if (!work || !side.cache.head_bytes) continue;
    if (args.reindex) changes.push_back(reindex(args, side.cache));
    appends.push_back(moves(args, side));
  }
  if (host) {
    for (const Reindex& rows : changes) reindex_on_host(rows);
    for (const AppendMoves& side : appends) casts(args) ? cast_on_host(side) : run_on_host(side);
  } else if constexpr (kGpuCode) {
    if (!changes.empty()) reindex_on_gpu(changes, place);
    if (!appends.empty()) (casts(args) ? append_cast_on_gpu : append_on_gpu)(appends, place);
  }
}

}  // namespace tea
