// The keep decisions of dropout. A thread makes those of four cells, that is of rows i and i + 8 by
// sixteen columns, and writes each row at once.
#include "math/dropout.h"
#include "ops/dropout_mask.h"
#include "ops/launch.cuh"

namespace tea {
namespace {

constexpr int kSide = 16, kPairs = kSide / 2;  // rows i and i + 8 of a square are a pair

// How many squares a length takes that begins anywhere.
TEA_HOST_DEVICE int64_t squares(int64_t origin, int64_t length) {
  return (origin % kSide + length + kSide - 1) / kSide;
}

// Sixteen decisions of one row, a byte each.
struct Line {
  uint32_t word[kSide / 4];
};

// Two decisions as two bytes: is each half of the word at least `threshold`? The sum's third byte
// says so.
__device__ __forceinline__ uint32_t decisions(uint32_t uniforms, uint32_t threshold) {
  const uint32_t low = (uniforms & 0xFFFF) + (0x10000 - threshold);
  const uint32_t high = (uniforms >> 16) + (0x10000 - threshold);
  return __byte_perm(low, high, 0x4462);
}

// Columns [begin, end) of the line go to row[begin ...].
__device__ void store(uint8_t* row, const Line& line, int64_t begin, int64_t end) {
  if (begin == 0 && end == kSide && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    *reinterpret_cast<uint4*>(row) = {line.word[0], line.word[1], line.word[2], line.word[3]};
  } else if (begin == 0 && end == kSide && reinterpret_cast<uintptr_t>(row) % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kSide / 4; ++w) reinterpret_cast<uint32_t*>(row)[w] = line.word[w];
  } else {
#pragma unroll
    for (int c = 0; c < kSide; ++c)
      if (c >= begin && c < end) row[c] = static_cast<uint8_t>(line.word[c / 4] >> (c % 4 * 8));
  }
}

__global__ void __launch_bounds__(kBlock) keep_decisions(const tea_dropout_mask a) {
  const RngState rng = {static_cast<uint64_t>(a.rng_state[0]),
                        static_cast<uint64_t>(a.rng_state[1])};
  const uint32_t threshold = dropout_threshold(a.dropout);
  const int64_t first_row = origin_of(a, 2), first_col = origin_of(a, 3);
  const int64_t pairs = squares(first_row, a.rows) * kPairs, wide = squares(first_col, a.cols);
  for (int64_t i = thread_index(); i < a.batch * a.heads * pairs * wide; i += thread_count()) {
    const int64_t line = quotient(i, wide), plane = quotient(line, pairs);
    const int64_t b = quotient(plane, a.heads);
    const int64_t pair = line - plane * pairs;
    const uint32_t stream =
        dropout_stream(b + origin_of(a, 0), plane - b * a.heads + origin_of(a, 1));
    // Global, as the cells count.
    const int64_t row = (first_row / kSide + pair / kPairs) * kSide + pair % kPairs;
    const int64_t col = (first_col / kSide + i - line * wide) * kSide;
    // A word of a cell has two neighbouring columns: of row i left, right, of row i + 8 likewise.
    Line lines[2];
#pragma unroll
    for (int c = 0; c < kSide / 2; c += 4) {
      const Philox4 left = dropout_cell(rng, stream, row, col + c);
      const Philox4 right = dropout_cell(rng, stream, row, col + c + 2);
#pragma unroll
      for (int w = 0; w < 4; ++w)
        lines[w / 2].word[c / 4 + w % 2 * 2] = __byte_perm(
            decisions(left.word[w], threshold), decisions(right.word[w], threshold), 0x5410);
    }
    const int64_t begin = first_col > col ? first_col - col : 0;
    const int64_t end = first_col + a.cols - col < kSide ? first_col + a.cols - col : kSide;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t local = row + 8 * half - first_row;
      if (local >= 0 && local < a.rows)
        store(a.keep + (plane * a.rows + local) * a.cols + col - first_col, lines[half], begin,
              end);
    }
  }
}

}  // namespace

void dropout_keep_on_gpu(const tea_dropout_mask& args, const Place& place) {
  // An origin in device memory is not known here: the most squares that any could take.
  const int64_t pairs = squares(kSide - 1, args.rows) * kPairs;
  const int64_t threads = args.batch * args.heads * pairs * squares(kSide - 1, args.cols);
  launch({"keep_decisions", blocks_for(threads)}, keep_decisions, place, args);
}

}  // namespace tea
