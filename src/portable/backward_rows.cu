// What backward does row by row: before the tiles, LSE and delta = dO . O - dLSE, and dQ's sums
// cleared; after them, dQ from its sums, and the gradient of sinks.
#include <algorithm>

#include "core/error.h"
#include "portable/backward_passes.h"
#include "portable/device/gradient.cuh"

namespace tea::portable {
namespace {

constexpr int kThreads = 256, kSinkThreads = 1024;

// A team of neighbouring lanes, a power of two, has a row of a head.
struct Parameters {
  BackwardWork work;
  int team;
};
struct Place {
  int64_t row, head;
  int member;
};
TEA_DEVICE Place place_of(const Parameters& p) {
  const int64_t n = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / static_cast<unsigned>(p.team);
  return {n / p.work.w.heads_q, n % p.work.w.heads_q, static_cast<int>(threadIdx.x) & (p.team - 1)};
}

// Eight elements from `element` on.
TEA_DEVICE void load_floats(float (&x)[8], const Rows& rows, int64_t element) {
  if (rows.wide && (rows.dtype == TEA_BF16 || rows.dtype == TEA_FP16)) {
    const uint4 bits =
        *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(rows.data) + element);
    const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool half = rows.dtype == TEA_FP16;
      x[2 * i] = half ? float_of_half(pair[i] & 0xFFFF) : __uint_as_float(pair[i] << 16);
      x[2 * i + 1] = half ? float_of_half(pair[i] >> 16) : __uint_as_float(pair[i] & 0xFFFF0000);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = load_float(rows.data, rows.dtype, element + i);
}

TEA_DEVICE void prepare_row(const Parameters& p, const Item& item, const Place& at) {
  const Work& w = p.work.w;
  const RowSums& sums = p.work.sums;
  const bool inside = at.row < item.q.length;
  const Columns seeing = seeing_rows(item);
  const bool sees = inside && at.row >= seeing.begin && at.row < seeing.end;
  const int64_t entry = first_entry(p.work, item, at.head) + at.row;
  float delta = 0;
  if (sees) {
    const int64_t o = first_element(w.o, w.queries, item.q, item.b, at.head) + at.row * w.o.seq;
    const int64_t dout =
        first_element(w.dout, w.queries, item.q, item.b, at.head) + at.row * w.dout.seq;
    for (int d = at.member * 8; d < w.dim_v; d += p.team * 8) {
      float x[8], y[8];
      load_floats(x, w.o, o + d);
      load_floats(y, w.dout, dout + d);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
    }
  }
  if (inside && sums.dq)
    for (int d = at.member * 4; d < sums.width; d += p.team * 4)
      *reinterpret_cast<float4*>(sums.dq + entry * sums.width + d) = {};
  for (int d = p.team / 2; d > 0; d /= 2) delta += __shfl_xor_sync(0xffffffff, delta, d);
  if (!inside || at.member != 0) return;
  const int64_t per_row = first_per_row(w, item.q, item.b, at.head) + at.row * w.per_row.seq;
  const float lse = w.per_row.lse[per_row];
  delta *= scalar(w.scales.o_inv) * scalar(w.scales.dout_inv);
  if (w.per_row.dlse) delta -= w.per_row.dlse[per_row];
  sums.lse2[entry] = lse == kMinusInfinity ? -kMinusInfinity : lse * kLog2E;
  sums.delta[entry] = delta;
}

__global__ void __launch_bounds__(kThreads) prepare_entry(const __grid_constant__ Parameters p) {
  const Place at = place_of(p);
  for (int64_t b = blockIdx.y; b < p.work.w.batch; b += gridDim.y)
    prepare_row(p, item_of(p.work.w, b), at);
}

// dQ's sums stand 16 dimensions at a time as accumulators hold them: the lane t of a quad has
// dimensions 2t, 2t + 1, 8 + 2t, 9 + 2t.
TEA_DEVICE void load_sums(float (&x)[16], const float* from) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 four = reinterpret_cast<const float4*>(from)[t];
    x[2 * t] = four.x, x[2 * t + 1] = four.y;
    x[8 + 2 * t] = four.z, x[9 + 2 * t] = four.w;
  }
}

// Up to 16 elements from `element` on.
TEA_DEVICE void store_floats(const float (&x)[16], int count, const Rows& rows, int64_t element) {
  if (rows.wide && (rows.dtype == TEA_BF16 || rows.dtype == TEA_FP16)) {
    uint32_t pair[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      pair[i] = rows.dtype == TEA_FP16 ? pack<TEA_FP16>(x[2 * i], x[2 * i + 1])
                                       : pack<TEA_BF16>(x[2 * i], x[2 * i + 1]);
    auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows.data) + element);
    to[0] = {pair[0], pair[1], pair[2], pair[3]};
    if (count > 8) to[1] = {pair[4], pair[5], pair[6], pair[7]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i < count) store_float(rows.data, rows.dtype, element + i, x[i]);
}

