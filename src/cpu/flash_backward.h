// Backward of the tiled engine: its work on threads, with the kernels of an instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/packed_heads.h"
#include "math/load_store.h"

namespace tea::cpu {

// With fewer KV heads, backward divides the blocks of rows of each, so that all threads have work.
constexpr int64_t kEnoughHeads = 8;

template <class Real>
class FlashBackward {
 public:
  FlashBackward(const View& view, const Kernels<Real>& kernels)
      : view_(view), kernels_(kernels), groups_(make_groups(view)) {}

  void operator()() {
    const Problem& p = view_.p;
    if (p.q_form != TEA_DENSE) view_.fill(TEA_DQ, 0);
    if (p.kv_form != TEA_DENSE) view_.fill(TEA_DK, 0), view_.fill(TEA_DV, 0);
    const auto n = static_cast<int64_t>(groups_.size());
    found_.resize(groups_.size());
    // The blocks of a group are dealt to its splits in turn, which balances causal masks.
    const int64_t splits = n ? std::max<int64_t>(1, kEnoughHeads / n) : 1;
    if (splits == 1)
      view_.parallel_for(n, [&](int64_t i) { group(i, 1); });
    else
      for (int64_t i = 0; i < n; ++i) group(i, splits);
    finish();
    if (view_.run.tensor[TEA_DBIAS]) bias_gradient();
  }

 private:
  struct Found {  // by one group
    double dp_amax = 0, dq_amax = 0, dk_amax = 0, dv_amax = 0;
    std::vector<double> dsink;  // by head of the group
  };

  // dK and dV of a head. Kernels may write whole tiles beyond its last key.
  int64_t dk_reals(const Group& g) const { return (g.kv.length + kCols) * padded(view_.p.dim_qk); }
  int64_t reals(const Group& g) const {
    return dk_reals(g) + (g.kv.length + kCols) * padded(view_.p.v_dim());
  }

  void group(int64_t i, int64_t splits) {
    Group& g = groups_[static_cast<size_t>(i)];
    const PackedHeads packed(view_, kernels_, Pass::kBackward, {&g, 1});
    const int64_t size = reals(g);
    splits = std::clamp<int64_t>(g.blocks(), 1, splits);
    const Kept<Real> memory(size * splits);
    std::vector<Found> found(static_cast<size_t>(splits));
    view_.parallel_for(splits, [&](int64_t part) {
      found[static_cast<size_t>(part)] = blocks(g, part, splits, memory.get() + part * size);
    });
    for (int64_t part = 1; part < splits; ++part)
      for (int64_t at = 0; at < size; ++at) memory.get()[at] += memory.get()[part * size + at];
    Found& all = found_[static_cast<size_t>(i)];
    all = found[0];
    for (size_t part = 1; part < found.size(); ++part) join(all, found[part]);
    all.dk_amax = kernels_.store_keys(view_, TEA_DK, TEA_DK_SCALE, g, memory.get());
    all.dv_amax = kernels_.store_keys(view_, TEA_DV, TEA_DV_SCALE, g, memory.get() + dk_reals(g));
  }

  static void join(Found& to, const Found& from) {
    to.dp_amax = std::fmax(to.dp_amax, from.dp_amax);
    to.dq_amax = std::fmax(to.dq_amax, from.dq_amax);
    for (size_t h = 0; h < to.dsink.size(); ++h) to.dsink[h] += from.dsink[h];
  }

  // Every splits-th block of a group, from block `part` on.
  Found blocks(const Group& g, int64_t part, int64_t splits, Real* memory) const {
    std::fill(memory, memory + reals(g), Real{0});
    Found found;
    found.dsink.assign(static_cast<size_t>(g.heads), 0);
    const Kept<Real> scratch(kernels_.scratch(view_.p));
    for (int64_t n = part; n < g.blocks(); n += splits) {
      const RowBlock block = make_block(g, n * kRows, kRows);
      Gradients<Real> out{memory, memory + dk_reals(g), nullptr, 0, 0, {}, 0, 0};
      kernels_.backward(view_, block, out, scratch.get());
      for (int lane = 0; lane < block.count; ++lane)
        found.dsink[static_cast<size_t>(block.head[lane] - g.kv_head * g.heads)] += out.dsink[lane];
      found.dp_amax = std::fmax(found.dp_amax, out.dp_amax);
      found.dq_amax = std::fmax(found.dq_amax, out.dq_amax);
    }
    return found;
  }

