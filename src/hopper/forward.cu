// Which kernel serves a forward pass, and what none serves.
#include <atomic>
#include <random>

#include "hopper/forward_launch.cuh"

namespace tea::hopper {
namespace {

bool is_general(const Forward& f) {
  const General& g = f.general;
  return g.alibi || g.softcap > 0 || g.dropout > 0 || !(f.scale > 0);
}

bool is_only_capped(const Forward& f) {
  const General& g = f.general;
  return caps_last(f) && !g.bias && g.dropout == 0 && f.scale > 0;
}

bool is_only_dropped(const Forward& f) {
  const General& g = f.general;
  return g.dropout > 0 && drops_whole_cells(f) && !bends(f);
}

// The row of a plain kernel. Of few rows, tiles of 256 rows waste less than tiles of 192, and of
// few keys a mask cuts less off blocks of 64 than of 80; how many are few was measured.
int plain_row(int row, const Forward& f) {
  const auto at_most = [&](int n) { return f.queries.rows <= n && f.keys.rows <= n; };
  const bool masked = bounded(f.mask);
  if (row == 0 && f.queries.rows > 192 && at_most(masked ? 1024 : 512)) return kShort;
  if (row == kWide && masked && at_most(1024)) return kShortWide;
  return row;
}

// Sizes that the kernels' counts cannot hold.
bool too_large(const Forward& f) {
  const int64_t tiles = (int64_t{f.queries.rows} / 64 + 1) * f.heads;
  return f.queries.rows > kMaxRows || f.keys.rows > kMaxRows ||
         (f.batch > 0 && tiles > INT32_MAX / f.batch);
}

}  // namespace

static_assert(sizeof(Claims) == kClaimsBytes && alignof(Claims) == 8);

uint64_t launch_number() {
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return next.fetch_add(1, std::memory_order_relaxed) | uint64_t{1} << 63;
}

int forward_row(int dim, int dim_v) {
  const auto serves = [&](const Row& r) { return dim <= r.dim && dim_v <= r.dim_v; };
  const Row* found = std::find_if(std::begin(kTable), std::end(kTable), serves);
  return found == std::end(kTable) ? -1 : static_cast<int>(found - kTable);
}

bool has_high_tiles(int dim, int dim_v) { return dim <= kTable[0].dim && dim_v <= kTable[0].dim_v; }

bool needs_counter(const Forward& f) {
  const bool equal = f.queries.form == Form::kDense && f.keys.form == Form::kDense;
  return f.batch > 0 && (!equal || bounded(f.mask) || has_high_tiles(f.dim, f.dim_v));
}

Outcome forward(const Forward& f, void* stream) {
  const int row = forward_row(f.dim, f.dim_v);
  if (row < 0) return refused("head dimensions beyond the table");
  if (too_large(f)) return refused("more tiles than can be counted");
  if (needs_counter(f) && !f.counter)
    return refused("tiles of different lengths without a counter");
  const bool empty = f.queries.form == Form::kDense && (f.queries.rows == 0 || f.batch == 0);
  if (empty || f.heads == 0) return {};
  const auto on = static_cast<cudaStream_t>(stream);
  if (f.general.bias) return launch_biased(row, f, on);
  if (has_dropped(row) && is_only_dropped(f)) return launch_dropped(row, f, on);
  if (is_general(f))
    return has_capped(row) && is_only_capped(f) ? launch_capped(row, f, on)
                                                : launch_general(row, f, on);
  const int plain = plain_row(row, f);
  return bounded(f.mask) ? launch_masked(plain, f, on) : launch_full(plain, f, on);
}

}  // namespace tea::hopper
