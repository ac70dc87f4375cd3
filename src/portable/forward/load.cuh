// Loads of Q, K and V into shared memory: by cp.async where the tensor is vectorizable, otherwise
// through registers.
#pragma once
#include "portable/device/load_store.cuh"
#include "portable/forward/work_tile.cuh"

namespace tea::portable {

// Eight threads load a row, eight elements each.
template <KernelConfig C>
struct TileLoader {
  using T = Traits<C>;
  static constexpr int kRowsAtOnce = T::kThreads / 8;
  static constexpr int kInputBytes = C.fp8 ? 1 : T::kBytes;  // of an element of Q
  // K and V alone may be FP8 in the general kernels of 16 bits.
  static constexpr bool kMayBeCache = C.general && !C.fp8 && T::kBytes == 2;
  static TEA_DEVICE int element_bytes(const StridedTensor& rows) {
    return kMayBeCache && is_fp8(rows.dtype) ? 1 : kInputBytes;
  }
  static TEA_DEVICE bool converts(const StridedTensor& rows) {
    return C.fp8 || (kMayBeCache && is_fp8(rows.dtype));
  }

  const WorkTile<C>& tile;
  const SharedTiles<C>& shared;

  static TEA_DEVICE int thread_row() { return static_cast<int>(threadIdx.x) / 8; }
  static TEA_DEVICE int thread_column() { return static_cast<int>(threadIdx.x) % 8 * 8; }

  // Rows `pitch` bytes apart, by asynchronous copies; those outside [first, last) are zero.
  template <int kRows, class Tile>
  TEA_DEVICE void copy_rows(const Tile& to, const char* start, int64_t pitch, int dim, int first,
                            int last) const {
    const char* from = start + thread_row() * pitch + thread_column() * kInputBytes;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      const int row = r + thread_row();
      const bool valid = row >= first && row < last;
#pragma unroll
      for (int c = 0; c < Tile::kRowBytes / T::kBytes; c += 64) {
        cp_async_8_elements(to, row, c + thread_column(), from + c * kInputBytes,
                            valid && c + thread_column() < dim);
      }
      from += kRowsAtOnce * pitch;
    }
  }
  // Rows of any address and alignment, and of FP8 as well. address(row): the first byte of a row.
  template <int kRows, class Tile, class Address>
  TEA_DEVICE void gather_rows(const Tile& to, const StridedTensor& rows, int dim, int first,
                              int last, const Address& address) const {
    const int bytes = element_bytes(rows);
    const bool copies = !converts(rows) && rows.is_vectorizable;
#pragma unroll 1
    for (int r = thread_row(); r < kRows; r += kRowsAtOnce) {
      const bool valid_row = r >= first && r < last;
      const char* const from = valid_row ? address(r) : static_cast<const char*>(rows.data);
#pragma unroll
      for (int c = 0; c < Tile::kRowBytes / T::kBytes; c += 64) {
        const int column = c + thread_column();
        const bool valid = valid_row && column < dim;
        const char* const source = from + (valid ? column * bytes : 0);
        if (copies)
          cp_async_8_elements(to, r, column, source, valid);
        else
          load_8_elements(to, r, column, source, rows, valid);
      }
    }
  }

  TEA_DEVICE void load_q(int rows) const {
    const AttentionArguments& args = tile.args;
    const auto* base = static_cast<const char*>(args.q.data);
    const int64_t first = first_element(args.q, args.queries, tile.seq.q, tile.seq.batch, 0);
    if constexpr (C.general) {
      gather_rows<T::kBlockM>(shared.q, args.q, args.dim_qk, 0, rows, [&](int r) {
        const QueryIndex at = tile.query(r);
        return base + (first + at.row * args.q.seq + at.head * args.q.head) * kInputBytes;
      });
    } else {
      const int64_t start = first + tile.index.first * args.q.seq + tile.index.head * args.q.head;
      copy_rows<T::kBlockM>(shared.q, base + start * kInputBytes, args.q.seq * kInputBytes,
                            args.dim_qk, 0, rows);
    }
  }
  // The columns of a tile from `column` on, of all `dim` columns that keys have. Keys that no row
  // of the sequence attends to are zero.
  template <class Tile>
  TEA_DEVICE void load_keys(const Tile& to, const StridedTensor& rows, const PageTable& table,
                            int dim, int block, int column = 0) const {
    const AttentionArguments& args = tile.args;
    const SequencePair& seq = tile.seq;
    const int64_t key = int64_t{block} * T::kBlockN;
    const int bytes = element_bytes(rows);
    const auto* base = static_cast<const char*>(rows.data) + column * bytes;
    dim -= column;
    const int first = static_cast<int>(max(seq.attended.begin - key, int64_t{0}));
    const int last = static_cast<int>(min(seq.attended.end - key, int64_t{T::kBlockN}));
    if (C.general && args.keys.form == TEA_PAGED) {
      gather_rows<T::kBlockN>(to, rows, dim, first, last, [&](int r) {
        return base + paged_element(args, rows, table, seq.batch, tile.kv_head, key + r) * bytes;
      });
      return;
    }
    const int64_t start =
        first_element(rows, args.keys, seq.kv, seq.batch, tile.kv_head) + key * rows.seq;
    if (converts(rows) || (C.general && !rows.is_vectorizable))
      gather_rows<T::kBlockN>(to, rows, dim, first, last,
                              [&](int r) { return base + (start + r * rows.seq) * bytes; });
    else
      copy_rows<T::kBlockN>(to, base + start * kInputBytes, rows.seq * kInputBytes, dim, first,
                            last);
  }
  // A piece of the columns of K or V into the memory of either.
  TEA_DEVICE void load_piece(const typename T::KTile& to, bool of_k, int block, int piece) const {
    const AttentionArguments& args = tile.args;
    load_keys(to, of_k ? args.k : args.v, of_k ? args.page_table_k : args.page_table_v,
              of_k ? args.dim_qk : args.dim_v, block, piece * T::kPieceK);
    cp_async_commit();
  }
  TEA_DEVICE void load_k(int block) const {
    load_keys(shared.k, tile.args.k, tile.args.page_table_k, tile.args.dim_qk, block);
    cp_async_commit();
  }
  TEA_DEVICE void load_v(int block) const {
    load_keys(shared.v, tile.args.v, tile.args.page_table_v, tile.args.dim_v, block);
    cp_async_commit();
  }
};

}  // namespace tea::portable
