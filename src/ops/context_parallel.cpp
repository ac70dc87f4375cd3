// Context parallelism: halves of sequences and the corrections of partial results.
#include "ops/context_parallel.h"

#include <cmath>
#include <vector>

#include "core/problem.h"
#include "ops/merge.h"
#include "ops/rows.h"

namespace tea {
namespace {

// Sequence `index` is rows start .. start + 2 * half; in half tensors, half rows from start / 2.
struct Halves {
  int64_t index, start, half;
};

// Calls body(Halves) for every sequence within `tokens`; reports the others.
template <class Args, class Body>
void for_each_sequence(const Args& a, int64_t tokens, Body body) {
  for (int64_t i = 0; i < a.batch; ++i) {
    const int64_t start = a.cu_seqlens[i], end = a.cu_seqlens[i + 1];
    if (start < 0 || end < start || end > tokens || start % 2 || end % 2)
      report(a.status, TEA_STATUS_BAD_LENGTHS);
    else
      body(Halves{i, start, (end - start) / 2});
  }
}

void check_sequences(int64_t batch, const int32_t* cu_seqlens) {
  require_sizes({{"batch", batch}});
  if (batch) require_pointers({{"cu_seqlens", cu_seqlens}});
}

int64_t slabs_of(int64_t slabs) { return slabs ? slabs : 1; }

// Where the LSE of one head of one sequence begins in the whole tensor and in the step's.
struct LseRun {
  int64_t whole, step, count;
};

struct LseShape {
  int32_t packed;
  int64_t heads, whole_len, step_len;
};

// `second`: the step holds second halves only. Sets count to -1 if the rows do not fit.
LseRun lse_run(const LseShape& shape, const Halves& s, bool second, int64_t head) {
  const int64_t skipped = second ? s.half : 0, count = 2 * s.half - skipped;
  const int64_t line = shape.packed ? head : s.index * shape.heads + head;
  const int64_t whole = (shape.packed ? s.start : 0) + skipped;
  const int64_t step = shape.packed ? (second ? s.start / 2 : s.start) : 0;
  const bool fits = whole + count <= shape.whole_len && step + count <= shape.step_len;
  return {line * shape.whole_len + whole, line * shape.step_len + step, fits ? count : -1};
}

void check_lse(const tea_cp_lse& a) {
  check_sequences(a.batch, a.cu_seqlens);
  require_flag("packed", a.packed);
  const NamedSize lines = {"batch", a.packed ? 1 : a.batch};
  if (require_sizes({lines, {"heads", a.heads}, {"lse_len", a.lse_len}}))
    require_pointers({{"lse", a.lse}});
  if (require_sizes({lines, {"heads", a.heads}, {"half_len", a.half_len}}))
    require_pointers({{"half_lse", a.half_lse}});
}

// Calls body(lse element, half_lse element) for every row of a second half.
template <class Body>
void for_each_lse(const tea_cp_lse& a, Body body) {
  const LseShape shape = {a.packed, a.heads, a.lse_len, a.half_len};
  const int64_t tokens = a.packed ? a.lse_len : INT64_MAX;
  for_each_sequence(a, tokens, [&](const Halves& s) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const LseRun run = lse_run(shape, s, true, h);
      if (run.count < 0) report(a.status, TEA_STATUS_BAD_LENGTHS);
      for (int64_t c = 0; c < run.count; ++c) body(a.lse[run.whole + c], a.half_lse[run.step + c]);
    }
  });
}

void check_out(const tea_cp_out& a) {
  require_dtype("dtype", a.dtype, kRealDtypes);
  require_flag("only_second_half", a.only_second_half);
  require_flag("packed", a.packed);
  check_sequences(a.batch, a.cu_seqlens);
  if (require_sizes({{"tokens", a.tokens}, {"heads", a.heads}, {"dim", a.dim}}) && a.batch)
    require_pointers(
        {{"out", a.out}, {"step_out", a.step_out}, {"lse", a.lse}, {"step_lse", a.step_lse}});
  const NamedSize lines = {"batch", a.packed ? 1 : a.batch};
  require_sizes({lines, {"heads", a.heads}, {"lse_len", a.lse_len}});
  require_sizes({lines, {"heads", a.heads}, {"step_lse_len", a.step_lse_len}});
}

struct Scratch {
  std::vector<double> out, step;
};

// One row of one head: `whole` and `step` are its first elements in out and step_out.
void correct_row(const tea_cp_out& a, int64_t whole, int64_t step, double weight, Scratch& row) {
  load_row(a.step_out, a.dtype, step, a.dim, row.step.data());
  load_row(a.out, a.dtype, whole, a.dim, row.out.data());
  for (size_t c = 0; c < row.out.size(); ++c)
    if (row.step[c] != 0) row.out[c] += rounded_to(a.dtype, row.step[c] * weight);
  store_row(a.out, a.dtype, whole, a.dim, row.out.data());
}

