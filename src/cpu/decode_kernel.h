// Decoding: attention of few rows to many keys. Lanes correspond to elements of the head dimension,
// so that K and V are read once, without packing, for all rows of a kv head, and no lane is idle.
// Included once per instruction set, after flash_kernel.h.
//
// Scores: s = q.k for a tile of keys after the other; then scale, bias, cap, ALiBi, mask and
// maximum of each row. Values: P = exp(s - max) and its sum; then O += P V, again tile by tile.
#pragma once

typedef uint16_t VH __attribute__((vector_size(kBytes / 2)));
typedef int8_t VB __attribute__((vector_size(kBytes / 4)));

inline constexpr int kVector = kLanes<float>;
inline constexpr int kLine = 64;  // bytes of a cache line
inline constexpr int kHeld = 4;   // rows whose sums are in registers at a time
// Of keys that are worked on while the next are fetched; but at least kVector keys of each head
// that takes its turn.
inline constexpr int64_t kBytesAtOnce = 8192;

constexpr bool is_e4m3(int32_t dtype) { return dtype == TEA_E4M3; }
// E4M3 becomes half by its bits, whose exponent is biased by 8 more.
constexpr float unit_of(int32_t dtype) { return is_e4m3(dtype) ? 256 : 1; }

template <class Vec>
TEA_PRIMITIVE Vec read(const char* from) {
  Vec v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

#ifndef TEA_HALVES_TO_FLOATS  // a set without instructions for it
#define TEA_HALVES_TO_FLOATS(x) from_halves(x)
#define TEA_U16_TO_U32(x) __builtin_convertvector(x, VU)
#define TEA_I8_TO_I16(x) __builtin_convertvector(x, VH)
TEA_PRIMITIVE VF from_halves(VH halves) {
  VF out{};
  for (int i = 0; i < kVector; ++i) out[i] = fp16_decode(halves[i]);
  return out;
}
#endif

// kVector elements as floats, in units of unit_of(T).
template <int32_t T>
TEA_PRIMITIVE VF widen(const char* from) {
  if constexpr (T == TEA_FP32) {
    return read<VF>(from);
  } else if constexpr (T == TEA_BF16) {
    return (VF)(TEA_U16_TO_U32(read<VH>(from)) << 16);
  } else if constexpr (T == TEA_FP16) {
    return TEA_HALVES_TO_FLOATS(read<VH>(from));
  } else {
    const VH code = TEA_I8_TO_I16(read<VB>(from));
    if constexpr (T == TEA_E5M2) return TEA_HALVES_TO_FLOATS(code << 8);
    // The sign is above the exponent's highest bit, which only the NaN, all ones, turns on.
    const VH half = code << 7, top = (half & 0x3F80) + 0x80;
    return TEA_HALVES_TO_FLOATS((half & 0xBFFF) | (top & 0x4000));
  }
}

template <int32_t T>
inline constexpr int64_t kElementBytes = T == TEA_FP32                    ? 4
                                         : T == TEA_FP16 || T == TEA_BF16 ? 2
                                                                          : 1;

// The elements of a row from `at` on. The last vector may reach beyond the row, where it is zero.
template <int32_t T>
TEA_PRIMITIVE VF elements(const char* row, int64_t at) {
  return widen<T>(row + at * kElementBytes<T>);
}
template <int32_t T>
TEA_PRIMITIVE VF last_elements(const char* row, int64_t at, int64_t dim) {
  constexpr int64_t bytes = kElementBytes<T>;
  char rest[kVector * bytes] = {};
  std::memcpy(rest, row + at * bytes, static_cast<size_t>((dim - at) * bytes));
  return widen<T>(rest);
}

// Prefetches keys into the L2 cache, line by line, while others are processed. Kernels read several
// keys at a time, but memory serves this order three times faster.
// Not into the first: then each line waits in one of the few places for what that cache misses, and
// the processor no longer fetches on its own.
class Fetch {
 public:
  Fetch(const char* const* keys, int64_t count, int64_t bytes)
      : key_(keys), end_(keys + count), bytes_(bytes) {}
  inline __attribute__((always_inline)) void lines(int64_t count) {
    for (int64_t i = 0; i < count && key_ != end_; ++i) {
      __builtin_prefetch(*key_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, ++key_;
    }
  }
  void rest() {
    while (key_ != end_) lines(1);
  }

 private:
  const char *const *key_, *const *const end_;
  const int64_t bytes_;
  int64_t at_ = 0;
};

// From two vectors the sums of both halves of each block of 2 n lanes: a's, then b's.
template <int n, int... lane>
TEA_PRIMITIVE VF fold(VF a, VF b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane % (2 * n) < n ? lane : lane - n + kVector)...) +
         __builtin_shufflevector(a, b, (lane % (2 * n) < n ? lane + n : lane + kVector)...);
}

