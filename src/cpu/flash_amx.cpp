// The tiled kernels for the matrix unit (AMX) of recent Xeons, for bf16: products in its tiles,
// everything between them in AVX-512. As in flash_kernel.h, query rows lie across the lanes. Keys
// and values are packed once per kv head; P and dS are rounded to bf16 for the second products.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
// GCC 12 misfires on the undefined operands of its own intrinsics: https://gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <asm/prctl.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#pragma GCC target("amx-tile,amx-bf16,prefer-vector-width=512")
#define TEA_MULTIPLY_EVEN(a, b) ((VQ)_mm512_maskz_mul_epu32(0xFF, (__m512i)(a), (__m512i)(b)))
#define TEA_WIDEN_FP16(from, to) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from))))

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/amx.h"
// clang-format on

constexpr int kPanel = 256;  // keys between two rescalings of O
constexpr int kGroups = kRows / kSide;
constexpr float kLog2e = 1.44269504f;

// ------------------------------------------------------------------------------------- packing

// How many tiles the operands of a problem have.
struct Sizes {
  explicit Sizes(const Problem& p)
      : deep_k(tiles_of(p.dim_qk, kDepth)),
        deep_v(tiles_of(p.v_dim(), kDepth)),
        wide_k(tiles_of(p.dim_qk, kSide)),
        wide_v(tiles_of(p.v_dim(), kSide)) {}
  int64_t deep_k, deep_v;  // along k of a product
  int64_t wide_k, wide_v;  // along rows or columns of C
};

// A packed head, by tiles: rows of K; forward: V transposed; backward: rows of V, K transposed.
struct Packed {
  Packed(const Problem& p, const Group& g, Pass pass, const std::byte* memory) : size(p) {
    const int64_t chunks = tiles_of(g.seen.end - g.seen.begin, kDepth);
    const std::byte* at = memory;
    const auto take = [&](int64_t tiles_of_a_chunk) {
      const std::byte* from = at;
      at += chunks * tiles_of_a_chunk * kTileBytes;
      return from;
    };
    k = take(2 * size.deep_k);
    if (pass == Pass::kForward) {
      v_turned = take(size.wide_v);
    } else {
      v = take(2 * size.deep_v);
      k_turned = take(size.wide_k);
    }
    bytes = at - memory;
  }
  // As A of a product, from key `first` of the head on, a multiple of kDepth.
  Tiles rows_k(int64_t first) const { return rows(k, size.deep_k, first); }
  Tiles rows_v(int64_t first) const { return rows(v, size.deep_v, first); }
  Tiles turned_k(int64_t first) const { return turned(k_turned, size.wide_k, first); }
  Tiles turned_v(int64_t first) const { return turned(v_turned, size.wide_v, first); }

  Sizes size;
  const std::byte *k, *v = nullptr, *k_turned = nullptr, *v_turned = nullptr;
  int64_t bytes;

 private:
  static Tiles rows(const std::byte* from, int64_t deep, int64_t first) {
    return {from + first / kSide * deep * kTileBytes, deep * kTileBytes, kTileBytes, 64};
  }
  static Tiles turned(const std::byte* from, int64_t wide, int64_t first) {
    return {from + first / kDepth * wide * kTileBytes, kTileBytes, wide * kTileBytes, 64};
  }
};

int64_t packed_bytes(const Problem& p, const Group& g, Pass pass) {
  return Packed(p, g, pass, nullptr).bytes;
}

std::byte* writable(Tiles t) { return static_cast<std::byte*>(const_cast<void*>(t.data)); }

void pack_head(const View& view, const Group& g, Pass pass, int64_t first, std::byte* memory) {
  const Problem& p = view.p;
  const Packed packed(p, g, pass, memory);
  const RowsOf of_k = view.rows(TEA_K), of_v = view.rows(TEA_V);
  const int64_t end = std::min(first + kPackedKeys, g.seen.end - g.seen.begin);
  for (int64_t j = first; j < end; j += kDepth) {
    const uint16_t *k[kDepth]{}, *v[kDepth]{};
    for (int64_t i = 0; i < std::min<int64_t>(kDepth, end - j); ++i) {
      const RowAt at{g.kv, g.b, g.kv_head, g.seen.begin + j + i};
      k[i] = static_cast<const uint16_t*>(view.address(of_k, at));
      v[i] = static_cast<const uint16_t*>(view.address(of_v, at));
    }
    for (int half = 0; half < 2; ++half) {
      pack_rows(k + half * kSide, p.dim_qk, writable(packed.rows_k(j + half * kSide)));
      if (pass == Pass::kBackward)
        pack_rows(v + half * kSide, p.v_dim(), writable(packed.rows_v(j + half * kSide)));
    }
    if (pass == Pass::kBackward)
      pack_transposed(k, p.dim_qk, writable(packed.turned_k(j)));
    else
      pack_transposed(v, p.v_dim(), writable(packed.turned_v(j)));
  }
}

