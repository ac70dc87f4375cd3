// Forward on the matrix unit. Included by flash_amx.cpp after amx_operands.h, inside its namespace.
#pragma once

constexpr int kPanel = 512;  // keys that are multiplied by V at a time

// The scores of kDepth keys, [key][row]: small enough to stay in the first cache until they are
// exponentials. Logits are s * factor.
struct Chunk {
  int64_t first, keys;
  float* s;
  float factor;
};

// Work on the vectors of a chunk, in steps that fit between the products: N vectors of rows at a
// time. `max` and `sum` are by lane.
template <int N>
class Maxima {
 public:
  Maxima(const Chunk& chunk, float* max) : chunk_(chunk), max_(max) {}

  void step() {
    if (at_ == kDepth) return;
    constexpr int kKeys = kDepth / 4;
    VF high[N];
    const float* s = chunk_.s + at_ * kRows;
    for (int n = 0; n < N; ++n) high[n] = load(s + n * kSide);
    for (int j = 1; j < kKeys; ++j)
      for (int n = 0; n < N; ++n) high[n] = larger(load(s + j * kRows + n * kSide), high[n]);
    for (int n = 0; n < N; ++n) {
      const VF before = load(max_ + n * kSide);
      store(max_ + n * kSide, larger(high[n] * chunk_.factor, before));
    }
    at_ += kKeys;
  }
  void finish() {
    while (at_ < kDepth) step();
  }

 private:
  const Chunk& chunk_;
  float* max_;
  int at_ = 0;
};

// P = 2^(logit / ln 2 - base) as B of the second product, and its sum. `keep`: factors of dropout.
template <int N>
class Exponentials {
 public:
  Exponentials(const Chunk& chunk, const float* base, const float* keep, float* sum, std::byte* p)
      : s_(chunk.s), keep_(keep), sum_to_(sum), p_(p), scale_(splat(chunk.factor * kLog2e)) {
    for (int n = 0; n < N; ++n) base_[n] = load(base + n * kSide), sum_[n] = load(sum + n * kSide);
  }
  static constexpr int kSteps = kDepth / 2;

  // Two keys. Always inlined, so that base and sum stay in registers.
  __attribute__((always_inline)) void step() {
    if (done_ == kSteps) return;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      VF low = power_of_two(load(s_ + n * kSide) * scale_ - base_[n]);
      VF high = power_of_two(load(s_ + kRows + n * kSide) * scale_ - base_[n]);
      sum_[n] += low + high;
      if (keep_) low *= load(keep_ + n * kSide), high *= load(keep_ + kRows + n * kSide);
      _mm512_store_si512(p_ + n * kSide * 4, as_pairs_up(low, high));
    }
    s_ += 2 * kRows, p_ += 4 * kRows;
    if (keep_) keep_ += 2 * kRows;
    ++done_;
  }
  void finish() {
    while (done_ < kSteps) step();
    for (int n = 0; n < N; ++n) store(sum_to_ + n * kSide, sum_[n]);
  }

 private:
  const float *s_, *keep_;
  float* sum_to_;
  std::byte* p_;
  int done_ = 0;
  const VF scale_;
  VF base_[N], sum_[N];
};

// One block of rows on its way over the keys. While the matrix unit works on the scores of a chunk
// and on V of an earlier panel of chunks, the vectors turn the scores before it into exponentials.
//
// Exponentials are relative to a base, which is a maximum of the row, but not always the last one:
// only where that is larger by kSlack are O and the sum taken to a new base.
class Walk {
 public:
  Walk(const View& view, const RowBlock& block, Columns columns, Partial<float> out, float* scratch)
      : p_(view.p),
        block_(block),
        columns_(columns),
        out_(out),
        t_(view, block, columns, scratch),
        packed_(p_, block.group, Pass::kForward, block.group.packed) {
    s_ = scratch + scratch_reals<float>(p_);
    probs_ = reinterpret_cast<std::byte*>(s_ + 2 * kDepth * kRows);
    queries_ = probs_ + 2 * kPanelBytes;
    pack_block(BlockRows(view, block, TEA_Q), p_.dim_qk, queries_);
    std::fill_n(out.max, kRows, kNone), std::fill_n(reference_, kRows, kNone);
    std::fill_n(out.sum, kRows, 0.0f), std::fill_n(base_, kRows, 0.0f);
    std::fill_n(out.o, padded(p_.v_dim()) * kRows, 0.0f);
  }

