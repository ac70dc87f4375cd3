// One function for each strategy; what they share comes first.
#include "core/cp_schedule.h"

#include <algorithm>

#include "core/boundary.h"
#include "core/error.h"
#include "core/growth.h"
#include "math/cp.h"

namespace tea {
namespace {

constexpr int32_t kMostRanks = 1 << 20;

// A piece of a member: where its rows are in the sequence and in the member's shard.
struct Piece {
  CpRows rows;
  int64_t local;
};
struct Shard {
  Piece piece[2];
  int pieces;
  int64_t count() const {
    int64_t n = 0;
    for (int i = 0; i < pieces; ++i) n += piece[i].rows.count();
    return n;
  }
};

Shard shard_of(const CpSharding& s, int32_t member, int64_t length) {
  Shard out{{}, s.pieces()};
  int64_t local = 0;
  for (int i = 0; i < out.pieces; ++i) {
    out.piece[i] = {cp_piece(s, member, i, length), local};
    local += out.piece[i].rows.count();
  }
  return out;
}

class Builder {
 public:
  explicit Builder(const tea_cp_shape& shape)
      : s_(shape),
        inner_(shape.strategy == TEA_CP_ALL_TO_ALL ? shape.world : std::max(shape.inner, 1)),
        members_{shape.world / inner_, inner_, shape.sharding == TEA_CP_ZIGZAG},
        ranks_{shape.world, 1, members_.zigzag},
        me_(shape.rank / inner_),
        shift_(diagonal(shape.bottom_right, shape.seqlen_q, shape.seqlen_kv)),
        rule_{shape.causal, 0, shape.window_left, shape.window_right} {
    // Both pieces of a group of all ranks are adjacent: one piece.
    if (members_.members == 1) members_.zigzag = false, members_.group = inner_ * ranks_.pieces();
  }

  CpSchedule build() {
    if (inner_ > 1) exchange_heads();
    switch (s_.strategy) {
      case TEA_CP_ALL_GATHER:
        all_gather();
        break;
      case TEA_CP_HALO:
        halo();
        break;
      default:
        ring();
    }
    number_launches();
    return std::move(out_);
  }

 private:
  // The first step of the ring: after the exchange of heads, where there is one.
  int32_t first_step() const { return inner_ > 1 ? 1 : 0; }
  Band band_at(int64_t row, int64_t col) const { return band(rule_, shift_, row, col); }
  Shard queries(int32_t member) const { return shard_of(members_, member, s_.seqlen_q); }
  Shard keys(int32_t member) const { return shard_of(members_, member, s_.seqlen_kv); }

  void move(int32_t step, int32_t from, int32_t to, int32_t owner, int64_t begin, int64_t count) {
    if (count > 0 && from != to && (from == s_.rank || to == s_.rank))
      out_.moves.push_back({step, from, to, owner, begin, count});
  }

  void exchange_heads() {
    const int32_t first = me_ * inner_;
    for (int32_t i = first; i < first + inner_; ++i)
      for (int32_t j = first; j < first + inner_; ++j)
        move(0, i, j, i, 0, shard_of(ranks_, i, s_.seqlen_kv).count());
  }

  // Columns that some of the rows attend to.
  CpRows hull(const CpRows& rows) const {
    if (rows.count() == 0) return {0, 0};
    const Band b = band_at(0, 0);
    const int64_t begin = std::max<int64_t>(0, rows.begin + b.lo);
    const int64_t end = std::min(s_.seqlen_kv, rows.end + b.hi);
    return {begin, std::max(begin, end)};
  }

  tea_cp_part part(int32_t step, int32_t source, const Piece& q, const Piece& kv) const {
    const int64_t rows = q.rows.count(), cols = kv.rows.count();
    const Band b = band_at(q.rows.begin, kv.rows.begin);
    const int64_t visible = pairs_in_band(b, rows, cols);
    return {step, source,       visible < rows * cols, 0,      q.local, rows, kv.local,
            cols, q.rows.begin, kv.rows.begin,         shift_, visible};
  }

  void add(const tea_cp_part& p) {
    if (p.visible > 0) out_.parts.push_back(p);
  }

  // ------------------------------------------------------------------------------------ ring

  bool needs(int32_t member, int32_t source) const {
    const Shard q = queries(member), kv = keys(source);
    for (int i = 0; i < q.pieces; ++i)
      for (int j = 0; j < kv.pieces; ++j)
        if (part(0, 0, q.piece[i], kv.piece[j]).visible > 0) return true;
    return false;
  }

