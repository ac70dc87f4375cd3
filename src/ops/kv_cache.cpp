// Appending to a KV cache: rows move as bytes, positions come from unchecked metadata.
#include "ops/kv_cache.h"

#include "core/problem.h"
#include "math/lengths.h"
#include "ops/rows.h"

namespace tea {
namespace {

struct Side {
  Rows from, cache;
};

int64_t table_width(const tea_kv_append& a) {
  return a.pages_per_sequence ? a.pages_per_sequence : 1;
}

// Returns whether there is anything to do.
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
  require_pointers({{"cu_new", a.cu_new}, {"cu_cached", a.cu_cached}});
  if (a.dim_k) require_pointers({{"k_cache", a.k_cache}});
  if (a.dim_v) require_pointers({{"v_cache", a.v_cache}});
  if (rows && a.dim_k) require_pointers({{"new_k", a.new_k}});
  if (rows && a.dim_v) require_pointers({{"new_v", a.new_v}});
  return true;
}

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

// Tokens of sequence n that are in the cache already; negative where the metadata is nonsense.
int64_t tokens_before(const tea_kv_append& a, int64_t n) {
  return (int64_t{a.cu_cached[n + 1]} - a.cu_cached[n]) - (int64_t{a.cu_new[n + 1]} - a.cu_new[n]);
}

// Only the entries up to the last descent are live: what follows are rows of finished sequences.
int64_t live_rows(const tea_kv_append& a) {
  int64_t live = a.batch;
  for (int64_t n = 0; n + 1 < a.batch; ++n)
    if (a.page_table[n + 1] < a.page_table[n]) live = n + 1;
  return live;
}

void move_rows(const tea_kv_append& a, const Side (&sides)[2]) {
  const int32_t* row = a.page_table;
  for (int64_t n = 0, live = live_rows(a); n < live; ++n) {
    if (row[0] == 0 && row[n] == n) continue;
    int64_t tokens = tokens_before(a, n);
    if (tokens < 0 || tokens > a.page_size) report(a.status, TEA_STATUS_BAD_LENGTHS);
    tokens = std::clamp<int64_t>(tokens, 0, a.page_size);
    if (row[n] < 0 || row[n] >= a.pages) {
      report(a.status, TEA_STATUS_BAD_PAGE);
      continue;
    }
    if (row[n] == n) continue;
    for (const Side& side : sides)
      for (int64_t t = 0; t < tokens; ++t)
        copy_row(side.cache, side.cache.row(n, t), side.cache, side.cache.row(row[n], t));
  }
}

// The page of position p, or -1.
int64_t page_of(const tea_kv_append& a, int64_t n, int64_t p) {
  if (a.reindex || !a.page_table) return n;
  const int64_t page = a.page_table[n * table_width(a) + p / a.page_size];
  if (page >= 0 && page < a.pages) return page;
  report(a.status, TEA_STATUS_BAD_PAGE);
  return -1;
}

void append_sequence(const tea_kv_append& a, const Side (&sides)[2], int64_t n) {
  const bool ragged = a.new_form == TEA_RAGGED;
  const int64_t rows = a.batch_new && n >= a.batch_new ? 0 : a.max_new;
  const Sequence added = ragged ? ragged_sequence(a.cu_new, nullptr, n, a.tokens_new, a.tokens_new)
                                : padded_sequence(a.cu_new, n, rows);
  const int64_t capacity = table_width(a) * a.page_size, first = tokens_before(a, n);
  const int64_t room = first < 0 ? 0 : std::max<int64_t>(capacity - first, 0);
  if (!added.sane || first < 0 || added.length > room) report(a.status, TEA_STATUS_BAD_LENGTHS);
  for (int64_t i = 0; i < std::min(added.length, room); ++i) {
    const int64_t page = page_of(a, n, first + i);
    if (page < 0) continue;
    for (const Side& side : sides)
      copy_row(side.cache, side.cache.row(page, (first + i) % a.page_size), side.from,
               ragged ? side.from.row(0, added.start + i) : side.from.row(n, i));
  }
}

}  // namespace

void append_kv(const tea_kv_append& args, const Place& place) {
  const bool work = check(args);
  const Side sides[2] = {side_k(args), side_v(args)};
  require_host(place);
  if (!work) return;
  if (args.reindex) move_rows(args, sides);
  for (int64_t n = 0; n < args.batch; ++n) append_sequence(args, sides, n);
}

}  // namespace tea
