// Cumulative lengths. Masks are counted first, into the place of the sums; blocks sum tiles of them
// there, one block sums the tiles, and what lies before a tile is added to its sums.
#include "ops/cu_seqlens.h"
#include "ops/fill.h"
#include "ops/launch.cuh"

namespace tea {
namespace {

constexpr int kScan = 1024, kWarp = 32;
constexpr int kEach = 8;      // lengths that a thread sums
constexpr int kUnderWay = 8;  // accesses
constexpr int64_t kTile = kScan * kEach, kMost = INT32_MAX;

__device__ int32_t saturated(int64_t sum) {
  return static_cast<int32_t>(sum < kMost ? sum : kMost);
}

// The sum over this thread and those before it; *total: over all.
__device__ int64_t scanned(int64_t value, int64_t* total) {
  __shared__ int64_t of_warp[kScan / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int64_t before = __shfl_up_sync(~0u, value, offset);
    if (lane >= offset) value += before;
  }
  if (lane == kWarp - 1) of_warp[warp] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kScan / kWarp; ++w) {
    if (w == warp) value += sum;
    sum += of_warp[w];
  }
  __syncthreads();
  *total = sum;
  return value;
}

// Which of the sums 1 .. end are worked on: every `step`-th and the last.
struct Places {
  int64_t end, step;
  TEA_HOST_DEVICE int64_t count() const { return (end + step - 1) / step; }
  TEA_HOST_DEVICE int64_t at(int64_t i) const {
    return (i + 1) * step < end ? (i + 1) * step : end;
  }
};

// A block sums tile after tile; with as many blocks as tiles, each sums its own alone. `lengths`,
// which begin with the first sequence's, may be the sums' own place.
__global__ void __launch_bounds__(kScan)
    sum_lengths(const int32_t* lengths, int32_t* cu_seqlens, const Places places, int32_t* status) {
  if (thread_index() == 0) cu_seqlens[0] = 0;
  int64_t before = 0;
  for (int64_t tile = blockIdx.x * kTile; tile < places.count(); tile += gridDim.x * kTile) {
    const int64_t first = tile + int64_t{threadIdx.x} * kEach;
    int64_t sum[kEach], total = 0;
    bool sane = true;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t length = first + k < places.count() ? lengths[places.at(first + k) - 1] : 0;
      sane &= length >= 0;
      sum[k] = (k ? sum[k - 1] : 0) + (length > 0 ? length : 0);
    }
    const int64_t own = sum[kEach - 1], base = before + scanned(own, &total) - own;
#pragma unroll
    for (int k = 0; k < kEach; ++k)
      if (first + k < places.count()) cu_seqlens[places.at(first + k)] = saturated(base + sum[k]);
    if (!sane || base + own > kMost) report(status, TEA_STATUS_BAD_LENGTHS);
    before += total;
  }
}

// The sums of a tile alone become those from the first tile on: each but the last, which is right
// already, lacks the last one of the tile before.
__global__ void __launch_bounds__(kBlock)
    add_tiles_before(int32_t* cu_seqlens, int64_t batch, int32_t* status) {
  for (int64_t i = kTile + 1 + thread_index(); i < batch; i += thread_count()) {
    if (i % kTile == 0) continue;
    const int64_t sum = int64_t{cu_seqlens[i]} + cu_seqlens[i / kTile * kTile];
    cu_seqlens[i] = saturated(sum);
    if (sum > kMost) report(status, TEA_STATUS_BAD_LENGTHS);
  }
}

