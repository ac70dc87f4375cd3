// Elementwise operations, updates of rows, and the random state.
#include "ops/context_parallel.h"
#include "ops/elements.h"
#include "ops/launch.cuh"
#include "ops/rng.h"
#include "ops/vectors.cuh"

namespace tea {
namespace {

// ---- Elementwise -------------------------------------------------------------------------------

constexpr int kPerThread = 8;  // outstanding elements per thread

// A thread processes elements at distance kBlock in a tile of a line, so that its cursor is valid
// for the next element and usually for all elements of a pass.
template <class Rule>
__global__ void __launch_bounds__(kBlock) each_element(const __grid_constant__ Rule rule) {
  run_checks(rule);
  constexpr int64_t kTile = kBlock * kPerThread * Rule::kPasses;
  const int64_t tiles = (rule.length + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < rule.lines * tiles; tile += gridDim.x) {
    const int64_t line = quotient(tile, tiles), first = (tile - line * tiles) * kTile + threadIdx.x;
    typename Rule::Cursor cursor{};
#pragma unroll 1
    for (int pass = 0; pass < Rule::kPasses; ++pass) {
      const int64_t i = first + pass * kPerThread * kBlock, last = i + (kPerThread - 1) * kBlock;
      if (last < rule.length && rule.reach(line, i, cursor) && cursor.holds(last)) {
        typename Rule::Value value[kPerThread];
#pragma unroll
        for (int k = 0; k < kPerThread; ++k)
          value[k] = rule.load(rule.slot(line, i + k * kBlock, cursor));
#pragma unroll
        for (int k = 0; k < kPerThread; ++k)
          rule.template store<float>(rule.slot(line, i + k * kBlock, cursor), value[k]);
        continue;
      }
#pragma unroll 1
      for (int64_t j = i; j <= last && j < rule.length; j += kBlock)
        if (rule.reach(line, j, cursor)) {
          const typename Rule::Slot slot = rule.slot(line, j, cursor);
          rule.template store<float>(slot, rule.load(slot));
        }
    }
  }
}

// ---- Updates of rows ---------------------------------------------------------------------------

constexpr int kUnderWay = 4;  // outstanding vectors per thread
constexpr int kBlocks = 3;    // CTAs per SM
// Rows per group of threads. The second row reuses the sequence of the first; with more rows, the
// last CTAs finish late.
constexpr int kOfGroup = 2;

// The distribution of rows over groups of threads.
struct Share {
  int64_t vectors;  // per row
  Team team;
  int64_t rows = 0;  // per CTA
};

template <int32_t dtype, bool wide, class Rule>
__global__ void __launch_bounds__(kBlock, kBlocks)
    update_rows(const __grid_constant__ Rule rule, const Share share) {
  using Stored = RowVector<dtype, wide>;
  using Vector = typename Stored::Numbers;
  using Format = Element<dtype>;
  using Real = typename Format::Real;
  run_checks(rule);
  const auto round = [](Real x) { return Format::decode(Format::encode(x)); };
  const int lane = share.team.lane(), lanes = share.team.lanes();
  const int64_t begin = blockIdx.x * share.rows;
  const int64_t end = begin + share.rows < rule.rows ? begin + share.rows : rule.rows;
  typename Rule::Cursor sequence{};
  for (int64_t i = begin + (threadIdx.x >> share.team.shift); i < end;
       i += kBlock >> share.team.shift) {
    const auto* const from =
        static_cast<const typename Format::Bits*>(rule.source) + i * rule.width;
    const auto load = [&](Stored(&x)[kUnderWay], const typename Format::Bits* row, int64_t v) {
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        const int64_t c = (v + k * lanes) * Vector::kSize;
        x[k].load(row + c, rule.width - c);
      }
    };
    Stored step[kUnderWay], old[kUnderWay];
    load(step, from, lane);  // in flight during the look-up of the factors
    const Update update = rule.at(i, sequence);
    if (update.change == Change::kNone) continue;
    auto* const to = static_cast<typename Format::Bits*>(rule.target) + update.to * rule.width;
    for (int64_t v = lane; v < share.vectors; v += kUnderWay * lanes) {
      const int64_t first = v * Vector::kSize, distance = int64_t{lanes} * Vector::kSize;
      const auto each = [&](const auto& body) {
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) body(k, first + k * distance);
      };
      if (v != lane) load(step, from, v);
      if (update.change != Change::kCopy) load(old, to, v);
      const Real weight = update.template weight<Real>();  // loaded concurrently with the rows
      const bool finite = weight > 0 && weight < INFINITY;
      const bool product = update.change == Change::kAddProduct;
      with_change(product && finite ? Change::kAddFinite : update.change, [&](auto change) {
        each([&](int k, int64_t) {
          Vector x = step[k].numbers();
          const Vector y = old[k].numbers();
#pragma unroll
          for (int i = 0; i < Vector::kSize; ++i)
            x.x[i] = updated<change()>(y.x[i], x.x[i], weight, round);
          step[k].set(x);
        });
      });
      each([&](int k, int64_t c) { step[k].store(to + c, rule.width - c); });
    }
  }
}

__global__ void update_rng(const RngUpdate update) { update(); }

}  // namespace

template <class Rule>
void run_elements_on_gpu(const Rule& rule, const Place& place) {
  constexpr int64_t kTile = kBlock * kPerThread * Rule::kPasses;
  const int64_t tiles = rule.lines * ((rule.length + kTile - 1) / kTile);
  if (!tiles && !rule.checks) return;
  launch({"each_element", blocks_for(std::max(tiles * kBlock, rule.checks))}, each_element<Rule>,
         place, rule);
}

template void run_elements_on_gpu(const LseElements&, const Place&);
template void run_elements_on_gpu(const PartitionElements&, const Place&);

template <class Rule>
void run_updates_on_gpu(const Rule& rule, const Place& place) {
  if (!(rule.rows && rule.width) && !rule.checks) return;
  with_real(rule.dtype, [&](auto dtype) {
    constexpr int kSize = VectorOf<dtype()>::kSize,
                  kBytes = sizeof(typename Element<dtype()>::Bits);
    Rule work = rule;
    if (!rule.width) work.rows = 0;
    Share share{(rule.width + kSize - 1) / kSize, {}};
    share.team = Team::of(share.vectors, kUnderWay, kBlock);
    const int access = access_bytes(reinterpret_cast<uintptr_t>(rule.target) |
                                    reinterpret_cast<uintptr_t>(rule.source) |
                                    static_cast<uint64_t>(rule.width * kBytes));
    with_bool(access == 16, [&](auto wide) {
      const int64_t groups = (work.rows + kOfGroup - 1) / kOfGroup;
      const unsigned blocks = blocks_for(std::max(groups * share.team.lanes(), work.checks));
      const int64_t teams = kBlock >> share.team.shift, at_once = blocks * teams;
      share.rows = (work.rows + at_once - 1) / at_once * teams;
      launch({"update_rows", blocks}, update_rows<dtype(), wide(), Rule>, place, work, share);
    });
  });
}

template void run_updates_on_gpu(const OutUpdates&, const Place&);
template void run_updates_on_gpu(const GradUpdates&, const Place&);

void update_rng_on_gpu(const RngUpdate& update, const Place& place) {
  launch({"update_rng", dim3(1), dim3(1)}, update_rng, place, update);
}

}  // namespace tea
