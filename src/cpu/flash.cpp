// Shares the work of the tiled engine out to threads. How it is cut depends on the problem only,
// never on the number of threads, so that results do not either.
#include "cpu/flash.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <vector>

#include "cpu/pool.h"
#include "math/load_store.h"

namespace tea::cpu {
namespace {

// With fewer pieces than this, rows or keys are split further.
constexpr int64_t kEnough = 16;
constexpr int64_t kLeastKeys = 512;         // of a split: below, the merge costs more than it wins
constexpr int64_t kPackedBytes = 16 << 20;  // of packed heads at a time, if there are several

template <class Real>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : data_(static_cast<Real*>(::operator new(static_cast<size_t>(n) * sizeof(Real), kLine))) {}
  ~Buffer() { ::operator delete(data_, kLine); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Real* get() const { return data_; }

 private:
  static constexpr std::align_val_t kLine{64};
  Real* data_;
};

// Memory that a thread keeps between calls.
template <class Real>
Real* thread_scratch(int64_t n) {
  thread_local std::unique_ptr<Buffer<Real>> buffer;
  thread_local int64_t size = 0;
  if (!buffer || n > size) {
    buffer = std::make_unique<Buffer<Real>>(n);
    size = n;
  }
  return buffer->get();
}

std::vector<Group> groups(const View& view) {
  std::vector<Group> out;
  for (int64_t b = 0; b < view.batch(); ++b)
    for (int64_t h = 0; h < view.p.heads_kv; ++h) out.push_back(make_group(view, b, h));
  return out;
}

struct Piece {
  const Group* group;
  int64_t first;  // row of the block
};

std::vector<Piece> pieces(std::span<const Group> groups) {
  std::vector<Piece> out;
  for (const Group& g : groups)
    for (int64_t block = 0; block < g.blocks(); ++block) out.push_back({&g, block * kRows});
  return out;
}

double highest(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0,
                         [](double a, double b) { return std::fmax(a, b); });
}

// K and V of heads as the kernels want them, in memory that the calling thread keeps. All threads
// share the work.
template <class Real>
void pack(const View& view, const Kernels<Real>& kernels, Pass pass, std::span<Group> groups) {
  if (!kernels.pack) return;
  struct Part {
    const Group* group;
    int64_t first;
    std::byte* to;
  };
  std::vector<Part> parts;
  int64_t bytes = 0;
  for (const Group& g : groups) bytes += kernels.packed_bytes(view.p, g, pass);
  std::byte* memory = thread_scratch<std::byte>(bytes);
  for (Group& g : groups) {
    for (int64_t first = 0; first < g.seen.end - g.seen.begin; first += kPackedKeys)
      parts.push_back({&g, first, memory});
    g.packed = memory;
    memory += kernels.packed_bytes(view.p, g, pass);
  }
  parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    kernels.pack(view, *part.group, pass, part.first, part.to);
  });
}

// ------------------------------------------------------------------------------------- forward

template <class Real>
class Forward {
 public:
  Forward(const View& view, const Kernels<Real>& kernels) : view_(view), kernels_(kernels) {}

