// Cumulative lengths. From lengths: CTAs scan tiles, one CTA scans the tiles' sums, and the prefix
// of each tile is added. From masks with short rows: one pass with decoupled look-back. From masks
// with long rows: counts are stored in cu_seqlens, and the last CTA scans them.
#include "ops/cu_seqlens.h"
#include "ops/fill.h"
#include "ops/launch.cuh"

namespace tea {
namespace {

constexpr int kScan = 1024, kWarp = 32;
constexpr int kEach = 8;      // lengths per thread
constexpr int kUnderWay = 8;  // outstanding loads per thread
constexpr int64_t kTile = kScan * kEach, kMost = INT32_MAX;

__device__ int32_t saturated(int64_t sum) {
  return static_cast<int32_t>(sum < kMost ? sum : kMost);
}

// Inclusive scan over the threads of a CTA; *total: the sum over all threads.
template <int kThreads>
__device__ int64_t scanned(int64_t value, int64_t* total) {
  __shared__ int64_t of_warp[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int64_t before = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += before;
  }
  if (lane == kWarp - 1) of_warp[warp] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w == warp) value += sum;
    sum += of_warp[w];
  }
  __syncthreads();
  *total = sum;
  return value;
}

// The subset of sums 1 .. end: every `step`-th, and the last.
struct Places {
  int64_t end, step;
  TEA_HOST_DEVICE int64_t count() const { return (end + step - 1) / step; }
  TEA_HOST_DEVICE int64_t at(int64_t i) const {
    return (i + 1) * step < end ? (i + 1) * step : end;
  }
};

// A single CTA scans all tiles; with as many CTAs as tiles, each scans only its own tile. `lengths`
// may be the memory of the sums.
__global__ void __launch_bounds__(kScan)
    sum_tiles(const int32_t* lengths, int32_t* cu_seqlens, const Places places, int32_t* status) {
  if (thread_index() == 0) cu_seqlens[0] = 0;
  int64_t before = 0;
  for (int64_t tile = blockIdx.x * kTile; tile < places.count(); tile += gridDim.x * kTile) {
    const int64_t first = tile + int64_t{threadIdx.x} * kEach;
    int64_t sum[kEach], total = 0;
    bool valid = true;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t length = first + k < places.count() ? lengths[places.at(first + k) - 1] : 0;
      valid &= length >= 0;
      sum[k] = (k ? sum[k - 1] : 0) + (length > 0 ? length : 0);
    }
    const int64_t own = sum[kEach - 1], base = before + scanned<kScan>(own, &total) - own;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (first + k < places.count()) cu_seqlens[places.at(first + k)] = saturated(base + sum[k]);
    if (!valid || base + own > kMost) report(status, TEA_STATUS_BAD_LENGTHS);
    before += total;
  }
}

// Adds the prefix of each tile: the last sum of the previous tile. The last sum of a tile is
// already complete.
__global__ void __launch_bounds__(kBlock)
    add_tiles_before(int32_t* cu_seqlens, int64_t batch, int32_t* status) {
  for (int64_t i = kTile + 1 + thread_index(); i < batch; i += thread_count()) {
    if (i % kTile == 0) continue;
    const int64_t sum = int64_t{cu_seqlens[i]} + cu_seqlens[i / kTile * kTile];
    cu_seqlens[i] = saturated(sum);
    if (sum > kMost) report(status, TEA_STATUS_BAD_LENGTHS);
  }
}

