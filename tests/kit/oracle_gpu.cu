// Two kernels: what a row of queries needs (softmax, O, dQ), and what a key needs (dK, dV).
// Whatever both need of a (row, column) is computed anew by each.
#include <cuda_runtime.h>

#include <cfloat>
#include <stdexcept>

#include "kit/approx.h"
#include "kit/oracle_gpu.h"

namespace tea::oracle {
namespace {

constexpr int kWarp = 32, kMostDim = 1024, kShare = kMostDim / kWarp;  // of a row, for a lane
constexpr unsigned kAll = 0xffffffff;

// The case in device memory.
struct Given {
  int64_t batch, heads_q, heads_kv, dim_qk, dim_v, max_q, max_kv;
  const int64_t *length_q, *length_kv;
  const double *q, *k, *v, *dout, *dlse, *o_stored, *slopes, *sink;
  bool causal, bottom_right, exact_o;
  int64_t window_left, window_right, origin[4];
  double softcap, scale, factor_kept;
  uint32_t drop_below;  // 0: no dropout
  uint64_t seed, offset;
  double unit, flush;  // of accumulation; smaller numbers may be zero
  Rounding p, o;

  __device__ int64_t row(int64_t b, int64_t h, int64_t i) const {
    return (b * heads_q + h) * max_q + i;
  }
  __device__ int64_t key(int64_t b, int64_t h, int64_t j) const {
    return (b * heads_kv + h / (heads_q / heads_kv)) * max_kv + j;
  }
  __device__ int64_t delta(int64_t b) const {
    return bottom_right ? length_kv[b] - length_q[b] : 0;
  }
};

// Of one row.
struct Stats {
  double lse, max, max_error, z_error, lse_bound;
  double shift, shift_error;  // dlse - sum of dO * O
};

struct Found {
  Stats* stats;
  double *max_value, *max_bound, *sum_exp, *sum_exp_bound, *o, *o_bound, *dq, *dq_bound, *dk,
      *dk_bound, *dv, *dv_bound, *sink_part, *sink_part_bound;
};

__device__ bool sees(const Given& c, int64_t b, int64_t i, int64_t j) {
  if (i >= c.length_q[b] || j >= c.length_kv[b]) return false;
  const int64_t ahead = j + c.origin[3] - i - c.origin[2] - c.delta(b);
  return !(c.causal && ahead > 0) && !(c.window_left >= 0 && -ahead > c.window_left) &&
         !(c.window_right >= 0 && ahead > c.window_right);
}

// 0, or 1 / (1 - p). Philox4x32-10 (Salmon et al., 2011), one call for a cell of 2 x 4.
__device__ double kept(const Given& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!c.drop_below) return 1;
  const uint64_t row = i + c.origin[2], col = j + c.origin[3];
  uint32_t x0 = row / 16 * 8 + row % 8, x1 = col / 16 * 4 + col % 8 / 2;
  uint32_t x2 = (b + c.origin[0]) * 4096 + h + c.origin[1], x3 = c.offset;
  const uint64_t key = c.seed ^ (c.offset >> 32) << 32;
  uint32_t k0 = key, k1 = key >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{x0} * 0xD2511F53u, d = uint64_t{x2} * 0xCD9E8D57u;
    const uint32_t y0 = (d >> 32) ^ x1 ^ k0, y2 = (a >> 32) ^ x3 ^ k1;
    x1 = d, x3 = a, x0 = y0, x2 = y2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const int half = row % 16 / 8 * 4 + col % 16 / 8 * 2 + col % 2;
  const uint32_t word = half / 2 == 0 ? x0 : half / 2 == 1 ? x1 : half / 2 == 2 ? x2 : x3;
  return (half % 2 ? word >> 16 : word & 0xFFFF) >= c.drop_below ? c.factor_kept : 0;
}

__device__ Approx product(const Given& c, const double* a, const double* b, int64_t n,
                          double factor) {
  double sum = 0, size = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d], size += fabs(a[d] * b[d]);
  return {factor * sum,
          fabs(factor) * (size * c.unit * (0.5 * n + 4) + static_cast<double>(n) * c.flush)};
}

struct Score {
  Approx x, cap_slope{1, 0};  // the logit; the slope of the softcap
};

