// Epilogue: normalises O by the row sum, and writes O, the row statistics and the FP8 amaxes; or,
// where keys are split, writes the unnormalised results for combine.cu.
#pragma once
#include <algorithm>

#include "portable/forward/row_results.cuh"

namespace tea::portable {

template <KernelConfig C>
struct Epilogue {
  using T = Traits<C>;
  using Output = typename T::Output;

  struct RowFactors {
    float of[T::kMmaM][2];
  };

  const WorkTile<C>& tile;
  const SharedTiles<C>& shared;

  // Writes the row statistics and returns the factors of O.
  TEA_DEVICE RowFactors normalize(const OnlineSoftmax (&softmax)[T::kMmaM]) const {
    const AttentionArguments& args = tile.args;
    RowFactors factors;
    const float value = value_factor(args, C.fp8, tile.kv_head);
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryIndex at = tile.thread_query(m, r);
        const float row_max = softmax[m].row_max[r] * (C.general ? 1.0f : args.scale);
        const float row_sum = quad_sum(softmax[m].row_sum[r]);
        const bool valid = at.row < tile.seq.q.length;
        const RowResult result =
            normalize_row(row_max, row_sum, valid ? sink_of(args, at.head) : 0.0f);
        factors.of[m][r] = valid ? result.factor * value : 0.0f;
        if (lane() % 4 == 0 && tile.column == 0 && at.row < rows_to_write(args, tile.seq))
          write_statistics(args, tile.seq, at, result, row_max, row_sum);
      }
    return factors;
  }

  // Stores O through the shared memory of Q, so that rows are written 16 bytes at a time.
  TEA_DEVICE void store_o(const Output& o, const RowFactors& factors) const {
    const AttentionArguments& args = tile.args;
    const typename T::OTile to = {shared.q.address};
    __syncthreads();  // every warp has read Q
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          store_shared_4(
              to.at(tile.thread_row(m, r), tile.output_column(n) + accumulator_column(0, 0)),
              normalized_pair<T::kDtype>(&o[m][n][2 * r], factors.of[m][r]));
    __syncwarp();
    // A lane stores the same chunk of each of its rows. All loads of a batch precede its stores.
    constexpr int kChunks = T::kWarpDimV / 8, kRowsAtOnce = 32 / kChunks;
    constexpr int kBatch = std::min(8, 16 * T::kMmaM / kRowsAtOnce);
    static_assert(kChunks <= 32 && 16 * T::kMmaM / kRowsAtOnce % kBatch == 0);
    const int local = tile.row + lane() / kChunks, column = tile.output_column(lane() % kChunks);
    const int64_t rows = rows_to_write(args, tile.seq), step = kRowsAtOnce * args.o.seq;
    auto* data = static_cast<uint16_t*>(args.o.data) + column +
                 first_element(args.o, args.queries, tile.seq.q, tile.seq.batch, 0);
    if constexpr (!C.general)
      data += (tile.index.first + local) * args.o.seq + tile.index.head * args.o.head;
#pragma unroll 1
    for (int from = local; from < local + 16 * T::kMmaM; from += kBatch * kRowsAtOnce) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = load_shared_16(to.at(from + i * kRowsAtOnce, column));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const QueryIndex at = tile.query(from + i * kRowsAtOnce);
        const bool valid = at.row < rows && column < args.dim_v;
        if constexpr (C.general) {
          if (valid)
            *reinterpret_cast<uint4*>(data + at.row * args.o.seq + at.head * args.o.head) = x[i];
        } else {  // one head: adding to the pointer is shorter than a product for each row
          if (valid) *reinterpret_cast<uint4*>(data) = x[i];
          data += step;
        }
      }
    }
  }
  // Stores O in fp32.
  TEA_DEVICE void store_o_fp32(const Output& o, const RowFactors& factors) const {
    const AttentionArguments& args = tile.args;
    float* const data = static_cast<float*>(args.o.data) +
                        first_element(args.o, args.queries, tile.seq.q, tile.seq.batch, 0) +
                        accumulator_column(0, 0);
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryIndex at = tile.thread_query(m, r);
        if (at.row >= rows_to_write(args, tile.seq)) continue;
        float* const row = data + at.row * args.o.seq + at.head * args.o.head;
        const float factor = factors.of[m][r];
#pragma unroll
        for (int n = 0; n < T::kWarpDimV / 8; ++n)
          if (tile.output_column(n) < args.dim_v)
            *reinterpret_cast<float2*>(row + tile.output_column(n)) = {
                normalized(o[m][n][2 * r], factor), normalized(o[m][n][2 * r + 1], factor)};
      }
  }
  // Stores O of any type and alignment, element by element.
  TEA_DEVICE void store_o_elements(const Output& o, const RowFactors& factors) const {
    const AttentionArguments& args = tile.args;
    const float scale = C.fp8 ? scalar_or_1(args.fp8.o) : 1.0f;
    const int64_t first = first_element(args.o, args.queries, tile.seq.q, tile.seq.batch, 0);
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryIndex at = tile.thread_query(m, r);
        if (at.row >= rows_to_write(args, tile.seq)) continue;
        const int64_t start = first + at.row * args.o.seq + at.head * args.o.head;
#pragma unroll
        for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (tile.output_column(n) < args.dim_v)
              store_float(args.o.data, args.o.dtype,
                          start + tile.output_column(n) + accumulator_column(0, i),
                          normalized(o[m][n][2 * r + i], factors.of[m][r]) * scale);
      }
  }
  TEA_DEVICE void update_amaxes(const Output& o, const RowFactors& factors, float p_amax) const {
    float o_amax = 0;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          o_amax = fmaxf(o_amax, fabsf(normalized(o[m][n][i], factors.of[m][row_slot(i)])));
    update_amax_by_warp(tile.args.fp8.o_amax, o_amax);
    update_amax_by_warp(tile.args.fp8.s_amax, p_amax);
  }
  // Writes the results of a split, of the tile's first `rows` rows.
  TEA_DEVICE void store_split(const Output& o, const OnlineSoftmax (&softmax)[T::kMmaM],
                              int rows) const {
    const AttentionArguments& args = tile.args;
    const SplitResults& to = tile.p.splits;
    const int64_t first =
        (tile.index.number * tile.p.scheduler.splits + tile.index.split) * T::kBlockM;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int local = tile.thread_row(m, r);
        const float row_sum = quad_sum(softmax[m].row_sum[r]);
        if (local >= rows) continue;
        if (lane() % 4 == 0 && tile.column == 0) {
          to.row_max[first + local] = softmax[m].row_max[r];
          to.row_sum[first + local] = row_sum;
        }
        float* const row = to.o + (first + local) * args.dim_v;
#pragma unroll
        for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (tile.output_column(n) < args.dim_v)
              row[tile.output_column(n) + accumulator_column(0, i)] = o[m][n][2 * r + i];
      }
  }

  TEA_DEVICE void run(const Output& o, const OnlineSoftmax (&softmax)[T::kMmaM], int rows,
                      float p_amax) const {
    if (C.general && tile.p.scheduler.is_split()) return store_split(o, softmax, rows);
    const RowFactors factors = normalize(softmax);
    if constexpr (C.fp8) update_amaxes(o, factors, p_amax);
    if constexpr (C.general)
      if (T::kDtype == TEA_FP32 || C.fp8 || !tile.args.o.is_vectorizable)
        return store_o_elements(o, factors);
    if constexpr (T::kDtype != TEA_FP32 && !C.fp8) {
      if (tile.args.o.dtype == TEA_FP32) return store_o_fp32(o, factors);
      store_o(o, factors);
    }
  }
};

}  // namespace tea::portable