  void finish() {
    std::vector<double> dsink(static_cast<size_t>(view_.p.heads_q));
    for (size_t i = 0; i < found_.size(); ++i) {
      const Found& f = found_[i];
      view_.raise(TEA_DP_AMAX, f.dp_amax);
      view_.raise(TEA_DQ_AMAX, f.dq_amax);
      view_.raise(TEA_DK_AMAX, f.dk_amax);
      view_.raise(TEA_DV_AMAX, f.dv_amax);
      const auto first = static_cast<size_t>(groups_[i].kv_head * groups_[i].heads);
      for (size_t h = 0; h < f.dsink.size(); ++h) dsink[first + h] += f.dsink[h];
    }
    view_.set_sink_gradient(dsink);
  }

  // A separate pass over the elements of dbias: the owner of an element computes every dS that is
  // summed into it, in order. It is therefore deterministic, and needs memory for one block of
  // rows, not for S x S.
  void bias_gradient() const {
    const Shape shape = tensor_info(TEA_DBIAS).shape(view_.p, view_.size);
    if (shape.elements() == 0) return;
    const bool one_row = view_.p.bias_broadcast & TEA_BROADCAST_ROW;
    const int64_t strips = one_row ? 1 : (view_.size.max_q + kRows - 1) / kRows;
    view_.parallel_for(shape.size[0] * shape.size[1] * strips, [&](int64_t i) {
      const int64_t strip = i % strips, head = i / strips % shape.size[1];
      bias_strip(shape, i / strips / shape.size[1], head, strip * kRows);
    });
  }

  void bias_strip(const Shape& shape, int64_t b, int64_t h, int64_t first) const {
    const bool one_row = shape.size[2] == 1 && (view_.p.bias_broadcast & TEA_BROADCAST_ROW);
    const int64_t rows = one_row ? 1 : std::min<int64_t>(kRows, view_.size.max_q - first);
    std::vector<Real> sum(static_cast<size_t>(kRows * shape.size[3]));
    const int64_t row_stride = one_row ? 0 : shape.size[3];
    const int64_t col_stride = view_.p.bias_broadcast & TEA_BROADCAST_COL ? 0 : 1;
    Gradients<Real> out{nullptr, nullptr, sum.data(), row_stride, col_stride, {}, 0, 0};
    const bool each_b = view_.p.bias_broadcast & TEA_BROADCAST_BATCH;
    const bool each_h = view_.p.bias_broadcast & TEA_BROADCAST_HEAD;
    for (const Group& g : groups_) {
      if (!each_b && g.b != b) continue;
      for (int64_t n = 0; n < g.heads; ++n)
        if (each_h || g.kv_head * g.heads + n == h) bias_rows(g, n, first, one_row, out);
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t col = 0; col < shape.size[3]; ++col)
        store_real(view_.run.tensor[TEA_DBIAS], view_.p.bias_type(),
                   b * shape.stride[0] + h * shape.stride[1] + (first + row) * shape.stride[2] +
                       col * shape.stride[3],
                   static_cast<double>(sum[static_cast<size_t>(row * shape.size[3] + col)]));
  }

  // Rows of one head from `first` on: one block of them, or all.
  void bias_rows(const Group& g, int64_t head, int64_t first, bool all,
                 Gradients<Real>& out) const {
    const Kept<Real> scratch(kernels_.scratch(view_.p));
    for (int64_t row = first; row < g.q.length; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, g.q.length - row);
      const RowBlock block = make_block(g, head * g.q.length + row, count);
      kernels_.backward(view_, block, out, scratch.get());
      if (!all) return;
    }
  }

  const View& view_;
  const Kernels<Real>& kernels_;
  std::vector<Group> groups_;
  std::vector<Found> found_;
};

}  // namespace tea::cpu
