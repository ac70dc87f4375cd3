// Adds the parts of the tiles that several CTAs of the MLA kernel have computed a part of each. A
// kernel of its own, so that all SMs share the work: the parts of a tile are 129 KiB each.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/decode/mla/shared_memory.cuh"
#include "hopper/decode/row_output.cuh"

namespace tea::hopper::decode::mla {

inline constexpr int kCombineThreads = kDimV / 4;  // of a row, four columns each
inline constexpr int kCombineCtasPerSm = 6;        // as registers allow

// The parts of a row are added in a fixed order, the last one first. Parts behind the row's last
// key are zero and change no bit, so a batch-invariant row does not depend on their number.
template <Type kType>
struct Combine {
  static constexpr int kBatch = 8;  // parts that are read at once

  struct SharedStorage {
    DividedTile tiles[kCombineThreads];
    int tiles_of_warp[kCombineThreads / 32];
    float row_max[kCombineThreads / 32];
    float weights[kCombineThreads], sums[kCombineThreads];
  };
  const LaunchParams& p;
  SharedStorage& s;

  static TEA_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
  TEA_DEVICE float* slot(const DividedTile& tile, int part) const {
    return p.slot(tile.cta - part * p.tiles_at_once, part == 0);
  }
  TEA_DEVICE RowState row_state(const DividedTile& tile, int row, int part) const {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(slot_rows(slot(tile, part)) + row));
    return {x.x, x.y};
  }
  // The maximum over all parts. Called by all threads.
  TEA_DEVICE float row_max(const DividedTile& tile, int row) const {
    float high = kMinusInfinity;
    for (int part = thread(); part < tile.parts; part += kCombineThreads)
      high = fmaxf(high, row_state(tile, row, part).max);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, d));
    if (lane() == 0) s.row_max[warp()] = high;
    __syncthreads();
#pragma unroll
    for (const float other : s.row_max) high = fmaxf(high, other);
    return high;
  }
  TEA_DEVICE void add_parts(float4& o, const DividedTile& tile, int row, int first,
                            int count) const {
#pragma unroll 1
    for (int i = 0; i < count; i += kBatch) {
      float4 part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (i + j < count)
          part[j] = __ldcg(
              reinterpret_cast<const float4*>(slot(tile, first + i + j) + row * kDimV) + thread());
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j >= count) break;
        const float weight = s.weights[i + j];
        o = {o.x + part[j].x * weight, o.y + part[j].y * weight, o.z + part[j].z * weight,
             o.w + part[j].w * weight};
      }
    }
  }
  TEA_DEVICE void write(const RowOutput& output, const float4& x) const {
    const AttentionArguments& a = p.args;
    const int column = 4 * thread();
    if (column >= a.dim_v) return;
    float4 o = {x.x * output.factor, x.y * output.factor, x.z * output.factor, x.w * output.factor};
    if (output.factor == 0) o = {};
    if (a.o.dtype == TEA_FP32)
      *reinterpret_cast<float4*>(static_cast<float*>(a.o.data) + output.at + column) = o;
    else
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a.o.data) + output.at + column) =
          uint2{pack<kType>(o.x, o.y), pack<kType>(o.z, o.w)};
  }
  TEA_DEVICE void add_row(const DividedTile& tile, int row) const {
    WorkItem item = {};
    item.batch = tile.batch, item.tile = tile.tile;
    item.bounds = p.args.is_uniform ? p.bounds : bounds_of(p.args, tile.batch);
    const int packed = p.first_row(item) + row;
    if (packed >= item.bounds.seqlen_q * p.group) return;
    const float high = row_max(tile, row), finite = high == kMinusInfinity ? 0.0f : high;
    float4 o = {};
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < tile.parts; first += kCombineThreads) {
      const int count = min(tile.parts - first, kCombineThreads);
      if (thread() < count) {
        const RowState part = row_state(tile, row, first + thread());
        const float weight = exp2_fast((part.max - finite) * p.scale_log2);
        s.weights[thread()] = weight, s.sums[thread()] = part.sum * weight;
      }
      __syncthreads();
      add_parts(o, tile, row, first, count);
      for (int i = 0; i < count; ++i) sum += s.sums[i];
      __syncthreads();  // before the weights, or the maxima of the next row, are overwritten
    }
    write(finish_row<false>(p, item, p.head_kv(item), packed, high, sum, thread() == 0), o);
  }
  // Gathers the descriptors of divided tiles of kCombineThreads CTAs, and returns their number.
  TEA_DEVICE int find_tiles(int first_cta) const {
    DividedTile tile = {};
    if (first_cta + thread() < p.ctas) {
      const int4 x = __ldcg(reinterpret_cast<const int4*>(p.divided_tiles + first_cta + thread()));
      tile = {x.x, x.y, x.z, x.w};
    }
    const uint32_t found = __ballot_sync(0xffffffff, tile.parts > 0);
    if (lane() == 0) s.tiles_of_warp[warp()] = __popc(found);
    __syncthreads();
    int before = __popc(found & ((1u << lane()) - 1)), count = 0;
#pragma unroll
    for (int w = 0; w < kCombineThreads / 32; ++w) {
      if (w < warp()) before += s.tiles_of_warp[w];
      count += s.tiles_of_warp[w];
    }
    if (tile.parts > 0) s.tiles[before] = tile;
    __syncthreads();
    return count;
  }
  // The rows of all divided tiles are distributed over the CTAs in turn.
  TEA_DEVICE void run() const {
    const int ctas = static_cast<int>(gridDim.x);
    int next = static_cast<int>(blockIdx.x);  // row, among those of the tiles that follow
#pragma unroll 1
    for (int first_cta = 0; first_cta < p.ctas; first_cta += kCombineThreads) {
      const int rows = find_tiles(first_cta) * kBlockM;
#pragma unroll 1
      for (; next < rows; next += ctas) add_row(s.tiles[next / kBlockM], next % kBlockM);
      next -= rows;
      __syncthreads();  // all threads have read the tiles
    }
  }
};

template <Type kType>
__global__ void __launch_bounds__(kCombineThreads, kCombineCtasPerSm)
    mla_combine_kernel(const __grid_constant__ LaunchParams p) {
  __shared__ typename Combine<kType>::SharedStorage s;
  launch_dependent_grids();
  wait_on_dependent_grids();
  Combine<kType>{p, s}.run();
}

}  // namespace tea::hopper::decode::mla
