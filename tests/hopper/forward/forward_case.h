// A forward pass for the tests of src/hopper/forward*.cu*: sizes, layout and mask; tensors on the
// host, in memory full of NaN; the same on the device, ready to launch.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "hopper/device/ptx.cuh"
#include "hopper/forward/forward.h"
#include "hopper/primitives.h"
#include "math/dropout.h"
#include "math/formats.h"

namespace tea::primitives {

using namespace tea::hopper;
using tea::hopper::Type;  // not tea::Type, which is visible too

// Poison is finite in both types and far beyond every mean of the values, so that none equals it.
constexpr uint16_t kNaN = 0x7FFF, kPoison = 0x7BAD;

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
  StridedTensor at(uint16_t* data, int32_t dtype) const {
    return {data, at_batch, at_row, at_head, dtype, 1};
  }
};

// Every element of an output was written, and nothing outside it.
inline bool wrote_all_of(const Tensor& x) {
  std::vector<bool> inside(x.memory.size(), false);
  for (int b = 0; b < x.batch; ++b)
    for (int h = 0; h < x.heads; ++h)
      for (int r = 0; r < x.rows; ++r)
        for (int c = 0; c < x.dim; ++c) inside[x.index(b, h, r, c)] = true;
  for (size_t i = 0; i < inside.size(); ++i)
    if (inside[i] == (x.memory[i] == kPoison)) return false;
  return true;
}

// A hash (FNV-1a) of values, or of those hashed before and these.
template <class T>
uint64_t hash(const std::vector<T>& values, uint64_t before = 0xCBF29CE484222325) {
  for (const T& x : values) {
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    before = (before ^ bits) * 0x100000001B3;
  }
  return before;
}

// Windows are stored plus one: {causal, bottom right, left, right}.
inline const MaskRule kRules[] = {{0, 0, 0, 0},  {1, 0, 0, 0}, {1, 1, 0, 0}, {0, 0, 101, 51},
                                  {1, 1, 34, 0}, {0, 1, 1, 1}, {0, 0, 0, 8}, {0, 1, 301, 0}};

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

// Normal numbers in a case's type, to be copied from anywhere among them.
inline std::vector<uint16_t> normals(const Case& c) {
  std::vector<uint16_t> v(1000003);
  for (uint16_t& x : v) x = c.encode(random_normal());
  return v;
}
inline const uint16_t* some_normals(const Case& c, int count) {
  static std::vector<uint16_t> pools[2];
  std::vector<uint16_t>& pool = pools[c.type == Type::kFp16];
  if (pool.empty()) pool = normals(c);
  return &pool[random_int(0, static_cast<int>(pool.size()) - count)];
}

inline void fill(Tensor& t, const Case& c, Columns rows) {
  for (int b = 0; b < t.batch; ++b)
    for (int h = 0; h < t.heads; ++h)
      for (int64_t r = rows.begin; r < rows.end; ++r)
        std::copy_n(some_normals(c, t.dim), t.dim,
                    &t.memory[t.index(b, h, static_cast<int>(r), 0)]);
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

// Sets equal lengths, which the kernels know without a look at memory.
inline void set_dense(AttentionArguments& f, int rows_q, int rows_kv) {
  f.queries = {.cu_seqlens = nullptr,
               .offsets = nullptr,
               .max_seqlen = rows_q,
               .tokens = 0,
               .form = TEA_DENSE,
               .page_size = 0};
  f.keys = f.queries;
  f.keys.max_seqlen = rows_kv;
  f.is_uniform = 1;
  f.uniform_pair =
      make_sequence_pair(f.mask, 0, dense_sequence(rows_q), dense_sequence(rows_kv), 0, 0, 0);
}

inline void set_ragged(AttentionArguments& f, const SequenceLayout& layout) {
  f.queries = f.keys = layout;
  f.is_uniform = 0;
}
// The rows of K and V as a pool of pages, of which a table with `columns` entries for each sequence
// makes sequences. Batch entries must follow each other in memory.
inline void set_pages(AttentionArguments& f, int page_size, const int* table, int columns,
                      const int* cu_seqlens) {
  const int64_t pages = f.batch * f.keys.max_seqlen / page_size;
  f.k.batch = page_size * f.k.seq, f.v.batch = page_size * f.v.seq;
  f.page_table_k = f.page_table_v = {table, columns, pages};
  f.keys = {.cu_seqlens = cu_seqlens,
            .offsets = nullptr,
            .max_seqlen = columns * page_size,
            .tokens = 0,
            .form = TEA_PAGED,
            .page_size = page_size};
  f.is_uniform = 0;
}
inline void set_dropout(AttentionArguments& f, float dropout, const int64_t* rng) {
  f.has_dropout = 1;
  f.dropout_threshold = dropout_threshold(dropout);
  f.keep_factor = 1 / (1 - dropout);
  f.rng = rng;
}

// On the device, ready to launch.
struct Launchable {
  Buffer<uint16_t> q, k, v, o;
  Buffer<float> lse;
  Buffer<char> counter{kTileCounterBytes};
  AttentionArguments f = {};

  Launchable(const Case& c, const Data& x)
      : q(x.q.memory),
        k(x.k.memory),
        v(x.v.memory),
        o(x.o.memory),
        lse(std::max<size_t>(1, x.lse.size())) {
    const int32_t dtype = c.type == Type::kFp16 ? TEA_FP16 : TEA_BF16;
    f.q = x.q.at(q.data, dtype);
    f.k = x.k.at(k.data, dtype);
    f.v = x.v.at(v.data, dtype);
    f.o = x.o.at(o.data, dtype);
    f.statistics = {.lse = lse.data,
                    .max = nullptr,
                    .sum_exp = nullptr,
                    .dlse = nullptr,
                    .batch = int64_t{c.h.heads} * c.n.rows_q,
                    .seq = 1,
                    .head = c.n.rows_q};
    f.mask = c.rule;
    f.workspace = counter.data;
    set_dense(f, c.n.rows_q, c.n.rows_kv);
    f.batch = c.h.batch;
    f.heads_q = c.h.heads;
    f.heads_kv = c.h.heads_kv;
    f.dim_qk = c.dim;
    f.dim_v = c.dim_v;
    f.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  }
};

}  // namespace tea::primitives