__device__ void cap(const Given& c, Score& s) {
  const double x = s.x.value, e = s.x.error;
  const double t = tanh(x / c.softcap), above = tanh((x + e) / c.softcap),
               below = tanh((x - e) / c.softcap);
  s.x = {c.softcap * t, c.softcap * (fmax(above - t, t - below) + 4 * c.unit)};
  const double slope = 1 - t * t;
  const double ends = fmax(fabs((1 - above * above) - slope), fabs((1 - below * below) - slope));
  s.cap_slope = {slope, fmax(ends, fabs(x) < e ? 1 - slope : 0) + 12 * c.unit};
}

__device__ Score score(const Given& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  Score s;
  s.x = product(c, c.q + c.row(b, h, i) * c.dim_qk, c.k + c.key(b, h, j) * c.dim_qk, c.dim_qk,
                c.scale);
  if (c.softcap > 0) cap(c, s);
  if (c.slopes) {
    const double distance = static_cast<double>(i + c.origin[2] + c.delta(b) - j - c.origin[3]);
    const double term = -c.slopes[b * c.heads_q + h] * fabs(distance);
    s.x.value += term;
    s.x.error += c.unit * (2 * fabs(term) + fabs(s.x.value));
    if (isinf(s.x.value)) s.x.error = 0;
  }
  return s;
}

__device__ double log_error(const Given& c, const Stats& s, Approx x) {
  return isinf(x.value) ? 0 : x.error + c.unit * (2 * fabs(x.value) + 2 * fabs(s.max) + 4);
}