// Lane i of the result: the sum of the lanes of v[i].
template <int n = kVector / 2>
TEA_PRIMITIVE VF sums_of_lanes(VF (&v)[kVector]) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i)
    v[i] = fold<n>(v[i], v[i + n], std::make_integer_sequence<int, kVector>{});
  if constexpr (n == 1)
    return v[0];
  else
    return sums_of_lanes<n / 2>(v);
}

// x >= 0 as an fp8 type holds it: to nearest even, saturated; NaN stays.
TEA_PRIMITIVE VF rounded_to_fp8(VF x, int32_t dtype) {
  const int dropped = is_e4m3(dtype) ? 20 : 21;                    // bits of the significand
  const VF smallest = splat(is_e4m3(dtype) ? 0x1p-6f : 0x1p-14f);  // of full precision
  const VF magic = splat(is_e4m3(dtype) ? 0x1.8p14f : 0x1.8p7f);   // its last bit is a subnormal's
  const VU bits = (VU)x, half = VU{} + ((1u << (dropped - 1)) - 1);
  const VU normal = (bits + half + (bits >> dropped & 1)) >> dropped << dropped;
  const VF rounded = x < smallest ? (x + magic) - magic : (VF)normal;
  return x == x ? at_most(rounded, splat(is_e4m3(dtype) ? 448.0f : 57344.0f)) : x;
}

template <class Body>
void with_type(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TEA_FP32:
      return body(std::integral_constant<int32_t, TEA_FP32>{});
    case TEA_BF16:
      return body(std::integral_constant<int32_t, TEA_BF16>{});
    case TEA_FP16:
      return body(std::integral_constant<int32_t, TEA_FP16>{});
    case TEA_E4M3:
      return body(std::integral_constant<int32_t, TEA_E4M3>{});
    default:
      return body(std::integral_constant<int32_t, TEA_E5M2>{});
  }
}

// Rows in the largest groups that their sums fit.
template <class Body>
void by_rows(int count, Body&& body) {
  int row = 0;
  for (; row + kHeld <= count; row += kHeld) body(row, std::integral_constant<int, kHeld>{});
  for (; row + 2 <= count; row += 2) body(row, std::integral_constant<int, 2>{});
  for (; row < count; ++row) body(row, std::integral_constant<int, 1>{});
}

// The rows of a block over some of its keys.
class FewRows {
 public:
  FewRows(const View& view, const FewHead<float>& head, Columns columns)
      : view_(view),
        p_(view.p),
        block_(*head.block),
        columns_(columns),
        stride_(few_stride(columns)),
        dk_(padded(p_.dim_qk)),
        dv_(padded(p_.v_dim())),
        out_(head.out),
        s_(head.s),
        q_(head.scratch),
        o_(head.scratch + kFewRows * dk_),
        scale_(static_cast<float>(p_.scale_value())),
        softcap_(static_cast<float>(p_.softcap)),
        score_unit_(unit(TEA_K_SCALE_INV)) {
    for (int lane = 0; lane < block_.count; ++lane)
      slope_[lane] = static_cast<float>(view.slope(block_.group.b, block_.head[lane]));
  }

  // Where the keys of a tile begin. Lists go on with the last one, to be read by whole vectors.
  using Keys = const char * [kCols + kVector];

  // Scores: begin, every tile of K with the place of its first key in the columns, end.
  void begin_scores() const { load_queries(); }
  void scores(const Keys& keys, int64_t n, int64_t j0, Fetch& fetch) const {
    with_type(p_.kv_type(), [&](auto type) {
      by_rows(block_.count, [&](int row, auto held) {
        constexpr int64_t at_once = kVector / held;
        for (int64_t j = 0; j < n; j += at_once)
          dot_products<type, held>(q_ + row * dk_, keys + j, s_ + row * stride_ + j0 + j, fetch);
      });
    });
  }
  void end_scores() const {
    for (int lane = 0; lane < kRows; ++lane)
      out_.max[lane] = lane < block_.count ? finish_scores(lane) : -kInfinity;
  }

