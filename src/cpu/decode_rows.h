// Decoding: a block of few rows, its scores, softmax and sums. Included once per instruction set,
// after decode_elements.h.
#pragma once

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