// 128 times the number of non-zero bytes, plus `sum`. Each non-zero byte sets its highest bit (by a
// carry or itself), and one instruction adds the four bytes of a word.
__device__ uint32_t marked_128(const uint4& bytes, uint32_t sum) {
  for (const uint32_t word : {bytes.x, bytes.y, bytes.z, bytes.w})
    sum = __dp4a((((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | word) & 0x80808080u, 0x01010101u, sum);
  return sum;
}

// The number of non-zero bytes of [begin, end) that this lane counts.
__device__ int64_t marked_between(const uint8_t* begin, const uint8_t* end, int lane, int lanes) {
  const auto align = [](const uint8_t* at) { return at - reinterpret_cast<uintptr_t>(at) % 16; };
  const uint8_t* p = align(begin) + 16 * lane;
  const int64_t step = 16 * lanes;
  int64_t count = 0;
  for (; p < end; p += kUnderWay * step) {
    if (p >= begin && p + (kUnderWay - 1) * step + 16 <= end) {
      uint4 word[kUnderWay];
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k)
        word[k] = __ldg(reinterpret_cast<const uint4*>(p + k * step));
      uint32_t sum = 0;
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) sum = marked_128(word[k], sum);
      count += sum / 128;
    } else {
      for (const uint8_t* q = p; q < end && q < p + kUnderWay * step; q += step)
        for (const uint8_t* b = q < begin ? begin : q; b < q + 16 && b < end; ++b) count += *b != 0;
    }
  }
  return count;
}

__device__ void add_saturating(int32_t* to, int64_t value) {
  for (int32_t seen = *static_cast<volatile int32_t*>(to);;) {
    const int64_t sum = seen + value;
    const int32_t before = atomicCAS(to, seen, saturated(sum));
    if (before == seen) return;
    seen = before;
  }
}