// Where the rows of a block begin; those that see nothing count as zero.
struct BlockRows {
  BlockRows(const View& view, const RowBlock& block, tea_tensor t) {
    const RowsOf of = view.rows(t);
    for (int lane = 0; lane < kRows; ++lane)
      row[lane] = block.sees(lane) ? static_cast<const uint16_t*>(view.address(of, block.at(lane)))
                                   : nullptr;
  }
  const uint16_t* row[kRows];
};

// The rows of a block as the columns of B, [tile of k][16 rows].
void pack_block(const BlockRows& rows, int64_t dim, std::byte* to) {
  for (int group = 0; group < kGroups; ++group)
    pack_columns(rows.row + group * kSide, dim, to + group * kTileBytes, kGroups * kTileBytes);
}
Tiles block_columns(const std::byte* packed) {
  return {packed, kTileBytes, kGroups * kTileBytes, 64};
}

// ------------------------------------------------------------------------------------- softmax

// While this lives, subnormal results are 0 or what they are. One takes the processor some 280
// cycles, but where a soft cap is huge they matter.
class Subnormals {
 public:
  explicit Subnormals(bool exact) {
    _mm_setcsr(exact ? before_ & ~unsigned{_MM_FLUSH_ZERO_MASK} : before_ | _MM_FLUSH_ZERO_ON);
  }
  ~Subnormals() { _mm_setcsr(before_); }
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// 2^x with a relative error of a few units in the last place: a polynomial in x - floor(x).
TEA_WORD VF power_of_two(VF x) {
  const VF r = (VF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  VF p = 1.8775766831e-3f * r + 8.9893401418e-3f;
  p = p * r + 5.5826317935e-2f;
  p = p * r + 2.4015361712e-1f;
  p = p * r + 6.9315307318e-1f;
  p = p * r + 9.9999992506e-1f;
  return (VF)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Two vectors of numbers that are not negative as bf16, element by element. Ties round up.
TEA_WORD __m512i as_pairs_up(VF low, VF high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32((__m512i)low, half);
  const __m512i b = _mm512_add_epi32((__m512i)high, half);
  return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b);
}

// Two vectors as bf16, element by element.
TEA_WORD __m512i as_pairs(VF low, VF high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// Two vectors as bf16, one after the other.
TEA_WORD __m512i joined(VF low, VF high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// ------------------------------------------------------------------------------------- forward

// The scores of some keys, [key][row].
struct Panel {
  int64_t first, keys;
  float* s;
  float factor;  // logits are s * factor
};

// Work on the vectors of a panel, in steps that fit between the products: N vectors of rows at a
// time. `max` and `sum` are by lane.
template <int N>
class Maxima {
 public:
  Maxima(const Panel& panel, float* max) : panel_(panel), max_(max) {
    std::fill_n(high_, N * kSide, -std::numeric_limits<float>::infinity());
  }

  bool step() {
    VF high[N];
    for (int n = 0; n < N; ++n) high[n] = load(high_ + n * kSide);
    const int64_t end = std::min(at_ + kKeys, panel_.keys);
    for (; at_ < end; ++at_)
      for (int n = 0; n < N; ++n)
        high[n] = larger(load(panel_.s + at_ * kRows + n * kSide), high[n]);
    for (int n = 0; n < N; ++n) store(high_ + n * kSide, high[n]);
    if (at_ < panel_.keys) return true;
    for (int n = 0; n < N; ++n)
      store(max_ + n * kSide, larger(high[n] * panel_.factor, load(max_ + n * kSide)));
    return false;
  }
  int64_t steps() const { return tiles_of(panel_.keys, kKeys); }

 private:
  static constexpr int kKeys = 8;
  const Panel& panel_;
  float* max_;
  alignas(64) float high_[N * kSide];
  int64_t at_ = 0;
};

// P = exp(logit - max) as B of the second product, and its sum.
template <int N>
class Exponentials {
 public:
  Exponentials(const Panel& panel, const float* base, float* sum, std::byte* p)
      : panel_(panel), scale_(panel.factor * kLog2e), base_(base), sum_(sum), p_(p) {}

  bool step() { return at_ < panel_.keys && (two_keys(nullptr), at_ < panel_.keys); }
  int64_t steps() const { return tiles_of(panel_.keys, 2); }
  int64_t at() const { return at_; }

  // `keep`: factors of dropout of these keys, [key][row].
  __attribute__((noinline)) void two_keys(const float* keep) {
    const bool both = at_ + 1 < panel_.keys;
    const float* s = panel_.s + at_ * kRows;
    const VF scale = splat(scale_);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n, s += kSide) {
      const VF base = load(base_ + n * kSide);
      VF low = power_of_two(load(s) * scale - base), high{};
      if (both) high = power_of_two(load(s + kRows) * scale - base);
      store(sum_ + n * kSide, load(sum_ + n * kSide) + (low + high));
      if (keep) {
        low *= load(keep + n * kSide);
        if (both) high *= load(keep + kRows + n * kSide);
      }
      _mm512_store_si512(p_ + (at_ / 2 * kRows + n * kSide) * 4, as_pairs_up(low, high));
    }
    at_ += 2;
  }

  // P of keys that complete a tile.
  void pad() {
    for (; at_ % kDepth; at_ += 2)
      for (int n = 0; n < N; ++n)
        _mm512_store_si512(p_ + (at_ / 2 * kRows + n * kSide) * 4, _mm512_setzero_si512());
  }

 private:
  const Panel& panel_;
  const float scale_;
  const float* base_;
  float* sum_;
  std::byte* p_;
  int64_t at_ = 0;
};

// One block of rows on its way over the keys, a panel at a time. The products of a panel run beside
// the softmax of its neighbours.
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
    probs_ = reinterpret_cast<std::byte*>(s_ + 2 * kPanel * kRows);
    queries_ = probs_ + kPanel * kRows * 2;
    pack_block(BlockRows(view, block, TEA_Q), p_.dim_qk, queries_);
    for (int lane = 0; lane < kRows; ++lane)
      out.max[lane] = used_[lane] = -std::numeric_limits<float>::infinity(), out.sum[lane] = 0;
    std::fill_n(out.o, padded(p_.v_dim()) * kRows, 0.0f);
  }

  static int64_t scratch(const Problem& p) {
    return scratch_reals<float>(p) + 2 * kPanel * kRows + kPanel * kRows / 2 +
           Sizes(p).deep_k * kGroups * kTileBytes / 4;
  }

  void operator()() {
    switch (groups()) {
      case 1:
        return over_panels<1>();
      case 2:
        return over_panels<2>();
      case 3:
        return over_panels<3>();
      default:
        return over_panels<4>();
    }
  }

 private:
  int64_t groups() const { return t_.lanes() / kSide; }

  // The panel from `first` on, in one of two buffers.
  Panel panel(int64_t first, int which) const {
    return {first, std::min<int64_t>(kPanel, columns_.end - first), s_ + which * kPanel * kRows, 1};
  }

  template <int N>
  void over_panels() {
    const int64_t base = block_.group.seen.begin;
    Panel now = panel(base + (columns_.begin - base) / kDepth * kDepth, 0);
    if (now.first >= columns_.end) return;
    scores(now, 0, Nothing{});
    logits(now);
    Maxima<N> first(now, out_.max);
    while (first.step()) continue;
    for (int which = 1;; which ^= 1) {
      const Subnormals none(false);
      begin<N>();
      Exponentials<N> exponentials(now, base_, out_.sum, probs_);
      Panel next = panel(now.first + kPanel, which);
      const bool more = next.first < columns_.end;
      if (more && !p_.drops())
        scores(next, exponentials.steps(), [&] { return exponentials.step(); });
      else if (more)
        scores(next, 0, Nothing{});
      finish(exponentials, now);
      rescale<N>();
      if (!more) return values(now, 0, Nothing{});
      logits(next);
      Maxima<N> maxima(next, out_.max);
      values(now, maxima.steps(), [&] { return maxima.step(); });
      now = next;
    }
  }

  // Calls `product` with what it is to call between its `steps` products of tiles: all of `work`.
  template <class Work, class Product>
  static void beside(int64_t steps, int64_t quanta, Work work, Product product) {
    if constexpr (std::is_same_v<Work, Nothing>) {
      product(work);
    } else {
      const int64_t each = tiles_of(quanta, static_cast<int>(steps));
      bool more = quanta > 0;
      product([&] {
        for (int64_t i = 0; more && i < each; ++i) more = work();
      });
      while (more) more = work();
    }
  }

  template <class Work>
  void scores(const Panel& panel, int64_t quanta, Work work) {
    const int64_t tiles = tiles_of(panel.keys, kSide), deep = packed_.size.deep_k;
    const Tiles k = packed_.rows_k(panel.first - block_.group.seen.begin);
    beside(tiles_of(tiles, 2) * tiles_of(groups(), 2) * deep, quanta, work, [&](auto&& between) {
      multiply_tiles(tiles, groups(), deep, k, block_columns(queries_), panel.s, kRows, false,
                     between);
    });
  }

  template <class Work>
  void values(const Panel& panel, int64_t quanta, Work work) {
    const int64_t tiles = packed_.size.wide_v, deep = tiles_of(panel.keys, kDepth);
    const Tiles v = packed_.turned_v(panel.first - block_.group.seen.begin);
    const Tiles probs{probs_, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4};
    beside(tiles_of(tiles, 2) * tiles_of(groups(), 2) * deep, quanta, work, [&](auto&& between) {
      multiply_tiles(tiles, groups(), deep, v, probs, out_.o, kRows, true, between);
    });
  }

  void move(const Panel& panel, int64_t j) {
    t_.s = panel.s + j * kRows;
    t_.move(panel.first + j, panel.first + std::min<int64_t>(j + kCols, panel.keys));
  }

  // Scores stay as they are where logits are no more than a positive multiple of them.
  void logits(Panel& panel) {
    bool plain = t_.is_plain() && p_.scale_value() > 0;
    for (int64_t j = 0; plain && j < panel.keys; j += kCols) {
      move(panel, j);
      plain = !t_.is_partial();
    }
    if (plain) {
      panel.factor = static_cast<float>(p_.scale_value());
      return;
    }
    const Subnormals kept(true);
    for (int64_t j = 0; j < panel.keys; j += kCols) {
      move(panel, j);
      t_.logits(false);
    }
  }

  // From the maxima before and with this panel: what its exponentials are relative to, and what
  // earlier sums shrink by.
  template <int N>
  void begin() {
    shrinks_ = false;
    for (int n = 0; n < N * kSide; n += kSide) {
      const VF none = splat(-std::numeric_limits<float>::infinity());
      const VF before = load(used_ + n), max = load(out_.max + n);
      const VF base = max == none ? VF{} : max * kLog2e;
      const VF shrink = power_of_two(before * kLog2e - base);
      store(out_.sum + n, load(out_.sum + n) * shrink);
      store(base_ + n, base), store(shrink_ + n, shrink), store(used_ + n, max);
      shrinks_ |= _mm512_cmpneq_ps_mask((__m512)before, (__m512)max) != 0;
    }
  }

  template <int N>
  void finish(Exponentials<N>& exponentials, const Panel& panel) {
    while (exponentials.at() < panel.keys) {
      const int64_t j = exponentials.at() % kCols;
      if (p_.drops() && j == 0) move(panel, exponentials.at()), t_.dropout();
      exponentials.two_keys(p_.drops() ? t_.keep + j * kRows : nullptr);
    }
    exponentials.pad();
  }

  template <int N>
  void rescale() {
    for (int64_t d = 0; shrinks_ && d < p_.v_dim(); ++d)
      for (int n = 0; n < N; ++n) {
        float* at = out_.o + d * kRows + n * kSide;
        store(at, load(at) * load(shrink_ + n * kSide));
      }
  }

  const Problem& p_;
  const RowBlock& block_;
  const Columns columns_;
  const Partial<float> out_;
  Tile<float> t_;
  const Packed packed_;
  float* s_;                     // of two panels
  std::byte *probs_, *queries_;  // P as B; Q as B
  alignas(64) float used_[kRows], base_[kRows], shrink_[kRows];
  bool shrinks_ = false;
};

double attend_amx(const View& view, const RowBlock& block, Columns columns, Partial<float> out,
                  float* scratch) {
  const Configured unit;
  Walk(view, block, columns, out, scratch)();
  return 0;
}

// ------------------------------------------------------------------------------------ backward

constexpr int kStep = 128;  // keys of one step of backward

// One block of rows on its way over the keys, which adds to the gradients.
class WalkBack {
 public:
  WalkBack(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch)
      : p_(view.p),
        block_(block),
        g_(g),
        t_(view, block, block.all, scratch),
        packed_(p_, block.group, Pass::kBackward, block.group.packed) {
    s_ = scratch + scratch_reals<float>(p_);
    dp_ = s_ + kStep * kRows;
    auto* at = reinterpret_cast<std::byte*>(dp_ + kStep * kRows);
    const auto take = [&](int64_t bytes) {
      std::byte* from = at;
      at += bytes;
      return from;
    };
    probs_ = take(kStep * kRows * 2), ds_ = take(kStep * kRows * 2);
    ds_pairs_ = take(kStep * kRows * 2);
    const Sizes& n = packed_.size;
    q_ = take(n.deep_k * kGroups * kTileBytes), dout_ = take(n.deep_v * kGroups * kTileBytes);
    q_pairs_ = take(n.wide_k * 2 * kTileBytes), dout_pairs_ = take(n.wide_v * 2 * kTileBytes);
    load_rows(view);
  }

