// The kernels of the forward pass: the table of their shapes, how tiles are numbered, and what a
// launch hands over.
#pragma once
#include <cuda_runtime.h>

#include <iterator>

#include "gpu/arguments.h"

namespace tea::portable {

// One row of the table: a shape of tile that fits registers and shared memory.
struct Row {
  int dim, dim_v;   // serves head dimensions up to these, filled up with zeros
  int warps, tall;  // of rows: a tile has 16 * warps * tall of them
  int groups;       // of columns of O
  int cols;         // keys of a block
  int resident;     // blocks on a multiprocessor that the registers must allow
};

// Scores go straight from scale to mask, and everything can be copied 16 bytes at a time.
// Chosen by measurement (docs/kernels/portable.md), within 99 KiB of shared memory, which every GPU
// has: rows of a warp until O and the scores fill 255 registers, since each load of K and V serves
// all of them; keys until nothing is spilled.
inline constexpr Row kPlain[] = {
    // dim  v  warps tall groups cols resident
    {64, 64, 4, 2, 1, 64, 3},   {128, 128, 4, 2, 1, 64, 2}, {192, 128, 4, 1, 1, 64, 2},
    {256, 256, 4, 1, 1, 64, 2}, {512, 512, 2, 1, 2, 32, 1},
};
inline constexpr Row kGeneral[] = {
    {64, 64, 4, 1, 1, 64, 2},   {128, 128, 4, 1, 1, 64, 2}, {192, 128, 4, 1, 1, 64, 2},
    {256, 256, 4, 1, 1, 64, 1}, {512, 512, 2, 1, 2, 32, 1},
};
inline constexpr Row kFp32[] = {
    {64, 64, 4, 1, 1, 64, 1},   {128, 128, 4, 1, 1, 32, 1}, {192, 128, 4, 1, 1, 32, 1},
    {256, 256, 2, 1, 2, 32, 1}, {512, 512, 1, 1, 4, 16, 1},
};
inline constexpr int kRows = static_cast<int>(std::size(kPlain));

// What a kernel computes in; the columns of the table of kernels.
enum Variant { kPlainBf16, kPlainFp16, kAnyBf16, kAnyFp16, kAnyFp8, kAnyFp32, kVariants };

struct Config {
  Row row;
  int dtype;  // of tiles: fp8 lies there as fp16
  bool general, fp8;
};
constexpr Config config(int number) {
  const int row = number / kVariants, variant = number % kVariants;
  if (variant == kPlainBf16) return {kPlain[row], TEA_BF16, false, false};
  if (variant == kPlainFp16) return {kPlain[row], TEA_FP16, false, false};
  if (variant == kAnyBf16) return {kGeneral[row], TEA_BF16, true, false};
  if (variant == kAnyFp16) return {kGeneral[row], TEA_FP16, true, false};
  if (variant == kAnyFp8) return {kGeneral[row], TEA_FP16, true, true};
  return {kFp32[row], TEA_FP32, true, false};
}
// How tiles are numbered: row blocks of one head in sequence, the last one first, since under a
// causal mask it is the longest; splits of the keys of one tile side by side.
struct Tiling {
  int64_t row_blocks, heads;  // heads: of queries, or with pack > 1 of keys
  int rows;                   // of a tile
  int pack;                   // query heads in the rows of one tile
  int splits;                 // of the keys

  struct Tile {
    int64_t number, b, first;  // first: row, or with pack > 1 row * pack + head of the group
    int head, split;           // head: the first query head
  };
  // Divisions in 32 bits, which are short, where the numbers fit.
  __host__ __device__ Tile at(int64_t block) const {
    return block < int64_t{1} << 31 && row_blocks < int64_t{1} << 31 ? at_number<uint32_t>(block)
                                                                     : at_number<uint64_t>(block);
  }
  template <class Number>
  __host__ __device__ Tile at_number(int64_t block) const {
    const auto all = static_cast<Number>(block);
    const Number number = splits == 1 ? all : all / static_cast<Number>(splits);
    const Number rest = number / static_cast<Number>(row_blocks);
    const Number b = rest / static_cast<Number>(heads);
    const auto row_block = row_blocks - 1 - (number - rest * row_blocks);
    return {static_cast<int64_t>(number), static_cast<int64_t>(b),
            static_cast<int64_t>(row_block) * rows, static_cast<int>(rest - b * heads) * pack,
            static_cast<int>(all - number * splits)};
  }
};

// What blocks with a share of the keys leave for merge(): by tile, split and row.
struct Partial {
  float *o, *top, *sum;
};

struct Parameters {
  AttentionArguments args;
  Tiling tiling;
  Partial partial;
  int64_t first_block;  // of this launch
  int group;            // query heads that share a head of keys
};
// Launches kernel `number` of the table on so many blocks, first_block being the first. Each serves
// the variants that its name says: they are compiled apart, since that takes long.
void launch_plain(int number, Parameters& p, int64_t blocks, cudaStream_t stream);
void launch_general(int number, Parameters& p, int64_t blocks, cudaStream_t stream);
void launch_fp8(int number, Parameters& p, int64_t blocks, cudaStream_t stream);
void launch_fp32(int number, Parameters& p, int64_t blocks, cudaStream_t stream);

}  // namespace tea::portable
