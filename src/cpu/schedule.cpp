// Rows into pieces, then the keys of each piece into parts.
#include "cpu/schedule.h"

#include <algorithm>
#include <utility>

namespace tea::cpu {
namespace {

constexpr int64_t kEnoughParts = 64;  // about so many where keys are long
constexpr int64_t kMostParts = 1024;  // so that partial results stay few
constexpr int64_t kLeastKeys = 512;   // of a part: below, the merge costs more than it wins
// Few rows: heads of one sequence often share pages of memory, so parts are short enough
// that these pages are still in the TLB for the next head.
constexpr int64_t kMostKeysOfFew = 2048;
// Of a part of a batch-invariant problem, whose parts begin at multiples of this.
constexpr int64_t kInvariantKeys = 1024;

int64_t length(const Columns& c) { return std::max<int64_t>(c.end - c.begin, 0); }

// FP8 casts exp(x - max) with the row's maximum over all keys. The kernel of few rows has the
// maxima of all parts before it casts; a tile is cast at once, so that its keys stay together.
bool splits(const View& view, bool few) { return few || !view.p.is_fp8(); }

// The keys of a part, where the pieces have `keys` together.
int64_t step_of(bool few, int64_t keys) {
  int64_t step = keys / kEnoughParts;
  if (few) step = std::max(std::min(step, kMostKeysOfFew), keys / kMostParts);
  return (std::max(step, kLeastKeys) + kCols - 1) / kCols * kCols;
}

// `aligned`: the parts begin at multiples of `step`, whichever rows are in the block.
void cut(Schedule& to, int64_t at, int64_t step, bool aligned) {
  Piece& piece = to.pieces[static_cast<size_t>(at)];
  const Columns whole = piece.group->visible;
  Columns all = whole;
  if (aligned || length(whole) > step) all = make_block(*piece.group, piece.first, kRows).all;
  const int64_t first = aligned ? all.begin / step * step : all.begin;
  if (all.end - first <= step) return to.parts.push_back({at, whole});
  piece.parts = (all.end - first + step - 1) / step;
  piece.first_slot = to.slots;
  for (int64_t begin = first; begin < all.end; begin += step)
    to.parts.push_back(
        {at, {std::max(begin, all.begin), std::min(begin + step, all.end)}, to.slots++});
}

}  // namespace

bool is_few(const View& view, const Group& group) {
  return group.rows() <= kFewRows && !view.p.drops() && !view.p.batch_invariant;
}

Schedule schedule(const View& view, std::span<const Group> groups, bool few) {
  Schedule out;
  out.few = few;
  int64_t keys = 0;
  for (const Group& g : groups)
    for (int64_t first = 0; first < g.rows(); first += kRows) {
      out.pieces.push_back({&g, first});
      keys += length(g.visible);
    }
  const bool aligned = view.p.batch_invariant && splits(view, few);
  const int64_t step = aligned             ? kInvariantKeys
                       : splits(view, few) ? step_of(few, keys)
                                           : INT64_MAX;
  for (size_t at = 0; at < out.pieces.size(); ++at)
    cut(out, static_cast<int64_t>(at), step, aligned);
  // Parts with the same keys of consecutive heads are adjacent.
  std::stable_sort(out.parts.begin(), out.parts.end(), [&](const Part& a, const Part& b) {
    const auto place = [&](const Part& part) {
      return std::pair(out.pieces[static_cast<size_t>(part.piece)].group->b, part.columns.begin);
    };
    return place(a) < place(b);
  });
  return out;
}

}  // namespace tea::cpu
