// Appending new tokens to a paged or non-paged KV cache.
#pragma once
#include <vector>

#include "math/lengths.h"
#include "ops/rows.h"

namespace tea {

void append_kv(const tea_kv_append& args, const Place& place);

// The source and destination of sequence n of an append.
struct Appended {
  Sequence added;       // rows of the new tensors
  int64_t first, room;  // destination and capacity; room is 0 for invalid metadata
  bool valid;
};

TEA_HOST_DEVICE int64_t table_width(const tea_kv_append& a) {
  return a.pages_per_sequence ? a.pages_per_sequence : 1;
}

// The number of tokens of sequence n already in the cache; negative for invalid metadata.
TEA_HOST_DEVICE int64_t tokens_before(const tea_kv_append& a, int64_t n) {
  return (int64_t{a.cu_cached[n + 1]} - a.cu_cached[n]) - (int64_t{a.cu_new[n + 1]} - a.cu_new[n]);
}

TEA_HOST_DEVICE Appended appended(const tea_kv_append& a, int64_t n) {
  const int64_t rows = a.batch_new && n >= a.batch_new ? 0 : a.max_new;
  const Sequence added = a.new_form == TEA_RAGGED
                             ? ragged_sequence(a.cu_new, nullptr, n, a.tokens_new, a.tokens_new)
                             : padded_sequence(a.cu_new, n, rows);
  const int64_t first = tokens_before(a, n), left = table_width(a) * a.page_size - first;
  const int64_t room = first < 0 || left < 0 ? 0 : left;
  return {added, first, room, added.valid && first >= 0 && added.length <= room};
}

// The new tokens of K, or of V.
struct AppendMoves : Moves {
  tea_kv_append a;
  Rows fresh, cache;
  int64_t runs;            // contiguous runs per row; with a cast one for each head
  int64_t dim;             // elements of a head
  const float* scale_inv;  // NULL: 1

  // The scale of move i, with a cast.
  TEA_HOST_DEVICE float scale_of(int64_t i) const {
    if (!scale_inv) return 1;
    return scale_inv[a.kv_scale == TEA_KV_SCALE_HEAD ? i - quotient(i, runs) * runs : 0];
  }

  TEA_HOST_DEVICE void check(int64_t n) const {
    if (!appended(a, n).valid) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE Move at(int64_t i) const {
    const int64_t row = quotient(i, runs), run = i - row * runs;
    const bool ragged = a.new_form == TEA_RAGGED;
    const int64_t n = ragged ? find_sequence(a.cu_new, a.batch, row) : quotient(row, a.max_new);
    if (n < 0) return {};
    const Appended s = appended(a, n);
    const int64_t t = ragged ? row - s.added.start : row - n * a.max_new;
    if (t < 0 || t >= s.added.length || t >= s.room) return {};
    const int64_t p = s.first + t, page = page_of(n, p);
    if (page < 0) return {};
    return {cache.at(page, p - quotient(p, a.page_size) * a.page_size, run),
            ragged ? fresh.at(0, row, run) : fresh.at(n, t, run)};
  }

 private:
  // The page of position p, or -1.
  TEA_HOST_DEVICE int64_t page_of(int64_t n, int64_t p) const {
    if (a.reindex || !a.page_table) return n;
    const int64_t page = a.page_table[n * table_width(a) + quotient(p, a.page_size)];
    if (page >= 0 && page < a.pages) return page;
    report(a.status, TEA_STATUS_BAD_PAGE);
    return -1;
  }
};

// The rows of K's or V's cache that move before new tokens are appended. The moves of one slot must
// be made in the order of n, because a row must be read before it is overwritten.
struct Reindex {
  tea_kv_append a;
  Rows cache;
  Moves runs;  // the runs of a row

  // Only entries up to the last descent are live; rows of finished sequences follow.
  TEA_HOST_DEVICE bool descends_after(int64_t n) const {
    return n + 1 < a.batch && a.page_table[n + 1] < a.page_table[n];
  }
  // The number of tokens that move to row n, and their row; reports invalid metadata.
  struct Source {
    int64_t row, tokens;
  };
  TEA_HOST_DEVICE Source source(int64_t n) const {
    const int64_t row = a.page_table[n];
    if (a.page_table[0] == 0 && row == n) return {row, 0};
    const int64_t before = tokens_before(a, n);
    const int64_t tokens = before < 0 ? 0 : before > a.page_size ? a.page_size : before;
    if (tokens != before) report(a.status, TEA_STATUS_BAD_LENGTHS);
    if (row >= 0 && row < a.pages) return {row, row == n ? 0 : tokens};
    report(a.status, TEA_STATUS_BAD_PAGE);
    return {n, 0};
  }
};

// Reindexes K and V in one launch, or one of them.
void reindex_on_gpu(const std::vector<Reindex>& sides, const Place& place);
void append_on_gpu(const std::vector<AppendMoves>& sides, const Place& place);
// The same with a cast of every element: defined in kv_cache.cu.
void append_cast_on_gpu(const std::vector<AppendMoves>& sides, const Place& place);

}  // namespace tea
