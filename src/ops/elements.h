// Elementwise operations and updates of rows. A rule is written once for the loop of the host,
// which computes in double, and the kernel of a GPU, which computes in float (for fp64 tensors in
// double).
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ops/args.h"
#include "ops/rows.h"

namespace tea {

// ---- Elementwise -----------------------------------------------------------------------------

// The base class of a rule, which adds
//   int kPasses                          passes of a thread over a tile: fewer give more CTAs, more
//                                        reuse a cursor longer
//   struct Cursor                        data shared by adjacent elements of a line, initially {}
//     bool holds(int64_t i)              whether it is valid for element i. If it is for two
//                                        elements, it is for those between them
//   bool reach(line, i, Cursor&)         makes it valid for element i < length; false: no work
//   there Slot slot(line, i, Cursor)           the addresses of the element Value load(Slot) loads
//   it; several loads are outstanding at a time void store<Real>(Slot, Value)        computes and
//   stores void check(int64_t i)                for i < checks: reports invalid metadata, once each
struct Elementwise {
  int64_t lines = 0, length = 0, checks = 0;
};

// Instantiated in elements.cu for each rule.
template <class Rule>
void run_elements_on_gpu(const Rule& rule, const Place& place);

template <class Rule>
void run_elements(const Rule& rule, const Place& place) {
  if (!is_host(place)) {
    if constexpr (kGpuCode) run_elements_on_gpu(rule, place);
    return;
  }
  for (int64_t i = 0; i < rule.checks; ++i) rule.check(i);
  for (int64_t line = 0; line < rule.lines; ++line) {
    typename Rule::Cursor cursor{};
    for (int64_t i = 0; i < rule.length; ++i) {
      if (!rule.reach(line, i, cursor)) continue;
      const typename Rule::Slot slot = rule.slot(line, i, cursor);
      rule.template store<double>(slot, rule.load(slot));
    }
  }
}

// ---- Updates of rows -------------------------------------------------------------------------

enum class Change { kNone, kAdd, kCopy, kAddProduct, kAddFinite };

// Updates row `to` with a row of the source, multiplied by exp(*step_lse - *lse) for products. The
// change is kAddFinite if that factor is known to be finite and positive, so that every product can
// be added.
struct Update {
  Change change = Change::kNone;
  int64_t to = 0;
  const float *step_lse = nullptr, *lse = nullptr;

  template <class Real>
  TEA_HOST_DEVICE Real weight() const {
    if (change != Change::kAddProduct) return 1;
    return *step_lse == -INFINITY ? 0 : static_cast<Real>(exp(Real{*step_lse} - Real{*lse}));
  }
};

// Updates one element. `round`: rounds to the tensor's type.
template <Change change, class Real, class Round>
TEA_HOST_DEVICE Real updated(Real old, Real step, Real weight, const Round& round) {
  if (change == Change::kCopy) return step;
  if (change == Change::kAdd) return old + step;
  if (change == Change::kAddFinite) return old + round(step * weight);
  return step == 0 || weight == 0 ? old : old + round(step * weight);
}

// Calls body with the change as a compile-time constant.
template <class Body>
TEA_HOST_DEVICE void with_change(Change change, const Body& body) {
  if (change == Change::kCopy)
    body(std::integral_constant<Change, Change::kCopy>());
  else if (change == Change::kAdd)
    body(std::integral_constant<Change, Change::kAdd>());
  else if (change == Change::kAddFinite)
    body(std::integral_constant<Change, Change::kAddFinite>());
  else
    body(std::integral_constant<Change, Change::kAddProduct>());
}

// The base class of a rule, which adds
//   struct Cursor                  data shared by adjacent rows, initially {}
//   Update at(int64_t i, Cursor&) const   for i < rows; no two updates change the same row
//   void check(int64_t i) const    as above
struct Updates {
  int64_t rows = 0, width = 0, checks = 0;  // width: elements per row
  int32_t dtype = 0;
  void* target = nullptr;
  const void* source = nullptr;
};

// Instantiated in elements.cu for each rule.
template <class Rule>
void run_updates_on_gpu(const Rule& rule, const Place& place);

template <class Rule>
void run_updates(const Rule& rule, const Place& place) {
  if (!is_host(place)) {
    if constexpr (kGpuCode) run_updates_on_gpu(rule, place);
    return;
  }
  for (int64_t i = 0; i < rule.checks; ++i) rule.check(i);
  const int64_t n = rule.width;
  std::vector<double> old(static_cast<size_t>(n)), step(static_cast<size_t>(n));
  const auto round = [&](double x) { return rounded_to(rule.dtype, x); };
  typename Rule::Cursor sequence{};
  for (int64_t i = 0; i < rule.rows; ++i) {
    const Update update = rule.at(i, sequence);
    if (update.change == Change::kNone) continue;
    const auto weight = update.template weight<double>();
    load_row(rule.source, rule.dtype, i * n, n, step.data());
    if (update.change != Change::kCopy)
      load_row(rule.target, rule.dtype, update.to * n, n, old.data());
    with_change(update.change, [&](auto change) {
      for (size_t c = 0; c < step.size(); ++c)
        step[c] = updated<change()>(old[c], step[c], weight, round);
    });
    store_row(rule.target, rule.dtype, update.to * n, n, step.data());
  }
}

}  // namespace tea
