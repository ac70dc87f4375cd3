// The loop over key blocks for rows of K and V that shared memory has no room for. Pieces of 256
// columns alternate between the two buffers, the next one is copied while one is multiplied:
//
//   cp.async  K3.0 | K3.1      | V3.0      | V3.1                | K2.0 ...
//   warps          | S += K3.0 | S += K3.1 | softmax, O.0 += V3.0 | O.1 += V3.1 ...
//
// Each warp computes all scores of its rows, and its columns of each piece of O.
#pragma once
#include <utility>

#include "portable/forward/mainloop.cuh"

namespace tea::portable {

template <KernelConfig C>
struct PiecewiseMainloop {
  using T = Traits<C>;
  using Scores = typename T::Scores;
  using Output = typename T::Output;
  static_assert(C.general && T::kMmaM == 1);

  const WorkTile<C>& tile;
  const SharedTiles<C>& shared;
  const TileLoader<C>& loader;

  TEA_DEVICE typename T::KTile buffer(int number) const {
    return number ? typename T::KTile{shared.v.address} : shared.k;
  }

  // S += Q K^T over the columns of a piece.
  TEA_DEVICE void gemm_qk(Scores& s, const typename T::KTile& k, int piece) const {
    const auto queries = offset_of<true>(shared.q, tile.row);
    const int first = piece * T::kPieceK, last = min(T::kPieceK, tile.args.dim_qk - first);
#pragma unroll 4
    for (int d = 0; d < last; d += 16) {
      const FragmentA<T::kDtype> a = load_a(queries.tile, 0, first + d);
#pragma unroll
      for (int n = 0; n < T::kBlockN / 16; ++n)
        mma(s[0][2 * n], s[0][2 * n + 1], a, load_b(k, 16 * n, d));
    }
  }
  // O += P V over the warp's columns of a piece.
  template <int kPiece>
  TEA_DEVICE void gemm_pv(Output& o, const Scores& p, const typename T::KTile& v) const {
    constexpr int kFirst = kPiece * T::kWarpPieceV / 8;
    // Keeps the compiler from merging the code of all pieces: O would then be indexed at run time,
    // and reside in local memory.
    asm volatile("// piece %0" ::"n"(kPiece));
#pragma unroll
    for (int c = 0; c < T::kBlockN / 16; ++c) {
      const auto a = accumulator_as_a<T::kDtype>(p[0][2 * c], p[0][2 * c + 1]);
#pragma unroll
      for (int n = 0; n < T::kWarpPieceV / 16; ++n)
        mma(o[0][kFirst + 2 * n], o[0][kFirst + 2 * n + 1], a,
            load_b_transposed(v, tile.column + 16 * n, 16 * c));
    }
  }
  template <int... kPiece>
  TEA_DEVICE void gemm_pv(Output& o, int piece, const Scores& p, const typename T::KTile& v,
                          std::integer_sequence<int, kPiece...>) const {
    ((piece == kPiece ? gemm_pv<kPiece>(o, p, v) : void()), ...);
  }

  // As Mainloop::run().
  TEA_DEVICE float run(Output& o, OnlineSoftmax (&softmax)[1], KeyBlocks blocks) const {
    const Mainloop<C> common{tile, shared, loader};
    const AttentionArguments& args = tile.args;
    const ScoreMod<C> score_mod{tile};
    const auto slopes = score_mod.alibi_slopes();
    const float threshold = common.rescale_threshold();
    const int pieces_k = (args.dim_qk + T::kPieceK - 1) / T::kPieceK;
    const int pieces_v = (args.dim_v + T::kPieceV - 1) / T::kPieceV;
    DropoutState dropout = {};
    float p_scale = 1, p_amax = 0;
    if (args.rng) dropout = dropout_state(args, tile.seq.batch, tile.index.head);
    if constexpr (C.fp8) p_scale = common.checked_p_scale();
    // Scores become P, and O is rescaled.
    const auto update = [&](Scores& s, int block) {
      float rescale[2];
      softmax[0].template update<C.fp8>(s[0], kLog2E, threshold, rescale);
      if (block != blocks.end - 1 && __any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1))
        common.rescale_o(o[0], rescale);
      if (args.rng) score_mod.drop(s, dropout, block);
      if constexpr (C.fp8) p_amax = fmaxf(p_amax, score_mod.cast_p(s, p_scale));
    };
    int now = 0;  // the buffer of the piece that is multiplied next
    for (int pass = C.fp8 ? 0 : 1; pass < 2; ++pass) {
      const int pieces = pass == 0 ? pieces_k : pieces_k + pieces_v;
      loader.load_piece(buffer(now), true, blocks.end - 1, 0);
      for (int block = blocks.end - 1; block >= blocks.begin; --block) {
        Scores s = {};
        // One loop over the pieces of K and then of V: copies of the loads' code would spill more
        // registers.
#pragma unroll 1
        for (int i = 0; i < pieces; ++i, now ^= 1) {
          cp_async_wait<0>();
          __syncthreads();  // the piece has arrived, and every warp has read the other buffer
          const bool is_last = i + 1 == pieces, is_k = is_last || i + 1 < pieces_k;
          if (!is_last || block > blocks.begin)
            loader.load_piece(buffer(now ^ 1), is_k, is_last ? block - 1 : block,
                              is_last ? 0
                              : is_k  ? i + 1
                                      : i + 1 - pieces_k);
          if (i < pieces_k) {
            gemm_qk(s, buffer(now), i);
          } else {
            gemm_pv(o, i - pieces_k, s, buffer(now), std::make_integer_sequence<int, T::kPieces>());
          }
          if (i == pieces_k - 1) {
            score_mod.modify(s, score_mod.score_scale(), slopes, block);
            if (pass == 0)
              softmax[0].update_max(s[0]);
            else
              update(s, block);
          }
        }
      }
    }
    return p_amax;
  }
};

}  // namespace tea::portable