  static int64_t scratch(const Problem& p) {
    const Sizes n(p);
    const int64_t tiles = (n.deep_k + n.deep_v) * kGroups + (n.wide_k + n.wide_v) * 2;
    return scratch_reals<float>(p) + 2 * kStep * kRows + 3 * kStep * kRows / 2 +
           tiles * kTileBytes / 4;
  }

  void operator()() {
    const int64_t base = block_.group.seen.begin;
    const Sizes& n = packed_.size;
    for (int64_t j = (block_.all.begin - base) / kDepth * kDepth; base + j < block_.all.end;
         j += kStep) {
      first_ = base + j, keys_ = std::min<int64_t>(kStep, block_.all.end - first_);
      const int64_t tiles = tiles_of(keys_, kSide), dk = t_.dim_k(), dv = t_.dim_v();
      const auto columns = [](const std::byte* b) { return block_columns(b); };
      multiply_tiles(tiles, 2 * deep(), n.deep_k, packed_.rows_k(j), columns(q_), s_, kRows, false);
      multiply_tiles(tiles, 2 * deep(), n.deep_v, packed_.rows_v(j), columns(dout_), dp_, kRows,
                     false);
      gradients();
      multiply_tiles(tiles, n.wide_v, deep(), rows(probs_), pairs(dout_pairs_, n.wide_v),
                     g_.dv + first_ * dv, dv, true);
      multiply_tiles(tiles, n.wide_k, deep(), rows(ds_), pairs(q_pairs_, n.wide_k),
                     g_.dk + first_ * dk, dk, true);
      multiply_tiles(n.wide_k, 2 * deep(), tiles_of(keys_, kDepth), packed_.turned_k(j),
                     {ds_pairs_, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4}, t_.dq, kRows, true);
    }
  }

