// Distributes the work of the tiled engine over threads. The partition depends only on the problem,
// not on the number of threads, so that the results do not depend on it either.
#include "cpu/flash.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cpu/pool.h"
#include "math/load_store.h"

namespace tea::cpu {
namespace {

// With fewer heads than half of this, backward splits their blocks.
constexpr int64_t kEnough = 16;
constexpr int64_t kPackedBytes = 16 << 20;  // of packed heads at a time, if there are several

template <class Real>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : data_(static_cast<Real*>(::operator new(static_cast<size_t>(n) * sizeof(Real), kLine))),
        size_(n) {}
  ~Buffer() { ::operator delete(data_, kLine); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Real* get() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static constexpr std::align_val_t kLine{64};
  Real* data_;
  int64_t size_;
};

// Memory that a thread keeps between calls, in the hands of one while this lives: a caller's
// parallel_for may come back to this thread with another call, which then gets memory of its own.
// New memory costs a page fault for every 4 KiB, which decoding would notice.
template <class Real>
class Kept {
 public:
  explicit Kept(int64_t n) {
    if (n == 0) return;
    auto& all = idle();
    auto fits = std::find_if(all.begin(), all.end(), [&](const auto& b) { return b->size() >= n; });
    if (fits == all.end()) {
      buffer_ = std::make_unique<Buffer<Real>>(n);
      if (all.size() == kMost) all.erase(all.begin());  // the smallest
    } else {
      buffer_ = std::move(*fits);
      all.erase(fits);
    }
  }
  // Memory larger than usual packed heads is returned to the system.
  ~Kept() {
    auto& all = idle();
    if (!buffer_ || buffer_->size() * int64_t{sizeof(Real)} > kPackedBytes || all.size() >= kMost)
      return;
    all.insert(std::find_if(all.begin(), all.end(),
                            [&](const auto& b) { return b->size() >= buffer_->size(); }),
               std::move(buffer_));
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  Real* get() const { return buffer_ ? buffer_->get() : nullptr; }

 private:
  static constexpr size_t kMost = 3;  // as many as a call has in hand at a time
  using Buffers = std::vector<std::unique_ptr<Buffer<Real>>>;
  static Buffers& idle() {  // by size
    thread_local Buffers buffers = [] {
      Buffers none;
      none.reserve(kMost);  // so that ~Kept does not allocate
      return none;
    }();
    return buffers;
  }
  std::unique_ptr<Buffer<Real>> buffer_;
};

double highest(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0,
                         [](double a, double b) { return std::fmax(a, b); });
}

// K and V of heads as the kernels want them, while this lives: of the first groups, as many as fit
// the memory for packed heads, but at least one. All threads share the work.
template <class Real>
class PackedHeads {
 public:
  PackedHeads(const View& view, const Kernels<Real>& kernels, Pass pass, std::span<Group> groups)
      : groups_(kernels.pack ? cut(view, kernels, pass, groups) : groups), memory_(bytes_) {
    if (kernels.pack) pack(view, kernels, pass);
  }
  std::span<Group> groups() const { return groups_; }

 private:
  struct Part {
    const Group* group;
    int64_t first;
    std::byte* to;
  };

  // Finds where each group begins, and what part of the memory all of them take.
  std::span<Group> cut(const View& view, const Kernels<Real>& kernels, Pass pass,
                       std::span<Group> groups) {
    for (const Group& g : groups) {
      const int64_t more = kernels.packed_bytes(view.p, g, pass);
      if (!begin_.empty() && bytes_ + more > kPackedBytes) break;
      begin_.push_back(bytes_);
      bytes_ += more;
    }
    return groups.first(begin_.size());
  }

  void pack(const View& view, const Kernels<Real>& kernels, Pass pass) {
    std::vector<Part> parts;
    for (size_t i = 0; i < groups_.size(); ++i) {
      Group& g = groups_[i];
      std::byte* const to = memory_.get() + begin_[i];
      g.packed = to;
      for (int64_t first = 0; first < g.visible.end - g.visible.begin; first += kPackedKeys)
        parts.push_back({&g, first, to});
    }
    view.parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t i) {
      const Part& part = parts[static_cast<size_t>(i)];
      kernels.pack(view, *part.group, pass, part.first, part.to);
    });
  }

  int64_t bytes_ = 0;
  std::vector<int64_t> begin_;  // by group
  const std::span<Group> groups_;
  const Kept<std::byte> memory_;
};

// ------------------------------------------------------------------------------------- forward

