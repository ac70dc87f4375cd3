// Forward of the tiled engine: its work on threads, with the kernels of an instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cpu/packed_heads.h"
#include "cpu/pool.h"

namespace tea::cpu {

inline double highest(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0,
                         [](double a, double b) { return std::fmax(a, b); });
}

template <class Real>
class FlashForward {
 public:
  // `few`: the kernels for few rows, if the instruction set has them.
  FlashForward(const View& view, const Kernels<Real>& kernels, const Kernels<Real>& few)
      : view_(view), tiles_(kernels), few_(few) {}

  void operator()() {
    fill_padding();
    std::vector<Group> all = make_groups(view_);
    const auto middle = std::stable_partition(all.begin(), all.end(), [&](const Group& g) {
      return few_.few_scores && is_few(view_, g);
    });
    attend({all.begin(), middle}, true);
    for (std::span<Group> rest{middle, all.end()}; !rest.empty();) {
      const PackedHeads some(view_, tiles_, Pass::kForward, rest);
      attend(some.groups(), false);
      rest = rest.subspan(some.groups().size());
    }
  }

 private:
  void fill_padding() const {
    const Problem& p = view_.p;
    if (p.q_form == TEA_DENSE) return;  // every row is written below
    view_.fill(TEA_O, 0);
    if (p.writes_lse()) view_.fill(TEA_LSE, -INFINITY);
    if (p.outputs & TEA_OUTPUT_MAX) view_.fill(TEA_MAX, -INFINITY);
    if (p.outputs & TEA_OUTPUT_SUM_EXP) view_.fill(TEA_SUM_EXP, 0);
  }

  void attend(std::span<const Group> some, bool few) {
    work_ = schedule(view_, some, few);
    s_amax_.assign(work_.parts.size(), 0), o_amax_.assign(work_.pieces.size(), 0);
    const bool split = work_.slots > 0, keeps = split && view_.p.is_fp8();
    const Kept<Real> memory(partial_reals() * work_.slots);
    kept_reals_ = keeps ? kept_reals() : 0;
    const Kept<Real> logits(work_.slots * kept_reals_);
    shared_ = memory.get(), kept_ = keeps ? logits.get() : nullptr;
    if (few) find_bundles();
    if (keeps) share_maxima();
    if (few)
      view_.parallel_for(size(bundles_), [&](int64_t i) { attend_few(bundle(i)); });
    else
      view_.parallel_for(size(work_.parts), [&](int64_t i) { attend(i); });
    if (split) view_.parallel_for(size(work_.pieces), [&](int64_t i) { merge(i); });
    view_.raise(TEA_S_AMAX, highest(s_amax_));
    view_.raise(TEA_O_AMAX, highest(o_amax_));
  }

  template <class T>
  static int64_t size(const T& items) {
    return static_cast<int64_t>(items.size());
  }
  const Part& part(int64_t i) const { return work_.parts[static_cast<size_t>(i)]; }
  const Piece& piece(int64_t i) const { return work_.pieces[static_cast<size_t>(i)]; }
  const Kernels<Real>& kernels() const { return work_.few ? few_ : tiles_; }

  int64_t partial_reals() const { return (padded(view_.p.v_dim()) + 2) * kRows; }
  Partial<Real> partial(Real* at) const {
    const int64_t o = padded(view_.p.v_dim()) * kRows;
    return {at, at + o, at + o + kRows};
  }
  Partial<Real> shared(int64_t slot) const { return partial(shared_ + slot * partial_reals()); }

  // Of split fp8 pieces: the logits of a slot, for as many rows as there are.
  int64_t kept_reals() const {
    int64_t rows = 0, keys = 0;
    for (const Piece& of : work_.pieces) rows = std::max(rows, of.group->rows());
    for (const Part& of : work_.parts) keys = std::max(keys, few_stride(of.columns));
    return rows * keys;
  }
  Real* kept(int64_t slot) const { return kept_ + slot * kept_reals_; }

  static RowBlock block_of(const Piece& piece) {
    return make_block(*piece.group, piece.first, kRows);
  }

  // Parts of few rows that are worked on together: of kv heads of one sequence that follow each
  // other, over the same keys. Results do not depend on it.
  using Bundle = std::span<const Part>;
  Bundle bundle(int64_t i) const {
    const auto [first, count] = bundles_[static_cast<size_t>(i)];
    return {work_.parts.data() + first, count};
  }

  void find_bundles() {
    constexpr size_t kMost = 16;
    const auto follows = [&](const Part& a, const Part& b) {
      const Group &g = *piece(a.piece).group, &h = *piece(b.piece).group;
      return g.b == h.b && g.kv_head + 1 == h.kv_head && a.columns.begin == b.columns.begin &&
             a.columns.end == b.columns.end;
    };
    const auto cut = [&](size_t most) {
      bundles_.clear();
      for (size_t i = 0; i < work_.parts.size(); ++i)
        if (i > 0 && bundles_.back().second < most && follows(work_.parts[i - 1], work_.parts[i]))
          ++bundles_.back().second;
        else
          bundles_.emplace_back(i, 1);
    };
    cut(kMost);
    if (size(bundles_) < 4 * int64_t{thread_count()}) cut(1);  // rather work for all threads
  }