  const float* dq() const { return t_.dq; }

 private:
  // Tiles of k along the rows, 32 at a time. Rows without anything to see have P = dS = 0.
  int64_t deep() const { return tiles_of(t_.lanes(), kDepth); }

  static Tiles rows(const std::byte* from) { return {from, kSide * kRows * 2, 64, kRows * 2}; }
  static Tiles pairs(const std::byte* from, int64_t wide) {
    return {from, kTileBytes, wide * kTileBytes, 64};
  }

  void load_rows(const View& view) {
    const BlockRows q(view, block_, TEA_Q), dout(view, block_, TEA_DOUT);
    pack_block(q, p_.dim_qk, q_);
    pack_block(dout, p_.v_dim(), dout_);
    for (int half = 0; half < 2; ++half) {
      const int64_t k = half * packed_.size.wide_k, v = half * packed_.size.wide_v;
      pack_pairs(q.row + half * kDepth, p_.dim_qk, q_pairs_ + k * kTileBytes);
      pack_pairs(dout.row + half * kDepth, p_.v_dim(), dout_pairs_ + v * kTileBytes);
    }
    t_.load_queries(TEA_DOUT, 1, p_.v_dim(), t_.dim_v(), t_.dout_rows);
    row_sums(view, block_, t_, g_.dsink);
    std::fill_n(t_.dq, t_.dim_k() * kRows, 0.0f);
  }

