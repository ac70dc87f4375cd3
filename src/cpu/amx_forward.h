// Forward with AMX. Included by flash_amx.cpp after amx_operands.h, inside its namespace.
#pragma once

constexpr int kMostKeys = 512;  // of a panel: keys that are multiplied by V at a time

// The scores of kDepth keys, [key][row], which stay in the L1 cache until the exponentials are
// computed. Logits are s * factor.
struct Chunk {
  int64_t first, keys;
  float* s;
  float factor;
  bool whole;  // all keys are visible to all rows, and logits are scores times the factor
};

// The largest logits by lane, of N vectors of rows.
template <int N>
void raise_maxima(const Chunk& chunk, float* max) {
  for (int n = 0; n < N * kSide; n += kSide) {
    VF high = load(chunk.s + n);
    for (int j = 1; j < kDepth; ++j) high = larger(load(chunk.s + j * kRows + n), high);
    store(max + n, larger(logit_of(high, splat(chunk.factor)), load(max + n)));
  }
}

// x / ln 2 - y, rounded once: what is left of a large logit is exact.
TEA_PRIMITIVE VF above(VF x, VF y) {
  return (VF)_mm512_fmsub_ps((__m512)x, _mm512_set1_ps(kLog2e), (__m512)y);
}

// P = 2^(logit / ln 2 - base) as B of the second product, and its sum over the chunk, in steps of
// two keys whose quarters are the vectors of rows. `keep`: factors of dropout. Always inlined, so
// that bases and sums stay in registers.
template <int N, int T>
class Exponentials {
 public:
  TEA_INLINE Exponentials(const Chunk& chunk, const float* base, const float* keep, std::byte* p,
                          int64_t term)
      : s_(chunk.s), keep_(keep), p_(p), term_(term), scale_(splat(chunk.factor)) {
    for (int n = 0; n < N; ++n) base_[n] = load(base + n * kSide), sum_[n] = VF{};
  }
  static constexpr int kSteps = kDepth / 2;

  // The quarters [From, To) of the next `count` steps.
  template <int From, int To>
  TEA_INLINE void quarters(int count) {
    for (int i = 0; i < count && left_ > i; ++i) {
      if constexpr (From <= 0 && 0 < To) pair<0>(i);
      if constexpr (From <= 1 && 1 < To && 1 < N) pair<1>(i);
      if constexpr (From <= 2 && 2 < To && 2 < N) pair<2>(i);
      if constexpr (From <= 3 && 3 < To && 3 < N) pair<3>(i);
    }
    if constexpr (To == 4) advance(count);
  }
  TEA_INLINE void finish() { quarters<0, 4>(left_); }

  TEA_INLINE VF sum(int n) const { return sum_[n]; }

 private:
  template <int n>
  TEA_INLINE void pair(int ahead) {
    const float* s = s_ + ahead * 2 * kRows + n * kSide;
    VF low = power(load(s), base_[n]), high = power(load(s + kRows), base_[n]);
    sum_[n] += low + high;
    if (keep_) {
      const float* keep = keep_ + ahead * 2 * kRows + n * kSide;
      low *= load(keep), high *= load(keep + kRows);
    }
    std::byte* const to = p_ + ahead * 4 * kRows + n * kSide * 4;
    if constexpr (T == 1) return _mm512_store_si512(to, as_pairs_up(low, high));
    const Terms<T> a(low), b(high);
    for (int t = 0; t < T; ++t) _mm512_store_si512(to + t * term_, pairs_of(a, b, t));
  }
  TEA_INLINE VF power(VF s, VF base) const {
    return power_of_two(above(logit_of(s, scale_), base));
  }
  TEA_INLINE void advance(int count) {
    s_ += count * 2 * kRows, p_ += count * 4 * kRows, left_ -= count;
    if (keep_) keep_ += count * 2 * kRows;
  }

  const float *s_, *keep_;
  std::byte* p_;
  const int64_t term_;  // bytes from one term of P to the next
  int left_ = kSteps;
  const VF scale_;
  VF base_[N], sum_[N];
};