template <class Real>
class Forward {
 public:
  // `few`: the kernels for few rows, if the instruction set has them.
  Forward(const View& view, const Kernels<Real>& kernels, const Kernels<Real>& few)
      : view_(view), tiles_(kernels), few_(few) {}

  void operator()() {
    fill_padding();
    std::vector<Group> all = make_groups(view_);
    const auto middle = std::stable_partition(all.begin(), all.end(), [&](const Group& g) {
      return few_.few_scores && is_few(view_, g);
    });
    attend({all.begin(), middle}, true);
    for (std::span<Group> rest{middle, all.end()}; !rest.empty();) {
      const PackedHeads some(view_, tiles_, Pass::kForward, rest);
      attend(some.groups(), false);
      rest = rest.subspan(some.groups().size());
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

  void attend(std::span<const Group> some, bool few) {
    work_ = schedule(view_, some, few);
    s_amax_.assign(work_.parts.size(), 0), o_amax_.assign(work_.pieces.size(), 0);
    const bool split = work_.slots > 0, keeps = split && view_.p.is_fp8();
    const Kept<Real> memory(partial_reals() * work_.slots);
    kept_reals_ = keeps ? kept_reals() : 0;
    const Kept<Real> logits(work_.slots * kept_reals_);
    shared_ = memory.get(), kept_ = keeps ? logits.get() : nullptr;
    if (few) find_bundles();
    if (keeps) share_maxima();
    if (few)
      view_.parallel_for(size(bundles_), [&](int64_t i) { attend_few(bundle(i)); });
    else
      view_.parallel_for(size(work_.parts), [&](int64_t i) { attend(i); });
    if (split) view_.parallel_for(size(work_.pieces), [&](int64_t i) { merge(i); });
    view_.raise(TEA_S_AMAX, highest(s_amax_));
    view_.raise(TEA_O_AMAX, highest(o_amax_));
  }

  template <class T>
  static int64_t size(const T& items) {
    return static_cast<int64_t>(items.size());
  }
  const Part& part(int64_t i) const { return work_.parts[static_cast<size_t>(i)]; }
  const Piece& piece(int64_t i) const { return work_.pieces[static_cast<size_t>(i)]; }
  const Kernels<Real>& kernels() const { return work_.few ? few_ : tiles_; }

  int64_t partial_reals() const { return (padded(view_.p.v_dim()) + 2) * kRows; }
  Partial<Real> partial(Real* at) const {
    const int64_t o = padded(view_.p.v_dim()) * kRows;
    return {at, at + o, at + o + kRows};
  }
  Partial<Real> shared(int64_t slot) const { return partial(shared_ + slot * partial_reals()); }

  // Of split fp8 pieces: the logits of a slot, for as many rows as there are.
  int64_t kept_reals() const {
    int64_t rows = 0, keys = 0;
    for (const Piece& of : work_.pieces) rows = std::max(rows, of.group->rows());
    for (const Part& of : work_.parts) keys = std::max(keys, few_stride(of.columns));
    return rows * keys;
  }
  Real* kept(int64_t slot) const { return kept_ + slot * kept_reals_; }

  static RowBlock block_of(const Piece& piece) {
    return make_block(*piece.group, piece.first, kRows);
  }

  // Parts of few rows that are worked on together: of kv heads of one sequence that follow each
  // other, over the same keys. Results do not depend on it.
  using Bundle = std::span<const Part>;
  Bundle bundle(int64_t i) const {
    const auto [first, count] = bundles_[static_cast<size_t>(i)];
    return {work_.parts.data() + first, count};
  }

  void find_bundles() {
    constexpr size_t kMost = 16;
    const auto follows = [&](const Part& a, const Part& b) {
      const Group &g = *piece(a.piece).group, &h = *piece(b.piece).group;
      return g.b == h.b && g.kv_head + 1 == h.kv_head && a.columns.begin == b.columns.begin &&
             a.columns.end == b.columns.end;
    };
    const auto cut = [&](size_t most) {
      bundles_.clear();
      for (size_t i = 0; i < work_.parts.size(); ++i)
        if (i > 0 && bundles_.back().second < most && follows(work_.parts[i - 1], work_.parts[i]))
          ++bundles_.back().second;
        else
          bundles_.emplace_back(i, 1);
    };
    cut(kMost);
    if (size(bundles_) < 4 * int64_t{thread_count()}) cut(1);  // rather work for all threads
  }

  // Their heads, with memory for `logits` of each if that is not in memory of its slot.
  struct Few {
    Few(const Forward& all, Bundle parts)
        : blocks(size(parts)), memory(size(parts) * all.few_reals(parts)) {
      for (size_t h = 0; h < parts.size(); ++h) {
        const Part& item = parts[h];
        // A block has two kilobytes: neither filled nor copied.
        const RowBlock& block = *new (blocks.get() + h) RowBlock(block_of(all.piece(item.piece)));
        columns = {std::max(item.columns.begin, block.all.begin),
                   std::min(item.columns.end, block.all.end)};
        Real* const own = memory.get() + static_cast<int64_t>(h) * all.few_reals(parts);
        Real *const s = own + all.partial_reals(), *const rest = s + kFewRows * few_stride(columns);
        const bool kept = item.slot >= 0 && all.kept_;
        heads.push_back({&block, kept ? all.kept(item.slot) : s,
                         item.slot < 0 ? all.partial(own) : all.shared(item.slot), rest, 0});
      }
    }
    const Kept<RowBlock> blocks;
    const Kept<Real> memory;
    Columns columns{};
    std::vector<FewHead<Real>> heads;
  };
  int64_t few_reals(Bundle parts) const {
    return partial_reals() + kFewRows * few_stride(parts[0].columns) + few_scratch(view_.p);
  }

  // FP8 with few rows: the maxima of each row over all parts; the logits are kept for attend_few().
  void share_maxima() {
    view_.parallel_for(size(bundles_), [&](int64_t i) {
      if (bundle(i)[0].slot < 0) return;
      Few few(*this, bundle(i));
      few_.few_scores(view_, few.heads, few.columns);
    });
    for (const Piece& of : work_.pieces)
      for (int lane = 0; lane < kFewRows && of.parts > 1; ++lane) {
        const auto max = [&](int64_t n) -> Real& { return shared(of.first_slot + n).max[lane]; };
        for (int64_t n = 1; n < of.parts; ++n) max(0) = std::max(max(0), max(n));
        for (int64_t n = 1; n < of.parts; ++n) max(n) = max(0);
      }
  }

  void attend(int64_t i) {
    const Part& item = part(i);
    const RowBlock block = block_of(piece(item.piece));
    const Columns columns{std::max(item.columns.begin, block.all.begin),
                          std::min(item.columns.end, block.all.end)};
    const Kept<Real> memory(partial_reals() + tiles_.scratch(view_.p));
    const Partial<Real> out = item.slot < 0 ? partial(memory.get()) : shared(item.slot);
    s_amax_[static_cast<size_t>(i)] =
        tiles_.attend(view_, block, columns, out, memory.get() + partial_reals());
    if (item.slot < 0) o_amax_[static_cast<size_t>(item.piece)] = tiles_.finish(view_, block, out);
  }

  void attend_few(Bundle parts) {
    Few few(*this, parts);
    if (parts[0].slot < 0 || !kept_) few_.few_scores(view_, few.heads, few.columns);
    few_.few_values(view_, few.heads, few.columns);
    for (size_t h = 0; h < parts.size(); ++h) {
      s_amax_[static_cast<size_t>(&parts[h] - work_.parts.data())] = few.heads[h].amax;
      if (parts[h].slot < 0)
        o_amax_[static_cast<size_t>(parts[h].piece)] =
            few_.finish(view_, *few.heads[h].block, few.heads[h].out);
    }
  }

  void merge(int64_t i) {
    const Piece& of = piece(i);
    if (of.parts == 1) return;
    const RowBlock block = block_of(of);
    const Partial<Real> all = shared(of.first_slot);
    for (int64_t n = 1; n < of.parts; ++n) merge(all, shared(of.first_slot + n), block.count);
    o_amax_[static_cast<size_t>(i)] = kernels().finish(view_, block, all);
  }

  void merge(const Partial<Real>& to, const Partial<Real>& from, int count) const {
    Real keep[kRows], take[kRows];
    for (int lane = 0; lane < count; ++lane) {
      const Real a = to.max[lane], b = from.max[lane];
      const bool nothing = b == -INFINITY && from.sum[lane] == 0;
      const Real max = nothing || a > b || std::isnan(a) ? a : b;
      keep[lane] = nothing ? 1 : a == -INFINITY ? 0 : std::exp(a - max);
      take[lane] = nothing ? 0 : std::exp(b - max);
      to.max[lane] = max;
      to.sum[lane] = to.sum[lane] * keep[lane] + from.sum[lane] * take[lane];
    }
    for (int64_t row = 0; row < view_.p.v_dim(); ++row)
      for (int lane = 0; lane < count; ++lane) {
        const int64_t at = row * kRows + lane;
        to.o[at] = to.o[at] * keep[lane] + from.o[at] * take[lane];
      }
  }

  const View& view_;
  const Kernels<Real>&tiles_, &few_;
  Schedule work_;
  std::vector<std::pair<size_t, size_t>> bundles_;  // the first part of each, and how many
  Real* shared_ = nullptr;                          // partial results of the parts of split pieces
  Real* kept_ = nullptr;                            // logits of split fp8 pieces, by slot
  int64_t kept_reals_ = 0;                          // of a slot
  std::vector<double> s_amax_, o_amax_;             // by part; by piece
};

// ------------------------------------------------------------------------------------ backward

template <class Real>
class Backward {
 public:
  Backward(const View& view, const Kernels<Real>& kernels)
      : view_(view), kernels_(kernels), groups_(make_groups(view)) {}

  void operator()() {
    const Problem& p = view_.p;
    if (p.q_form != TEA_DENSE) view_.fill(TEA_DQ, 0);
    if (p.kv_form != TEA_DENSE) view_.fill(TEA_DK, 0), view_.fill(TEA_DV, 0);
    const auto n = static_cast<int64_t>(groups_.size());
    found_.resize(groups_.size());
    // The blocks of a group are dealt to its splits in turn, which balances causal masks.
    const int64_t splits = n ? std::max<int64_t>(1, kEnough / 2 / n) : 1;
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

// -------------------------------------------------------------------------------------- engine

template <class Real>
struct Flash : Executable {
  Problem problem;
  const Kernels<Real>&kernels, &few;
  Flash(const Problem& p, const Kernels<Real>& k, const Kernels<Real>& f)
      : problem(p), kernels(k), few(f) {}

  void forward(const Run& run) const override {
    const View view(problem, run);
    Forward<Real>{view, kernels, few}();
  }
  void backward(const Run& run) const override {
    const View view(problem, run);
    Backward<Real>{view, kernels}();
  }
};

constexpr Known kKnown[] = {
    {"dtype", below(7)},
    {"o_dtype", below(7)},
    {"dout_dtype", below(7)},
    {"dqkv_dtype", below(7)},
    {"bias_dtype", below(7)},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"lse_gradient", below(2)},
    {"q_form", below(3)},
    {"kv_form", below(4)},
    {"gaps", below(2)},
    {"causal", below(2)},
    {"bottom_right", below(2)},
    {"window_left"},
    {"window_right"},
    {"bias", below(3)},
    {"bias_broadcast", below(4)},
    {"alibi", below(3)},
    {"softmax", below(3)},
    {"softcap"},
    {"dropout"},
    {"scale"},
    {"has_scale", below(2)},
    {"kv_dtype", below(7)},
    {"kv_scale", below(2)},
    {"batch_invariant", below(2)},
    {"max_ctas"},
};

}  // namespace

std::span<const Known> flash_known_fields() { return kKnown; }

#if !defined(__x86_64__)  // sets that other processors do not have
const InstructionSet kAmx{"cpu-amx", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx512Bf16{"cpu-avx512-bf16", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx512{"cpu-avx512", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx2{"cpu-avx2", [] { return false; }, nullptr, nullptr};
#endif

Attempt plan_with(const InstructionSet& set, const Problem& problem, const Device& device) {
  TEA_REFUSE_IF(!device.is_host(), "device is a GPU; it runs on the host");
  TEA_REFUSE_IF(!set.available(), "this processor lacks the instructions");
  const InstructionSet *tiles = &set, *few = &set;
  // Sets that multiply pairs of 16-bit numbers expect K, V and dO in the type of Q. They also
  // rescale all rows of a block at once, so that the bits of a row depend on the other rows.
  const bool excludes_pairs = problem.kv_dtype || problem.batch_invariant ||
                              (problem.training && problem.dout_type() != problem.dtype);
  while (tiles->others && (excludes_pairs || !tiles->multiplies(problem.dtype)))
    tiles = tiles->others;
  if (problem.dtype == TEA_FP64)
    return std::make_unique<Flash<double>>(problem, *tiles->twice, *tiles->twice);
  while (!few->single->few_scores) few = few->others;
  return std::make_unique<Flash<float>>(problem, *tiles->single, *few->single);
}

Attempt plan_flash(const Problem& p, const Device& d) {
  const InstructionSet* const wide = pairs_are_fast() ? &kAvx512Bf16 : &kAvx512;
  for (const InstructionSet* set : {&kAmx, wide, &kAvx2, &kGeneric})
    if (set->available()) return plan_with(*set, p, d);
  return Refusal{"no instruction set fits this processor"};
}

}  // namespace tea::cpu
