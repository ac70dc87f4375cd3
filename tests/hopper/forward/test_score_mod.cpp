// Work descriptors, and the score modifications of the general kernels: the device code of the
// forward pass compiled for the host, thread by thread, against the definition in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "hopper/forward/score_mod.cuh"
#include "hopper/forward/tile_order.cuh"

namespace tea::hopper {
namespace {

constexpr int kHeads = 4;

struct Draw {
  std::mt19937 generator;
  int between(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  }
  bool sometimes() { return between(0, 1); }
  float normal() { return std::normal_distribution<float>()(generator); }
};

// One side: lengths, and a ragged buffer with gaps before each sequence and behind the last.
struct Lengths {
  std::vector<int32_t> cu_seqlens{0}, offsets;
  SequenceLayout sequences{};

  Lengths(Draw& d, int batch, int most) {
    int tokens = 0;
    for (int i = 0; i < batch; ++i) {
      const int length = d.between(0, most);
      cu_seqlens.push_back(cu_seqlens.back() + length);
      offsets.push_back(tokens += d.between(0, 5));
      tokens += length;
    }
    offsets.push_back(tokens);
    sequences.form = d.between(TEA_DENSE, TEA_RAGGED);
    sequences.max_seqlen = most;
    if (sequences.form != TEA_DENSE) sequences.cu_seqlens = cu_seqlens.data();
    if (sequences.form != TEA_RAGGED) return;
    sequences.tokens = tokens + 3;
    sequences.offsets = offsets.data();
  }
};

// A random problem with every option, and its definition.
struct Problem {
  Draw d;
  const int batch, most_q, most_kv;
  const Type type;
  Lengths q, kv;
  AttentionArguments f = {};
  std::vector<char> bias;
  std::vector<float> slopes, sinks;
  int copied = 0;  // blocks whose bias a thread took from shared memory
  int whole = 0;   // and whose cells are dropout's
  int64_t rng[2];

  Problem(uint32_t seed, Type t)
      : d{std::mt19937(seed)},
        batch(d.between(1, 3)),
        most_q(d.between(1, 200)),
        most_kv(d.between(1, 260)),
        type(t),
        q(d, batch, most_q),
        kv(d, batch, most_kv),
        rng{d.between(0, 1 << 30), int64_t{d.between(0, 1 << 30)} << 20} {
    f.batch = batch, f.heads_q = kHeads, f.heads_kv = 2, f.dim_qk = f.dim_v = 64;
    f.scale = d.between(0, 3) ? 0.3f : -0.2f;
    f.queries = q.sequences, f.keys = kv.sequences;
    f.mask = {d.sometimes(), d.sometimes(), d.sometimes() ? d.between(1, 100) : 0,
              d.sometimes() ? d.between(1, 100) : 0};
    if (d.sometimes())
      for (int64_t& o : f.origin) o = d.sometimes() ? 16 * d.between(0, 5) : d.between(0, 100);
    for (int i = 0; i < batch * kHeads; ++i) slopes.push_back(d.normal());
    for (int i = 0; i < kHeads; ++i) sinks.push_back(d.normal());
    f.softmax = d.between(TEA_SOFTMAX_VANILLA, TEA_SOFTMAX_LEARNABLE), f.sink = sinks.data();
    constexpr float kCaps[] = {0.5f, 3, 50, 1e6f};
    if (d.sometimes()) f.softcap = kCaps[d.between(0, 3)];
    if (d.sometimes()) f.has_dropout = 1, f.dropout_threshold = dropout_threshold(0.3f);
    f.rng = rng;
    f.alibi = d.between(TEA_ALIBI_NONE, TEA_ALIBI_SLOPES);
    f.slopes = slopes.data(), f.slopes_stride = d.sometimes() ? kHeads : 0;
    if (d.between(0, 2)) add_bias();
  }

