// The postprocess warps: convert units that have received their last contribution to the type of
// the gradients and store them. Each store warp has two postprocess warps, which take half of the
// rows of a unit each.
#pragma once
#include "hopper/backward/epilogue.cuh"

namespace tea::hopper::backward {

// Called by all lanes of a warp.
template <KernelConfig C>
struct PostprocessWarp {
  using T = Traits<C>;
  // A piece is 16 rows by 32 columns of a unit.
  static constexpr int kPieces = 8, kPieceFloats = 16 * 32;  // of a pair of units, for one warp

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int warp;  // among the postprocess warps
  Pipeline<1>& completed = s.pipeline_completed[warp / 2];
  PipelineState<1> completed_state{};
  PipelineState<2> piece_state{};

  TEA_DEVICE const CompletedUnit& unit_of(int piece) const {
    return s.completed_units[warp / 2][piece / 4];
  }
  TEA_DEVICE int strip_of(int piece) const { return warp % 2 * 2 + piece % 2; }
  static TEA_DEVICE int half_of(int piece) { return piece / 2 % 2; }

  // Whether a piece has any element to store.
  TEA_DEVICE bool is_stored(int piece) const {
    const CompletedUnit& u = unit_of(piece);
    return 16 * strip_of(piece) < u.rows && 32 * half_of(piece) < u.columns;
  }
  // Starts to load a piece, by one lane.
  TEA_DEVICE void load(int piece, int stage) {
    Barrier& loaded = s.piece_loaded[warp][stage];
    const float* const from =
        unit_of(piece).from + half_of(piece) * (kUnitFloats / 2) + strip_of(piece) * 128;
    arrive_and_expect_tx(loaded, kPieceFloats * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      bulk_load(s.pieces[warp][stage] + 128 * j, from + 512 * j, 512, loaded);
  }
  // Stores eight rows of a piece, eight further on for r = 1: eight columns by each lane.
  TEA_DEVICE void convert(int piece, int r) {
    const CompletedUnit& u = unit_of(piece);
    const float2* const from =
        reinterpret_cast<const float2*>(s.pieces[warp][piece_state.stage]) + 2 * lane() + r;
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = from[64 * j];
      x[j] = pack<C.type>(pair.x * u.factor, pair.y * u.factor);
    }
    transpose_quad(x);
    const int row = 16 * strip_of(piece) + lane() / 4 + 8 * r;
    const int column = 32 * half_of(piece) + lane() % 4 * 8;
    if (row < u.rows && column < u.columns)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(u.to) + row * u.row_stride + column) = {
          x[0], x[1], x[2], x[3]};
  }
  // The same in fp32: two columns of each eight by each lane.
  TEA_DEVICE void scale(int piece, int r) {
    const CompletedUnit& u = unit_of(piece);
    const float2* const from =
        reinterpret_cast<const float2*>(s.pieces[warp][piece_state.stage]) + 2 * lane() + r;
    const int row = 16 * strip_of(piece) + lane() / 4 + 8 * r;
    if (row >= u.rows) return;
    float* const to = static_cast<float*>(u.to) + row * u.row_stride + 32 * half_of(piece);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (32 * half_of(piece) + 8 * j < u.columns) {
        const float2 pair = from[64 * j];
        *reinterpret_cast<float2*>(to + 8 * j + lane() % 4 * 2) = {pair.x * u.factor,
                                                                   pair.y * u.factor};
      }
  }
  TEA_DEVICE void convert_pair() {
    if (lane() == 0) {
      fence_proxy_async_global();
      load(0, piece_state.stage);
    }
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      if (lane() == 0 && piece + 1 < kPieces) load(piece + 1, piece_state.stage ^ 1);
      wait(s.piece_loaded[warp][piece_state.stage], piece_state.parity);
      if (is_stored(piece)) {
        if (p.args.dq.dtype == TEA_FP32) {
#pragma unroll 1  // registers
          for (int r = 0; r < 2; ++r) scale(piece, r);
        } else {
          convert(piece, 0);
          convert(piece, 1);
        }
      }
      piece_state.advance();
      fence_proxy_async();  // the next load overwrites what ordinary loads have read
      __syncwarp();
    }
  }
  TEA_DEVICE void run() {
    for (;;) {
      completed.consumer_wait(completed_state);
      if (!s.completed_units[warp / 2][0].from) return;
      convert_pair();
      completed.consumer_release(completed_state);
      completed_state.advance();
    }
  }
};

}  // namespace tea::hopper::backward
