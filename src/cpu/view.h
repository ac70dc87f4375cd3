// One execution in the form for the reference: sequences, rows as doubles, FP8 scales resolved.
// This file does not compute attention.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensors.h"
#include "cpu/pool.h"
#include "math/dropout.h"
#include "math/lengths.h"
#include "math/mask.h"

namespace tea::cpu {

using Reals = std::vector<double>;

// A tensor of rows: where row i of sequence b and head h begins.
struct RowsOf {
  void* data;
  int32_t dtype, form;
  tea_strides stride;
  const int32_t* table;  // paged: logical page n of sequence b is table[b * table_stride + n]
  int64_t table_stride, page_size, pages;
};

// Row i of head h in sequence b, whose position is `sequence`.
struct RowAt {
  Sequence sequence;
  int64_t b, h, i;
};

class View {
 public:
  View(const Problem& problem, const Run& run);

  const Problem& p;
  const Run& run;
  const Geometry& size;
  RngState rng;

  // Where sequence b is in the global problem.
  Origin origin(int64_t b) const;

  // Sequences that may have rows: none of a dense batch without any, however large it is.
  int64_t batch() const;
  Sequence queries(int64_t b) const;
  Sequence keys(int64_t b) const;

  RowsOf rows(tea_tensor t) const;
  // Where a row begins.
  void* address(const RowsOf& of, const RowAt& at) const;
  // A row as doubles times `scale`.
  void load(const RowsOf& of, const RowAt& at, double scale, std::span<double> out) const;
  void store(const RowsOf& of, const RowAt& at, double scale, std::span<const double> values) const;
  // The element of LSE, MAX, SUM_EXP or DLSE for a row.
  double statistic(tea_tensor t, const RowAt& at) const;
  void set_statistic(tea_tensor t, const RowAt& at, double value) const;

  // The logit of the extra term in the denominator for a query head; -infinity: there is none.
  double sink(int64_t h) const;
  // Writes the gradient of every head's sink, if it is wanted.
  void set_sink_gradient(std::span<const double> gradient) const;

  // The slope of ALiBi for a query head of sequence b; 0 without ALiBi.
  double slope(int64_t b, int64_t h) const;
  // Run::number(): a scale, 1 where there is none; and an amax, raised where there is one.
  double scalar(tea_tensor t) const;
  // The scale of the keys or values of a kv head.
  double kv_scale(tea_tensor t, int64_t kv_head) const;
  void raise(tea_tensor t, double value) const;

  // Runs body(0) ... body(count - 1) on the threads of this execution.
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) const;

  // Sets every element of a tensor, also of padding and gaps.
  void fill(tea_tensor t, double value) const;

 private:
  Origin origin(int64_t b, bool* valid) const;
  int64_t offset(const RowsOf& of, const RowAt& at) const;
  int64_t statistic_offset(const RowAt& at) const;
  Sequence checked(Sequence s) const;
  void report(int32_t bit) const;
};

}  // namespace tea::cpu