  void operator()() {
    fill_padding();
    std::vector<Group> all = groups(view_);
    // As many heads at a time as fit the memory for packed ones.
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
      int64_t bytes = 0;
      do bytes += packed_bytes(all[end++]);
      while (end < all.size() && bytes + packed_bytes(all[end]) <= kPackedBytes);
      attend(std::span(all).subspan(first, end - first));
    }
  }

 private:
  void fill_padding() const {
    const Problem& p = view_.p;
    if (p.q_form == TEA_DENSE) return;  // every row is written below
    view_.fill(TEA_O, 0);
    if (p.writes_lse()) view_.fill(TEA_LSE, -INFINITY);
    if (p.outputs & TEA_OUTPUT_MAX) view_.fill(TEA_MAX, -INFINITY);
    if (p.outputs & TEA_OUTPUT_SUM_EXP) view_.fill(TEA_SUM_EXP, 0);
  }

  int64_t packed_bytes(const Group& g) const {
    return kernels_.pack ? kernels_.packed_bytes(view_.p, g, Pass::kForward) : 0;
  }

  void attend(std::span<Group> some) {
    pack(view_, kernels_, Pass::kForward, some);
    const std::vector<Piece> work = pieces(some);
    s_amax_.assign(work.size(), 0), o_amax_.assign(work.size(), 0);
    const auto n = static_cast<int64_t>(work.size());
    const bool many = n >= kEnough, short_keys = view_.size.max_kv < 2 * kLeastKeys;
    if (many || short_keys || view_.p.is_fp8())  // fp8 needs the row's maximum over all keys
      parallel_for(n, [&](int64_t i) { whole(work[static_cast<size_t>(i)], i); });
    else
      for (int64_t i = 0; i < n; ++i) split(work[static_cast<size_t>(i)], i, (kEnough + n - 1) / n);
    view_.raise(TEA_S_AMAX, highest(s_amax_));
    view_.raise(TEA_O_AMAX, highest(o_amax_));
  }

  int64_t partial_reals() const { return (padded(view_.p.v_dim()) + 2) * kRows; }
  Real* scratch(int64_t more) const {
    return thread_scratch<Real>(kernels_.scratch(view_.p) + more);
  }

  Partial<Real> partial(Real* at) const {
    const int64_t o = padded(view_.p.v_dim()) * kRows;
    return {at, at + o, at + o + kRows};
  }

  void whole(const Piece& piece, int64_t i) {
    const RowBlock block = make_block(*piece.group, piece.first, kRows);
    Real* memory = scratch(partial_reals());
    const Partial<Real> out = partial(memory);
    const auto at = static_cast<size_t>(i);
    s_amax_[at] = kernels_.attend(view_, block, block.all, out, memory + partial_reals());
    o_amax_[at] = kernels_.finish(view_, block, out);
  }

  // Few rows and many keys (decoding): parts of the keys in parallel, then merged in order.
  void split(const Piece& piece, int64_t i, int64_t wanted) {
    const RowBlock block = make_block(*piece.group, piece.first, kRows);
    const int64_t keys = std::max<int64_t>(block.all.end - block.all.begin, 0);
    const int64_t parts = std::clamp<int64_t>(keys / kLeastKeys, 1, wanted);
    const int64_t step = ((keys + parts - 1) / parts + kCols - 1) / kCols * kCols;
    const Buffer<Real> memory(parts * partial_reals());
    parallel_for(parts, [&](int64_t part) {
      const int64_t begin = block.all.begin + part * step;
      const Columns columns{begin, std::min(begin + step, block.all.end)};
      kernels_.attend(view_, block, columns, partial(memory.get() + part * partial_reals()),
                      scratch(0));
    });
    const Partial<Real> all = partial(memory.get());
    for (int64_t part = 1; part < parts; ++part)
      merge(all, partial(memory.get() + part * partial_reals()));
    o_amax_[static_cast<size_t>(i)] = kernels_.finish(view_, block, all);
  }

  void merge(const Partial<Real>& to, const Partial<Real>& from) const {
    for (int lane = 0; lane < kRows; ++lane) {
      const Real a = to.max[lane], b = from.max[lane];
      if (b == -INFINITY && from.sum[lane] == 0) continue;
      const Real max = a > b || std::isnan(a) ? a : b;
      const Real keep = a == -INFINITY ? 0 : std::exp(a - max), take = std::exp(b - max);
      to.max[lane] = max;
      to.sum[lane] = to.sum[lane] * keep + from.sum[lane] * take;
      for (int64_t at = lane; at < view_.p.v_dim() * kRows; at += kRows)
        to.o[at] = to.o[at] * keep + from.o[at] * take;
    }
  }

  const View& view_;
  const Kernels<Real>& kernels_;
  std::vector<double> s_amax_, o_amax_;
};

// ------------------------------------------------------------------------------------ backward

template <class Real>
class Backward {
 public:
  Backward(const View& view, const Kernels<Real>& kernels)
      : view_(view), kernels_(kernels), groups_(groups(view)) {}