  // P and dS of the step, as operands.
  void gradients() {
    const bool plain = t_.is_plain() && !p_.drops();
    const Subnormals flushed(!plain);
    for (int64_t j = 0; j < keys_; j += kCols) {
      t_.s = s_ + j * kRows, t_.dp = dp_ + j * kRows;
      t_.move(first_ + j, first_ + std::min<int64_t>(j + kCols, keys_));
      if (plain) {
        store_tile_rows(j, [this](int64_t i, int lane) { return plain_pair(i, lane); });
        continue;
      }
      t_.logits(p_.softcap > 0);
      if (p_.drops()) t_.dropout();
      probabilities(p_, t_);
      before_scale(p_, t_);
      store_tile_rows(j, [this](int64_t i, int lane) {
        return Pair{load(t_.s + i * kRows + lane), load(t_.dp + i * kRows + lane)};
      });
    }
  }

  struct Pair {
    VF p, ds;
  };

  Pair plain_pair(int64_t j, int lane) const {
    const auto scale = static_cast<float>(p_.scale_value());
    const int64_t at = j * kRows + lane;
    const VF x = load(t_.s + at) * (scale * kLog2e) - load(t_.lse + lane) * kLog2e;
    const VF p = t_.where_seen(power_of_two(x), lane, j, 0);
    const VF ds = p * (load(t_.dp + at) * scale - load(t_.delta + lane) * scale);
    return {p, t_.where_seen(ds, lane, j, 0)};
  }

