// Tests of src/hopper/forward.cu on the device: every head dimension, type and mask, odd lengths,
// layouts and groups of heads, against double precision on sampled rows. Tensors lie in memory full
// of NaN; so do the keys that no row attends to. One process per head dimension.
// usage: check_forward [STEP]    runs every STEP-th case
#include <algorithm>
#include <cmath>

#include "hopper/apart.h"
#include "hopper/forward.h"
#include "hopper/words.h"
#include "math/formats.h"

namespace tea::words {
namespace {

using namespace tea::hopper;

// Poison is finite in both types and far beyond every mean of the values, so that none equals it.
constexpr uint16_t kNaN = 0x7FFF, kPoison = 0x7BAD;
constexpr int kSeconds = 90;  // for a group: a kernel that hangs is ended, and its case named

enum class Layout { kBshd, kBhsd, kSbhd, kPacked };  // kPacked: three tensors side by side

// A 16-bit tensor on the host with its place in memory.
struct Tensor {
  int batch, heads, rows, dim;
  int64_t at_batch, at_head, at_row;
  std::vector<uint16_t> memory;

  Tensor(Layout l, int b, int h, int r, int d, uint16_t fill)
      : batch(b), heads(h), rows(r), dim(d) {
    const int64_t wide = (d + 7) / 8 * 8, apart = l == Layout::kPacked ? 3 : 1;
    at_head = l == Layout::kBhsd ? r * wide : wide;
    at_row = l == Layout::kBhsd ? wide : l == Layout::kSbhd ? b * h * wide : apart * h * wide;
    at_batch = l == Layout::kSbhd ? h * wide : l == Layout::kBhsd ? h * r * wide : r * at_row;
    memory.assign(std::max<int64_t>(8, apart * b * h * r * wide), fill);
  }
  size_t index(int b, int h, int r, int c) const {
    return b * at_batch + h * at_head + r * at_row + c;
  }
  Strided at(uint16_t* data) const { return {data, at_batch, at_head, at_row}; }
};

struct Lengths {
  int rows_q, rows_kv;
};
struct Heads {
  int batch, heads, heads_kv;
};
struct Case {
  int dim, dim_v;
  Type type;
  MaskRule rule;
  Lengths n;
  Heads h;
  Layout layout;

  Band band() const {
    return tea::band(rule, diagonal(rule.bottom_right, n.rows_q, n.rows_kv), 0, 0);
  }
  std::string name() const {
    const auto text = [](auto... x) { return ((std::to_string(x) + " ") + ...); };
    return "dim " + text(dim, dim_v) + (type == Type::kBf16 ? "bf16 " : "fp16 ") + "rows " +
           text(n.rows_q, n.rows_kv) + "batch, heads " + text(h.batch, h.heads, h.heads_kv) +
           "mask " + text(rule.causal, rule.bottom_right, rule.window_left, rule.window_right) +
           "layout " + text(static_cast<int>(layout));
  }
  float decode(uint16_t x) const { return type == Type::kBf16 ? bf16_decode(x) : fp16_decode(x); }
  uint16_t encode(float x) const { return type == Type::kBf16 ? bf16_encode(x) : fp16_encode(x); }
};

float pooled_normal() {
  static const std::vector<float> pool = [] {
    std::vector<float> v(1000003);
    for (float& x : v) x = random_normal();
    return v;
  }();
  static size_t next = 0;
  return pool[next = (next + 1) % pool.size()];
}

void fill(Tensor& t, const Case& c, Columns rows) {
  for (int b = 0; b < t.batch; ++b)
    for (int h = 0; h < t.heads; ++h)
      for (int64_t r = rows.begin; r < rows.end; ++r)
        for (int x = 0; x < t.dim; ++x)
          t.memory[t.index(b, h, static_cast<int>(r), x)] = c.encode(pooled_normal());
}

struct Data {
  Tensor q, k, v, o;
  std::vector<float> lse;

