// Operations on elements, one at a time or row by row: rules that serve the loop of the host, which
// works in double, and the kernel of a GPU, which works in float (in double on fp64 tensors).
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ops/args.h"
#include "ops/rows.h"

namespace tea {

// ---- One at a time ---------------------------------------------------------------------------

// What a rule derives from. It adds
//   int kPasses                          of a thread over a tile: few make many blocks, many serve
//                                        long by one cursor
//   struct Cursor                        what neighbours in a line have in common, at first {}
//     bool holds(int64_t i)              is it that of element i? of those between two, if of both
//   bool reach(line, i, Cursor&)         makes it that of element i < length, if there is work
//   Slot slot(line, i, Cursor)           where that element is
//   Value load(Slot)                     what lies there; several are under way at a time
//   void store<Real>(Slot, Value)        does the work
//   void check(int64_t i)                for i < checks: reports nonsense, once each
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

// ---- Row by row ------------------------------------------------------------------------------

enum class Change { kNone, kAdd, kCopy, kAddProduct, kAddFinite };

// Row `to` changes by the row of the source that it was asked for; a product is with exp(*step_lse
// - *lse). It is kAddFinite where that is known to be finite and more than 0: then every term of it
// can be added.
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

// One element. `round`: to the tensor's type and back.
template <Change change, class Real, class Round>
TEA_HOST_DEVICE Real updated(Real old, Real step, Real weight, const Round& round) {
  if (change == Change::kCopy) return step;
  if (change == Change::kAdd) return old + step;
  if (change == Change::kAddFinite) return old + round(step * weight);
  return step == 0 || weight == 0 ? old : old + round(step * weight);
}

// Calls body with the change as a constant.
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

// What a rule derives from. It adds
//   struct Cursor                  what neighbouring rows have in common, at first {}
//   Update at(int64_t i, Cursor&) const   for i < rows; no two change the same row
//   void check(int64_t i) const    as above
struct Updates {
  int64_t rows = 0, width = 0, checks = 0;  // width: elements of a row
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