  void add_bias() {
    const bool is_fp32 = d.sometimes();
    f.bias.dtype = is_fp32 ? TEA_FP32 : type == Type::kBf16 ? TEA_BF16 : TEA_FP16;
    f.bias.kind = d.sometimes() ? TEA_BIAS_PRE_SCALE : TEA_BIAS_POST_SCALE;
    tea_bias_strides& s = f.bias.stride;
    int64_t size = 1;
    const bool aligned = d.sometimes();  // rows begin at multiples of 16 bytes, or anywhere
    const auto stride = [&](int n, int64_t smallest) {
      if (d.between(0, 3) == 0) return int64_t{0};  // broadcast
      const int64_t step = std::max(size, smallest);
      size = aligned ? (step * n + 7) / 8 * 8 : step * n + d.between(0, 1);
      return step;
    };
    s.col = aligned ? stride(most_kv, 1) : stride(most_kv, d.between(1, 2));
    s.row = stride(most_q, 1);
    s.head = stride(kHeads, 1), s.batch = stride(batch, 1);
    bias.resize(static_cast<size_t>(size + 1) * 4);
    for (int64_t i = 0; i <= size; ++i) {
      const float x = d.between(0, 15) ? d.normal() : -INFINITY;
      const uint16_t code = type == Type::kBf16 ? bf16_encode(x) : fp16_encode(x);
      if (is_fp32)
        memcpy(&bias[static_cast<size_t>(i) * 4], &x, 4);
      else
        memcpy(&bias[static_cast<size_t>(i) * 2], &code, 2);
    }
    f.bias.data = bias.data();
  }

