// The check of a caller's run against the table of tensors, and its form for engines.
#include <cstddef>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/growth.h"
#include "core/tensors.h"
#include "math/mask.h"

namespace tea {
namespace {

static_assert(sizeof(tea_run) == 192, "the layout of tea_run is frozen; it may only grow");

// The required alignment of a tensor's address. The alignment field of the problem applies to the
// tensors that have its dtypes.
uint64_t alignment(const Problem& p, const TensorInfo& info) {
  const auto element = static_cast<uint64_t>(info.element_bytes(p));
  const auto promised = static_cast<uint64_t>(p.alignment ? p.alignment : kDefaultAlignment);
  return info.type <= Type::kBias ? std::max(element, promised) : element;
}

void check_tensor(const Problem& p, const Run& run, const TensorInfo& info, Direction d) {
  const void* at = run.tensor[info.index];
  const Use use = info.use(p, d);
  const auto name = [&] { return "tensor " + std::string(info.name); };
  if (use == Use::kUnused) {
    // A tensor of the other direction may be in the array; one that no direction uses is an error.
    const Direction other = d == Direction::kForward ? Direction::kBackward : Direction::kForward;
    TEA_REQUIRE(!at || info.use(p, other) != Use::kUnused, name(), at,
                "NULL: this problem does not use it");
    return;
  }
  if (!at) {
    if (use == Use::kOptional) return;
    TEA_REQUIRE(info.shape(p, run.size).elements() == 0, name(), at, "memory for its elements");
    return;
  }
  const bool main = info.type <= Type::kBias;
  const uint64_t needed = alignment(p, info);
  TEA_REQUIRE(is_aligned(at, needed), name(), "not aligned",
              "an address that is a multiple of " + shown(needed) +
                  (main ? " (or a smaller problem.alignment)" : ""));
}

// The only pair of tensors of which one requires the other.
void check_sink(const Problem& p, const Run& run, Direction d) {
  const bool needed =
      d == Direction::kBackward && p.softmax == TEA_SOFTMAX_LEARNABLE && run.tensor[TEA_DSINK];
  TEA_REQUIRE(!needed || run.tensor[TEA_SINK], "tensor sink", run.tensor[TEA_SINK],
              "memory for its elements where tensor dsink is given (or dsink NULL too)");
}

bool gives_sizes(const tea_run& run) {
  return run.batch || run.max_q || run.max_kv || run.tokens_q || run.tokens_kv || run.pages_k ||
         run.pages_v;
}

void check_shift(const tea_run& run) {
  constexpr int64_t kLeast = 5;  // numbers of a sequence
  const bool strided = run.origin_stride != 0;
  TEA_REQUIRE(!strided || run.origin_device, "run.origin_stride", run.origin_stride,
              "0 without origin_device");
  TEA_REQUIRE(!strided || run.origin_stride >= kLeast, "run.origin_stride", run.origin_stride,
              "0, or at least " + shown(kLeast));
  TEA_REQUIRE(run.shift >= -kMaxOrigin && run.shift <= kMaxOrigin, "run.shift", run.shift,
              "-2^40 to 2^40");
  TEA_REQUIRE(!strided || !run.shift, "run.shift", run.shift, "0 with origin_stride");
}

void import_tensors(const tea_run& from, Run& run) {
  TEA_REQUIRE(from.tensors || !from.tensor_count, "run.tensors", from.tensors,
              "an array of pointers");
  for (uint32_t i = 0; i < from.tensor_count; ++i) {
    if (i < TEA_TENSOR_COUNT)
      run.tensor[i] = from.tensors[i];
    else
      TEA_REQUIRE(!from.tensors[i], "run.tensors[" + shown(i) + "]", from.tensors[i],
                  "NULL: this library knows " + shown(+TEA_TENSOR_COUNT) + " tensors");
  }
}

}  // namespace

tea_run as_known(const tea_run* caller) {
  return as_known(caller,
                  {"run", "tea_run", "a tea_run", "run.struct_size", offsetof(tea_run, workspace)});
}

bool is_aligned(const void* p, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

void require_origin(const char* of, const int64_t (&origin)[4], const int64_t* origin_device) {
  const auto name = [&](int i) { return of + ("origin[" + shown(i) + "]"); };
  for (int i = 0; i < 4; ++i) {
    TEA_REQUIRE(origin[i] >= 0 && origin[i] <= kMaxOrigin, name(i), origin[i],
                "0 or more, at most 2^40");
    TEA_REQUIRE(!origin_device || !origin[i], name(i), origin[i], "0 with origin_device");
  }
  TEA_REQUIRE(is_aligned(origin_device, sizeof *origin_device), std::string(of) + "origin_device",
              "not aligned", "an address that is a multiple of 8");
}

Checks::Checks(const Problem& p) {
  static_assert(TEA_TENSOR_COUNT <= 64);
  if (!p.varies()) size_ = geometry(p, nullptr);
  for (const Direction d : {Direction::kForward, Direction::kBackward})
    for (const TensorInfo& info : tensor_table()) {
      Rules& rules = rules_[static_cast<int>(d)];
      const uint64_t bit = uint64_t{1} << info.index;
      const Use use = info.use(p, d);
      if (use == Use::kRequired) rules.required |= bit;
      if (use != Use::kUnused) rules.unaligned[info.index] = alignment(p, info) - 1;
      if (info.forward(p) == Use::kUnused && info.backward(p) == Use::kUnused) rules.refused |= bit;
    }
}

bool Checks::pass(void* const (&tensor)[TEA_TENSOR_COUNT], Direction d) const {
  const Rules& rules = rules_[static_cast<int>(d)];
  uint64_t given = 0, unaligned = 0;
  for (int i = 0; i < TEA_TENSOR_COUNT; ++i) {
    given |= uint64_t{tensor[i] != nullptr} << i;
    unaligned |= reinterpret_cast<uintptr_t>(tensor[i]) & rules.unaligned[i];
  }
  return !unaligned && !(given & rules.refused) && !(rules.required & ~given);
}

Run import_run(const Problem& p, const Checks& checks, const tea_run* caller, Direction d,
               uint64_t (*workspace)(const Problem&, const Geometry&, Direction)) {
  const tea_run from = as_known(caller);
  Run run{};
  run.size = checks.size() && !gives_sizes(from) ? *checks.size() : geometry(p, &from);
  import_tensors(from, run);
  if (!checks.pass(run.tensor, d))
    for (const TensorInfo& info : tensor_table()) check_tensor(p, run, info, d);
  check_sink(p, run, d);
  const uint64_t needed = workspace ? workspace(p, run.size, d) : 0;
  TEA_REQUIRE(from.workspace_bytes >= needed, "run.workspace_bytes", from.workspace_bytes,
              "at least " + shown(needed));
  TEA_REQUIRE(!needed || (from.workspace && is_aligned(from.workspace, 256)), "run.workspace",
              from.workspace, "memory aligned to 256 bytes");
  require_origin("run.", from.origin, from.origin_device);
  check_shift(from);
  TEA_REQUIRE(from.partial == 0 || from.partial == 1, "run.partial", from.partial, "0 or 1");
  const bool forward = d == Direction::kForward;
  const int32_t bits = forward ? TEA_ACCUMULATE_ROWS : TEA_ACCUMULATE_ROWS | TEA_ACCUMULATE_KEYS;
  TEA_REQUIRE(!(from.accumulate & ~bits), "run.accumulate", from.accumulate,
              forward ? "0 or 1" : "0 to 3");
  TEA_REQUIRE(is_aligned(from.status, sizeof *from.status), "run.status", "not aligned",
              "an address that is a multiple of 4");
  TEA_REQUIRE(from.parallel_for || !from.parallel_context, "run.parallel_context",
              from.parallel_context, "NULL without run.parallel_for");
  TEA_REQUIRE(from.threads >= 0, "run.threads", from.threads, "0 or more");
  run.workspace = from.workspace, run.stream = from.stream;
  std::memcpy(run.origin, from.origin, sizeof run.origin);
  run.origin_device = from.origin_device, run.status = from.status;
  run.origin_stride = from.origin_stride, run.shift = from.shift;
  run.partial = from.partial, run.accumulate = from.accumulate;
  run.parallel_for = from.parallel_for, run.parallel_context = from.parallel_context;
  run.threads = from.threads;
  return run;
}

}  // namespace tea
