// The parameters of a forward kernel: the arguments and what the host derives from them.
#pragma once
#include "hopper/device/tile_counter.cuh"
#include "hopper/device/tma.cuh"
#include "hopper/forward/softcap.cuh"
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

struct KernelParams {
  TensorMap q, k, v, o;  // o: of 16-bit O in configurations with tma_store
  AttentionArguments args;
  TileCounter* counter;  // null: CTA i takes tiles i, i + gridDim.x, and so on
  TileOrder order;       // of dense queries
  TileOrder::Divisors<FastDivisor> divisors;
  FastDivisor heads_per_kv;
  SequenceBounds bounds;      // of every sequence, if args.is_uniform
  ScoreUnit unit;             // of scores after all modifications
  float scale_log2;           // unit.factor * log2(e)
  SoftcapPolynomial softcap;  // of the soft-cap variant
  uint64_t launch_number;     // the owner of the tile counter
  int bias_rows;              // of a bias in shared memory: see BiasTile
  TensorMap bias;
  FastDivisor page_size;       // of the paged variant
  int box_rows_log2;           // of K and V there: see page_box.cuh
  TensorMap first_k, first_v;  // of the first box of a sequence where keys are skipped
  int pages_k, pages_v;        // of the pools, at most INT32_MAX
};

}  // namespace tea::hopper
