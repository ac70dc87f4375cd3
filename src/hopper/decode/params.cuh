// The parameters of a decoding kernel: the arguments and what the host derives from them.
#pragma once
#include "gpu/fast_divisor.h"
#include "hopper/decode/config.h"
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper::decode {

struct KernelParams {
  AttentionArguments args;
  int tiles;                  // of a sequence: heads of K and V times the tiles of a head's rows
  FastDivisor tiles_at_once;  // see tiles_at_once()
  FastDivisor group;          // query heads of a head of K and V
  FastDivisor page_size;      // 1 unless paged
  int part_blocks;            // key blocks of a part of a batch-invariant problem, otherwise 0
  SequenceBounds bounds;      // of every sequence, if args.is_uniform
  ScoreUnit unit;             // of scores after all modifications
  float scale_log2;           // unit.factor * log2(e)
  bool modifies_scores;
  uint64_t launch_number;  // what a CTA writes to its flag when its result is in its slot
  uint64_t* flags;
  float* slots;
};

// Conditions that plain kernels need not ask: see KernelConfig.
template <bool kIsPlain>
TEA_DEVICE bool is_uniform(const KernelParams& p) {
  return kIsPlain || p.args.is_uniform;
}
template <bool kIsPlain>
TEA_DEVICE bool is_paged(const KernelParams& p) {
  return !kIsPlain && p.args.keys.form == TEA_PAGED;
}
template <bool kIsPlain>
TEA_DEVICE bool has_ragged_keys(const KernelParams& p) {
  return !kIsPlain && p.args.keys.form == TEA_RAGGED;
}
template <bool kIsPlain>
TEA_DEVICE bool has_ragged_queries(const KernelParams& p) {
  return !kIsPlain && p.args.queries.form == TEA_RAGGED;
}
template <bool kIsPlain>
TEA_DEVICE int part_blocks(const KernelParams& p) {
  return kIsPlain ? 0 : p.part_blocks;
}
template <bool kIsPlain>
TEA_DEVICE bool has_modified_scores(const KernelParams& p) {
  return !kIsPlain && p.modifies_scores;
}

}  // namespace tea::hopper::decode