  static int64_t scratch(const Problem& p) {
    return scratch_reals<float>(p) + 2 * kDepth * kRows + 2 * kPanelBytes / 4 +
           Sizes(p).deep_k * kGroups * kTileBytes / 4;
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
  static constexpr float kSlack = 6;  // in powers of two
  static constexpr int64_t kPanelBytes = int64_t{kPanel} * kRows * 2;

  int64_t groups() const { return t_.lanes() / kSide; }
  int64_t base_key() const { return block_.group.seen.begin; }

  // The chunk from `first` on, in one of two buffers.
  Chunk chunk(int64_t first, int which) const {
    const int64_t keys = std::min<int64_t>(kDepth, columns_.end - first);
    return {first, keys, s_ + which * kDepth * kRows, 1};
  }

  template <int N>
  void over_chunks() {
    const int64_t skipped = (columns_.begin - base_key()) / kDepth * kDepth;
    Chunk now = chunk(base_key() + skipped, 0);
    if (now.first >= columns_.end) return;
    panel_ = waiting_ = {now.first, 0, probs_};
    scores(now)();
    logits(now);
    Maxima<N>(now, out_.max).finish();
    for (int which = 1;; which ^= 1) {
      rebase_if_needed<N>();
      std::byte* p = probs_ + (panel_.p == probs_ ? 0 : kPanelBytes) + panel_.keys * kRows * 2;
      Exponentials<N> exponentials(now, base_, keep(now), out_.sum, p);
      Chunk next = chunk(now.first + kDepth, which);
      const bool more = next.first < columns_.end;
      if (more) products(exponentials, next);
      exponentials.finish();
      panel_.keys += kDepth;
      if (panel_.keys == kPanel) hand_over(next.first);
      if (!more) break;
      now = next;
    }
    finish_values();
    move_base<N>();
  }

  // The scores of the next chunk, their maxima, and a part of the product that waits, beside
  // exponentials.
  template <int N>
  void products(Exponentials<N>& exponentials, Chunk& next) {
    const Product product = scores(next);
    const int64_t steps = product.parts() * product.steps + parts_now() * waiting_.keys / kDepth;
    const int64_t each = tiles_of(Exponentials<N>::kSteps, static_cast<int>(steps));
    const auto some = [&] {
      for (int64_t i = 0; i < each; ++i) exponentials.step();
    };
    product(some);
    logits(next);
    Maxima<N> maxima(next, out_.max);
    some_values([&] { some(), maxima.step(); });
    maxima.finish();
  }

  // ---- the first product

  Product scores(const Chunk& chunk) const {
    return {2,
            groups(),
            packed_.size.deep_k,
            packed_.rows_k(chunk.first - base_key()),
            block_columns(queries_),
            chunk.s,
            kRows,
            false};
  }

  // Scores stay as they are where logits are no more than a positive multiple of them. Keys that
  // complete the chunk are hidden.
  void logits(Chunk& chunk) {
    const Columns keys{chunk.first, chunk.first + chunk.keys};
    if (chunk.keys == kDepth && t_.is_plain() && t_.whole(keys) && p_.scale_value() > 0) {
      chunk.factor = static_cast<float>(p_.scale_value());
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

  Product values(const Panel& panel) const {
    const Tiles p{panel.p, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4};
    return {packed_.size.wide_v,
            groups(),
            panel.keys / kDepth,
            packed_.turned_v(panel.first - base_key()),
            p,
            out_.o,
            kRows,
            true};
  }

  // The panel is complete: it waits for its product, and the other buffer is filled.
  void hand_over(int64_t next_key) {
    finish_waiting();
    waiting_ = panel_, part_ = 0;
    panel_ = {next_key, 0, panel_.p == probs_ ? probs_ + kPanelBytes : probs_};
  }

  // How many parts of the product that waits are next, such that it is done when the next panel is.
  int64_t parts_now() const {
    const int64_t all = waiting_.keys ? values(waiting_).parts() : 0;
    return std::min(all - part_, tiles_of(all, kPanel / kDepth));
  }

  template <class Between>
  void some_values(Between between) {
    const Product product = values(waiting_);
    for (int64_t end = part_ + parts_now(); part_ < end; ++part_) product.part(part_, between);
  }

  void finish_waiting() {
    const Product product = values(waiting_);
    for (; waiting_.keys && part_ < product.parts(); ++part_) product.part(part_);
  }

  void finish_values() {
    finish_waiting();
    if (panel_.keys) hand_over(panel_.first + panel_.keys);
    finish_waiting();
  }

  // ---- the base

  template <int N>
  void rebase_if_needed() {
    bool needed = false;
    for (int n = 0; n < N * kSide; n += kSide) {
      const VF high = load(out_.max + n) * kLog2e, most = load(reference_ + n) + kSlack;
      needed |= _mm512_cmp_ps_mask((__m512)high, (__m512)most, _CMP_GT_OQ) != 0;
    }
    if (!needed) return;
    finish_values();
    move_base<N>();
  }

  // O and the sum, from what they were relative to, to the maximum.
  template <int N>
  void move_base() {
    alignas(64) float shrink[N * kSide];
    bool shrinks = false;
    for (int n = 0; n < N * kSide; n += kSide) {
      const VF before = load(reference_ + n), now = load(out_.max + n) * kLog2e;
      const VF base = now == splat(kNone) ? VF{} : now, factor = power_of_two(before - base);
      store(out_.sum + n, load(out_.sum + n) * factor);
      store(reference_ + n, now), store(base_ + n, base), store(shrink + n, factor);
      shrinks |= _mm512_cmpneq_ps_mask((__m512)before, (__m512)now) != 0;
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
  const Partial<float> out_;
  Tile<float> t_;
  const Packed packed_;
  float* s_;                                          // of two chunks
  std::byte *probs_, *queries_;                       // P of two panels as B; Q as B
  Panel panel_{}, waiting_{};                         // being filled; to be multiplied by V
  int64_t part_ = 0;                                  // of the product that waits: how much is done
  alignas(64) float reference_[kRows], base_[kRows];  // in powers of two; base: 0 if there is none
};