  void ring() {
    const int32_t n = members_.members;
    for (int32_t t = 0; t < n; ++t) ring_step(t, (me_ - t + n) % n);
    // A shard goes on as long as a member further along needs it.
    for (int32_t owner = 0; owner < n; ++owner) {
      int32_t last = 0;
      for (int32_t t = 1; t < n; ++t)
        if (needs((owner + t) % n, owner)) last = t;
      for (int32_t t = 0; t < last; ++t) {
        const int32_t from = (owner + t) % n * inner_ + s_.rank % inner_;
        const int32_t to = (owner + t + 1) % n * inner_ + s_.rank % inner_;
        move(t + first_step(), from, to, owner, 0, keys(owner).count());
      }
    }
    std::ranges::stable_sort(out_.moves, {}, &tea_cp_move::step);
  }

  void ring_step(int32_t t, int32_t source) {
    const Shard q = queries(me_), kv = keys(source);
    const int32_t step = t + first_step();
    if (joins_diagonal(q, kv, source)) return join_diagonal(step, source, q);
    std::vector<tea_cp_part> found;
    for (int i = 0; i < q.pieces; ++i)
      for (int j = 0; j < kv.pieces; ++j)
        if (const auto p = part(step, source, q.piece[i], kv.piece[j]); p.visible > 0)
          found.push_back(p);
    if (!s_.positions) join(found);
    out_.parts.insert(out_.parts.end(), found.begin(), found.end());
  }

  // With equal lengths a causal mask among a member's own rows is one of their local order.
  bool joins_diagonal(const Shard& q, const Shard& kv, int32_t source) const {
    return source == me_ && q.pieces == 2 && !s_.positions && s_.causal && !s_.window_left &&
           s_.seqlen_q == s_.seqlen_kv && q.piece[1].rows.count() && kv.piece[1].rows.count();
  }

  void join_diagonal(int32_t step, int32_t source, const Shard& shard) {
    const int64_t n = shard.count();
    add({step, source, 1, 0, 0, n, 0, n, 0, 0, 0, n * (n + 1) / 2});
  }

  // Unmasked parts with the same queries and adjacent keys, then with the same keys and adjacent
  // queries.
  static void join(std::vector<tea_cp_part>& parts) {
    const auto unite = [&](auto same, int64_t tea_cp_part::*begin, int64_t tea_cp_part::*count) {
      for (size_t a = 0; a < parts.size(); ++a)
        for (size_t b = a + 1; b < parts.size();) {
          tea_cp_part &x = parts[a], &y = parts[b];
          if (x.masked || y.masked || !same(x, y) || x.*begin + x.*count != y.*begin) {
            ++b;
            continue;
          }
          x.*count += y.*count, x.visible += y.visible;
          parts.erase(parts.begin() + static_cast<int64_t>(b));
        }
    };
    using P = tea_cp_part;
    unite([](const P& x, const P& y) { return x.q_begin == y.q_begin && x.q_count == y.q_count; },
          &P::kv_begin, &P::kv_count);
    unite(
        [](const P& x, const P& y) { return x.kv_begin == y.kv_begin && x.kv_count == y.kv_count; },
        &P::q_begin, &P::q_count);
  }

  // -------------------------------------------------------------- whole sequences of keys

  // A part for each piece of queries, on the columns that it attends to.
  void parts_of_columns() {
    const Shard q = queries(me_);
    for (int i = 0; i < q.pieces; ++i) {
      const CpRows columns = hull(q.piece[i].rows);
      add(part(1, -1, q.piece[i], {columns, columns.begin}));
    }
  }

  void all_gather() {
    for (int32_t from = 0; from < s_.world; ++from)
      for (int32_t to = 0; to < s_.world; ++to) move(0, from, to, from, 0, keys(from).count());
    parts_of_columns();
  }

  void halo() {
    for (int32_t from = 0; from < s_.world; ++from)
      for (int32_t to = 0; to < s_.world; ++to)
        if (from == s_.rank || to == s_.rank) halo_moves(from, to);
    parts_of_columns();
  }

  // The rows of `from` that `to` attends to: a move for each of its pieces, or for two that
  // overlap.
  void halo_moves(int32_t from, int32_t to) {
    const Shard q = queries(to), kv = keys(from);
    for (int j = 0; j < kv.pieces; ++j) {
      const Piece& of = kv.piece[j];
      CpRows wanted[2];
      for (int i = 0; i < q.pieces; ++i) {
        const CpRows h = hull(q.piece[i].rows);
        wanted[i] = {std::max(h.begin, of.rows.begin), std::min(h.end, of.rows.end)};
      }
      const bool both = q.pieces == 2 && wanted[0].count() > 0 && wanted[1].count() > 0 &&
                        wanted[1].begin <= wanted[0].end && wanted[0].begin <= wanted[1].end;
      if (both) {
        wanted[0] = {std::min(wanted[0].begin, wanted[1].begin),
                     std::max(wanted[0].end, wanted[1].end)};
        wanted[1] = {0, 0};
      }
      for (int i = 0; i < q.pieces; ++i)
        move(0, from, to, from, of.local + wanted[i].begin - of.rows.begin, wanted[i].count());
    }
  }