  // Values: begin, which returns the largest P, every tile of V, end.
  double begin_values() const {
    float amax = 0;
    for (int lane = 0; lane < kRows; ++lane)
      out_.sum[lane] = lane < block_.count ? exponentials(lane, out_.max[lane], &amax) : 0;
    for (int64_t i = 0; i < block_.count * dv_; ++i) o_[i] = 0;
    return static_cast<double>(amax);
  }
  void values(const Keys& keys, int64_t n, int64_t j0, Fetch& fetch) const {
    with_type(p_.kv_type(), [&](auto type) {
      by_rows(block_.count,
              [&](int row, auto held) { products<type, held>(row, keys, n, j0, fetch); });
    });
  }
  void end_values() const {
    const float factor = unit(TEA_V_SCALE_INV);
    for (int lane = 0; lane < block_.count; ++lane)
      for (int64_t d = 0; d < p_.v_dim(); ++d)
        out_.o[d * kRows + lane] = o_[lane * dv_ + d] * factor;
  }

  void find(const RowsOf& of, int64_t j0, int64_t n, Keys& keys) const {
    const Group& g = block_.group;
    const int64_t row_bytes = of.stride.seq * dtype_bytes(of.dtype);
    for (int64_t j = 0, run; j < n; j += run) {
      run = of.form == TEA_PAGED ? std::min(n - j, of.page_size - (j0 + j) % of.page_size) : n;
      const auto* at = static_cast<const char*>(view_.address(of, {g.kv, g.b, g.kv_head, j0 + j}));
      for (int64_t i = 0; i < run; ++i) keys[j + i] = at + i * row_bytes;
    }
    for (int64_t j = n; j < kCols + kVector; ++j) keys[j] = keys[n - 1];
  }

 protected:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  // The factor of keys or values as elements() reads them.
  float unit(tea_tensor scale) const {
    return static_cast<float>(view_.kv_scale(scale, block_.group.kv_head)) * unit_of(p_.kv_type());
  }

  void load_queries() const {
    const RowsOf of = view_.rows(TEA_Q);
    const double scale = view_.scalar(TEA_Q_SCALE_INV);
    for (int lane = 0; lane < block_.count; ++lane) {
      float* to = q_ + lane * dk_;
      for (int64_t i = 0; i < dk_; ++i) to[i] = 0;
      if (block_.sees(lane))
        load_row(view_.address(of, block_.at(lane)), of.dtype, p_.dim_qk, scale, to);
    }
  }