__device__ double sum_of_lanes(double x) {
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}
__device__ double max_of_lanes(double x) {
  for (int step = kWarp / 2; step; step /= 2) x = fmax(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

// The contribution of a column to a row, for O and for the gradients. `weight`: factor of the value
// in O.
struct Terms {
  Approx weight, dv, dqk;
  bool blown;        // dS may leave the range of the type that it is rounded to
  bool dropped_nan;  // which dropping may multiply by zero or leave out
};

__device__ Approx rounded(Approx a, const Rounding& r, double factor) {
  return {a.value, a.error + r.unit * fabs(a.value) + r.floor * factor};
}

__device__ Approx output_weight(const Given& c, const Stats& s, const Score& score, double keep) {
  const double e = exp(score.x.value - s.lse);
  const double unsure =
      exp_error(score.x.value - s.lse, log_error(c, s, score.x)) + e * s.z_error + c.flush;
  return rounded({keep * e, keep * fmin(1.0, unsure)}, c.p, keep);
}

__device__ Terms gradient_terms(const Given& c, const Stats& s, const Score& score, double keep,
                                const double* dout, const double* v) {
  const double p = exp(score.x.value - s.lse), u = c.unit;
  const double off = log_error(c, s, score.x) + s.lse_bound + u * fabs(s.lse);
  const double dp = exp_error(score.x.value - s.lse, off) + c.flush;
  const double blown = dp > FLT_MAX ? dp : 0;
  Terms out{};
  out.dropped_nan = keep == 0 && isnan(p);
  if (!out.dropped_nan) out.dv = rounded({keep * p, fmax(keep * dp, blown)}, c.p, keep);
  const Approx a = product(c, dout, v, c.dim_v, keep);
  const double t = a.value + s.shift;
  const double te = a.error + s.shift_error + 2 * u * (fabs(a.value) + fabs(s.shift));
  const double unsure = dp * (fabs(t) + te) + 2 * u * fabs(p * t) + c.flush;
  const Approx after{p * t, p * te + fmax(unsure, blown)};
  const Approx before{after.value * score.cap_slope.value,
                      after.error * (fabs(score.cap_slope.value) + score.cap_slope.error) +
                          fabs(after.value) * (score.cap_slope.error + u)};
  const Approx g{c.scale * before.value,
                 fabs(c.scale) * (before.error + 2 * u * fabs(before.value))};
  out.dqk = rounded(g, c.p, fmax(1.0, fabs(c.scale)));
  out.blown = !(fmax(fabs(g.value), fabs(before.value)) < c.p.largest);
  return out;
}

// Each lane adds its elements d = lane, lane + 32, ... of a row of `n`.
struct Sums {
  double value[kShare] = {}, bound[kShare] = {};
  __device__ void add(Approx a, double roundings, const double* x, int64_t n) {
    const double error = a.error + roundings * fabs(a.value);
    for (int s = 0; s < kShare; ++s) {
      const int64_t d = threadIdx.x + s * kWarp;
      if (d >= n) break;
      value[s] += a.value * x[d];
      bound[s] += error * fabs(x[d]);
    }
  }
  __device__ void store(double* values, double* bounds, int64_t n, bool unknown) const {
    for (int s = 0; s < kShare; ++s) {
      const int64_t d = threadIdx.x + s * kWarp;
      if (d >= n) break;
      values[d] = value[s];
      bounds[d] = unknown ? kInfinity : bound[s];
    }
  }
};

__device__ Approx from_lane(Approx a, int lane) {
  return {__shfl_sync(kAll, a.value, lane), __shfl_sync(kAll, a.error, lane)};
}

__device__ Stats softmax(const Given& c, int64_t b, int64_t h, int64_t i, int64_t& columns) {
  Peak peak{-kInfinity};
  double poisoned = 0, count = 0;
  for (int64_t j = threadIdx.x; j < c.length_kv[b]; j += kWarp) {
    if (!sees(c, b, i, j)) continue;
    const Approx x = score(c, b, h, i, j).x;
    peak.add(x);
    poisoned += isnan(x.value);
    count += 1;
  }
  peak.value = max_of_lanes(peak.value);
  peak.low = max_of_lanes(peak.low), peak.high = max_of_lanes(peak.high);
  columns = static_cast<int64_t>(sum_of_lanes(count));
  Stats s{};
  const double sink = c.sink ? c.sink[h] : -kInfinity;
  s.max = sum_of_lanes(poisoned) > 0 ? NAN : peak.value;
  s.lse = sink;
  if (s.max == -kInfinity) {
    columns = 0;
    return s;
  }
  const double top = s.max < sink ? sink : s.max;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < c.length_kv[b]; j += kWarp)
    if (sees(c, b, i, j)) sum += exp(score(c, b, h, i, j).x.value - top);
  s.lse = top + log(exp(sink - top) + sum_of_lanes(sum));
  double error = 0;
  for (int64_t j = threadIdx.x; j < c.length_kv[b]; j += kWarp) {
    if (!sees(c, b, i, j)) continue;
    const Approx x = score(c, b, h, i, j).x;
    error += exp_error(x.value - s.lse, log_error(c, s, x));
  }
  s.z_error = exp_error(sink - s.lse, log_error(c, s, {sink, 0})) + sum_of_lanes(error) +
              c.unit * (static_cast<double>(columns) + 8);
  s.max_error = isfinite(s.max) ? peak.error() : kInfinity;
  return s;
}

__device__ void store_softmax(const Given& c, const Found& f, int64_t row, Stats& s) {
  const double unit = 0x1p-24, far = s.z_error > 1 ? s.max_error : 0;
  s.lse_bound = log1p(s.z_error) + far + c.unit * (fabs(s.max) + fabs(s.lse) + 8) +
                unit * fabs(s.lse) + FLT_MIN;
  const double max_bound = s.max_error + unit * fabs(s.max) + FLT_MIN;
  const double ratio = exp(s.lse - s.max);
  f.max_value[row] = s.max, f.max_bound[row] = max_bound;
  f.sum_exp[row] = ratio;
  f.sum_exp_bound[row] =
      exp_error(s.lse - s.max, s.lse_bound + max_bound) + (unit + 4 * c.unit) * ratio;
}

__device__ void shift_of(const Given& c, const Found& f, int64_t b, int64_t row, bool sees_any,
                         Stats& s) {
  const double given = c.dlse ? c.dlse[row] : 0;
  double sum = 0, size = 0, error = 0;
  for (int64_t d = threadIdx.x; sees_any && d < c.dim_v; d += kWarp) {
    const int64_t at = row * c.dim_v + d;
    const double o = c.exact_o ? f.o[at] : c.o_stored[at];
    sum += c.dout[at] * o, size += fabs(c.dout[at] * o);
    if (c.exact_o) error += fabs(c.dout[at]) * (f.o_bound[at] + c.o.unit * fabs(o) + c.o.floor);
  }
  s.shift = given - sum_of_lanes(sum);
  error = sum_of_lanes(error) + (sees_any ? c.unit * fabs(given) : 0);
  s.shift_error = error + c.unit * (0.5 * c.dim_v + 4) * sum_of_lanes(size);
}

__device__ void sink_gradient(const Given& c, const Found& f, int64_t h, int64_t row,
                              const Stats& s) {
  if (!c.sink || s.lse == -kInfinity) return;
  const double x = c.sink[h], p = exp(x - s.lse);
  const double off = s.lse_bound + c.unit * (fabs(x) + fabs(s.lse) + 4);
  const double unsure = p > 0 ? exp_error(x - s.lse, off) : 0;
  const double rows = 0.5 * c.batch * c.max_q + 4;
  f.sink_part[row] = p * s.shift;
  f.sink_part_bound[row] =
      (p + unsure) * s.shift_error + fabs(s.shift) * (unsure + p * rows * c.unit);
}

// One warp for each row of queries.
__global__ void row_of_queries(Given c, Found f) {
  const int64_t row = blockIdx.x, i = row % c.max_q, h = row / c.max_q % c.heads_q,
                b = row / c.max_q / c.heads_q;
  if (i >= c.length_q[b]) return;
  int64_t columns = 0;
  Stats s = softmax(c, b, h, i, columns);
  if (columns)
    store_softmax(c, f, row, s);
  else
    f.max_value[row] = s.max;
  Sums o, dq;
  const double roundings = c.unit * (static_cast<double>(columns) + 8);
  for (int64_t first = 0; columns && first < c.length_kv[b]; first += kWarp) {
    const int64_t j = first + threadIdx.x;
    const bool mine = sees(c, b, i, j);
    const Approx weight =
        mine ? output_weight(c, s, score(c, b, h, i, j), kept(c, b, h, i, j)) : Approx{0, 0};
    for (unsigned todo = __ballot_sync(kAll, mine); todo; todo &= todo - 1) {
      const int lane = __ffs(todo) - 1;
      o.add(from_lane(weight, lane), roundings, c.v + c.key(b, h, first + lane) * c.dim_v, c.dim_v);
    }
  }
  o.store(f.o + row * c.dim_v, f.o_bound + row * c.dim_v, c.dim_v, false);
  __syncwarp();
  if (c.dout) shift_of(c, f, b, row, columns > 0, s);
  if (threadIdx.x == 0) {
    f.stats[row] = s;
    if (c.dout) sink_gradient(c, f, h, row, s);
  }
  if (!c.dout || !columns) return;
  bool unknown = false;
  const double cols = c.unit * (0.5 * columns + 8);
  for (int64_t first = 0; first < c.length_kv[b]; first += kWarp) {
    const int64_t j = first + threadIdx.x;
    const bool mine = sees(c, b, i, j);
    Terms t{};
    if (mine)
      t = gradient_terms(c, s, score(c, b, h, i, j), kept(c, b, h, i, j), c.dout + row * c.dim_v,
                         c.v + c.key(b, h, j) * c.dim_v);
    unknown |= __any_sync(kAll, mine && t.blown);
    for (unsigned todo = __ballot_sync(kAll, mine); todo; todo &= todo - 1) {
      const int lane = __ffs(todo) - 1;
      dq.add(from_lane(t.dqk, lane), cols, c.k + c.key(b, h, first + lane) * c.dim_qk, c.dim_qk);
    }
  }
  dq.store(f.dq + row * c.dim_qk, f.dq_bound + row * c.dim_qk, c.dim_qk, unknown);
}

// One warp for each key; lanes take the rows of the heads that share it.
__global__ void key(Given c, Found f) {
  const int64_t at = blockIdx.x, j = at % c.max_kv, group = at / c.max_kv % c.heads_kv,
                b = at / c.max_kv / c.heads_kv, shared = c.heads_q / c.heads_kv;
  if (j >= c.length_kv[b]) return;
  Sums dk, dv;
  bool unknown = false, unknown_v = false;
  const double rows = c.unit * (0.5 * c.length_q[b] * shared + 8);
  for (int64_t h = group * shared; h < (group + 1) * shared; ++h)
    for (int64_t first = 0; first < c.length_q[b]; first += kWarp) {
      const int64_t i = first + threadIdx.x;
      const bool mine = sees(c, b, i, j) && f.max_value[c.row(b, h, i)] != -kInfinity;
      Terms t{};
      if (mine)
        t = gradient_terms(c, f.stats[c.row(b, h, i)], score(c, b, h, i, j), kept(c, b, h, i, j),
                           c.dout + c.row(b, h, i) * c.dim_v, c.v + at * c.dim_v);
      unknown |= __any_sync(kAll, mine && t.blown);
      unknown_v |= __any_sync(kAll, mine && t.dropped_nan);
      for (unsigned todo = __ballot_sync(kAll, mine); todo; todo &= todo - 1) {
        const int lane = __ffs(todo) - 1;
        const int64_t row = c.row(b, h, first + lane);
        dv.add(from_lane(t.dv, lane), rows, c.dout + row * c.dim_v, c.dim_v);
        dk.add(from_lane(t.dqk, lane), rows, c.q + row * c.dim_qk, c.dim_qk);
      }
    }
  dk.store(f.dk + at * c.dim_qk, f.dk_bound + at * c.dim_qk, c.dim_qk, unknown);
  dv.store(f.dv + at * c.dim_v, f.dv_bound + at * c.dim_v, c.dim_v, unknown_v);
}

void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string("the oracle of the GPU, ") + what + ": " +
                             cudaGetErrorString(code));
}