  // 32 rows of two keys at a time; keys that complete a tile of k are zero.
  template <class Element>
  void store_tile_rows(int64_t first, Element element) {
    const int64_t whole = tiles_of(t_.cols, kDepth) * kDepth;
    for (int lane = 0; lane < deep() * kDepth; lane += kDepth)
      for (int64_t j = 0; j < whole; j += 2) {
        Pair at[2][2]{};
        for (int key = 0; key < 2; ++key)
          for (int half = 0; half < 2; ++half)
            if (j + key < t_.cols) at[key][half] = element(j + key, lane + half * kSide);
        for (int key = 0; key < 2; ++key) {
          const int64_t to = ((first + j + key) * kRows + lane) * 2;
          _mm512_store_si512(probs_ + to, joined(at[key][0].p, at[key][1].p));
          _mm512_store_si512(ds_ + to, joined(at[key][0].ds, at[key][1].ds));
        }
        for (int half = 0; half < 2; ++half)
          _mm512_store_si512(ds_pairs_ + ((first + j) / 2 * kRows + lane + half * kSide) * 4,
                             as_pairs(at[0][half].ds, at[1][half].ds));
      }
  }

  const Problem& p_;
  const RowBlock& block_;
  Gradients<float>& g_;
  Tile<float> t_;
  const Packed packed_;
  float *s_, *dp_;                                 // [key][row] of the step
  std::byte *probs_, *ds_, *ds_pairs_;             // P and dS as A, dS as B
  std::byte *q_, *dout_, *q_pairs_, *dout_pairs_;  // as B, along their elements or rows
  int64_t first_ = 0, keys_ = 0;                   // of the step
};

int64_t scratch_amx(const Problem& p) {
  return std::max(Walk::scratch(p), p.training ? WalkBack::scratch(p) : 0);
}

// The gradient of a bias is left to AVX-512, which reads K and V as they lie.
void backward_amx(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch) {
  if (g.dbias) return kAvx512.single->backward(view, block, g, scratch);
  const Configured unit;
  WalkBack walk(view, block, g, scratch);
  walk();
  store_dq(view, block, walk.dq(), g);
}

constexpr Kernels<float> kAmxKernels{scratch_amx,   packed_bytes, pack_head,        attend_amx,
                                     finish<float>, backward_amx, store_keys<float>};
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {

// The kernel hands the tile registers out on request, once per process.
bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool available() {
  static const bool yes = [] {
    if (!kAvx512.available() || !__builtin_cpu_supports("avx512bf16")) return false;
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    return (d & kBf16) && (d & kTile) && permitted();
  }();
  return yes;
}
}  // namespace
const InstructionSet kAmx{"cpu-amx", available, &kAmxKernels, nullptr, &kAvx512};
}  // namespace tea::cpu
#else
namespace tea::cpu {
const InstructionSet kAmx{"cpu-amx", [] { return false; }, nullptr, nullptr};
}
#endif

namespace tea::cpu {
Attempt plan_amx(const Problem& p, const Device& d) { return plan_with(kAmx, p, d); }
}  // namespace tea::cpu