void correct_sequence(const tea_cp_out& a, const Halves& s, Scratch& row) {
  const bool second = a.only_second_half;
  const LseShape shape = {a.packed, a.heads, a.lse_len, a.step_lse_len};
  const int64_t out_first = s.start + (second ? s.half : 0);
  const int64_t step_first = second ? s.start / 2 : s.start;
  for (int64_t h = 0; h < a.heads; ++h) {
    const LseRun run = lse_run(shape, s, second, h);
    if (run.count < 0) report(a.status, TEA_STATUS_BAD_LENGTHS);
    for (int64_t c = 0; c < run.count; ++c) {
      const double step_lse = double{a.step_lse[run.step + c]};
      if (std::isinf(step_lse) && step_lse < 0) continue;
      const double weight = std::exp(step_lse - double{a.lse[run.whole + c]});
      correct_row(a, ((out_first + c) * a.heads + h) * a.dim,
                  ((step_first + c) * a.heads + h) * a.dim, weight, row);
    }
  }
}

void check_grad(const tea_cp_grad& a) {
  require_dtype("dtype", a.dtype, kRealDtypes);
  check_sequences(a.batch, a.cu_seqlens);
  for (const NamedSize& action : {NamedSize{"first", a.first}, NamedSize{"second", a.second}})
    TEA_REQUIRE(action.value >= TEA_CP_NONE && action.value <= TEA_CP_COPY, action.name,
                action.value, "a tea_cp_action");
  TEA_REQUIRE(a.first != a.second, "second", a.second,
              "another action than first, which is " + shown(a.first));
  if (require_sizes(
          {{"slabs", slabs_of(a.slabs)}, {"tokens", a.tokens}, {"row_elements", a.row_elements}}) &&
      a.batch)
    require_pointers({{"grad", a.grad}, {"step_grad", a.step_grad}});
}

// `count` rows: grad row `to` takes step_grad row `from` by `action`.
struct GradRun {
  int32_t action;
  int64_t to, from, count;
};

void apply(const tea_cp_grad& a, const GradRun& run, Scratch& row) {
  const int64_t n = a.row_elements;
  for (int64_t r = 0; run.action != TEA_CP_NONE && r < run.count; ++r) {
    load_row(a.step_grad, a.dtype, (run.from + r) * n, n, row.step.data());
    if (run.action == TEA_CP_ADD) {
      load_row(a.grad, a.dtype, (run.to + r) * n, n, row.out.data());
      for (size_t c = 0; c < row.step.size(); ++c) row.step[c] += row.out[c];
    }
    store_row(a.grad, a.dtype, (run.to + r) * n, n, row.step.data());
  }
}

}  // namespace

void cp_read_half(const tea_cp_half& args, const Place& place) {
  require_flag("second", args.second);
  check_sequences(args.batch, args.cu_seqlens);
  const int64_t slabs = slabs_of(args.slabs);
  if (require_sizes({{"slabs", slabs}, {"tokens", args.tokens}, {"row_bytes", args.row_bytes}}) &&
      args.batch)
    require_pointers({{"tensor", args.tensor}, {"half", args.half}});
  require_host(place);
  if (!args.row_bytes) return;
  for (int64_t slab = 0; slab < slabs; ++slab)
    for_each_sequence(args, args.tokens, [&](const Halves& s) {
      const int64_t from = slab * args.tokens + s.start + args.second * s.half;
      const int64_t to = slab * (args.tokens / 2) + s.start / 2;
      std::memcpy(static_cast<char*>(args.half) + to * args.row_bytes,
                  static_cast<const char*>(args.tensor) + from * args.row_bytes,
                  static_cast<size_t>(s.half * args.row_bytes));
    });
}

void cp_lse_correct(const tea_cp_lse& args, const Place& place) {
  check_lse(args);
  require_host(place);
  for_each_lse(args, [](float& lse, const float& half) {
    lse = static_cast<float>(log_add_exp(double{lse}, double{half}));
  });
}

void cp_lse_read(const tea_cp_lse& args, const Place& place) {
  check_lse(args);
  require_host(place);
  for_each_lse(args, [](const float& lse, float& half) { half = lse; });
}

void cp_out_correct(const tea_cp_out& args, const Place& place) {
  check_out(args);
  require_host(place);
  const auto dim = static_cast<size_t>(args.dim);
  Scratch row = {std::vector<double>(dim), std::vector<double>(dim)};
  for_each_sequence(args, args.tokens, [&](const Halves& s) { correct_sequence(args, s, row); });
}

void cp_grad_correct(const tea_cp_grad& args, const Place& place) {
  check_grad(args);
  require_host(place);
  const auto n = static_cast<size_t>(args.row_elements);
  Scratch row = {std::vector<double>(n), std::vector<double>(n)};
  const bool half_step = args.first == TEA_CP_NONE || args.second == TEA_CP_NONE;
  const int64_t step_tokens = half_step ? args.tokens / 2 : args.tokens;
  for (int64_t slab = 0; slab < slabs_of(args.slabs); ++slab)
    for_each_sequence(args, args.tokens, [&](const Halves& s) {
      const int64_t to = slab * args.tokens + s.start;
      const int64_t from = slab * step_tokens + (half_step ? s.start / 2 : s.start);
      apply(args, {args.first, to, from, s.half}, row);
      apply(args, {args.second, to + s.half, half_step ? from : from + s.half, s.half}, row);
    });
}

}  // namespace tea