// Arrays in device memory that live as long as one solution.
class Memory {
 public:
  ~Memory() {
    for (void* p : all_) cudaFree(p);
  }
  template <class T>
  const T* copy(const std::vector<T>& from) {
    if (from.empty()) return nullptr;
    T* const to = make<T>(from.size());
    require(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    return to;
  }
  template <class T>
  T* make(size_t count) {
    void* p = nullptr;
    require(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)), "memory");
    all_.push_back(p);
    require(cudaMemset(p, 0, count * sizeof(T)), "memory");
    return static_cast<T*>(p);
  }

 private:
  std::vector<void*> all_;
};

std::vector<double> read(const double* from, size_t count) {
  std::vector<double> out(count);
  if (count)
    require(cudaMemcpy(out.data(), from, count * sizeof(double), cudaMemcpyDeviceToHost), "result");
  return out;
}

Given given(const Case& c, const Precision& p, Memory& memory) {
  Given g{};
  g.batch = c.batch, g.heads_q = c.heads_q, g.heads_kv = c.heads_kv;
  g.dim_qk = c.dim_qk, g.dim_v = c.dim_v, g.max_q = c.max_q, g.max_kv = c.max_kv;
  g.length_q = memory.copy(c.length_q), g.length_kv = memory.copy(c.length_kv);
  g.q = memory.copy(c.q), g.k = memory.copy(c.k), g.v = memory.copy(c.v);
  g.dout = memory.copy(c.dout), g.dlse = memory.copy(c.dlse);
  g.o_stored = memory.copy(c.o_stored), g.exact_o = c.o_stored.empty();
  g.slopes = memory.copy(c.slopes), g.sink = memory.copy(c.sink);
  g.causal = c.causal, g.bottom_right = c.bottom_right;
  g.window_left = c.window_left, g.window_right = c.window_right;
  const bool moves = c.origin[4] || c.origin_step[0] || c.origin_step[1] || c.origin_step[2] ||
                     c.origin_step[3] || c.origin_step[4];
  if (moves) throw std::invalid_argument("shift or origin_step is not 0; the GPU's oracle needs 0");
  std::copy(c.origin, c.origin + 4, g.origin);
  g.drop_below = static_cast<uint32_t>(std::lround(double{static_cast<float>(c.dropout)} * 65536));
  g.factor_kept = 1 / (1 - c.dropout);
  g.softcap = c.softcap, g.scale = c.scale, g.seed = c.seed, g.offset = c.offset;
  g.unit = p.unit_acc, g.flush = p.unit_acc < 1e-12 ? DBL_MIN : FLT_MIN;
  g.p = p.p, g.o = p.o;
  return g;
}

