// The tile of a CTA of the main backward kernel: a block of keys, and the query tiles that attend
// to it.
#pragma once
#include "portable/backward/buffers.cuh"
#include "portable/backward/shared_memory.cuh"

namespace tea::portable {

// The query tiles of a key block: of each query head, from the last rows to the first.
template <int kBlockM>
struct QueryTileIterator {
  int head, first, last_first, restart;  // `first`: the tile's first row; it ends at last_first
  TEA_DEVICE void advance() {
    if (first == last_first)
      first = restart, ++head;
    else
      first -= kBlockM;
  }
};

// Positions are in 32 bits, see limits.h.
template <BackwardConfig C>
struct BackwardWorkTile {
  using T = BackwardTraits<C>;

  const BackwardParams& p;
  typename T::SharedStorage& s;
  const SequencePair seq;
  const int kv_head, key;   // the first key
  const int lo, hi, keys;   // a key is visible to a row iff lo <= key - row <= hi and key < keys
  const Columns attending;  // rows of the sequence that attend to any key
  int begin, end;           // rows that attend to one of these keys
};

TEA_DEVICE int clamp_to_int(int64_t x) {
  return static_cast<int>(max(min(x, int64_t{1} << 30), -(int64_t{1} << 30)));
}

template <BackwardConfig C>
TEA_DEVICE BackwardWorkTile<C> backward_work_tile(const BackwardParams& p,
                                                  typename BackwardTraits<C>::SharedStorage& s) {
  constexpr int kBlockN = BackwardTraits<C>::kBlockN;
  const AttentionArguments& args = p.work.args;
  const auto n = static_cast<unsigned>(p.first_cta + blockIdx.x);
  const unsigned tile = n % p.tiles, rest = n / p.tiles;
  const SequencePair seq = sequence_pair_of(args, rest / args.heads_kv);
  const int key = static_cast<int>(tile) * kBlockN, keys = static_cast<int>(seq.kv.length);
  const Columns rows = attending_rows(seq, key, min(key + kBlockN, keys));
  return {p,
          s,
          seq,
          static_cast<int>(rest % args.heads_kv),
          key,
          clamp_to_int(seq.band.lo),
          clamp_to_int(seq.band.hi),
          keys,
          attending_rows(seq),
          clamp_to_int(rows.begin),
          key < keys ? clamp_to_int(rows.end) : 0};
}

}  // namespace tea::portable