// Processes the keys for one block of rows. While AMX computes the scores of a chunk and the
// product of an earlier panel with V, vector code computes the exponentials of the previous chunk.
//
// Exponentials are relative to a base, which is a maximum of the row, but not always the last one:
// only where that is larger by kSlack are O and the sum taken to a new base. Where all rows have a
// base and see all keys of a chunk, its maxima are not even looked for, unless the sum of its
// exponentials is so large that one of them may be: then they are computed again.
template <int T>
class Walk {
 public:
  Walk(const View& view, const RowBlock& block, Columns columns, Partial<float> out, float* scratch)
      : p_(view.p),
        block_(block),
        columns_(columns),
        scale_(static_cast<float>(p_.scale_value())),
        out_(out),
        t_(view, block, columns, scratch),
        packed_(p_, block.group, Pass::kForward, block.group.packed) {
    s_ = scratch + scratch_reals<float>(p_);
    probs_ = reinterpret_cast<std::byte*>(s_ + 2 * kDepth * kRows);
    panel_keys_ = panel_keys();
    const BlockRows<T> q(view, block, TEA_Q, p_.dim_qk);
    queries_ = pack_block(q, probs_ + 2 * T * kPanelBytes);
    const Columns all{block.all.begin - base_key(), block.all.end - base_key()};  // as backward
    scores_ = {packed_.rows_k(0), queries_, packed_.size.deep_k, base_key(),
               q.ordinary && packed_.is_ordinary(all, kOrdinaryK)};
    ordinary_ = scores_.ordinary && packed_.is_ordinary(visible(), kOrdinaryV);
    std::fill_n(out.max, kRows, kNone), std::fill_n(reference_, kRows, kNone);
    std::fill_n(out.sum, kRows, 0.0f), std::fill_n(base_, kRows, 0.0f);
  }

  static int64_t scratch(const Problem& p) {
    return scratch_reals<float>(p) + 2 * kDepth * kRows +
           T * (2 * kPanelBytes + Sizes(p).deep_k * kGroups * kTileBytes) / 4;
  }

  // Whether the products of the operands' terms are exact.
  bool is_ordinary() const { return ordinary_; }
  const UnitScores<T>& unit_scores() const { return scores_; }

  // Afterwards: whether the largest logit of a row is so far from 0, as where a bias of -1e30 hides
  // all keys, that the rounding of the base is felt, or the base infinite. Then exponentials that
  // are relative to it may be anything.
  bool is_beyond() const {
    constexpr float kFarthest = 0x1p24f;
    for (int lane = 0; lane < kRows; ++lane)
      if (std::isfinite(out_.max[lane]) && std::fabs(out_.max[lane] * kLog2e) >= kFarthest)
        return true;
    return false;
  }

  void operator()() {
    switch (groups()) {
      case 1:
        return over_chunks<1>();
      case 2:
        return over_chunks<2>();
      case 3:
        return over_chunks<3>();
      default:
        return over_chunks<4>();
    }
  }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
  static constexpr int kSlack = 6;                                        // in powers of two
  static constexpr int64_t kPanelBytes = int64_t{kMostKeys} * kRows * 2;  // of one term

  int64_t groups() const { return t_.lanes() / kSide; }
  int64_t base_key() const { return block_.group.visible.begin; }
  // The keys of the walk, in the packed head.
  Columns visible() const { return {columns_.begin - base_key(), columns_.end - base_key()}; }

  // The chunk from `first` on, in one of two buffers.
  Chunk chunk(int64_t first, int which) const {
    const int64_t keys = std::min<int64_t>(kDepth, columns_.end - first);
    return {first, keys, s_ + which * kDepth * kRows, 1, false};
  }

  // Keys of a panel: one chunk for each part of its product, which runs concurrently with it.
  int64_t panel_keys() const {
    const int64_t parts = Product<T>::parts_of(packed_.size.wide_v, groups());
    return std::clamp<int64_t>(parts * kDepth, Product<T>::kLeastPanel, kMostKeys);
  }

