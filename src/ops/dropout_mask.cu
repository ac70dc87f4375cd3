// The dropout mask. A thread computes four cells at a time, that is rows i and i + 8 by sixteen
// columns, and writes the sixteen bytes of each row with one store.
#include "math/dropout.h"
#include "ops/dropout_mask.h"
#include "ops/launch.cuh"

namespace tea {
namespace {

constexpr int kSide = 16, kPairs = kSide / 2;  // rows i and i + 8 of a square are a pair

constexpr int kSquares = 4;  // squares per thread, if there are enough

// The number of squares that `length` elements from `origin` overlap.
TEA_HOST_DEVICE int64_t squares(int64_t origin, int64_t length) {
  return (origin % kSide + length + kSide - 1) / kSide;
}

// Sixteen mask bytes of one row.
struct Line {
  uint32_t word[kSide / 4];
};

// Compares two uniforms, the halves of a word, with the threshold.
struct Keep {
  uint32_t floor, add;  // for both halves

  // Uniforms below the threshold are clamped to threshold - 1. The sum then wraps to 0 for these,
  // and is larger for the others. If all are kept, the floor is the highest number and the sum
  // always 1.
  __device__ explicit Keep(uint32_t threshold)
      : floor(pair(threshold - 1)), add(pair(threshold ? 1 - threshold : 2)) {}
  // 1 in each half whose element is kept, else 0.
  __device__ uint32_t operator()(uint32_t uniforms) const {
    return __viaddmin_u16x2(__vmaxu2(uniforms, floor), add, 0x00010001);
  }

 private:
  __device__ static uint32_t pair(uint32_t x) { return __byte_perm(x, x, 0x1010); }
};

// The sixteen bytes of a square's row `row` and those of row + 8; col: its first column.
__device__ __forceinline__ void decide(Line (&lines)[2], const RngState& rng, uint32_t stream,
                                       int64_t row, int64_t col, const Keep& keep) {
  // A word of a cell has two adjacent columns: row i left and right, then row i + 8 likewise.
#pragma unroll
  for (int c = 0; c < kSide / 2; c += 4) {
    const Philox4 left = dropout_cell(rng, stream, row, col + c);
    const Philox4 right = dropout_cell(rng, stream, row, col + c + 2);
#pragma unroll
    for (int w = 0; w < 4; ++w)
      lines[w / 2].word[c / 4 + w % 2 * 2] =
          __byte_perm(keep(left.word[w]), keep(right.word[w]), 0x6420);
  }
}

// Stores columns [begin, end) of the line to row[begin ...].
__device__ __forceinline__ void store(uint8_t* row, const Line& line, int begin, int end) {
  if (end - begin == kSide && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    __stwb(reinterpret_cast<uint4*>(row), {line.word[0], line.word[1], line.word[2], line.word[3]});
  } else if (end - begin == kSide && reinterpret_cast<uintptr_t>(row) % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kSide / 4; ++w) reinterpret_cast<uint32_t*>(row)[w] = line.word[w];
  } else {
#pragma unroll
    for (int c = 0; c < kSide; ++c)
      if (c >= begin && c < end) row[c] = static_cast<uint8_t>(line.word[c / 4] >> (c % 4 * 8));
  }
}

// A team of threads computes a pair of rows.
__global__ void __launch_bounds__(kBlock)
    keep_decisions(const __grid_constant__ tea_dropout_mask a, const Team team) {
  const RngState rng = {static_cast<uint64_t>(a.rng_state[0]),
                        static_cast<uint64_t>(a.rng_state[1])};
  const Keep keep(dropout_threshold(a.dropout));
  const int64_t first_row = origin_of(a, 2), first_col = origin_of(a, 3);
  const int64_t pairs = squares(first_row, a.rows) * kPairs, wide = squares(first_col, a.cols);
  const int left_out = static_cast<int>(first_col % kSide);  // columns of the first square
  for (int64_t i = team.index(); i < a.batch * a.heads * pairs; i += team.count()) {
    const int64_t plane = quotient(i, pairs), pair = i - plane * pairs;
    const int64_t b = quotient(plane, a.heads);
    const uint32_t stream =
        dropout_stream(b + origin_of(a, 0), plane - b * a.heads + origin_of(a, 1));
    // Global, because cells are aligned to global rows.
    const int64_t row = (first_row / kSide + pair / kPairs) * kSide + pair % kPairs;
    const int64_t local = row - first_row;
    uint8_t* const to = a.keep + (plane * a.rows + local) * a.cols - left_out;
    const bool here = local >= 0 && local < a.rows, below = local >= -8 && local + 8 < a.rows;
    for (int64_t square = team.lane(); square < wide; square += team.lanes()) {
      Line lines[2];
      decide(lines, rng, stream, row, (first_col / kSide + square) * kSide, keep);
      const int64_t left = a.cols + left_out - square * kSide;
      const int begin = square ? 0 : left_out, end = left < kSide ? static_cast<int>(left) : kSide;
      if (here) store(to + square * kSide, lines[0], begin, end);
      if (below) store(to + 8 * a.cols + square * kSide, lines[1], begin, end);
    }
  }
}

}  // namespace

void dropout_keep_on_gpu(const tea_dropout_mask& args, const Place& place) {
  // The host does not know an origin in device memory, so this is the maximum over all origins.
  const int64_t wide = squares(kSide - 1, args.cols);
  const int64_t pairs = args.batch * args.heads * squares(kSide - 1, args.rows) * kPairs;
  const Team team = Team::of(wide / kSquares, 1, kBlock);
  launch({"keep_decisions", blocks_for(pairs * team.lanes())}, keep_decisions, place, args, team);
}

}  // namespace tea