// The stored value has the rounding of its type in addition.
Tensor stored(std::vector<double> value, std::vector<double> bound, const Rounding& type,
              double flush, Tensor* amax = nullptr) {
  Peak peak{0};
  for (size_t i = 0; i < value.size(); ++i) {
    peak.add({std::abs(value[i]), bound[i]});
    if (value[i] != 0 || bound[i] != 0)
      bound[i] += type.unit * std::abs(value[i]) + std::max(type.floor, flush);
    if (type.saturates) value[i] = std::clamp(value[i], -type.largest, type.largest);
  }
  if (amax) {
    const Rounding fp32 = rounding(Type::kFp32);
    *amax = {{peak.value}, {peak.error() + fp32.unit * peak.value + FLT_MIN}, fp32};
  }
  return {std::move(value), std::move(bound), type};
}

}  // namespace

Result solve_on_gpu(const Case& c, const Precision& p) {
  if (c.fp8.s != Type::kExact || !c.k_factors.empty() || c.bias_kind != Bias::kNone ||
      c.dim_qk > kMostDim || c.dim_v > kMostDim)
    throw std::runtime_error("the oracle of the GPU knows neither FP8 nor a bias");
  Memory memory;
  const Given g = given(c, p, memory);
  const auto rows = static_cast<size_t>(c.batch * c.heads_q * c.max_q);
  const auto keys = static_cast<size_t>(c.batch * c.heads_kv * c.max_kv);
  const auto dim = static_cast<size_t>(c.dim_qk), dim_v = static_cast<size_t>(c.dim_v);
  const auto array = [&](size_t n) { return memory.make<double>(n); };
  const Found f{memory.make<Stats>(rows),
                array(rows),
                array(rows),
                array(rows),
                array(rows),
                array(rows * dim_v),
                array(rows * dim_v),
                array(rows * dim),
                array(rows * dim),
                array(keys * dim),
                array(keys * dim),
                array(keys * dim_v),
                array(keys * dim_v),
                array(rows),
                array(rows)};
  const std::vector<double> none(rows, -kInfinity);  // rows past the lengths
  require(cudaMemcpy(f.max_value, none.data(), rows * sizeof(double), cudaMemcpyHostToDevice),
          "maximum");
  if (rows) row_of_queries<<<static_cast<unsigned>(rows), kWarp>>>(g, f);
  if (keys && rows && !c.dout.empty()) key<<<static_cast<unsigned>(keys), kWarp>>>(g, f);
  require(cudaDeviceSynchronize(), "kernels");

  const Rounding fp32 = rounding(Type::kFp32);
  std::vector<Stats> stats(rows);
  if (rows)
    require(cudaMemcpy(stats.data(), f.stats, rows * sizeof(Stats), cudaMemcpyDeviceToHost),
            "statistics");
  Result r;
  r.max = {read(f.max_value, rows), read(f.max_bound, rows), fp32};
  r.sum_exp = {read(f.sum_exp, rows), read(f.sum_exp_bound, rows), fp32};
  r.lse = {none, std::vector<double>(rows), fp32};
  for (size_t row = 0; row < rows; ++row) {
    const auto i = static_cast<int64_t>(row) % c.max_q;
    const auto b = static_cast<size_t>(static_cast<int64_t>(row) / c.max_q / c.heads_q);
    if (i >= c.length_q[b]) continue;
    r.lse.value[row] = stats[row].lse, r.lse.bound[row] = stats[row].lse_bound;
  }
  r.o = stored(read(f.o, rows * dim_v), read(f.o_bound, rows * dim_v), p.o, g.flush, &r.o_amax);
  if (c.dout.empty()) return r;
  r.dq = stored(read(f.dq, rows * dim), read(f.dq_bound, rows * dim), p.dqkv, g.flush, &r.dq_amax);
  r.dk = stored(read(f.dk, keys * dim), read(f.dk_bound, keys * dim), p.dqkv, g.flush, &r.dk_amax);
  r.dv =
      stored(read(f.dv, keys * dim_v), read(f.dv_bound, keys * dim_v), p.dqkv, g.flush, &r.dv_amax);
  if (c.sink.empty()) return r;
  const std::vector<double> part = read(f.sink_part, rows), bound = read(f.sink_part_bound, rows);
  std::vector<double> sum(static_cast<size_t>(c.heads_q)), sum_bound(sum);
  for (size_t row = 0; row < rows; ++row) {
    const size_t h = row / static_cast<size_t>(c.max_q) % sum.size();
    sum[h] += part[row], sum_bound[h] += bound[row];
  }
  r.dsink = stored(std::move(sum), std::move(sum_bound), fp32, g.flush);
  return r;
}

}  // namespace tea::oracle