  // Of the definition; i and j count from the start of the sequence.
  int64_t delta(int b) const {
    return diagonal(f.mask.bottom_right, sequence_of(f.queries, b).length,
                    sequence_of(f.keys, b).length);
  }
  Band band(int b) const { return tea::band(f.mask, delta(b), f.origin[2], f.origin[3]); }
  double bias_at(int b, int h, int64_t i, int64_t j) const {
    const tea_bias_strides& s = f.bias.stride;
    const auto at = static_cast<size_t>(b * s.batch + h * s.head + i * s.row + j * s.col);
    if (f.bias.dtype == TEA_FP32) {
      float x;
      memcpy(&x, &bias[at * 4], 4);
      return double{x};
    }
    uint16_t code;
    memcpy(&code, &bias[at * 2], 2);
    return double{type == Type::kBf16 ? bf16_decode(code) : fp16_decode(code)};
  }
  double score(double x, int b, int h, int64_t i, int64_t j) const {
    if (f.bias.kind == TEA_BIAS_PRE_SCALE) x += bias_at(b, h, i, j);
    x *= double{f.scale};
    if (f.softcap > 0) x = softcap(x, double{f.softcap});
    if (f.bias.kind == TEA_BIAS_POST_SCALE) x += bias_at(b, h, i, j);
    const int64_t distance = alibi_distance(i + f.origin[2], delta(b), j + f.origin[3]);
    const double slope = f.alibi == TEA_ALIBI_NONE     ? 0
                         : f.alibi == TEA_ALIBI_SLOPES ? double{f.slopes[b * f.slopes_stride + h]}
                                                       : alibi_slope(h, kHeads);
    return x - slope * static_cast<double>(distance);
  }
  bool keeps(int b, int h, int64_t i, int64_t j) const {
    return dropout_keeps({static_cast<uint64_t>(rng[0]), static_cast<uint64_t>(rng[1])},
                         dropout_stream(b + f.origin[0], h + f.origin[1]), i + f.origin[2],
                         j + f.origin[3], f.dropout_threshold);
  }
};

// The band and the keys of the tile show each row what it may see, and nothing more is loaded than
// the rows of the sequence see between them.
void check_columns(const Problem& p, const WorkTile& w) {
  const int64_t length = sequence_of(p.f.keys, w.batch).length;
  int64_t first = INT32_MAX, last = 0;
  for (int i = 0; i < w.seqlen_q; ++i) {
    const Columns want = visible_columns(p.band(w.batch), i, length),
                  got = visible_columns({w.lo, w.hi}, i, w.seqlen_kv);
    const bool attends = want.begin < want.end;
    ASSERT_EQ(w.seqlen_kv > 0 && got.begin < got.end, attends) << "row " << i;
    if (!attends) continue;
    ASSERT_EQ(got.begin + w.skipped_keys, want.begin) << "row " << i;
    ASSERT_EQ(got.end + w.skipped_keys, want.end) << "row " << i;
    first = std::min(first, want.begin), last = std::max(last, want.end);
  }
  if (first > last) return;
  EXPECT_EQ(w.skipped_keys, first);
  EXPECT_EQ(w.seqlen_kv, last - first);
  EXPECT_EQ(w.start_kv, sequence_of(p.f.keys, w.batch).start + first);
}

// The bias of 64 rows in a block, as TMA loads it: arbitrary values outside the tensor.
template <int kCols>
BiasTile copy_bias(const Problem& p, const WorkTile& w, int block) {
  const tea_bias_strides& s = p.f.bias.stride;
  if (!p.f.bias.kind || p.f.bias.dtype == TEA_FP32 || s.col != 1 || w.skipped_keys % 8) return {};
  const int rows = s.row ? 64 : 1;
  memset(shared_memory, 0xFF, BiasTile::bytes(kCols));  // NaN
  for (int row = 0; row < rows; ++row)
    for (int c = 0; c < kCols; ++c) {
      const int64_t i = rows > 1 ? w.first_row + row : 0, j = w.skipped_keys + block * kCols + c;
      if (i >= p.f.queries.max_seqlen || j >= p.f.keys.max_seqlen) continue;
      const auto from = static_cast<size_t>(w.batch * s.batch + w.head * s.head + i * s.row + j);
      memcpy(shared_memory + c / BiasTile::kColumns * BiasTile::kSlabBytes +
                 swizzled(BiasTile::kSwizzle, row, c % BiasTile::kColumns * 2),
             &p.bias[from * 2], 2);
    }
  return {shared_memory, rows};
}

// The shared-memory reads of the other lanes of the thread's warp.
template <Type kType, int kCols>
void collect_addresses(const BiasTile& bias) {
  if (!bias.rows || threadIdx.x % 32) return;
  const unsigned first = threadIdx.x;
  for (; threadIdx.x < first + 32; ++threadIdx.x) {
    float any[kCols / 2] = {};
    matrix_load = 0;
    add_bias<kType>(any, 1, bias);
  }
  threadIdx.x = first;
}

// A thread's elements of a block, as the kernel treats them.
template <Type kType, int kCols>
void check_thread(Problem& p, const WorkTile& w, int block, const BiasTile& bias) {
  const int row = w.first_row + accumulator_row(0), column = block * kCols;
  const ElementOrigin corner = {row, column + accumulator_column(0)};
  uint32_t mask[2];
  for (int r = 0; r < 2; ++r) {
    const Columns c = visible_columns({w.lo, w.hi}, row + 8 * r, w.seqlen_kv);
    mask[r] = column_mask<kCols>(static_cast<int>(std::max(c.begin - column, int64_t{0})),
                                 static_cast<int>(std::min(c.end - column, int64_t{kCols})));
    if (row + 8 * r >= w.seqlen_q) mask[r] = 0;
  }
  float raw[kCols / 2], modified[kCols / 2], kept[kCols / 2];
  for (int i = 0; i < kCols / 2; ++i) raw[i] = modified[i] = 4 * p.d.normal(), kept[i] = 1;
  matrix_load = 0;
  float highest[2], largest[2] = {kMinusInfinity, kMinusInfinity};
  if (p.f.bias.kind)
    modify_scores<kType, true>(modified, p.f, w, corner, mask, bias, highest);
  else
    modify_scores<kType, false>(modified, p.f, w, corner, mask, bias, highest);
  const ScoreUnit unit = modifies_scores(p.f) ? score_unit(p.f) : ScoreUnit{1, 0};
  for (float& x : modified) x = std::fma(unit.factor, x, unit.offset);
  p.copied += bias.rows > 0;
  uint32_t p_pairs[kCols / 16][4];  // of which dropout alone takes pairs
  for (auto& four : p_pairs) std::fill_n(four, 4, ~0u);
  if (p.f.has_dropout) apply_dropout(kept, p.f, w, corner);
  const bool whole = p.f.has_dropout && dropout_is_tile_aligned(p.f);
  if (whole) apply_dropout(p_pairs, p.f, w, corner);
  p.whole += whole;
  for (int i = 0; i < kCols / 2; ++i) {
    const int64_t at = w.first_row + accumulator_row(i), key = column + accumulator_column(i),
                  j = key + w.skipped_keys;
    const bool attends = at < w.seqlen_q && key < w.seqlen_kv && visible(p.band(w.batch), at, j);
    ASSERT_EQ(mask[row_slot(i)] >> index_in_row(i) & 1, attends) << "row " << at << " key " << j;
    if (!attends) continue;
    const double want = p.score(double{raw[i]}, w.batch, w.head, at, j);
    const double unsure = 1e-5 + 3e-7 * double{p.f.softcap} + 1e-6 * std::fabs(want);
    largest[row_slot(i)] = std::max(largest[row_slot(i)], modified[i]);
    if (double{modified[i]} != want) {  // minus infinity is minus infinity
      ASSERT_NEAR(double{modified[i]}, want, unsure) << "row " << at << " key " << j;
    }
    const bool stays = !p.f.has_dropout || p.keeps(w.batch, w.head, at, j);
    ASSERT_EQ(kept[i] != 0, stays) << "row " << at << " key " << j;
    const uint32_t pair = p_pairs[i / 8][i % 8 / 2] >> i % 2 * 16 & 0xFFFF;
    ASSERT_EQ(pair, !whole || stays ? 0xFFFFu : 0) << "row " << at << " key " << j;
  }
  if (!softcap_is_last(p.f)) return;
  for (int r = 0; r < 2; ++r) {
    const float row_max = std::fma(unit.factor, highest[r], unit.offset);
    if (row_max != largest[r]) {
      ASSERT_NEAR(row_max, largest[r], 1e-5f + 3e-7f * p.f.softcap) << "row half " << r;
    }
  }
}

// Counts how many times a bias came from shared memory, and how many times dropout took pairs.
template <Type kType, int kCols>
void check_tile(uint32_t seed, int* copied, int* whole) {
  Problem p(seed, kType);
  if (kCols % BiasTile::kColumns)
    p.f.bias.kind = TEA_BIAS_NONE;  // then kernels for a bias have others
  const int b = p.d.between(0, p.batch - 1), h = p.d.between(0, kHeads - 1);
  const Sequence q = sequence_of(p.f.queries, b);
  if (q.length == 0) return;
  WorkTile w;
  const TileIndex tile = {p.d.between(0, static_cast<int>(q.length - 1) / 64), h, b};
  const SequenceBounds common = bounds_of(p.f, b);
  describe<64, kCols>(w, p.f, common, FastDivisor(p.f.heads_q / p.f.heads_kv), tile);
  describe_origin(w, p.f);
  describe_score_mod(w, p.f);
  EXPECT_EQ(w.seqlen_q, q.length);
  EXPECT_EQ(w.start_q, q.start);
  EXPECT_EQ(w.head_kv, h / (p.f.heads_q / p.f.heads_kv));
  check_columns(p, w);
  const Range clear = w.unmasked_blocks<kCols>(w.first_row);
  for (int block = w.blocks.begin; block < w.blocks.end; ++block) {
    for (int i = w.first_row; i < std::min(w.first_row + 64, w.seqlen_q); ++i) {
      const Columns c = visible_columns({w.lo, w.hi}, i, w.seqlen_kv);
      const bool all = c.begin <= block * kCols && c.end >= (block + 1) * kCols;
      ASSERT_TRUE(all || block < clear.begin || block >= clear.end);
    }
    const BiasTile bias = copy_bias<kCols>(p, w, block);
    for (unsigned thread = 0; thread < 128; ++thread) {
      threadIdx.x = thread;
      collect_addresses<kType, kCols>(bias);
      check_thread<kType, kCols>(p, w, block, bias);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  *copied += p.copied;
  *whole += p.whole;
}

TEST(HopperWork, ScoresOfRandomTilesAgreeWithTheDefinition) {
  int copied = 0, whole = 0;
  for (uint32_t seed = 0; seed < 400 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_tile<Type::kBf16, 128>(seed, &copied, &whole);
    check_tile<Type::kFp16, 64>(seed, &copied, &whole);
    check_tile<Type::kBf16, 96>(seed, &copied, &whole);
    check_tile<Type::kFp16, 80>(seed, &copied, &whole);
    check_tile<Type::kBf16, 112>(seed, &copied, &whole);
  }
  EXPECT_GT(copied, 1000);
  EXPECT_GT(whole, 1000);
}

// Every uniform with thresholds of all sizes, in both halves.
TEST(HopperDropout, PairsKeepWhatIsNotBelowTheThreshold) {
  for (const uint32_t threshold : {1u, 2u, 6554u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x10000u})
    for (uint32_t u = 0; u < 0x10000; ++u) {
      const uint32_t other = u * 40503u & 0xFFFF;
      const uint32_t want = (u >= threshold ? 0xFFFFu : 0) | (other >= threshold ? 0xFFFF0000u : 0);
      ASSERT_EQ(kept_pair(u | other << 16, threshold), want) << u << " and " << other;
    }
}

// A soft cap is a polynomial where all scores of a thread are below 1 in its units, else
// exponentials and a division for four: both at, before and behind that place, and at what is no
// number.
TEST(HopperWork, TheSoftCapIsTheSameOnBothSidesOfItsPolynomial) {
  constexpr int kCount = 8;
  for (int n = -1300; n <= 1300; ++n)
    for (const float other : {0.0f, 0.999f, 1.0f, -1.001f, 40.0f, -INFINITY}) {
      float s[kCount], highest[2];
      for (float& x : s) x = static_cast<float>(n) / 1000;
      s[5] = other;
      const float raw[2] = {s[0], other};
      softcap_scores(s, highest);
      const auto want = [](float x) { return -1 / (1 + std::exp2(double{x})); };
      EXPECT_NEAR(s[0], want(raw[0]), 1.5e-7) << n << " next to " << other;
      EXPECT_NEAR(s[5], want(other), 1.5e-7) << n << " next to " << other;
      for (int r = 0; r < 2; ++r) {
        const float row_max = row_slot(5) == r ? std::max(raw[0], other) : raw[0];
        EXPECT_NEAR(highest[r], want(row_max), 1.5e-7) << n << " next to " << other;
      }
    }
  float s[kCount] = {}, highest[2];
  s[2] = NAN;
  softcap_scores(s, highest);
  EXPECT_TRUE(std::isnan(s[2]));
}

// The largest difference of logarithms of P from the definition, in units of what is allowed.
// Every fourth product is the largest that there is, `most` of the cap. With some_masked,
// some of the others are masked.
double worst_under_cap(float scale, float cap, double most, bool some_masked) {
  constexpr int kCount = 64;
  Draw d;
  float s[kCount], rescale[2];
  double scores[kCount], row_max[2] = {-INFINITY, -INFINITY};
  uint32_t mask[2] = {~0u, ~0u};
  for (int i = 0; i < kCount; ++i) {
    const double of_cap = most * (i % 8 == 1 ? 1 : i % 8 == 2 ? -1 : std::sin(d.normal()));
    s[i] = static_cast<float>(of_cap * double{cap} / double{scale});
    scores[i] = double{cap} * std::tanh(double{s[i]} * double{scale} / double{cap});
    if (some_masked && i % 5 == 0) {
      mask[row_slot(i)] &= ~(1u << index_in_row(i));
      s[i] = kMinusInfinity;
      scores[i] = -INFINITY;
    }
    row_max[row_slot(i)] = std::max(row_max[row_slot(i)], scores[i]);
  }
  OnlineSoftmax softmax;
  softmax.start();
  const SoftcapPolynomial c = make_softcap_polynomial(scale, cap);
  SoftcapSoftmax b;
  b.update_max(c, softmax, s, mask, 2 * cap * kLog2E, rescale);
  b.exponentials(c, s, mask);
  double worst = 0;
  for (int i = 0; i < kCount; ++i) {
    const double want = scores[i] - row_max[row_slot(i)];
    const double unsure = 2e-6 + 5e-7 * double{cap} + 1e-6 * std::fabs(want);
    if (want < -80)
      worst = std::max(worst, s[i] < 1e-34f ? 0 : 1e9);
    else
      worst = std::max(worst, std::fabs(std::log(double{s[i]}) - want) / unsure);
    const double is = double{std::fma(2 * cap, softmax.row_max[row_slot(i)], cap)};
    worst = std::max(worst, std::fabs(is - row_max[row_slot(i)]) / (5e-7 * double{cap}));
  }
  return worst;
}

// Up to a quarter of the cap the exponents have a polynomial, for all scores of a warp or for none.
// Where the coefficients of caps leave the range of floats, it serves no score.
TEST(HopperWork, TheSoftmaxUnderACapIsTheSameOnBothSidesOfItsPolynomial) {
  for (const float cap : {0.3f, 20.0f, 50.0f, 400.0f})
    for (const float scale : {0.125f, 1.0f, 3.0f})
      for (const double most : {0.0, 0.01, 0.249, 0.2501, 0.4, 2.0, 30.0, 1000.0})
        for (const bool some_masked : {false, true})
          EXPECT_LT(worst_under_cap(scale, cap, most, some_masked), 1)
              << cap << ' ' << scale << ' ' << most << ' ' << some_masked;
  EXPECT_GT(make_softcap_polynomial(0.125f, 50).limit, 0);
  for (const float cap : {1e-30f, 1e-9f, 1e9f, 1e30f})
    EXPECT_LT(make_softcap_polynomial(0.125f, cap).limit, 0);
  for (const float cap : {1e-9f, 1e-4f}) EXPECT_LT(worst_under_cap(0.125f, cap, 0.1, true), 1);
}

// NaN stays NaN, and rows without a visible key have P = 0, for logits near zero and far from it.
TEST(HopperWork, UnderACapWhatIsNoNumberStaysNone) {
  for (const float other : {1.0f, 1000.0f}) {
    float s[8] = {NAN, 1, kMinusInfinity, kMinusInfinity, other, 2, kMinusInfinity, kMinusInfinity};
    float rescale[2];
    const uint32_t mask[2] = {~0u, 0};
    OnlineSoftmax softmax;
    softmax.start();
    const SoftcapPolynomial c = make_softcap_polynomial(1, 50);
    SoftcapSoftmax b;
    b.update_max(c, softmax, s, mask, 100 * kLog2E, rescale);
    EXPECT_EQ(b.use_polynomial, other < 2);
    b.exponentials(c, s, mask);
    EXPECT_TRUE(std::isnan(s[0]));
    for (const int i : {2, 3, 6, 7}) EXPECT_EQ(s[i], 0) << i;
    EXPECT_EQ(softmax.row_max[1], kMinusInfinity);
  }
}

// Of 132 CTAs that fetch causal tiles as the scheduler warp does: the mean share of work over the
// largest. A tile costs its key blocks and two more. A CTA fetches the number of the next tile when
// kFetchLead blocks (shared_memory.cuh) remain, or at the start of a tile without so many.
double balance(const TileOrder& order) {
  constexpr int kFetchLead = 4;
  using Cta = std::pair<int64_t, int64_t>;  // fetches its next number; may begin that tile
  std::priority_queue<Cta, std::vector<Cta>, std::greater<>> ctas;
  for (int i = 0; i < 132; ++i) ctas.push({0, 0});
  int64_t total = 0, end = 0;
  for (int n = 0; n < order.count(); ++n) {
    const int length = order.at(n).row_block + 1;
    const auto [fetch, idle] = ctas.top();
    ctas.pop();
    const int64_t start = std::max(fetch, idle), free = start + length + 2;
    ctas.push({length > kFetchLead ? free - kFetchLead : start, free});
    total += length + 2;
    end = std::max(end, free);
  }
  return static_cast<double>(total) / 132 / static_cast<double>(end);
}

TileOrder causal_order(int dim, int rows, int64_t keys, int heads, int batch, int group = 1) {
  const int height = dim == 64 ? 192 : 128, blocks = (rows + height - 1) / height;
  return make_tile_order(blocks, batch, {heads, group, height / 64, 4 * keys * dim, true});
}

// A cache that held one byte less than 32 heads took 31, and the last of 128 had the SMs to
// themselves: 0.90 to 0.96 in half of these shapes.
TEST(HopperOrder, CausalTilesEndEvenly) {
  for (const int dim : {64, 128, 256})
    for (const int rows : {512, 1024, 2048, 4096, 16384})
      for (const int heads : {2048 / dim, 2048 / dim + 1, 40})
        EXPECT_GT(balance(causal_order(dim, rows, rows, heads, 16384 / rows)), 0.97)
            << dim << ", " << rows << " rows, " << heads << " heads";
}

// Heads that make a little less than three tiles for each SM counted as enough, because numbers of
// heads had been rounded: no rows came last, 0.943 and 0.962.
TEST(HopperOrder, HeadsThatNearlyMakeThreeTilesForEachSmEndEvenly) {
  EXPECT_GT(balance(causal_order(160, 9344, 9344, 8, 1)), 0.97);
  EXPECT_GT(balance(causal_order(256, 25472, 25472, 5, 1)), 0.97);
}

// The heads whose K and V fit 32 MiB, few with rows that come last; none for narrow windows.
TEST(HopperOrder, LongHeadsAreVisitedTogetherAsFarAsTheyFitTheCache) {
  const auto together = [](int dim, int rows, int64_t keys, int group = 1, int last = 0) {
    const TileOrder order = causal_order(dim, rows, keys, 64, 1, group);
    EXPECT_EQ(order.last_blocks, last);
    return order.heads_at_once;
  };
  EXPECT_EQ(together(64, 16384, 16384), 8);
  EXPECT_EQ(together(128, 16384, 16384), 4);
  EXPECT_EQ(together(128, 16384, 16384, 8), 32);
  EXPECT_EQ(together(256, 16384, 16384, 1, 48), 2);
  EXPECT_EQ(together(128, 16384, 1025), 32);
  EXPECT_EQ(together(128, 1024, 1024), 49);
}

TEST(HopperOrder, APreparedDivisorDivides) {
  std::vector<int> numbers = {0, 1, 2, 3, 65535, 65536, INT32_MAX - 1, INT32_MAX};
  Draw d{std::mt19937(6)};
  for (int i = 0; i < 200; ++i) numbers.push_back(d.between(0, INT32_MAX) >> d.between(0, 30));
  for (const int by : numbers) {
    if (by == 0) continue;
    const FastDivisor divisor(by);
    for (const int n : numbers) {
      for (const int near : {n, n / by * by, std::max(n / by * by - 1, 0)}) {
        ASSERT_EQ(near / divisor, near / by) << near << " by " << by;
        ASSERT_EQ(near % divisor, near % by) << near << " by " << by;
      }
    }
  }
}

TEST(HopperOrder, VisitsEveryTileOnceAndTheFirstRowsOfAllHeadsLast) {
  for (const int heads : {1, 3, 8})
    for (const int at_once : {1, 2, 5, 24})
      for (const int last : {0, 1, 4}) {
        const TileOrder order = {7, heads, 3, std::min(at_once, 3 * heads), true, last};
        std::set<std::array<int, 3>> visited;
        for (int n = 0; n < order.count(); ++n) {
          const TileIndex t = order.at(n);
          ASSERT_TRUE(visited.insert({t.row_block, t.head, t.batch}).second);
          ASSERT_TRUE(t.row_block >= 0 && t.row_block < 7 && t.head < heads && t.batch < 3);
          ASSERT_EQ(t.row_block < last, n >= (7 - last) * heads * 3);
        }
        ASSERT_EQ(static_cast<int>(visited.size()), order.count());
      }
}

TEST(HopperOrder, PreparedStepsLeadToTheSameTiles) {
  for (const int heads : {1, 3, 8, 16})
    for (const int at_once : {1, 2, 5, 8, 48}) {
      const TileOrder order = {5, heads, 3, std::min(at_once, 3 * heads), true, heads % 3};
      const TileOrder::Divisors<FastDivisor> divisors = order.divisors<FastDivisor>();
      for (int n = 0; n < order.count(); ++n) {
        const TileIndex a = order.at(n), b = order.at(n, divisors);
        ASSERT_TRUE(a.row_block == b.row_block && a.head == b.head && a.batch == b.batch)
            << n << " of " << heads << " heads, " << at_once << " at once";
      }
    }
}

// A row with scores exp(row_max) * sum, or none, and a sink or none.
TEST(HopperWork, TheEndOfARowAccountsForTheSink) {
  Draw d{std::mt19937(5)};
  for (int i = 0; i < 2000; ++i) {
    const double row_max = 5 * d.normal(), sum = 1 + std::fabs(d.normal());
    const double sink = d.sometimes() ? 5 * d.normal() : -INFINITY;
    const bool none = d.between(0, 4) == 0;
    OnlineSoftmax softmax;
    softmax.start();
    if (!none) {
      softmax.row_max[0] = static_cast<float>(row_max);
      softmax.row_sum[0] = static_cast<float>(sum) / 4;  // of one thread in four
    }
    const OnlineSoftmax::RowResult end = softmax.finalize({1, 0}, static_cast<float>(sink)).row[0];
    const double own = none ? 0 : sum * std::exp(row_max), total = own + std::exp(sink);
    const auto near = [](double got, double want) {
      return got == want || std::fabs(got - want) <= 5e-6 * (1 + std::fabs(want));
    };
    EXPECT_TRUE(near(end.lse, std::log(total))) << end.lse;
    EXPECT_TRUE(near(end.factor, none ? 0 : std::exp(row_max) / total)) << end.factor;
    EXPECT_TRUE(near(end.max, none ? -INFINITY : row_max)) << end.max;
    EXPECT_TRUE(near(end.sum_exp, none ? 0 : total / std::exp(row_max))) << end.sum_exp;
  }
}

// Caught by review: from about 2^31 on, the rounding of a row maximum times the scale took
// exponentials out of range, and O became NaN. Range of scores whose maxima rise and fall, of every
// magnitude.
TEST(HopperSoftmax, ScoresOfAnyMagnitudeHaveASum) {
  constexpr int kCount = 8, kBlocks = 6;
  const float scale = 0.3f;
  Draw d{std::mt19937(7)};
  for (int power = 0; power < 120; ++power) {
    const float magnitude = std::ldexp(1.0f, power);
    OnlineSoftmax softmax;
    softmax.start();
    double accumulated = 0, row_max = -INFINITY, total = 0;
    std::vector<double> all;
    for (int block = 0; block < kBlocks; ++block) {
      float s[kCount], rescale[2];
      for (int i = 0; i < kCount; ++i) {
        const float x =
            block == 0 ? -INFINITY : d.normal() * magnitude;            // first, no key is visible
        s[i] = i == 3 && block == 4 ? static_cast<float>(row_max) : x;  // a tie
        if (row_slot(i) == 0)
          all.push_back(double{s[i]}), row_max = std::fmax(row_max, double{s[i]});
      }
      float highest[2];
      thread_row_max(s, highest);
      softmax.update(s, highest, scale * kLog2E, rescale);
      accumulated *= double{rescale[0]};
      for (int i = 0; i < kCount; ++i)
        if (row_slot(i) == 0) accumulated += double{s[i]};
    }
    for (const double x : all) total += std::exp((x - row_max) * double{scale});
    const OnlineSoftmax::RowResult end = softmax.finalize({scale, 0}).row[0];
    const double own = row_max * double{scale};
    // A product with the row maximum is rounded; beyond kFar only the largest score counts.
    const bool far = std::fabs(own) >= double{OnlineSoftmax::kExactScaleFrom} * double{kLn2};
    const double unsure = 1e-5 + (far ? 0 : 2e-7 * std::fabs(own));
    EXPECT_NEAR(4 * accumulated * double{end.factor}, 1, 1e-5) << "2^" << power;  // of a quad
    EXPECT_NEAR(std::log(double{end.sum_exp} / 4), std::log(total), unsure) << "2^" << power;
    EXPECT_NEAR(double{end.max}, own, 1e-6 * std::fabs(own)) << "2^" << power;
    EXPECT_NEAR(double{end.lse}, own + std::log(4 * total), unsure + 1e-6 * std::fabs(own));
  }
}

}  // namespace
}  // namespace tea::hopper