  // Their heads, with memory for `logits` of each if that is not in memory of its slot.
  struct Few {
    Few(const FlashForward& all, Bundle parts)
        : blocks(size(parts)), memory(size(parts) * all.few_reals(parts)) {
      for (size_t h = 0; h < parts.size(); ++h) {
        const Part& item = parts[h];
        // A block has two kilobytes: neither filled nor copied.
        const RowBlock& block = *new (blocks.get() + h) RowBlock(block_of(all.piece(item.piece)));
        columns = {std::max(item.columns.begin, block.all.begin),
                   std::min(item.columns.end, block.all.end)};
        Real* const own = memory.get() + static_cast<int64_t>(h) * all.few_reals(parts);
        Real *const s = own + all.partial_reals(), *const rest = s + kFewRows * few_stride(columns);
        const bool kept = item.slot >= 0 && all.kept_;
        heads.push_back({&block, kept ? all.kept(item.slot) : s,
                         item.slot < 0 ? all.partial(own) : all.shared(item.slot), rest, 0});
      }
    }
    const Kept<RowBlock> blocks;
    const Kept<Real> memory;
    Columns columns{};
    std::vector<FewHead<Real>> heads;
  };
  int64_t few_reals(Bundle parts) const {
    return partial_reals() + kFewRows * few_stride(parts[0].columns) + few_scratch(view_.p);
  }

  // FP8 with few rows: the maxima of each row over all parts; the logits are kept for attend_few().
  void share_maxima() {
    view_.parallel_for(size(bundles_), [&](int64_t i) {
      if (bundle(i)[0].slot < 0) return;
      Few few(*this, bundle(i));
      few_.few_scores(view_, few.heads, few.columns);
    });
    for (const Piece& of : work_.pieces)
      for (int lane = 0; lane < kFewRows && of.parts > 1; ++lane) {
        const auto max = [&](int64_t n) -> Real& { return shared(of.first_slot + n).max[lane]; };
        for (int64_t n = 1; n < of.parts; ++n) max(0) = std::max(max(0), max(n));
        for (int64_t n = 1; n < of.parts; ++n) max(n) = max(0);
      }
  }

  void attend(int64_t i) {
    const Part& item = part(i);
    const RowBlock block = block_of(piece(item.piece));
    const Columns columns{std::max(item.columns.begin, block.all.begin),
                          std::min(item.columns.end, block.all.end)};
    const Kept<Real> memory(partial_reals() + tiles_.scratch(view_.p));
    const Partial<Real> out = item.slot < 0 ? partial(memory.get()) : shared(item.slot);
    s_amax_[static_cast<size_t>(i)] =
        tiles_.attend(view_, block, columns, out, memory.get() + partial_reals());
    if (item.slot < 0) o_amax_[static_cast<size_t>(item.piece)] = tiles_.finish(view_, block, out);
  }

  void attend_few(Bundle parts) {
    Few few(*this, parts);
    if (parts[0].slot < 0 || !kept_) few_.few_scores(view_, few.heads, few.columns);
    few_.few_values(view_, few.heads, few.columns);
    for (size_t h = 0; h < parts.size(); ++h) {
      s_amax_[static_cast<size_t>(&parts[h] - work_.parts.data())] = few.heads[h].amax;
      if (parts[h].slot < 0)
        o_amax_[static_cast<size_t>(parts[h].piece)] =
            few_.finish(view_, *few.heads[h].block, few.heads[h].out);
    }
  }

  void merge(int64_t i) {
    const Piece& of = piece(i);
    if (of.parts == 1) return;
    const RowBlock block = block_of(of);
    const Partial<Real> all = shared(of.first_slot);
    for (int64_t n = 1; n < of.parts; ++n) merge(all, shared(of.first_slot + n), block.count);
    o_amax_[static_cast<size_t>(i)] = kernels().finish(view_, block, all);
  }

  void merge(const Partial<Real>& to, const Partial<Real>& from, int count) const {
    Real keep[kRows], take[kRows];
    for (int lane = 0; lane < count; ++lane) {
      const Real a = to.max[lane], b = from.max[lane];
      const bool nothing = b == -INFINITY && from.sum[lane] == 0;
      const Real max = nothing || a > b || std::isnan(a) ? a : b;
      keep[lane] = nothing ? 1 : a == -INFINITY ? 0 : std::exp(a - max);
      take[lane] = nothing ? 0 : std::exp(b - max);
      to.max[lane] = max;
      to.sum[lane] = to.sum[lane] * keep[lane] + from.sum[lane] * take[lane];
    }
    for (int64_t row = 0; row < view_.p.v_dim(); ++row)
      for (int lane = 0; lane < count; ++lane) {
        const int64_t at = row * kRows + lane;
        to.o[at] = to.o[at] * keep[lane] + from.o[at] * take[lane];
      }
  }

  const View& view_;
  const Kernels<Real>&tiles_, &few_;
  Schedule work_;
  std::vector<std::pair<size_t, size_t>> bundles_;  // the first part of each, and how many
  Real* shared_ = nullptr;                          // partial results of the parts of split pieces
  Real* kept_ = nullptr;                            // logits of split fp8 pieces, by slot
  int64_t kept_reals_ = 0;                          // of a slot
  std::vector<double> s_amax_, o_amax_;             // by part; by piece
};

}  // namespace tea::cpu