  template <int N>
  void over_chunks() {
    const int64_t skipped = visible().begin / kDepth * kDepth;
    Chunk now = chunk(base_key() + skipped, 0);
    if (now.first >= columns_.end) {
      std::fill_n(out_.o, padded(p_.v_dim()) * kRows, 0.0f);
      return;
    }
    first_key_ = now.first;
    panel_ = waiting_ = {first_key_, 0, probs_};
    scores(now)();
    logits(now);
    for (int which = 1;; which ^= 1) {
      Chunk next = chunk(now.first + kDepth, which);
      exponentials<N>(now, next);
      panel_.keys += kDepth;
      if (panel_.keys == panel_keys_) enqueue_panel(next.first);
      if (next.first >= columns_.end) break;
      now = next;
    }
    finish_values();
    move_base<N>(true);
  }

  // P and its sums of one chunk, concurrently with the scores of the next.
  template <int N>
  void exponentials(const Chunk& now, Chunk& next) {
    const bool trusting = now.whole && started_;
    if (!trusting) {
      raise_maxima<N>(now, out_.max);
      rebase_if_needed<N>();
    }
    Exponentials<N, T> all(now, base_, keep(now), place(), kPanelBytes);
    if (next.first < columns_.end) products(all, next);
    all.finish();
    if (trusting && !moderate(all)) return exponentials_again<N>(now);
    for (int n = 0; n < N; ++n) add_to(out_.sum + n * kSide, all.sum(n));
  }

  // Whether no exponential is much above 1; NaN is not.
  template <int N>
  TEA_INLINE bool moderate(const Exponentials<N, T>& all) const {
    const __m512 most = _mm512_set1_ps(1 << kSlack);
    unsigned beyond = 0;
    for (int n = 0; n < N; ++n) beyond |= _mm512_cmp_ps_mask((__m512)all.sum(n), most, _CMP_NLE_UQ);
    return beyond == 0;
  }

  template <int N>
  __attribute__((noinline)) void exponentials_again(const Chunk& now) {
    finish_values();
    raise_maxima<N>(now, out_.max);
    move_base<N>();
    Exponentials<N, T> all(now, base_, keep(now), place(), kPanelBytes);
    all.finish();
    for (int n = 0; n < N; ++n) add_to(out_.sum + n * kSide, all.sum(n));
  }

  // The scores of the next chunk and a part of the pending product, concurrently with exponentials.
  template <int N>
  TEA_INLINE void products(Exponentials<N, T>& all, Chunk& next) {
    const Product<T> product = scores(next);
    const int64_t steps = product.parts() * product.steps + parts_now() * waiting_.keys / kDepth;
    const auto each =
        static_cast<int>(tiles_of(Exponentials<N, T>::kSteps, static_cast<int>(steps)));
    const auto some = [&]<class From, class To>(From, To) __attribute__((always_inline)) {
      all.template quarters<From::value, To::value>(each);
    };
    product(some);
    logits(next);
    some_values(some);
  }

  // Where P of the chunk goes.
  std::byte* place() const {
    return probs_ + (panel_.p == probs_ ? 0 : T * kPanelBytes) + panel_.keys * kRows * 2;
  }
  static void add_to(float* at, VF x) { store(at, load(at) + x); }

  // ---- the first product

  Product<T> scores(const Chunk& chunk) const {
    return {2,
            groups(),
            packed_.size.deep_k,
            packed_.rows_k(chunk.first - base_key()),
            queries_,
            chunk.s,
            kRows,
            false};
  }

  // Scores stay as they are where logits are no more than a positive multiple of them. Keys that
  // complete the chunk are hidden.
  void logits(Chunk& chunk) {
    const Columns keys{chunk.first, chunk.first + chunk.keys};
    if (chunk.keys == kDepth && t_.is_plain() && t_.whole(keys) && scale_ > 0) {
      chunk.factor = scale_, chunk.whole = true;
      return;
    }
    t_.s = chunk.s;
    t_.move(keys.begin, keys.end);
    t_.logits(false);
    std::fill(chunk.s + chunk.keys * kRows, chunk.s + kDepth * kRows, kNone);
  }

  const float* keep(const Chunk& chunk) {
    if (!p_.drops()) return nullptr;
    t_.move(chunk.first, chunk.first + chunk.keys);
    t_.dropout();
    std::fill(t_.keep + chunk.keys * kRows, t_.keep + kDepth * kRows, 0.0f);
    return t_.keep;
  }

  // ---- the second product

  struct Panel {
    int64_t first, keys;
    const std::byte* p;
  };

