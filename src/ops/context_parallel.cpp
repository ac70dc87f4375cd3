// Context parallelism: checks for halves of sequences and corrections of partial results.
#include "ops/context_parallel.h"

#include "core/problem.h"

namespace tea {
namespace {

void check_sequences(int64_t batch, const int32_t* cu_seqlens) {
  require_sizes({{"batch", batch}});
  if (batch) require_pointers({{"cu_seqlens", cu_seqlens}});
}

int64_t slabs_of(int64_t slabs) { return slabs ? slabs : 1; }

void check_lse(const tea_cp_lse& a) {
  check_sequences(a.batch, a.cu_seqlens);
  require_flag("packed", a.packed);
  const NamedSize lines = {"batch", a.packed ? 1 : a.batch};
  if (require_sizes({lines, {"heads", a.heads}, {"lse_len", a.lse_len}}))
    require_pointers({{"lse", a.lse}});
  if (require_sizes({lines, {"heads", a.heads}, {"half_len", a.half_len}}))
    require_pointers({{"half_lse", a.half_lse}});
}

LseElements lse_elements(const tea_cp_lse& a, bool correct) {
  check_lse(a);
  LseElements e{};
  e.a = a, e.correct = correct;
  e.shape = {a.packed, 1, a.heads, a.lse_len, a.half_len};
  e.lines = (a.packed ? 1 : a.batch) * a.heads, e.length = a.half_len;
  e.checks = a.batch;
  return e;
}

void check_out(const tea_cp_out& a) {
  require_dtype("dtype", a.dtype, kRealDtypes);
  require_flag("only_second_half", a.only_second_half);
  require_flag("packed", a.packed);
  check_sequences(a.batch, a.cu_seqlens);
  if (require_sizes({{"tokens", a.tokens}, {"heads", a.heads}, {"dim", a.dim}}) && a.batch)
    require_pointers({{"out", a.out, dtype_bytes(a.dtype)},
                      {"step_out", a.step_out, dtype_bytes(a.dtype)},
                      {"lse", a.lse},
                      {"step_lse", a.step_lse}});
  const NamedSize lines = {"batch", a.packed ? 1 : a.batch};
  require_sizes({lines, {"heads", a.heads}, {"lse_len", a.lse_len}});
  require_sizes({lines, {"heads", a.heads}, {"step_lse_len", a.step_lse_len}});
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
    require_pointers(
        {{"grad", a.grad, dtype_bytes(a.dtype)}, {"step_grad", a.step_grad, dtype_bytes(a.dtype)}});
}

}  // namespace

void cp_read_half(const tea_cp_half& args, const Place& place) {
  require_flag("second", args.second);
  check_sequences(args.batch, args.cu_seqlens);
  const int64_t slabs = slabs_of(args.slabs);
  if (require_sizes({{"slabs", slabs}, {"tokens", args.tokens}, {"row_bytes", args.row_bytes}}) &&
      args.batch)
    require_pointers({{"tensor", args.tensor, 1}, {"half", args.half, 1}});
  ReadHalfMoves m{};
  m.a = args;
  m.moves = args.batch ? slabs * (args.tokens / 2) : 0, m.bytes = args.row_bytes;
  m.checks = args.row_bytes ? args.batch : 0;
  m.align(m.bytes), m.align(args.tensor), m.align(args.half);
  run(m, place);
}

void cp_lse_correct(const tea_cp_lse& args, const Place& place) {
  run_elements(lse_elements(args, true), place);
}

void cp_lse_read(const tea_cp_lse& args, const Place& place) {
  run_elements(lse_elements(args, false), place);
}

void cp_out_correct(const tea_cp_out& args, const Place& place) {
  check_out(args);
  OutUpdates u{};
  u.a = args;
  u.shape = {args.packed, args.only_second_half, args.heads, args.lse_len, args.step_lse_len};
  const int64_t tokens = args.only_second_half ? args.tokens / 2 : args.tokens;
  u.rows = args.batch ? tokens * args.heads : 0;
  u.width = args.dim, u.checks = args.batch;
  u.dtype = args.dtype, u.target = args.out, u.source = args.step_out;
  run_updates(u, place);
}

void cp_grad_correct(const tea_cp_grad& args, const Place& place) {
  check_grad(args);
  GradUpdates u{};
  u.a = args;
  const bool half_step = args.first == TEA_CP_NONE || args.second == TEA_CP_NONE;
  u.step_tokens = half_step ? args.tokens / 2 : args.tokens;
  u.rows = args.batch ? slabs_of(args.slabs) * u.step_tokens : 0;
  u.width = args.row_elements, u.checks = args.batch;
  u.dtype = args.dtype, u.target = args.grad, u.source = args.step_grad;
  run_updates(u, place);
}

}  // namespace tea
