// Context parallelism: checks for the assignment of tokens to ranks and their order.
#include <limits>

#include "core/problem.h"
#include "ops/context_parallel.h"

namespace tea {
namespace {

template <class Args>
void check_world(const Args& a) {
  require_sizes({{"batch", a.batch}, {"tokens", a.tokens}});
  if (a.batch) require_pointers({{"cu_seqlens", a.cu_seqlens}});
  TEA_REQUIRE(a.world >= 1, "world", a.world, "1 or more");
  TEA_REQUIRE(a.tokens % (int64_t{2} * a.world) == 0, "tokens", a.tokens,
              "a multiple of 2 * world = " + shown(int64_t{2} * a.world));
  TEA_REQUIRE(a.tokens <= std::numeric_limits<int32_t>::max(), "tokens", a.tokens,
              "at most 2^31 - 1, as cu_seqlens is int32");
}

void check_rows(const void* input, const void* output, int64_t tokens, int64_t row_bytes) {
  if (require_sizes({{"tokens", tokens}, {"row_bytes", row_bytes}}))
    require_pointers({{"input", input, 1}, {"output", output, 1}});
}

void set_rows(Moves& m, const void* input, const void* output, int64_t tokens, int64_t row_bytes) {
  check_rows(input, output, tokens, row_bytes);
  m.moves = tokens, m.bytes = row_bytes;
  m.align(input), m.align(output), m.align(row_bytes);
}

void reorder(const tea_cp_order& a, bool to_rank_order, const Place& place) {
  check_world(a);
  OrderMoves m{};
  m.a = a, m.to_rank_order = to_rank_order;
  set_rows(m, a.input, a.output, a.tokens, a.row_bytes);
  m.checks = a.row_bytes ? a.batch : 0;
  run(m, place);
}

}  // namespace

void cp_partition_indices(const tea_cp_partition& args, const Place& place) {
  check_world(args);
  require_reserved("reserved", args.reserved);
  TEA_REQUIRE(args.rank >= 0 && args.rank < args.world, "rank", args.rank,
              "0 .. world - 1 = " + shown(args.world - 1));
  if (args.tokens) require_pointers({{"indices", args.indices}});
  PartitionElements e{};
  e.a = args;
  e.lines = 1, e.length = args.tokens / args.world, e.checks = args.batch;
  run_elements(e, place);
}

void cp_to_rank_order(const tea_cp_order& args, const Place& place) { reorder(args, true, place); }

void cp_to_sequence_order(const tea_cp_order& args, const Place& place) {
  reorder(args, false, place);
}

void cp_copy_valid(const tea_cp_valid& args, const Place& place) {
  require_reserved("reserved", args.reserved);
  require_sizes({{"batch", args.batch}});
  if (args.batch)
    require_pointers(
        {{"cu_seqlens_padded", args.cu_seqlens_padded}, {"cu_seqlens", args.cu_seqlens}});
  ValidMoves m{};
  m.a = args;
  set_rows(m, args.input, args.output, args.tokens, args.row_bytes);
  m.checks = args.row_bytes ? args.batch : 0;
  run(m, place);
}

}  // namespace tea
