// The parameters of a backward kernel: the arguments and what the host derives from them.
#pragma once
#include "hopper/backward/work_tile.cuh"
#include "hopper/device/tma.cuh"
#include "hopper/forward/tile_order.cuh"

namespace tea::hopper::backward {

struct KernelParams : TileParams {
  TensorMap q, k, v, dout;
  TensorMap dk, dv;    // if stores_by_tma
  bool stores_by_tma;  // dK and dV: they are 16-bit, and no tiles share a key block
  TileOrder order;     // of dense keys; its heads are those of K, times `parts`
  TileOrder::Divisors<FastDivisor> divisors;
  float scale_log2;     // of the scores, times log2(e)
  float inverse_scale;  // 1 / scale
  TermTasks tasks;      // of the preprocess kernel
};

}  // namespace tea::hopper::backward