// How many of the bytes are not zero, 128 times, and `sum`: each sets its highest bit, as a carry
// or before, and one instruction adds the four of a word.
__device__ uint32_t marked_128(const uint4& bytes, uint32_t sum) {
  for (const uint32_t word : {bytes.x, bytes.y, bytes.z, bytes.w})
    sum = __dp4a((((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | word) & 0x80808080u, 0x01010101u, sum);
  return sum;
}

// The bytes of [begin, end) that are not zero and fall to this lane.
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

// What one group of threads counts: a row, or a piece of it.
struct Pieces {
  int64_t bytes, of_row;
  Team team;  // at most a warp
};

__global__ void __launch_bounds__(kBlock)
    count_marks(const tea_cu_seqlens a, int32_t* counts, const Pieces pieces) {
  const int lane = pieces.team.lane(), lanes = pieces.team.lanes(), in_warp = threadIdx.x % kWarp;
  const int64_t count = a.batch * pieces.of_row;
  // Whole warps stay together, for the sums over their threads.
  for (int64_t first = (thread_index() - in_warp) >> pieces.team.shift; first < count;
       first += pieces.team.count()) {
    const int64_t i = first + (in_warp >> pieces.team.shift);
    const int64_t row = quotient(i, pieces.of_row),
                  begin = (i - row * pieces.of_row) * pieces.bytes;
    const int64_t end = begin + pieces.bytes < a.seqlen ? begin + pieces.bytes : a.seqlen;
    const uint8_t* const mask = a.mask + row * a.seqlen;
    int64_t tokens = i < count ? marked_between(mask + begin, mask + end, lane, lanes) : 0;
    for (int offset = lanes / 2; offset; offset /= 2)
      tokens += __shfl_xor_sync(~0u, tokens, offset);
    if (i >= count || lane) continue;
    if (!a.mask_marks_tokens) tokens = end - begin - tokens;
    if (pieces.of_row == 1)
      counts[row] = saturated(tokens);
    else if (a.seqlen <= kMost)
      atomicAdd(counts + row, static_cast<int32_t>(tokens));
    else
      add_saturating(counts + row, tokens);
  }
}

__global__ void __launch_bounds__(kBlock)
    count_above_zero(const int32_t* values, int64_t count, int32_t* result) {
  int32_t above = 0;
  for (int64_t i = thread_index(); i < count; i += thread_count()) above += values[i] > 0;
  for (int offset = kWarp / 2; offset; offset /= 2) above += __shfl_xor_sync(~0u, above, offset);
  if (threadIdx.x % kWarp == 0 && above) atomicAdd(result, above);
}

void count(const tea_cu_seqlens& a, const Place& place) {
  constexpr int64_t kOfLane = 16 * kUnderWay, kRounds = 8;
  int32_t* const counts = a.cu_seqlens + 1;
  Pieces pieces{0, 0, Team::of(a.seqlen, kOfLane, kWarp)};
  pieces.bytes = pieces.team.lanes() * kOfLane * kRounds;
  pieces.of_row = std::max<int64_t>((a.seqlen + pieces.bytes - 1) / pieces.bytes, 1);
  if (pieces.of_row > 1) fill_bytes(counts, 0, static_cast<uint64_t>(a.batch) * 4, place);
  launch({"count_marks", blocks_for(a.batch * pieces.of_row * pieces.team.lanes())}, count_marks,
         place, a, counts, pieces);
}

void sum(const int32_t* lengths, const tea_cu_seqlens& a, const Place& place) {
  const int64_t tiles = std::max<int64_t>((a.batch + kTile - 1) / kTile, 1);
  int32_t* const sums = a.cu_seqlens;
  launch({"sum_lengths", dim3(static_cast<unsigned>(tiles)), dim3(kScan)}, sum_lengths, place,
         lengths, sums, Places{a.batch, 1}, a.status);
  if (tiles == 1) return;
  launch({"sum_lengths", dim3(1), dim3(kScan)}, sum_lengths, place,
         static_cast<const int32_t*>(sums + 1), sums, Places{a.batch, kTile}, a.status);
  launch({"add_tiles_before", blocks_for(a.batch)}, add_tiles_before, place, sums, a.batch,
         a.status);
}

}  // namespace

void fill_cu_seqlens_on_gpu(const tea_cu_seqlens& args, const Place& place) {
  if (args.mask && args.batch) count(args, place);
  sum(args.mask ? args.cu_seqlens + 1 : args.lengths, args, place);
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
  cudaGetLastError();  // or the next launch in this thread, whose ever it is, reports it again
  throw Error(TEA_FAILED, std::string("copy to the host: ") + cudaGetErrorString(error));
}

}  // namespace tea