  Product<T> values(const Panel& panel) const {
    const Tiles p{panel.p, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4, kPanelBytes};
    return {packed_.size.wide_v,
            groups(),
            panel.keys / kDepth,
            packed_.turned_v(panel.first - base_key()),
            p,
            out_.o,
            kRows,
            panel.first != first_key_};
  }

  // The panel is complete: it waits for its product, and the other buffer is filled.
  void enqueue_panel(int64_t next_key) {
    finish_waiting();
    waiting_ = panel_, part_ = 0;
    panel_ = {next_key, 0, panel_.p == probs_ ? probs_ + T * kPanelBytes : probs_};
  }

  // How many parts of the product that waits are next, such that it is done when the next panel is.
  int64_t parts_now() const {
    const int64_t all = waiting_.keys ? values(waiting_).parts() : 0;
    return std::min(all - part_, tiles_of(all, static_cast<int>(panel_keys_ / kDepth)));
  }

  template <class Between>
  TEA_INLINE void some_values(Between between) {
    const Product<T> product = values(waiting_);
    for (int64_t end = part_ + parts_now(); part_ < end; ++part_) product.part(part_, between);
  }

  void finish_waiting() {
    const Product<T> product = values(waiting_);
    for (; waiting_.keys && part_ < product.parts(); ++part_) product.part(part_);
  }

  void finish_values() {
    finish_waiting();
    if (panel_.keys) enqueue_panel(panel_.first + panel_.keys);
    finish_waiting();
  }

  // ---- the base

  template <int N>
  void rebase_if_needed() {
    bool needed = false;
    for (int n = 0; n < N * kSide; n += kSide) {
      const VF high = load(out_.max + n) * kLog2e, most = load(reference_ + n) + float{kSlack};
      needed |= _mm512_cmp_ps_mask((__m512)high, (__m512)most, _CMP_GT_OQ) != 0;
    }
    if (!needed) return;
    finish_values();
    move_base<N>();
  }

  // O and the sum, from what they were relative to, to the maximum; in the end to no rounding of
  // it.
  template <int N>
  void move_base(bool end = false) {
    alignas(64) float shrink[N * kSide];
    bool shrinks = false;
    started_ = N == kGroups && !(p_.outputs & (TEA_OUTPUT_MAX | TEA_OUTPUT_SUM_EXP));
    for (int n = 0; n < N * kSide; n += kSide) {
      const VF before = load(reference_ + n), max = load(out_.max + n), now = max * kLog2e;
      const VF base = now == splat(kNone) ? VF{} : now;
      const VF change = end ? -above(max, before) : before - base;
      const VF factor = now == splat(kNone) ? splat(1.0f) : power_of_two(change);
      store(out_.sum + n, load(out_.sum + n) * factor);
      store(reference_ + n, now), store(base_ + n, base), store(shrink + n, factor);
      shrinks |= _mm512_cmpneq_ps_mask((__m512)factor, _mm512_set1_ps(1)) != 0;
      started_ &= _mm512_cmp_ps_mask((__m512)now, (__m512)splat(kNone), _CMP_EQ_OQ) == 0;
    }
    for (int64_t d = 0; shrinks && part_ > 0 && d < p_.v_dim(); ++d)
      for (int n = 0; n < N * kSide; n += kSide) {
        float* at = out_.o + d * kRows + n;
        store(at, load(at) * load(shrink + n));
      }
  }

  const Problem& p_;
  const RowBlock& block_;
  const Columns columns_;
  const float scale_;
  const Partial<float> out_;
  Tile<float> t_;
  const Packed<T> packed_;
  bool ordinary_;
  UnitScores<T> scores_;
  float* s_;                                          // of two chunks
  std::byte* probs_;                                  // P of two panels as B
  Tiles queries_;                                     // Q as B
  Panel panel_{}, waiting_{};                         // being filled; to be multiplied by V
  int64_t part_ = 0;                                  // of the product that waits: how much is done
  int64_t panel_keys_ = 0, first_key_ = 0;            // of a panel; of the walk
  bool started_ = false;                              // each row has a base, and needs no maximum
  alignas(64) float reference_[kRows], base_[kRows];  // in powers of two; base: 0 if there is none
};