  // The least number for which no other part of the step writes the same rows of O.
  void number_launches() {
    int32_t next = 0;
    for (size_t first = 0, end; first < out_.parts.size(); first = end) {
      for (end = first; end < out_.parts.size() && out_.parts[end].step == out_.parts[first].step;)
        ++end;
      int32_t used = next;
      for (size_t i = first; i < end; ++i) {
        tea_cp_part& p = out_.parts[i];
        const auto taken = [&](int32_t launch) {
          return std::any_of(out_.parts.begin() + static_cast<int64_t>(first),
                             out_.parts.begin() + static_cast<int64_t>(i), [&](const auto& o) {
                               return o.launch == launch && o.q_begin < p.q_begin + p.q_count &&
                                      p.q_begin < o.q_begin + o.q_count;
                             });
        };
        for (p.launch = next; taken(p.launch);) ++p.launch;
        used = std::max(used, p.launch + 1);
      }
      next = used;
    }
  }

  const tea_cp_shape& s_;
  const int32_t inner_;
  CpSharding members_;  // of the ring
  const CpSharding ranks_;
  const int32_t me_;
  const int64_t shift_;
  const MaskRule rule_;
  CpSchedule out_;
};

void check(const tea_cp_shape& s) {
  TEA_REQUIRE(s.world >= 1 && s.world <= kMostRanks, "world", s.world, "1 to 2^20");
  TEA_REQUIRE(s.rank >= 0 && s.rank < s.world, "rank", s.rank,
              "0 or more, less than world, which is " + shown(s.world));
  TEA_REQUIRE(s.strategy >= TEA_CP_RING && s.strategy <= TEA_CP_ALL_TO_ALL, "strategy", s.strategy,
              "one of tea_cp_strategy");
  TEA_REQUIRE(s.sharding == TEA_CP_ZIGZAG || s.sharding == TEA_CP_CONTIGUOUS, "sharding",
              s.sharding, "one of tea_cp_sharding");
  const bool divides = s.inner >= 0 && s.world % std::max(s.inner, 1) == 0;
  TEA_REQUIRE(divides && (s.inner <= 1 || s.strategy == TEA_CP_RING), "inner", s.inner,
              "0, 1, or with a ring a divisor of world, which is " + shown(s.world));
  for (const auto& [name, value] : {std::pair{"positions", s.positions},
                                    {"causal", s.causal},
                                    {"bottom_right", s.bottom_right}})
    TEA_REQUIRE(value == 0 || value == 1, name, value, "0 or 1");
  TEA_REQUIRE(s.reserved == 0, "reserved", s.reserved, "0");
  for (const auto& [name, value] :
       {std::pair{"window_left", s.window_left}, {"window_right", s.window_right}})
    TEA_REQUIRE(value >= 0, name, value, "0 (none) or the bound + 1");
  for (const auto& [name, value] : {std::pair{"seqlen_q", s.seqlen_q}, {"seqlen_kv", s.seqlen_kv}})
    TEA_REQUIRE(value >= 0 && value <= kMaxOrigin, name, value, "0 or more, at most 2^40");
}

template <class T>
void give_list(const std::vector<T>& from, T* to, size_t* count, const char* name) {
  TEA_REQUIRE(count, std::string(name) + "_count", count, "the capacity of the array");
  TEA_REQUIRE(to || *count == 0, name, to, "an array, or a capacity of 0");
  if (from.size() <= *count) std::ranges::copy(from, to);
  *count = from.size();
}

}  // namespace

int64_t pairs_in_band(const Band& band, int64_t rows, int64_t cols) {
  // Pairs with j - i < k. Rows from `first` on have one, from `full` on all columns.
  const auto below = [&](int64_t k) {
    const int64_t first = std::clamp<int64_t>(1 - k, 0, rows);
    const int64_t full = std::clamp<int64_t>(cols - k, first, rows);
    const int64_t n = full - first;
    return n * (first + k) + n * (n - 1) / 2 + (rows - full) * cols;
  };
  if (band.lo > band.hi) return 0;
  return below(band.hi + 1) - below(band.lo);
}

CpSchedule cp_schedule(const tea_cp_shape& shape) {
  check(shape);
  return Builder(shape).build();
}

}  // namespace tea

extern "C" tea_status tea_cp_schedule(const tea_cp_shape* shape, tea_cp_part* parts,
                                      size_t* parts_count, tea_cp_move* moves,
                                      size_t* moves_count) {
  return tea::guarded([&] {
    const tea_cp_shape known = tea::as_known(shape, {"shape", "tea_cp_shape", "a tea_cp_shape"});
    const tea::CpSchedule schedule = tea::cp_schedule(known);
    tea::give_list(schedule.parts, parts, parts_count, "parts");
    tea::give_list(schedule.moves, moves, moves_count, "moves");
  });
}
