// The kernel for dQ without atomics, for results that are equal bit for bit. The main kernel
// (kernel.cu) then computes dK and dV only; together they do 7/5 of its operations.
#include <cstddef>

#include "portable/backward/dq_mainloop.cuh"
#include "portable/backward/launch.cuh"
#include "portable/backward/store_gradient.cuh"

namespace tea::portable {
namespace {

// Stores the rows of the tile that the tensor has; those that attend to no key are zero.
template <DqConfig C>
struct DqEpilogue {
  using T = DqTraits<C>;
  using Operand = typename T::Operand;

  const DqMainloop<C>& from;

  // Rows of any type and alignment. The memory of Q and dO together holds them as fp32.
  TEA_DEVICE void store_general(const GradientOutput& to, int64_t count) const {
    using Storage = typename T::SharedStorage;
    static_assert(offsetof(Storage, dout) == sizeof from.s.q);
    float(*const sums)[T::kDim] = reinterpret_cast<float(*)[T::kDim]>(from.s.q);
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < T::kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[from.warp_row(m) - from.first + accumulator_row(i)][accumulator_column(n, i)] =
              from.dq[m][n][i];
    __syncthreads();
    store_gradient<T::kBlockM, T::kDim, T::kThreads>(sums, to, to.rows.dtype, from.first, count,
                                                     from.rows);
  }
  // Through the memory of Q, so that rows are stored 16 bytes at a time.
  TEA_DEVICE void store_plain(const GradientOutput& to, int64_t count) const {
    const Operand tile{shared_address(from.s.q)};
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = from.warp_row(m) + accumulator_row(2 * r);
        const bool any = row >= from.rows.begin && row < from.rows.end;
#pragma unroll
        for (int n = 0; n < T::kDim / 8; ++n)
          store_pair(tile, row - from.first, accumulator_column(n, 0),
                     any ? from.dq[m][n][2 * r] * to.factor : 0.0f,
                     any ? from.dq[m][n][2 * r + 1] * to.factor : 0.0f);
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T::kBlockM * Operand::kChunks / T::kThreads; ++i) {
      const int n = i * T::kThreads + static_cast<int>(threadIdx.x);
      const int row = n / Operand::kChunks, column = n % Operand::kChunks * 8;
      if (from.first + row >= count || column >= to.dim) continue;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.rows.data) + to.head_element +
                                (from.first + row) * to.rows.seq + column) =
          load_shared_16(tile.chunk(row, column / 8));
    }
  }
  TEA_DEVICE void run() const {
    const AttentionArguments& args = from.args;
    const SequencePair& seq = from.seq;
    const int64_t count = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
    const GradientOutput to = {args.dq,
                               first_element(args.dq, args.queries, seq.q, seq.batch, from.head),
                               0,
                               args.dim_qk,
                               from.scales.dq,
                               scalar_or_1(args.fp8.dq),
                               args.fp8.dq_amax};
    __syncthreads();  // every warp has read Q and dO
    if (T::kGeneral || !is_stored_in_chunks<T::kDtype>(args.dq))
      store_general(to, count);
    else
      store_plain(to, count);
  }
};

// Integers as template arguments: see kKernelConfig in forward/kernel.cuh.
template <int kTile, int kDtype>
inline constexpr DqConfig kDqConfig = {kDqTiles[kTile], kDtype};

template <int kTile, int kDtype>
__global__ void __launch_bounds__(DqTraits<kDqConfig<kTile, kDtype>>::kThreads)
    dq_kernel(const __grid_constant__ BackwardParams p) {
  constexpr DqConfig C = kDqConfig<kTile, kDtype>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename DqTraits<C>::SharedStorage*>(memory);
  const auto n = static_cast<unsigned>(p.first_cta + blockIdx.x);
  const auto heads = static_cast<unsigned>(p.work.args.heads_q);
  // The last tile first: under a causal mask it is the longest.
  const int tile = static_cast<int>(p.tiles - 1 - n % p.tiles);
  const SequencePair seq = sequence_pair_of(p.work.args, n / p.tiles / heads);
  DqMainloop<C> mainloop(p, shared, seq, static_cast<int>(n / p.tiles % heads),
                         tile * C.tile.block_m);
  mainloop.run();
  DqEpilogue<C>{mainloop}.run();
}

template <int kTile, int kDtype>
struct DqLaunch {
  static void run(const BackwardArguments& work, cudaStream_t stream) {
    static OncePerDevice allowed;
    using T = DqTraits<kDqConfig<kTile, kDtype>>;
    const Launch how{"backward, dQ", {}, T::kThreads, sizeof(typename T::SharedStorage)};
    launch_tiles(how, dq_kernel<kTile, kDtype>, allowed, work, work.args.queries.max_seqlen,
                 T::kBlockM, work.args.heads_q, stream);
  }
};

}  // namespace

void launch_dq(int tile, const BackwardArguments& work, cudaStream_t stream) {
  find_launcher<DqLaunch, 0, int{std::size(kDqTiles)}>(tile, work.args)(work, stream);
}

}  // namespace tea::portable