  explicit Data(const Case& c)
      : q(c.layout, c.h.batch, c.h.heads, c.n.rows_q, c.dim, kNaN),
        k(c.layout, c.h.batch, c.h.heads_kv, c.n.rows_kv, c.dim, kNaN),
        v(c.layout, c.h.batch, c.h.heads_kv, c.n.rows_kv, c.dim_v, kNaN),
        o(c.layout, c.h.batch, c.h.heads, c.n.rows_q, c.dim_v, kPoison),
        lse(size_t{1} * c.h.batch * c.h.heads * c.n.rows_q) {
    const Columns attended = {visible_columns(c.band(), 0, c.n.rows_kv).begin,
                              visible_columns(c.band(), c.n.rows_q - 1, c.n.rows_kv).end};
    fill(q, c, {0, c.n.rows_q});
    fill(k, c, attended);
    fill(v, c, attended);
  }
};

Outcome run(const Case& c, Data& x) {
  const Buffer<uint16_t> q(x.q.memory), k(x.k.memory), v(x.v.memory), o(x.o.memory);
  const Buffer<float> lse(std::max<size_t>(1, x.lse.size()));
  const Buffer<int> counter(1);
  Forward f = {};
  f.q = x.q.at(q.data);
  f.k = x.k.at(k.data);
  f.v = x.v.at(v.data);
  f.o = x.o.at(o.data);
  f.lse = {lse.data, int64_t{c.h.heads} * c.n.rows_q, c.n.rows_q, 1};
  f.band = c.band();
  f.counter = counter.data;
  f.type = c.type;
  f.batch = c.h.batch;
  f.heads = c.h.heads;
  f.heads_kv = c.h.heads_kv;
  f.rows_q = c.n.rows_q;
  f.rows_kv = c.n.rows_kv;
  f.dim = c.dim;
  f.dim_v = c.dim_v;
  f.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  const Outcome outcome = forward(f, nullptr);
  if (outcome.code != cudaSuccess) return outcome;
  finish(c.name());
  x.o.memory = o.read();
  x.lse = lse.read();
  return outcome;
}

// What a row must be, and how far rounding may lead from it.
struct Row {
  std::vector<double> o, bound;
  double lse, lse_bound;
};

Row exact_row(const Case& c, const Data& x, int b, int h, int row) {
  const int kv_head = h / (c.h.heads / c.h.heads_kv);
  const Columns seen = visible_columns(c.band(), row, c.n.rows_kv);
  const int64_t count = std::max<int64_t>(0, seen.end - seen.begin);
  std::vector<double> score(count);
  double top = -INFINITY, total = 0, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int key = static_cast<int>(seen.begin + i);
    double magnitude = 0;
    for (int d = 0; d < c.dim; ++d) {
      const double product = double{c.decode(x.q.memory[x.q.index(b, h, row, d)])} *
                             c.decode(x.k.memory[x.k.index(b, kv_head, key, d)]);
      score[i] += product;
      magnitude += std::fabs(product);
    }
    score[i] /= std::sqrt(static_cast<double>(c.dim));
    largest = std::max(largest, magnitude / std::sqrt(static_cast<double>(c.dim)));
    top = std::max(top, score[i]);
  }
  for (double& s : score) total += s = std::exp(s - top);
  const double half = c.type == Type::kBf16 ? 0x1p-8 : 0x1p-11,
               sum = 0x1p-23 * (2 * largest + count);
  const double tiny = c.type == Type::kBf16 ? 0 : 0x1p-25;  // what underflows in fp16
  Row want = {std::vector<double>(c.dim_v, 0), std::vector<double>(c.dim_v, 0), 0, 0};
  for (int64_t i = 0; i < count; ++i)
    for (int d = 0; d < c.dim_v; ++d) {
      const int key = static_cast<int>(seen.begin + i);
      const double value = c.decode(x.v.memory[x.v.index(b, kv_head, key, d)]);
      want.o[d] += score[i] / total * value;
      want.bound[d] += (score[i] / total * (half + sum) + tiny) * std::fabs(value);
    }
  for (int d = 0; d < c.dim_v; ++d) want.bound[d] += half * std::fabs(want.o[d]) + tiny;
  want.lse = count ? top + std::log(total) : -INFINITY;
  want.lse_bound = 2 * sum + 0x1p-20 * (1 + std::fabs(count ? want.lse : 0));
  return want;
}

// The largest error of sampled rows, in bounds; more than 2 fails.
double worst_error(const Case& c, const Data& x) {
  double worst = 0;
  for (int sample = 0; sample < 14; ++sample) {
    const int b = random_int(0, c.h.batch - 1), h = random_int(0, c.h.heads - 1);
    const int row = sample == 0 ? 0 : sample == 1 ? c.n.rows_q - 1 : random_int(0, c.n.rows_q - 1);
    const Row want = exact_row(c, x, b, h, row);
    const auto note = [&](double got, double exact, double bound) {
      if (got == exact) return;  // also both -infinity
      const double error = std::fabs(got - exact) / bound;
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    };
    for (int d = 0; d < c.dim_v; ++d)
      note(c.decode(x.o.memory[x.o.index(b, h, row, d)]), want.o[d], want.bound[d]);
    note(x.lse[(size_t{1} * b * c.h.heads + h) * c.n.rows_q + row], want.lse, want.lse_bound);
  }
  return worst;
}

// Every element of O was written, and nothing beside it.
bool wrote_all_of(const Tensor& o) {
  std::vector<bool> inside(o.memory.size(), false);
  for (int b = 0; b < o.batch; ++b)
    for (int h = 0; h < o.heads; ++h)
      for (int r = 0; r < o.rows; ++r)
        for (int c = 0; c < o.dim; ++c) inside[o.index(b, h, r, c)] = true;
  for (size_t i = 0; i < inside.size(); ++i)
    if (inside[i] == (o.memory[i] == kPoison)) return false;
  return true;
}

void check(const Case& c) {
  Data x(c);
  note_work(c.name());
  const Outcome outcome = run(c, x);
  const bool ran = outcome.code == cudaSuccess;
  expect(ran, c.name() + outcome.what + ": " + cudaGetErrorName(outcome.code));
  if (!ran || c.n.rows_q == 0) return;
  const double error = worst_error(c, x);
  expect(error <= 2, c.name() + "error in bounds: " + std::to_string(error));
  expect(wrote_all_of(x.o), c.name() + "writes O, all of it and nothing else");
}

// Windows are stored plus one: {causal, bottom right, left, right}.
const MaskRule kRules[] = {{0, 0, 0, 0},  {1, 0, 0, 0}, {1, 1, 0, 0}, {0, 0, 101, 51},
                           {1, 1, 34, 0}, {0, 1, 1, 1}, {0, 0, 0, 8}, {0, 1, 301, 0}};
const Lengths kLengths[] = {{1, 1},     {1, 300},   {300, 1},   {200, 500},
                            {500, 200}, {129, 129}, {384, 384}, {700, 911},
                            {192, 640}, {65, 0},    {0, 65},    {1100, 1024}};
const Heads kHeads[] = {{2, 3, 3}, {1, 6, 2}, {3, 5, 1}, {2, 8, 4}};

int check_dims(int dim, int dim_v, int step) {
  int number = 0;
  for (const Type type : {Type::kBf16, Type::kFp16})
    for (const MaskRule& rule : kRules)
      for (const Lengths& n : kLengths) {
        const Heads& h = kHeads[number % std::size(kHeads)];
        const Layout layout = static_cast<Layout>(number / 3 % 4);
        if (number++ % step == 0) check({dim, dim_v, type, rule, n, h, layout});
      }
  printf("dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

// More tiles than processors, so that blocks go on to further tiles, and lengths of thousands.
int check_large(int step) {
  const MaskRule causal = {1, 1, 0, 0}, full = {};
  int number = 0;
  for (const int dim : {64, 128, 256})
    for (const MaskRule& rule : {causal, full})
      for (const Lengths& n : {Lengths{512, 512}, Lengths{2048, 2048}, Lengths{3000, 4100}})
        if (number++ % step == 0)
          check({dim, dim, Type::kBf16, rule, n, {4, 16, 4}, Layout::kBshd});
  printf("large: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

int check_refusals() {
  Forward f = {};
  f.type = Type::kBf16;
  f.batch = f.heads = f.heads_kv = f.rows_q = f.rows_kv = 1;
  f.dim = f.dim_v = 264;
  f.band = {-kUnbounded, kUnbounded};
  f.scale = 1;
  const auto refused = [&](const std::string& why) {
    const Outcome o = forward(f, nullptr);
    expect(o.code == cudaErrorInvalidValue && o.what == why, why + ", got " + o.what);
  };
  refused("head dimensions beyond the table");
  f.dim = f.dim_v = 64;
  f.q = f.k = f.v = f.o = {reinterpret_cast<void*>(8), 64, 64, 64};
  refused("cuTensorMapEncodeTiled");  // pointers that are no multiple of 16
  f.band.hi = 0;
  refused("a mask without a counter");
  f.scale = 0;
  refused("a scale that is not positive");
  f.type = Type::kFp32;
  refused("a type not of 16 bits");
  printf("refusals: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tea::words

int main(int count, char** arguments) {
  using namespace tea::words;
  const int step = count > 1 ? std::max(1, atoi(arguments[1])) : 1;
  constexpr int kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256},
                              {8, 8},   {72, 40}, {80, 96},   {64, 128},  {160, 160}, {248, 200}};
  std::vector<tea::Apart> groups;  // at once: most of the time is the host's
  groups.push_back(tea::start_apart("refusals", kSeconds, check_refusals));
  groups.push_back(tea::start_apart("large", kSeconds, [&] { return check_large(step); }));
  for (const auto& d : kDims) {
    const std::string name = "dim " + std::to_string(d[0]) + ", " + std::to_string(d[1]);
    groups.push_back(
        tea::start_apart(name, kSeconds, [&] { return check_dims(d[0], d[1], step); }));
  }
  int bad = 0;
  for (const tea::Apart& group : groups) {
    const int status = tea::wait_apart(group);
    bad += status != 0;
    if (status != 0) printf("FAILED group %s: %d\n", group.name.c_str(), status);
  }
  printf("%d of %zu groups failed\n", bad, groups.size());
  return bad != 0;
}
