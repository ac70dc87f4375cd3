// Attention of few rows to many keys by dot products of pairs of bf16 numbers, for types whose
// numbers bf16 holds exactly: fp8 and bf16. As decode_kernel.h, but that 64 elements of a key are
// read at a time, codes of fp8 are looked up in tables of registers, and P is bf16 where it meets
// two adjacent values. (A P of fp8 is cast to fp8 anyway.) Included by
// flash_avx512_bf16.cpp after decode_kernel.h and amx_vectors.h, inside its namespace.
#pragma once

inline constexpr int kUnit = 64;  // elements

constexpr int64_t units_of(int64_t dim) { return (dim + kUnit - 1) / kUnit; }
template <int32_t T>
inline constexpr bool kIsFp8 = T == TEA_E4M3 || T == TEA_E5M2;

// Both bytes of the bf16 number of every positive code of an fp8 type.
template <int32_t T>
struct Codes {
  Codes() {
    for (int code = 0; code < 128; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      const uint16_t bits = bf16_encode(static_cast<float>(load_real(&byte, T, 0)));
      low[code] = static_cast<uint8_t>(bits), high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
  alignas(64) uint8_t low[128], high[128];

  // Made when it is first needed, on a processor that has the instructions.
  static const Codes& all() {
    static const Codes codes;
    return codes;
  }
};

// 64 elements of a row as bf16, and of two rows as pairs, in an order of their own: element d is in
// place_of<T>(d) of the four vectors of pairs.
template <int32_t T>
class Reader {
 public:
  Reader() {
    if constexpr (kIsFp8<T>) {
      const Codes<T>& codes = Codes<T>::all();
      for (int half = 0; half < 2; ++half) {
        low_[half] = _mm512_load_si512(codes.low + 64 * half);
        high_[half] = _mm512_load_si512(codes.high + 64 * half);
      }
    }
  }

  // Elements `kept` of those at `from`, others are zero.
  TEA_INLINE void row(const char* from, __mmask64 kept, __m512i (&to)[2]) const {
    if constexpr (kIsFp8<T>) {
      bytes(_mm512_maskz_loadu_epi8(kept, from), to[0], to[1]);
    } else {
      to[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kept), from);
      to[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kept >> 32), from + 64);
    }
  }
  TEA_INLINE void pairs(const char* a, __mmask64 kept_a, const char* b, __mmask64 kept_b,
                        __m512i (&to)[4]) const {
    if constexpr (kIsFp8<T>) {
      const __m512i x = _mm512_maskz_loadu_epi8(kept_a, a), y = _mm512_maskz_loadu_epi8(kept_b, b);
      bytes(_mm512_unpacklo_epi8(x, y), to[0], to[1]);
      bytes(_mm512_unpackhi_epi8(x, y), to[2], to[3]);
    } else {
      __m512i x[2], y[2];
      row(a, kept_a, x), row(b, kept_b, y);
      for (int half = 0; half < 2; ++half) {
        to[2 * half] = _mm512_unpacklo_epi16(x[half], y[half]);
        to[2 * half + 1] = _mm512_unpackhi_epi16(x[half], y[half]);
      }
    }
  }

 private:
  // Within 128 bits, the lower eight codes become `first`.
  TEA_INLINE void bytes(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    constexpr int kSigned = 0xF8;  // magnitude | (codes & sign)
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), kSigned);
    first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  }
  __m512i low_[2], high_[2];
};

// Where row() and pairs() put element d of a unit.
template <int32_t T>
constexpr int place_in_row(int d) {
  return kIsFp8<T> ? d / 8 % 2 * 32 + d / 16 * 8 + d % 8 : d;
}
template <int32_t T>
constexpr int place_in_pairs(int d) {
  return kIsFp8<T> ? d / 4 % 4 * 16 + d / 16 * 4 + d % 4
                   : (d / 32 * 2 + d / 4 % 2) * 16 + d / 8 % 4 * 4 + d % 4;
}

template <int32_t T>
class PairRows : FewRows {
 public:
  using FewRows::Keys, FewRows::find, FewRows::end_scores;

  PairRows(const View& view, const FewHead<float>& head, Columns columns)
      : FewRows(view, head, columns),
        units_k_(units_of(p_.dim_qk)),
        units_v_(units_of(p_.v_dim())),
        queries_(reinterpret_cast<uint16_t*>(head.scratch)) {
    o_ = head.scratch + kFewRows * units_k_ * kUnit;
    score_unit_ = static_cast<float>(view.scalar(TEA_K_SCALE_INV) * view.scalar(TEA_Q_SCALE_INV));
  }

  void begin_scores() const { load_queries(); }
  void scores(const Keys& keys, int64_t n, int64_t j0, Fetch& fetch) const {
    const Reader<T> reader;
    by_rows(block_.count, [&](int row, auto held) {
      constexpr int at_once = kVector / held;
      for (int64_t j = 0; j < n; j += at_once)
        dot_products<held>(reader, row, keys + j, s_ + row * stride_ + j0 + j, fetch);
    });
  }

  double begin_values() const {
    float amax = 0;
    for (int lane = 0; lane < kRows; ++lane)
      out_.sum[lane] = lane < block_.count ? exponentials(lane, out_.max[lane], &amax) : 0;
    std::fill_n(o_, block_.count * units_v_ * kUnit, 0.0f);
    return static_cast<double>(amax);
  }
  void values(const Keys& keys, int64_t n, int64_t j0, Fetch& fetch) const {
    const Reader<T> reader;
    by_rows(block_.count,
            [&](int row, auto held) { products<held>(reader, row, keys, n, j0, fetch); });
  }
  void end_values() const {
    const auto unit = static_cast<float>(view_.scalar(TEA_V_SCALE_INV) *
                                         (kIsFp8<T> ? view_.scalar(TEA_S_SCALE_INV) : 1.0));
    for (int lane = 0; lane < block_.count; ++lane)
      for (int d = 0; d < p_.v_dim(); ++d)
        out_.o[d * kRows + lane] =
            o_[lane * units_v_ * kUnit + d / kUnit * kUnit + place_in_pairs<T>(d % kUnit)] * unit;
  }

