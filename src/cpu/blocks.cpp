// Cuts the rows of a group into blocks, and determines the visible columns of each row.
#include "cpu/blocks.h"

#include <algorithm>

namespace tea::cpu {
namespace {

// Visible ranges move monotonically, so the first and last rows with a visible column bound them.
Columns visible(const Group& g) {
  const int64_t first = std::max<int64_t>(0, -g.band.hi);
  const int64_t last = std::min(g.q.length, g.kv.length - g.band.lo) - 1;
  if (first > last) return {0, 0};
  return {visible_columns(g.band, first, g.kv.length).begin,
          visible_columns(g.band, last, g.kv.length).end};
}

}  // namespace

Group make_group(const View& view, int64_t b, int64_t kv_head) {
  const Problem& p = view.p;
  Group g{};
  g.b = b, g.kv_head = kv_head, g.heads = p.heads_q / p.heads_kv;
  g.q = view.queries(b), g.kv = view.keys(b), g.origin = view.origin(b);
  g.delta = diagonal(p.bottom_right, g.q.length, g.kv.length) + g.origin.shift;
  g.band = band(p.mask(), g.delta, g.origin.row, g.origin.column);
  g.visible = visible(g);
  return g;
}

std::vector<Group> make_groups(const View& view) {
  std::vector<Group> out;
  for (int64_t b = 0; b < view.batch(); ++b)
    for (int64_t h = 0; h < view.p.heads_kv; ++h) out.push_back(make_group(view, b, h));
  return out;
}

RowBlock make_block(const Group& group, int64_t first, int64_t count) {
  RowBlock block{};
  block.group = group;
  block.count = static_cast<int>(std::min<int64_t>({count, kRows, group.rows() - first}));
  block.all = {group.kv.length, 0};
  block.common = {0, group.kv.length};
  int64_t row = first % group.q.length;
  int64_t head = group.kv_head * group.heads + first / group.q.length;
  for (int lane = 0; lane < block.count; ++lane) {
    block.row[lane] = row, block.head[lane] = head;
    if (++row == group.q.length) row = 0, ++head;
    block.columns[lane] = visible_columns(group.band, block.row[lane], group.kv.length);
    block.common.begin = std::max(block.common.begin, block.columns[lane].begin);
    block.common.end = std::min(block.common.end, block.columns[lane].end);
    if (!block.sees(lane)) continue;
    block.all.begin = std::min(block.all.begin, block.columns[lane].begin);
    block.all.end = std::max(block.all.end, block.columns[lane].end);
  }
  return block;
}

}  // namespace tea::cpu