// Returns the largest magnitude before the output's scale.
TEA_DEVICE float finish_row(const Parameters& p, const Item& item, const Place& at) {
  const Work& w = p.work.w;
  const RowSums& sums = p.work.sums;
  const int64_t rows = w.queries.form == TEA_RAGGED ? item.q.length : w.queries.capacity;
  if (at.row >= rows) return 0;
  const Columns seeing = seeing_rows(item);
  const bool sees = at.row >= seeing.begin && at.row < seeing.end;
  const int64_t first = first_entry(p.work, item, at.head);
  const int row = static_cast<int>(at.row), length = static_cast<int>(item.q.length);
  const int64_t element =
      first_element(w.dq, w.queries, item.q, item.b, at.head) + at.row * w.dq.seq;
  const float factor = factors_of(w).dq, scale = scalar(w.scales.dq);
  float largest = 0;
  for (int d = at.member * 16; d < w.dim_qk; d += p.team * 16) {
    float x[16] = {};
    if (sees) load_sums(x, sums.dq + dq_sum(sums, first, row, length, d));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] *= factor;
      if (d + i < w.dim_qk) largest = fmaxf(largest, fabsf(x[i]));
      x[i] *= scale;
    }
    store_floats(x, w.dim_qk - d, w.dq, element + d);
  }
  return largest;
}

__global__ void __launch_bounds__(kThreads) finish_entry(const __grid_constant__ Parameters p) {
  const Place at = place_of(p);
  float largest = 0;
  for (int64_t b = blockIdx.y; b < p.work.w.batch; b += gridDim.y)
    largest = fmaxf(largest, finish_row(p, item_of(p.work.w, b), at));
  raise_by_block(p.work.w.scales.dq_amax, largest);
}

// One block for each head; rows are added up in an order that only the sizes decide.
__global__ void __launch_bounds__(kSinkThreads)
    dsink_entry(const __grid_constant__ BackwardWork work) {
  __shared__ float share[kSinkThreads];
  const Work& w = work.w;
  const int64_t head = blockIdx.x;
  const float sink = sink_of(w, head);
  float sum = 0;
  for (int64_t b = 0; b < w.batch; ++b) {
    const Item item = item_of(w, b);
    const int64_t first = first_entry(work, item, head);
    for (int64_t i = threadIdx.x; i < item.q.length; i += kSinkThreads) {
      const float lse2 = work.sums.lse2[first + i];
      if (lse2 == -kMinusInfinity) continue;
      sum -= exp2_fast(fmaf(sink, kLog2E, -lse2)) * work.sums.delta[first + i];
    }
  }
  share[threadIdx.x] = sum;
  for (int n = kSinkThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) share[threadIdx.x] += share[threadIdx.x + n];
  }
  if (threadIdx.x == 0) w.dsink[head] = share[0];
}

int team_for(int pieces) {
  int team = 1;
  while (team < pieces && team < 32) team *= 2;
  return team;
}

dim3 grid_of(const Work& w, int team) {
  const int64_t rows = w.queries.capacity * w.heads_q, per_block = kThreads / team;
  return {static_cast<unsigned>((rows + per_block - 1) / per_block),
          static_cast<unsigned>(std::min<int64_t>(w.batch, 65535))};
}
bool has_rows(const Work& w) { return w.batch > 0 && w.queries.capacity > 0; }

}  // namespace

void check_launch(const char* kernel) {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess)
    throw Error(TEA_FAILED, std::string(kernel) + ": " + cudaGetErrorString(code));
}

void prepare_rows(const BackwardWork& work, cudaStream_t stream) {
  if (!has_rows(work.w)) return;
  const int team = team_for(work.w.dim_v / 8);
  prepare_entry<<<grid_of(work.w, team), kThreads, 0, stream>>>({work, team});
  check_launch("backward, before the tiles");
}

void finish_dq(const BackwardWork& work, cudaStream_t stream) {
  if (!has_rows(work.w)) return;
  const int team = team_for((work.w.dim_qk + 15) / 16);
  finish_entry<<<grid_of(work.w, team), kThreads, 0, stream>>>({work, team});
  check_launch("backward, dQ after the tiles");
}

void sum_dsink(const BackwardWork& work, cudaStream_t stream) {
  dsink_entry<<<static_cast<unsigned>(work.w.heads_q), kSinkThreads, 0, stream>>>(work);
  check_launch("backward, dsink");
}

}  // namespace tea::portable