  // M rows by kVector / M keys.
  template <int32_t T, int M>
  void dot_products(const float* q, const char* const* keys, float* s, Fetch& fetch) const {
    constexpr int N = kVector / M;
    VF sum[kVector];
#pragma GCC unroll 16
    for (VF& x : sum) x = VF{};
    const auto add = [&](int64_t d, auto&& key) __attribute__((always_inline)) {
      VF left[M];
      for (int m = 0; m < M; ++m) left[m] = load(q + m * dk_ + d);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const VF right = key(n);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sum[m * N + n] += left[m] * right;
      }
    };
    const int64_t dim = p_.dim_qk;
    int64_t d = 0;
    for (; d + kVector <= dim; d += kVector) {
      fetch.lines((N * kVector * kElementBytes<T> + kLine - 1) / kLine);
      add(d, [&](int n) { return elements<T>(keys[n], d); });
    }
    if (d < dim) add(d, [&](int n) { return last_elements<T>(keys[n], d, dim); });
    const VF all = sums_of_lanes(sum);
    float lanes[kVector];
    store(lanes, all);
    for (int m = 0; m < M; ++m) std::memcpy(s + m * stride_, lanes + m * N, N * sizeof(float));
  }

  // From products to logits; returns their maximum.
  float finish_scores(int lane) const {
    float* row = s_ + lane * stride_;
    const Columns& c = block_.columns[lane];
    const int64_t begin = std::clamp<int64_t>(c.begin - columns_.begin, 0, stride_);
    const int64_t end = std::clamp(std::min(c.end, columns_.end) - columns_.begin, begin, stride_);
    for (int64_t j = begin / kVector * kVector; j < end; j += kVector)
      store(row + j, logits(load(row + j), lane, j));
    for (int64_t j = 0; j < begin; ++j) row[j] = -kInfinity;
    for (int64_t j = end; j < stride_; ++j) row[j] = -kInfinity;
    VF max = splat(-kInfinity);
    for (int64_t j = 0; j < stride_; j += kVector) max = larger(load(row + j), max);
    float high = max[0];
    for (int i = 1; i < kVector; ++i) high = max[i] > high ? max[i] : high;
    return high;
  }

  VF logits(VF x, int lane, int64_t j) const {
    if (is_fp8(p_.kv_type())) x *= score_unit_;
    if (p_.bias == TEA_BIAS_PRE_SCALE) x += bias(lane, j);
    x *= scale_;
    if (softcap_ > 0) x = hyperbolic_tangent(x / softcap_) * softcap_;
    if (p_.bias == TEA_BIAS_POST_SCALE) x += bias(lane, j);
    if (p_.alibi) x -= slope_[lane] * distances(lane, j);
    return x;
  }

  VF bias(int lane, int64_t j) const {
    const tea_bias_strides& st = view_.size.bias;
    const Columns& c = block_.columns[lane];
    const int64_t at =
        block_.group.b * st.batch + block_.head[lane] * st.head + block_.row[lane] * st.row;
    VF out{};
    for (int i = 0; i < kVector; ++i) {
      const int64_t column = columns_.begin + j + i;
      if (c.begin <= column && column < c.end)
        out[i] = static_cast<float>(
            load_real(view_.run.tensor[TEA_BIAS], p_.bias_type(), at + column * st.col));
    }
    return out;
  }

  // |row + delta - column|; exact below 2^24.
  VF distances(int lane, int64_t j) const {
    const int64_t first = block_.row[lane] + block_.group.delta + block_.group.origin.row -
                          block_.group.origin.column - columns_.begin - j;
    VF out{};
    for (int i = 0; i < kVector; ++i) out[i] = static_cast<float>(-i);
    out += static_cast<float>(first);
    return out < 0 ? -out : out;
  }

  // P in place of the logits, in fp8 as cast; returns the sum before the cast.
  float exponentials(int lane, float max, float* amax) const {
    float* row = s_ + lane * stride_;
    const VF base = splat(max == -kInfinity ? 0 : max);
    const auto scale = static_cast<float>(view_.scalar(TEA_S_SCALE)),
               scale_inv = static_cast<float>(view_.scalar(TEA_S_SCALE_INV));
    VF sum{}, high{};
    for (int64_t j = 0; j < stride_; j += kVector) {
      VF prob = exponential(load(row + j) - base);
      sum += prob;
      if (p_.is_fp8()) {
        high = larger(prob, high);
        prob = rounded_to_fp8(prob * scale, p_.dtype) * scale_inv;
      }
      store(row + j, prob);
    }
    float total = 0;
    for (int i = 0; i < kVector; ++i) total += sum[i], *amax = std::fmax(*amax, high[i]);
    return total;
  }

  template <int32_t T, int M>
  void products(int row, const Keys& keys, int64_t n, int64_t j0, Fetch& fetch) const {
    const int64_t wide = int64_t{kStrip} * kVector, dim = p_.v_dim();
    const float* p = s_ + row * stride_ + j0;
    int64_t d = 0;
    const auto value = [&](int64_t j, int64_t at) {
      if ((at - d) * kElementBytes<T> % kLine == 0) fetch.lines(1);
      return elements<T>(keys[j], at);
    };
    const auto last = [&](int64_t j, int64_t at) { return last_elements<T>(keys[j], at, dim); };
    float* o = o_ + row * dv_;
    for (; d + wide <= dim; d += wide) product<M, kStrip>(p, n, d, o, value);
    for (; d + kVector <= dim; d += kVector) product<M, 1>(p, n, d, o, value);
    if (d < dim) product<M, 1>(p, n, d, o, last);
  }

  // O[M rows][N vectors from d on] += P V over n keys, added one by one to what O has: tiles of
  // other sizes, which other numbers of threads have, give the same bits.
  template <int M, int N, class Value>
  void product(const float* p, int64_t n, int64_t d, float* o, Value value) const {
    const auto at = [&](int m, int i) { return o + m * dv_ + d + i * kVector; };
    VF sum[M][N];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i) sum[m][i] = load(at(m, i));
    for (int64_t j = 0; j < n; ++j) {
      VF right[N];
      for (int i = 0; i < N; ++i) right[i] = value(j, d + i * kVector);
      for (int m = 0; m < M; ++m) {
        const VF left = splat(p[m * stride_ + j]);
        for (int i = 0; i < N; ++i) sum[m][i] += left * right[i];
      }
    }
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i) store(at(m, i), sum[m][i]);
  }

  const View& view_;
  const Problem& p_;
  const RowBlock& block_;
  const Columns columns_;
  const int64_t stride_, dk_, dv_;
  const Partial<float> out_;
  float *s_, *q_, *o_;  // [row][key of columns_]: scores, then P; [row][dim]
  const float scale_, softcap_;
  float score_unit_;  // of products of fp8
  float slope_[kFewRows];
};