  void operator()() {
    const Problem& p = view_.p;
    if (p.q_form != TEA_DENSE) view_.fill(TEA_DQ, 0);
    if (p.kv_form != TEA_DENSE) view_.fill(TEA_DK, 0), view_.fill(TEA_DV, 0);
    const auto n = static_cast<int64_t>(groups_.size());
    found_.resize(groups_.size());
    // The blocks of a group are dealt to its splits in turn, which balances causal masks.
    const int64_t splits = n ? std::max<int64_t>(1, kEnough / 2 / n) : 1;
    if (splits == 1)
      parallel_for(n, [&](int64_t i) { group(i, 1); });
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
    pack(view_, kernels_, Pass::kBackward, {&g, 1});
    const int64_t size = reals(g);
    splits = std::clamp<int64_t>(g.blocks(), 1, splits);
    const Buffer<Real> memory(size * splits);
    std::vector<Found> found(static_cast<size_t>(splits));
    parallel_for(splits, [&](int64_t part) {
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
    for (int64_t n = part; n < g.blocks(); n += splits) {
      const RowBlock block = make_block(g, n * kRows, kRows);
      Gradients<Real> out{memory, memory + dk_reals(g), nullptr, 0, 0, {}, 0, 0};
      kernels_.backward(view_, block, out, thread_scratch<Real>(kernels_.scratch(view_.p)));
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
      view_.raise(TEA_DK_AMAX, TEA_DQ_AMAX, f.dk_amax);
      view_.raise(TEA_DV_AMAX, TEA_DQ_AMAX, f.dv_amax);
      const auto first = static_cast<size_t>(groups_[i].kv_head * groups_[i].heads);
      for (size_t h = 0; h < f.dsink.size(); ++h) dsink[first + h] += f.dsink[h];
    }
    if (float* out = view_.run.as<float>(TEA_DSINK))
      for (size_t h = 0; h < dsink.size(); ++h) out[h] = static_cast<float>(dsink[h]);
  }

  // A pass of its own, over the elements of dbias: whoever owns some of them computes every dS that
  // is summed into them, in order. So it is deterministic, and needs one block of rows, never S x
  // S.
  void bias_gradient() const {
    const Shape shape = tensor_info(TEA_DBIAS).shape(view_.p, view_.size);
    if (shape.elements() == 0) return;
    const bool one_row = view_.p.bias_broadcast & TEA_BROADCAST_ROW;
    const int64_t strips = one_row ? 1 : (view_.size.max_q + kRows - 1) / kRows;
    parallel_for(shape.size[0] * shape.size[1] * strips, [&](int64_t i) {
      const int64_t strip = i % strips, head = i / strips % shape.size[1];
      bias_strip(shape, i / strips / shape.size[1], head, strip * kRows);
    });
  }

  void bias_strip(const Shape& shape, int64_t b, int64_t h, int64_t first) const {
    const bool one_row = shape.size[2] == 1 && (view_.p.bias_broadcast & TEA_BROADCAST_ROW);
    const int64_t rows = one_row ? 1 : std::min<int64_t>(kRows, view_.size.max_q - first);
    std::vector<Real> sum(static_cast<size_t>(kRows * shape.size[3]));
    Gradients<Real> out{nullptr,
                        nullptr,
                        sum.data(),
                        one_row ? 0 : shape.size[3],
                        view_.p.bias_broadcast & TEA_BROADCAST_COL ? 0 : 1,
                        {},
                        0,
                        0};
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
    for (int64_t row = first; row < g.q.length; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, g.q.length - row);
      const RowBlock block = make_block(g, head * g.q.length + row, count);
      kernels_.backward(view_, block, out, thread_scratch<Real>(kernels_.scratch(view_.p)));
      if (!all) return;
    }
  }

  const View& view_;
  const Kernels<Real>& kernels_;
  std::vector<Group> groups_;
  std::vector<Found> found_;
};

// -------------------------------------------------------------------------------------- engine

template <class Real>
struct Flash : Executable {
  Problem problem;
  const Kernels<Real>& kernels;
  Flash(const Problem& p, const Kernels<Real>& k) : problem(p), kernels(k) {}

  void forward(const Run& run) const override {
    const View view(problem, run);
    Forward<Real>{view, kernels}();
  }
  void backward(const Run& run) const override {
    const View view(problem, run);
    Backward<Real>{view, kernels}();
  }
};

}  // namespace

Attempt plan_with(const InstructionSet& set, const Problem& problem, const Device& device) {
  TEA_REFUSE_IF(!device.is_host(), "device is a GPU; it runs on the host");
  TEA_REFUSE_IF(!set.available(), "this processor lacks the instructions");
  if (set.others && problem.dtype != TEA_BF16) return plan_with(*set.others, problem, device);
  if (problem.dtype == TEA_FP64) return std::make_unique<Flash<double>>(problem, *set.twice);
  return std::make_unique<Flash<float>>(problem, *set.single);
}

Attempt plan_flash(const Problem& p, const Device& d) {
  for (const InstructionSet* set : {&kAmx, &kAvx512, &kAvx2, &kGeneric})
    if (set->available()) return plan_with(*set, p, d);
  return Refusal{"no instruction set fits this processor"};
}

}  // namespace tea::cpu
