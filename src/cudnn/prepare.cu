// The small kernels around cuDNN's. Device memory is read when they run, clamped and reported by
// the rules of math/lengths.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "cudnn/prepare.h"
#include "gpu/amax.cuh"
#include "math/lengths.h"
#include "te_attention.h"

namespace tea::cudnn {
namespace {

constexpr int kThreads = 256, kPlaces = 64;
constexpr int64_t kMostBlocks = 1024;  // of kernels whose threads take many items each

__device__ Sequence sequence_of(const Side& side, int64_t b) {
  if (side.form == TEA_RAGGED)
    return ragged_sequence(side.cu_seqlens, side.offsets, b, side.capacity, side.tokens);
  if (side.form != TEA_DENSE) return padded_sequence(side.cu_seqlens, b, side.capacity);
  return dense_sequence(side.capacity);
}

__device__ void report(int32_t* status, int32_t bit) {
  if (status) atomicOr(status, bit);
}

// Of all threads of the grid.
__device__ int64_t first() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ int64_t step() { return int64_t{gridDim.x} * kThreads; }

__device__ void prepare_side(const Prepare& p, const PrepareSide& s) {
  for (int64_t b = first(); b <= p.graph_batch; b += step()) {
    const bool given = b < p.batch;
    const Sequence at = given ? sequence_of(s.side, b) : Sequence{s.side.tokens, 0, true};
    if (!at.valid) report(p.status, TEA_STATUS_BAD_LENGTHS);
    if (s.lengths && b < p.graph_batch) s.lengths[b] = static_cast<int32_t>(at.length);
    for (const Starts& starts : s.starts)
      if (starts.out) starts.out[b] = at.start * starts.stride;
  }
}

// Pages past the end of a sequence are not looked at, so they may hold anything: the first one.
__device__ void prepare_table(const Prepare& p, const PrepareTable& t) {
  if (!t.in) return;
  for (int64_t i = first(); i < p.graph_batch * p.columns; i += step()) {
    const int64_t b = i / p.columns, column = i % p.columns;
    bool valid = true;
    const bool read = b < p.batch && column < p.given_columns &&
                      column * p.page_size < sequence_of(p.kv.side, b).length;
    const int64_t page = read ? clamp_page(t.in[b * t.stride + column], t.pages, &valid) : 0;
    if (!valid) report(p.status, TEA_STATUS_BAD_PAGE);
    t.out[i] = static_cast<int32_t>(page);
  }
}

__global__ void __launch_bounds__(kThreads) prepare_entry(const __grid_constant__ Prepare p) {
  prepare_side(p, p.q), prepare_side(p, p.kv);
  prepare_table(p, p.k_table), prepare_table(p, p.v_table);
  if (p.zero_sink)
    for (int64_t h = first(); h < p.heads; h += step()) p.zero_sink[h] = 0;
  for (int64_t i = first(); i < p.lse.count; i += step())
    p.lse.out[i] = p.lse.in[i] == -__builtin_huge_valf() ? 0.0f : p.lse.in[i];
  if (p.scalars && first() <= p.zeros) p.scalars[first() * kScalarStep] = first() ? 0.0f : 1.0f;
}

__global__ void raise_entry(const __grid_constant__ Raise p) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kMostRaised && p.to[i]) raise_amax(p.to[i], fabsf(*p.from[i]));
}

// Where an infinite score makes SUM_EXP NaN, MAX is the infinity.
__global__ void __launch_bounds__(kThreads) finish_entry(const __grid_constant__ Finish f) {
  for (int64_t i = first(); i < f.batches * f.heads * f.rows; i += step()) {
    const int64_t b = i / f.rows / f.heads, head = i / f.rows % f.heads, row = i % f.rows;
    const int64_t at = b * f.batch + row * f.seq + head * f.head;
    const float sum = f.sum_exp[at], found = f.max[at];
    const float largest = isnan(sum) && !isinf(found) ? sum : found;
    f.max[at] = largest;
    if (f.lse) f.lse[at] = found == -__builtin_huge_valf() ? found : largest + logf(sum);
  }
}

// The rows of a sequence that have a result, as a range: the bounds of a band move one way.
struct Range {
  int64_t begin, end;
};
__device__ Range with_result(const Clear& c, int64_t b, int64_t length) {
  const int64_t other = sequence_of(c.other, b).length;
  const int64_t length_q = c.keys ? other : length, length_kv = c.keys ? length : other;
  const Band bound = band(c.mask, diagonal(c.mask.bottom_right, length_q, length_kv), 0, 0);
  // A row attends to columns row + lo .. row + hi of `other`; a column is visible to rows col - hi
  // .. col - lo.
  const int64_t lo = c.keys ? -bound.hi : bound.lo, hi = c.keys ? -bound.lo : bound.hi;
  const int64_t begin = max(int64_t{0}, -hi), end = min(length, other - lo);
  return other > 0 ? Range{begin, end} : Range{0, 0};
}