// Iterates over the keys of a part by tiles, and prefetches the next tile, because rows are rarely
// contiguous and the hardware cannot predict them. Heads with adjacent keys are interleaved tile by
// tile, and the tile is prefetched for all of them; other heads are processed sequentially.
template <class Rows>
class KeyTiles {
 public:
  KeyTiles(const RowsOf& of, int64_t dim, Columns columns, std::span<const Rows> heads)
      : of_(of),
        columns_(columns),
        heads_(heads),
        together_(of.stride.head == dim ? heads.size() : 1),
        bytes_(dim * dtype_bytes(of.dtype)) {
    while (step_ > kVector && step_ * line() > kBytesAtOnce) step_ /= 2;
    find({0, columns.begin}, places_[0]);
    fetch(places_[0]).rest();
  }

  // Calls body(head, keys of a tile, how many, the first one's place in the columns, what fetches
  // the keys of the next tile meanwhile) for every tile and head.
  template <class Body>
  void operator()(Body&& body) {
    typename Rows::Keys own;
    for (int which = 0; places_[which].count > 0; which ^= 1) {
      const Place &now = places_[which], &ahead = places_[which ^ 1];
      find(after(now), places_[which ^ 1]);
      Fetch next = fetch(ahead);
      body(heads_[now.head], now.keys, now.count, now.first - columns_.begin, next);
      for (size_t h = 1; h < together_; ++h) {
        for (int j = 0; j < kCols + kVector; ++j)
          own[j] = now.keys[j] + static_cast<int64_t>(h) * bytes_;
        body(heads_[h], own, now.count, now.first - columns_.begin, next);
      }
      next.rest();
    }
  }

 private:
  struct Place {
    size_t head;
    int64_t first, count;
    typename Rows::Keys keys;
  };
  // Bytes of a key over all interleaved heads.
  int64_t line() const { return bytes_ * static_cast<int64_t>(together_); }
  Fetch fetch(const Place& place) const { return {place.keys, place.count, line()}; }

  std::pair<size_t, int64_t> after(const Place& place) const {
    if (place.first + step_ < columns_.end) return {place.head, place.first + step_};
    return {place.head + together_, columns_.begin};
  }
  void find(std::pair<size_t, int64_t> at, Place& to) const {
    to.head = at.first, to.first = at.second;
    to.count = 0;  // at the end, and where no row sees a key
    if (to.head < heads_.size()) to.count = std::clamp<int64_t>(columns_.end - to.first, 0, step_);
    if (to.count > 0) heads_[to.head].find(of_, to.first, to.count, to.keys);
  }

  const RowsOf of_;
  const Columns columns_;
  const std::span<const Rows> heads_;
  const size_t together_;
  const int64_t bytes_;
  int64_t step_ = kCols;
  Place places_[2];
};

template <class Rows>
std::vector<Rows> rows_of_heads(const View& view, std::span<const FewHead<float>> heads,
                                Columns columns) {
  std::vector<Rows> out;
  out.reserve(heads.size());
  for (const FewHead<float>& head : heads) out.emplace_back(view, head, columns);
  return out;
}

template <class Rows>
void scores_of(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  const std::vector<Rows> all = rows_of_heads<Rows>(view, heads, columns);
  KeyTiles<Rows> tiles(view.rows(TEA_K), view.p.dim_qk, columns, all);
  for (const Rows& rows : all) rows.begin_scores();
  tiles([](const Rows& rows, const auto& keys, int64_t n, int64_t j0, Fetch& fetch) {
    rows.scores(keys, n, j0, fetch);
  });
  for (const Rows& rows : all) rows.end_scores();
}

template <class Rows>
void values_of(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  const std::vector<Rows> all = rows_of_heads<Rows>(view, heads, columns);
  KeyTiles<Rows> tiles(view.rows(TEA_V), view.p.v_dim(), columns, all);
  for (size_t h = 0; h < all.size(); ++h) heads[h].amax = all[h].begin_values();
  tiles([](const Rows& rows, const auto& keys, int64_t n, int64_t j0, Fetch& fetch) {
    rows.values(keys, n, j0, fetch);
  });
  for (const Rows& rows : all) rows.end_values();
}

template <>
constexpr Kernels<float> kKernels<float>{
    scratch_reals<float>, nullptr,         nullptr,           attend<float>,
    finish<float>,        backward<float>, store_keys<float>, scores_of<FewRows>,
    values_of<FewRows>};