 private:
  static constexpr int64_t kUnitLines = kUnit * kElementBytes<T> / kLine;

  // The elements of a unit that a row of `dim` has.
  static __mmask64 kept(int64_t unit, int64_t dim) {
    const int64_t left = dim - unit * kUnit;
    return left >= kUnit ? ~__mmask64{} : (__mmask64{1} << left) - 1;
  }

  // As rows of keys will be read, without their factor.
  void load_queries() const {
    const RowsOf of = view_.rows(TEA_Q);
    const Reader<T> reader;
    for (int lane = 0; lane < block_.count; ++lane) {
      const auto* from = static_cast<const char*>(view_.address(of, block_.at(lane)));
      for (int64_t unit = 0; unit < units_k_; ++unit) {
        __m512i row[2];
        reader.row(from + unit * kUnit * kElementBytes<T>,
                   block_.sees(lane) ? kept(unit, p_.dim_qk) : 0, row);
        for (int half = 0; half < 2; ++half)
          _mm512_storeu_si512(queries_ + (lane * units_k_ + unit) * kUnit + half * 32, row[half]);
      }
    }
  }

  // M rows by kVector / M keys.
  template <int M>
  void dot_products(const Reader<T>& reader, int row, const char* const* keys, float* s,
                    Fetch& fetch) const {
    constexpr int N = kVector / M;
    __m512 sum[kVector];
#pragma GCC unroll 16
    for (__m512& x : sum) x = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < units_k_; ++unit) {
      const __mmask64 here = kept(unit, p_.dim_qk);
      __m512bh left[M][2];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
          left[m][half] = (__m512bh)_mm512_loadu_si512(
              queries_ + ((row + m) * units_k_ + unit) * kUnit + half * 32);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        fetch.lines(kUnitLines);
        __m512i right[2];
        reader.row(keys[n] + unit * kUnit * kElementBytes<T>, here, right);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half)
            sum[m * N + n] = _mm512_dpbf16_ps(sum[m * N + n], left[m][half], (__m512bh)right[half]);
      }
    }
    VF all[kVector];
#pragma GCC unroll 16
    for (int i = 0; i < kVector; ++i) all[i] = (VF)sum[i];
    float lanes[kVector];
    store(lanes, sums_of_lanes(all));
    for (int m = 0; m < M; ++m) std::memcpy(s + m * stride_, lanes + m * N, N * sizeof(float));
  }

  uint16_t* probabilities(int lane) const {
    return reinterpret_cast<uint16_t*>(s_ + lane * stride_);
  }

  // P as bf16 in place of the logits, in fp8 as cast, without its factor; returns the sum before.
  float exponentials(int lane, float max, float* amax) const {
    const float* row = s_ + lane * stride_;
    const VF base = splat(max == -kInfinity ? 0 : max);
    const auto scale = static_cast<float>(view_.scalar(TEA_S_SCALE));
    VF sum{}, high{};
    const auto prob = [&](int64_t j) {
      const VF x = load(row + j) - base;
      if constexpr (!kIsFp8<T>) {  // a cast to fp8 wants the last bit of 1
        const VF p = power_of_two(x * kLog2e);
        sum += p;
        return p;
      }
      const VF p = exponential(x);
      sum += p, high = larger(p, high);
      return rounded_to_fp8(p * scale, T);
    };
    for (int64_t j = 0; j < stride_; j += 2 * kVector) {
      const VF low = prob(j), upper = prob(j + kVector);
      _mm512_storeu_si512(probabilities(lane) + j, joined(low, upper));
    }
    float total = 0;
    for (int i = 0; i < kVector; ++i) total += sum[i], *amax = std::fmax(*amax, high[i]);
    return total;
  }

  // O[M rows] += P V over n keys, pair by pair to what O has; see decode_kernel.h.
  template <int M>
  void products(const Reader<T>& reader, int row, const Keys& keys, int64_t n, int64_t j0,
                Fetch& fetch) const {
    for (int64_t unit = 0; unit < units_v_; ++unit) {
      const __mmask64 here = kept(unit, p_.v_dim());
      const int64_t at = unit * kUnit * kElementBytes<T>;
      const uint16_t* p = probabilities(row) + j0;
      const auto to = [&](int m, int i) {
        return o_ + ((row + m) * units_v_ + unit) * kUnit + i * kVector;
      };
      __m512 sum[M][4];
      for (int m = 0; m < M; ++m)
        for (int i = 0; i < 4; ++i) sum[m][i] = _mm512_loadu_ps(to(m, i));
      for (int64_t j = 0; j < n; j += 2) {
        fetch.lines(2 * kUnitLines);
        __m512i right[4];
        reader.pairs(keys[j] + at, here, keys[j + 1] + at, j + 1 < n ? here : 0, right);
        for (int m = 0; m < M; ++m) {
          int32_t both;
          std::memcpy(&both, p + m * 2 * stride_ + j, sizeof both);
          const __m512bh left = (__m512bh)_mm512_set1_epi32(both);
          for (int i = 0; i < 4; ++i)
            sum[m][i] = _mm512_dpbf16_ps(sum[m][i], left, (__m512bh)right[i]);
        }
      }
      for (int m = 0; m < M; ++m)
        for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to(m, i), sum[m][i]);
    }
  }

  const int64_t units_k_, units_v_;
  uint16_t* queries_;  // [row][unit]: as rows of keys are read
};
