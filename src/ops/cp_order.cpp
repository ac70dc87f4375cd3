// Context parallelism: which tokens of the global sequences a rank owns, and in which order.
#include <limits>

#include "ops/context_parallel.h"

namespace tea {
namespace {

// `count` tokens of one rank that are neighbours on the rank and in the global order.
struct Chunk {
  int64_t local, global, count;
};

// Calls body(Chunk) for every chunk of `rank`; reports sequences that cannot be cut evenly.
template <class Args, class Body>
void for_each_chunk(const Args& a, int64_t rank, Body body) {
  const int64_t world = a.world, cuts = 2 * world;
  for (int64_t i = 0; i < a.batch; ++i) {
    const int64_t start = a.cu_seqlens[i], end = a.cu_seqlens[i + 1];
    if (start < 0 || end < start || end > a.tokens || start % cuts || end % cuts) {
      report(a.status, TEA_STATUS_BAD_LENGTHS);
      continue;
    }
    const int64_t chunk = (end - start) / cuts, local = start / world;
    body(Chunk{local, start + rank * chunk, chunk});
    body(Chunk{local + chunk, start + (cuts - 1 - rank) * chunk, chunk});
  }
}

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
    require_pointers({{"input", input}, {"output", output}});
}

// Copies rows of `bytes` bytes.
void copy_rows(void* output, int64_t to, const void* input, int64_t from, int64_t bytes) {
  std::memcpy(static_cast<char*>(output) + to, static_cast<const char*>(input) + from,
              static_cast<size_t>(bytes));
}

void reorder(const tea_cp_order& a, bool to_rank_order, const Place& place) {
  check_world(a);
  check_rows(a.input, a.output, a.tokens, a.row_bytes);
  require_host(place);
  if (!a.row_bytes) return;
  for (int64_t rank = 0; rank < a.world; ++rank)
    for_each_chunk(a, rank, [&](const Chunk& c) {
      const int64_t ranked = (rank * (a.tokens / a.world) + c.local) * a.row_bytes;
      const int64_t global = c.global * a.row_bytes;
      copy_rows(a.output, to_rank_order ? ranked : global, a.input, to_rank_order ? global : ranked,
                c.count * a.row_bytes);
    });
}

}  // namespace

void cp_partition_indices(const tea_cp_partition& args, const Place& place) {
  check_world(args);
  require_reserved("reserved", args.reserved);
  TEA_REQUIRE(args.rank >= 0 && args.rank < args.world, "rank", args.rank,
              "0 .. world - 1 = " + shown(args.world - 1));
  if (args.tokens) require_pointers({{"indices", args.indices}});
  require_host(place);
  for_each_chunk(args, args.rank, [&](const Chunk& c) {
    for (int64_t t = 0; t < c.count; ++t)
      args.indices[c.local + t] = static_cast<int32_t>(c.global + t);
  });
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
  check_rows(args.input, args.output, args.tokens, args.row_bytes);
  require_host(place);
  if (!args.row_bytes) return;
  for (int64_t i = 0; i < args.batch; ++i) {
    const int64_t start = args.cu_seqlens_padded[i];
    const int64_t space = args.cu_seqlens_padded[i + 1] - start;
    const int64_t length = int64_t{args.cu_seqlens[i + 1]} - args.cu_seqlens[i];
    const int64_t most = std::min(space, args.tokens - start);
    if (start < 0 || length < 0 || length > most) report(args.status, TEA_STATUS_BAD_LENGTHS);
    if (start < 0 || std::min(length, most) <= 0) continue;
    copy_rows(args.output, start * args.row_bytes, args.input, start * args.row_bytes,
              std::min(length, most) * args.row_bytes);
  }
}

}  // namespace tea
