// The postprocess warps: convert units that have received their last contribution to the type of
// the gradients and store them. All warps of all CTAs take units from one queue (workspace.h).
#pragma once
#include "gpu/async_copy.cuh"
#include "hopper/backward/epilogue.cuh"
#include "hopper/device/ordered_sum.cuh"
#include "hopper/device/quad_transpose.cuh"

namespace tea::hopper::backward {

// Called by all lanes of a warp.
template <KernelConfig C>
struct PostprocessWarp {
  using T = Traits<C>;
  static constexpr int kPieces = 8;  // of a unit: 16 rows by 32 columns each

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int warp;  // among the postprocess warps

  static TEA_DEVICE int strip_of(int piece) { return piece / 2; }
  static TEA_DEVICE int half_of(int piece) { return piece % 2; }

  // Whether a piece has any element to store.
  TEA_DEVICE bool is_stored(int piece) const {
    const CompletedPair& u = s.units[warp];
    return 16 * strip_of(piece) < u.rows && 32 * half_of(piece) < u.columns;
  }
  // Starts to load a piece. Not by TMA, whose unit takes requests in turn: the small loads would
  // wait for the reductions of dQ and for the load warp's boxes.
  TEA_DEVICE void load(int piece, int stage) {
    const int at = half_of(piece) * (kUnitFloats / 2) + strip_of(piece) * 128 + 4 * lane();
    const float* const from = s.units[warp].from + at;
    const uint32_t to = shared_address(s.pieces[warp][stage] + 4 * lane());
#pragma unroll
    for (int j = 0; j < 4; ++j) cp_async_16(to + 512 * j, from + 512 * j, true);
  }
  // Stores eight rows of a piece, eight further on for r = 1: eight columns by each lane.
  TEA_DEVICE void convert(int piece, int r) {
    const CompletedPair& u = s.units[warp];
    const int row = 16 * strip_of(piece) + lane() / 4 + 8 * r;
    const int column = 32 * half_of(piece) + lane() % 4 * 8;
    const bool stored = row < u.rows && column < u.columns;
    uint16_t* to = static_cast<uint16_t*>(u.to) + row * u.row_stride + column;
    asm volatile("" : "+l"(to)::"memory");  // the address first: its factors would need registers
    const float2* const from =
        reinterpret_cast<const float2*>(s.pieces[warp][piece % 2]) + 2 * lane() + r;
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = from[64 * j];
      x[j] = pack<C.type>(pair.x * u.factor, pair.y * u.factor);
    }
    transpose_quad(x);
    if (stored) *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  }
  // The same in fp32: two columns of each eight by each lane.
  TEA_DEVICE void scale(int piece, int r) {
    const CompletedPair& u = s.units[warp];
    const float2* const from =
        reinterpret_cast<const float2*>(s.pieces[warp][piece % 2]) + 2 * lane() + r;
    const int row = 16 * strip_of(piece) + lane() / 4 + 8 * r;
    if (row >= u.rows) return;
    float* const to = static_cast<float*>(u.to) + row * u.row_stride + 32 * half_of(piece);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (32 * half_of(piece) + 8 * j < u.columns) {
        const float2 sums = from[64 * j];
        float2* const at = reinterpret_cast<float2*>(to + 8 * j + lane() % 4 * 2);
        float2 pair = {__fmul_rn(sums.x, u.factor), __fmul_rn(sums.y, u.factor)};
        if (u.adds) pair = {pair.x + at->x, pair.y + at->y};  // not by red: ptxas would spill
        *at = pair;
      }
  }
  TEA_DEVICE void convert_unit() {
    fence_proxy_async_global();  // the sums were added by the async proxy
    load(0, 0);
    cp_async_commit();
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      // There may be no memory of other pieces (workspace.h).
      if (piece + 1 < kPieces && is_stored(piece + 1)) load(piece + 1, (piece + 1) % 2);
      cp_async_commit();
      cp_async_wait<1>();
      __syncwarp();
      if (is_stored(piece)) {
        if (p.args.dq.dtype == TEA_FP32) {
#pragma unroll 1  // registers
          for (int r = 0; r < 2; ++r) scale(piece, r);
        } else {
          convert(piece, 0);
          convert(piece, 1);
        }
      }
      __syncwarp();  // the next load overwrites what other lanes have read
    }
    // L2 need not write back sums that are never read again.
    const float* const lines = s.units[warp].from + 32 * lane();
#pragma unroll
    for (int i = 0; i < kUnitFloats / 1024; ++i)
      if (i < kUnitFloats / 2048 || s.units[warp].columns > 32) discard_line(lines + 1024 * i);
    // A bulk copy may write where ordinary instructions have read; the release below comes after
    // the discarding, too.
    if (s.units[warp].converted) fence_proxy_async_global();
    __syncwarp();
    if (lane() == 0 && s.units[warp].converted) add_release(*s.units[warp].converted, 1);
    __syncwarp();
  }
  // Waits until a unit is completed and returns true; false if there will be no such unit: no tile
  // is left that this CTA could take, and all tiles that were taken are finished. A CTA that waits
  // here keeps no tile from being computed.
  TEA_DEVICE bool wait_for_unit(uint32_t number) {
    const CompletedQueue& queue = p.work.completed;
    const uint32_t pair = number / 2;
    if (pair >= queue.capacity) return false;
    while (!load_acquire(queue.published[pair])) {
      if (test_wait(s.no_more_tiles, 0)) {
        const uint32_t finished = load_acquire(*queue.finished);
        const uint32_t taken = load_acquire(*p.work.next_tile);
        if (finished == T::kStoreWarps * taken && pair >= load_acquire(*queue.tail)) return false;
      }
      __nanosleep(500);
    }
    return true;
  }
  // The description of a unit: that of its pair, or of what follows the first unit of the pair.
  TEA_DEVICE void describe(uint32_t number) {
    CompletedPair& u = s.units[warp];
    u = p.work.completed.pairs[number / 2];
    if (number % 2 == 0) return;
    u.from += kUnitFloats;
    (u.by_rows ? u.rows : u.columns) -= 64;
    const int element_bytes = p.args.dq.dtype == TEA_FP32 ? 4 : 2;
    u.to = static_cast<char*>(u.to) + (u.by_rows ? u.row_stride : 1) * (64 * element_bytes);
  }
  TEA_DEVICE bool take_unit() {
    bool found = false;
    if (lane() == 0) {
      const uint32_t number = fetch_add(*p.work.completed.next_unit, 1);
      found = wait_for_unit(number);
      if (found) describe(number);
    }
    return __shfl_sync(0xffffffff, found, 0);  // also orders the description for other lanes
  }
  TEA_DEVICE void run() {
    while (take_unit()) convert_unit();
  }
};

}  // namespace tea::hopper::backward
