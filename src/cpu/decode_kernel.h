// Decoding: attention of few rows to many keys. Lanes correspond to elements of the head dimension,
// so that K and V are read once, without packing, for all rows of a kv head, and no lane is idle.
// Included once per instruction set, after decode_rows.h.
//
// Scores: s = q.k for a tile of keys after the other; then scale, bias, cap, ALiBi, mask and
// maximum of each row. Values: P = exp(s - max) and its sum; then O += P V, again tile by tile.
#pragma once

// Iterates over the keys of a part by tiles, and prefetches the next tile, because rows are rarely
// contiguous and the hardware cannot predict them. Heads with adjacent keys are interleaved tile by
// tile, and the tile is prefetched for all of them; other heads are processed sequentially.
template <class Rows>
class KeyTiles {
 public:
  KeyTiles(const RowsOf& of, int64_t dim, Columns columns, std::span<const Rows> heads)
      : of_(of),
        columns_(columns),
        heads_(heads),
        together_(of.stride.head == dim ? heads.size() : 1),
        bytes_(dim * dtype_bytes(of.dtype)) {
    while (step_ > kVector && step_ * line() > kBytesAtOnce) step_ /= 2;
    find({0, columns.begin}, places_[0]);
    fetch(places_[0]).rest();
  }

  // Calls body(head, keys of a tile, how many, the first one's place in the columns, what fetches
  // the keys of the next tile meanwhile) for every tile and head.
  template <class Body>
  void operator()(Body&& body) {
    typename Rows::Keys own;
    for (int which = 0; places_[which].count > 0; which ^= 1) {
      const Place &now = places_[which], &ahead = places_[which ^ 1];
      find(after(now), places_[which ^ 1]);
      Fetch next = fetch(ahead);
      body(heads_[now.head], now.keys, now.count, now.first - columns_.begin, next);
      for (size_t h = 1; h < together_; ++h) {
        for (int j = 0; j < kCols + kVector; ++j)
          own[j] = now.keys[j] + static_cast<int64_t>(h) * bytes_;
        body(heads_[h], own, now.count, now.first - columns_.begin, next);
      }
      next.rest();
    }
  }

 private:
  struct Place {
    size_t head;
    int64_t first, count;
    typename Rows::Keys keys;
  };
  // Bytes of a key over all interleaved heads.
  int64_t line() const { return bytes_ * static_cast<int64_t>(together_); }
  Fetch fetch(const Place& place) const { return {place.keys, place.count, line()}; }

  std::pair<size_t, int64_t> after(const Place& place) const {
    if (place.first + step_ < columns_.end) return {place.head, place.first + step_};
    return {place.head + together_, columns_.begin};
  }
  void find(std::pair<size_t, int64_t> at, Place& to) const {
    to.head = at.first, to.first = at.second;
    to.count = 0;  // at the end, and where no row sees a key
    if (to.head < heads_.size()) to.count = std::clamp<int64_t>(columns_.end - to.first, 0, step_);
    if (to.count > 0) heads_[to.head].find(of_, to.first, to.count, to.keys);
  }

  const RowsOf of_;
  const Columns columns_;
  const std::span<const Rows> heads_;
  const size_t together_;
  const int64_t bytes_;
  int64_t step_ = kCols;
  Place places_[2];
};

template <class Rows>
std::vector<Rows> rows_of_heads(const View& view, std::span<const FewHead<float>> heads,
                                Columns columns) {
  std::vector<Rows> out;
  out.reserve(heads.size());
  for (const FewHead<float>& head : heads) out.emplace_back(view, head, columns);
  return out;
}

template <class Rows>
void scores_of(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  const std::vector<Rows> all = rows_of_heads<Rows>(view, heads, columns);
  KeyTiles<Rows> tiles(view.rows(TEA_K), view.p.dim_qk, columns, all);
  for (const Rows& rows : all) rows.begin_scores();
  tiles([](const Rows& rows, const auto& keys, int64_t n, int64_t j0, Fetch& fetch) {
    rows.scores(keys, n, j0, fetch);
  });
  for (const Rows& rows : all) rows.end_scores();
}

template <class Rows>
void values_of(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  const std::vector<Rows> all = rows_of_heads<Rows>(view, heads, columns);
  KeyTiles<Rows> tiles(view.rows(TEA_V), view.p.v_dim(), columns, all);
  for (size_t h = 0; h < all.size(); ++h) heads[h].amax = all[h].begin_values();
  tiles([](const Rows& rows, const auto& keys, int64_t n, int64_t j0, Fetch& fetch) {
    rows.values(keys, n, j0, fetch);
  });
  for (const Rows& rows : all) rows.end_values();
}

template <>
constexpr Kernels<float> kKernels<float>{
    scratch_reals<float>, nullptr,         nullptr,           attend<float>,
    finish<float>,        backward<float>, store_keys<float>, scores_of<FewRows>,
    values_of<FewRows>};