// A bit for each place of a block.
struct Places {
  unsigned long long valid, kept;  // in a sequence; with a result
};

__device__ void mark_range(unsigned long long* bits, int64_t begin, int64_t end) {
  const int64_t from = max(begin, int64_t{0}), to = min(end, int64_t{kPlaces});
  if (from < to) atomicOr(bits, ~0ull >> (kPlaces - (to - from)) << from);
}

__device__ void mark(const Clear& c, int64_t first, Places* places) {
  for (int64_t b = threadIdx.x; b < c.batch; b += kThreads) {
    const Sequence s = sequence_of(c.side, b);
    const Range rows = with_result(c, b, s.length);
    const int64_t base = (c.side.form == TEA_RAGGED ? s.start : b * c.side.capacity) - first;
    mark_range(&places->valid, base, base + s.length);
    mark_range(&places->kept, base + rows.begin, base + rows.end);
  }
}

__device__ void write(const Cleared& t, int64_t b, int64_t row, bool valid) {
  for (int i = static_cast<int>(threadIdx.x); i < t.heads * t.dim; i += kThreads) {
    const int head = i / t.dim;
    const int64_t at = b * t.batch + row * t.seq + head * t.head + i % t.dim;
    if (t.bytes == 1)
      static_cast<uint8_t*>(t.data)[at] = 0;
    else if (t.bytes == 2)
      static_cast<uint16_t*>(t.data)[at] = 0;
    else
      static_cast<float*>(t.data)[at] = t.sink && valid ? t.sink[head] : t.value;
  }
}

__host__ __device__ int64_t places_of(const Clear& c) {
  return c.side.form == TEA_RAGGED ? c.side.tokens : c.batch * c.side.capacity;
}

// Blocks of `one`, then those of `other`.
struct ClearBoth {
  Clear one, other;
  int64_t blocks;  // of `one`
};

__device__ void clear_block(const Clear& c, int64_t block) {
  __shared__ Places bits;
  const bool ragged = c.side.form == TEA_RAGGED;
  const int64_t first = block * kPlaces, places = places_of(c);
  if (threadIdx.x == 0) bits = {0, 0};
  __syncthreads();
  mark(c, first, &bits);
  __syncthreads();
  for (int i = 0; i < kPlaces && first + i < places; ++i) {
    if (bits.kept >> i & 1) continue;
    const int64_t place = first + i;
    for (const Cleared& t : c.tensor)
      if (t.data)
        write(t, ragged ? 0 : place / c.side.capacity, ragged ? place : place % c.side.capacity,
              bits.valid >> i & 1);
  }
}

__global__ void __launch_bounds__(kThreads) clear_entry(const __grid_constant__ ClearBoth c) {
  if (blockIdx.x < c.blocks)
    clear_block(c.one, blockIdx.x);
  else
    clear_block(c.other, blockIdx.x - c.blocks);
}

int64_t blocks_of(int64_t items) {
  return std::min((items + kThreads - 1) / kThreads, kMostBlocks);
}

template <class Parameters>
void launch(const char* name, int64_t blocks, void (*kernel)(Parameters), Parameters parameters,
            void* stream) {
  void* addresses[] = {&parameters};
  const cudaError_t code =
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), addresses, 0,
                       static_cast<cudaStream_t>(stream));
  if (code == cudaSuccess) return;
  cudaGetLastError();  // or the next launch in this thread, whose ever it is, reports it again
  throw Error(TEA_FAILED, std::string(name) + ": " + cudaGetErrorString(code));
}

}  // namespace

void prepare(const Prepare& work, void* stream) {
  const int64_t items = std::max(
      {work.graph_batch + 1, work.graph_batch * work.columns, int64_t{work.heads}, work.lse.count});
  launch("cudnn: preparing", blocks_of(items), prepare_entry, work, stream);
}

void finish(const Finish& work, void* stream) {
  const int64_t items = work.batches * work.heads * work.rows;
  launch("cudnn: finishing rows", blocks_of(items), finish_entry, work, stream);
}

void raise(const Raise& work, void* stream) {
  launch("cudnn: recording amaxes", 1, raise_entry, work, stream);
}

void clear(const Clear& work, const Clear* keys, void* stream) {
  const auto blocks = [](const Clear& c) { return (places_of(c) + kPlaces - 1) / kPlaces; };
  const ClearBoth both{work, keys ? *keys : Clear{}, blocks(work)};
  if (const int64_t all = both.blocks + (keys ? blocks(*keys) : 0))
    launch("cudnn: clearing", all, clear_entry, both, stream);
}

}  // namespace tea::cudnn