__device__ int64_t sum_over(const Team& team, int64_t value) {
  for (int offset = team.lanes() / 2; offset; offset /= 2)
    value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Stores sums 1 + first .., one per thread of the CTA, of which `count` exist.
__device__ void store_sum(const tea_cu_seqlens& a, int64_t first, int count, int64_t sum) {
  const int i = threadIdx.x;
  if (i >= count) return;
  a.cu_seqlens[first + i + 1] = saturated(sum);
  if (sum > kMost) report(a.status, TEA_STATUS_BAD_LENGTHS);
}

// ---- Short rows --------------------------------------------------------------------------------

// The states of a tile's last sum before it is complete: kNothing, then the tile's own sum encoded
// as a number below kNothing (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
// Look-back", 2016).
constexpr int32_t kNothing = -1;
__device__ int32_t as_own(int64_t sum) { return static_cast<int32_t>(kNothing - 1 - sum); }

// Initialises sum 0 and the selected sums with `value` for the dependent grid.
__global__ void __launch_bounds__(kBlock)
    clear_sums(int32_t* cu_seqlens, const Places places, int32_t value) {
  launch_dependent_grids();
  if (thread_index() == 0) cu_seqlens[0] = value;
  for (int64_t i = thread_index(); i < places.count(); i += thread_count())
    cu_seqlens[places.at(i)] = value;
}

struct Tiles {
  Team team;  // the threads of a row, at most a warp
  // Large enough that few CTAs wait for their predecessors, small enough for many CTAs.
  TEA_HOST_DEVICE int rounds() const { return team.shift >= 2 && team.shift <= 4 ? 4 : 1; }
  TEA_HOST_DEVICE int at_once() const { return kBlock >> team.shift; }
  TEA_HOST_DEVICE int rows() const { return at_once() * rounds(); }
  TEA_HOST_DEVICE int64_t count(int64_t batch) const { return (batch + rows() - 1) / rows(); }
  __device__ volatile int32_t* last_sum(const tea_cu_seqlens& a, int64_t tile) const {
    const int64_t end = (tile + 1) * rows();
    return a.cu_seqlens + (end < a.batch ? end : a.batch);
  }
};

// The prefix of a tile (look-back), by all threads of its CTA: as many tiles at a time, back to the
// first tile with a complete sum.
__device__ int64_t sum_before(const tea_cu_seqlens& a, const Tiles& tiles, int64_t tile) {
  constexpr int kWarps = kBlock / kWarp;
  __shared__ int64_t of_warp[kWarps];
  __shared__ bool knows[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int64_t sum = 0;
  for (int64_t i = tile - 1 - static_cast<int>(threadIdx.x);; i -= kBlock) {
    int32_t seen = 0;
    if (i >= 0)
      while ((seen = *tiles.last_sum(a, i)) == kNothing) {
      }
    const unsigned known = __ballot_sync(~0u, seen >= 0), up_to_known = known ^ (known - 1);
    if (!(up_to_known >> lane & 1)) seen = 0;
    const int64_t own = sum_over({5}, int64_t{seen >= 0 ? seen : as_own(seen)});
    if (lane == 0) of_warp[warp] = own, knows[warp] = known != 0;
    __syncthreads();
    bool done = false;
    for (int w = 0; w < kWarps && !done; ++w) sum += of_warp[w], done = knows[w];
    if (done) return sum;
    __syncthreads();
  }
}

// The predecessor grid sets the last sum of every tile to kNothing; a CTA waits for that grid after
// it has counted. CTAs start in the order of their indices, so that a CTA may wait for its
// predecessors.
__global__ void __launch_bounds__(kBlock) sum_marks(const tea_cu_seqlens a, const Tiles tiles) {
  __shared__ int32_t tokens[kBlock];
  const int64_t tile = blockIdx.x, first = tile * tiles.rows(), left = a.batch - first;
  const int count = left < tiles.rows() ? static_cast<int>(left) : tiles.rows();
  const int lane = tiles.team.lane(), lanes = tiles.team.lanes();
  for (int round = 0; round < tiles.rounds(); ++round) {
    const int row = round * tiles.at_once() + (threadIdx.x >> tiles.team.shift);
    const uint8_t* const mask = a.mask + (first + row) * a.seqlen;
    const int64_t marked =
        sum_over(tiles.team, row < count ? marked_between(mask, mask + a.seqlen, lane, lanes) : 0);
    if (lane == 0)
      tokens[row] = static_cast<int32_t>(a.mask_marks_tokens ? marked : a.seqlen - marked);
  }
  __syncthreads();
  int64_t total;
  const int i = threadIdx.x;
  const int64_t sum = scanned<kBlock>(i < count ? tokens[i] : 0, &total);
  wait_on_dependent_grids();
  if (threadIdx.x == 0 && tile > 0) *tiles.last_sum(a, tile) = as_own(total);
  const int64_t before = sum_before(a, tiles, tile);
  if (threadIdx.x == 0) *tiles.last_sum(a, tile) = saturated(before + total);
  store_sum(a, first, count, before + sum);
  if (tile == 0 && threadIdx.x == 0) a.cu_seqlens[0] = 0;
}

// ---- Long rows ---------------------------------------------------------------------------------

struct Pieces {
  int64_t bytes, of_row;
};

// A warp counts a piece. The predecessor grid sets cu_seqlens to 0; the first entry counts the CTAs
// that have finished.
__global__ void __launch_bounds__(kBlock) count_marks(const tea_cu_seqlens a, const Pieces pieces) {
  __shared__ bool is_last;
  int32_t* const counts = a.cu_seqlens + 1;
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = thread_index() / kWarp; i < a.batch * pieces.of_row;
       i += thread_count() / kWarp) {
    const int64_t row = quotient(i, pieces.of_row),
                  begin = (i - row * pieces.of_row) * pieces.bytes;
    const int64_t end = begin + pieces.bytes < a.seqlen ? begin + pieces.bytes : a.seqlen;
    const uint8_t* const mask = a.mask + row * a.seqlen;
    int64_t tokens = sum_over({5}, marked_between(mask + begin, mask + end, lane, kWarp));
    if (lane) continue;
    if (!a.mask_marks_tokens) tokens = end - begin - tokens;
    wait_on_dependent_grids();
    if (a.seqlen <= kMost)
      atomicAdd(counts + row, static_cast<int32_t>(tokens));
    else
      add_saturating(counts + row, tokens);
    __threadfence();
  }
  wait_on_dependent_grids();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(a.cu_seqlens, 1) == static_cast<int32_t>(gridDim.x - 1);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  int64_t before = 0, total = 0;
  for (int64_t first = 0; first < a.batch; first += kBlock, before += total) {
    const int64_t left = a.batch - first;
    const int count = left < kBlock ? static_cast<int>(left) : kBlock, i = threadIdx.x;
    const int64_t own = i < count ? __ldcg(counts + first + i) : 0;
    store_sum(a, first, count, before + scanned<kBlock>(own, &total));
  }
  if (threadIdx.x == 0) a.cu_seqlens[0] = 0;
}

__global__ void __launch_bounds__(kBlock)
    count_above_zero(const int32_t* values, int64_t count, int32_t* result) {
  int32_t above = 0;
  for (int64_t i = thread_index(); i < count; i += thread_count()) above += values[i] > 0;
  for (int offset = kWarp / 2; offset; offset /= 2) above += __shfl_xor_sync(~0u, above, offset);
  if (threadIdx.x % kWarp == 0 && above) atomicAdd(result, above);
}

void sum_masks(const tea_cu_seqlens& a, const Place& place) {
  constexpr int64_t kOfLane = 16 * kUnderWay, kPiece = kWarp * kOfLane * 8;
  const bool is_short = a.seqlen <= kPiece;
  const Tiles tiles = {Team::of(a.seqlen, kOfLane, kWarp)};
  const Places cleared = {a.batch, is_short ? tiles.rows() : 1};
  launch({"clear_sums", blocks_for(cleared.count())}, clear_sums, place, a.cu_seqlens, cleared,
         is_short ? kNothing : 0);
  if (is_short) {
    const dim3 grid(static_cast<unsigned>(tiles.count(a.batch)));
    return launch_dependent({"sum_marks", grid}, sum_marks, place, a, tiles);
  }
  const Pieces pieces = {kPiece, (a.seqlen + kPiece - 1) / kPiece};
  launch_dependent({"count_marks", blocks_for(a.batch * pieces.of_row * kWarp)}, count_marks, place,
                   a, pieces);
}

void sum_lengths(const tea_cu_seqlens& a, const Place& place) {
  const int64_t tiles = std::max<int64_t>((a.batch + kTile - 1) / kTile, 1);
  int32_t* const sums = a.cu_seqlens;
  launch({"sum_tiles", dim3(static_cast<unsigned>(tiles)), dim3(kScan)}, sum_tiles, place,
         a.lengths, sums, Places{a.batch, 1}, a.status);
  if (tiles == 1) return;
  launch({"sum_tiles", dim3(1), dim3(kScan)}, sum_tiles, place,
         static_cast<const int32_t*>(sums + 1), sums, Places{a.batch, kTile}, a.status);
  launch({"add_tiles_before", blocks_for(a.batch)}, add_tiles_before, place, sums, a.batch,
         a.status);
}

}  // namespace

void fill_cu_seqlens_on_gpu(const tea_cu_seqlens& args, const Place& place) {
  if (args.mask && args.batch)
    sum_masks(args, place);
  else
    sum_lengths(args, place);
}

int64_t count_positive_on_gpu(const int32_t* values, int64_t count, int32_t* scratch,
                              const Place& place) {
  fill_bytes(scratch, 0, sizeof *scratch, place);
  launch({"count_above_zero", blocks_for(count)}, count_above_zero, place, values, count, scratch);
  const driver::OnDevice here(place.device);
  const auto stream = static_cast<cudaStream_t>(place.stream);
  int32_t result = 0;
  cudaError_t error =
      cudaMemcpyAsync(&result, scratch, sizeof result, cudaMemcpyDeviceToHost, stream);
  if (!error) error = cudaStreamSynchronize(stream);
  if (!error) return result;
  cudaGetLastError();  // clears the error, which the next launch of this thread would report again
  throw Error(TEA_FAILED, std::string("copy to the host: ") + cudaGetErrorString(error));
}

}  // namespace tea
