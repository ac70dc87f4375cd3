// Tests of src/hopper/backward/ that compare bits: of ragged and padded sequences with dense ones,
// of parts of the keys with all of them, of numbers of CTAs, and of builds.
#include <algorithm>
#include <cmath>

#include "hopper/apart.h"
#include "hopper/backward/backward_case.h"
#include "hopper/backward/interleaving.h"
#include "math/formats.h"

namespace tea::primitives {
namespace {

using Gradients = std::array<std::vector<uint16_t>, 3>;  // dQ, dK, dV

Gradients read(const BackwardLaunch& l) { return {l.dq.read(), l.dk.read(), l.dv.read()}; }

// The gradients of one sequence by itself, dense: of the rows and keys from `first` on of batch
// entry `batch`. O and LSE are those in `x`, since forward may take another kernel for its length.
Gradients run_dense(const BackwardCase& c, const BackwardData& x, int64_t batch, int64_t first,
                    const Lengths& n) {
  BackwardLaunch l(c, x);
  upload(l.forward_pass.lse, x.lse);
  AttentionArguments& f = l.f;
  for (StridedTensor* const t : l.tensors())
    t->data = static_cast<uint16_t*>(t->data) + batch * t->batch + first * t->seq;
  RowStatistics& s = f.statistics;
  s.lse += batch * s.batch + first * s.seq;
  if (s.dlse) s.dlse += batch * s.batch + first * s.seq;
  f.batch = 1;
  set_dense(f, n.rows_q, n.rows_kv);
  l.prepare();
  expect(l.run_backward().code == 0, c.name() + "a dense sequence runs");
  finish(c.name());
  return read(l);
}

// Copies `count` rows from row `from` on.
void copy_rows(const std::vector<uint16_t>& from, std::vector<uint16_t>& to, int64_t first,
               int64_t count) {
  std::copy_n(from.begin() + first, count, to.begin() + first);
}

// Everything but the given rows of a tensor of one batch entry becomes NaN.
void keep_rows(Tensor& t, int64_t batch, int64_t length) {
  for (int h = 0; h < t.heads; ++h)
    for (int64_t r = length; r < t.rows; ++r)
      for (int d = 0; d < t.dim; ++d)
        t.memory[t.index(static_cast<int>(batch), h, static_cast<int>(r), d)] = kNaN;
}

// Whether sums of the same terms in two orders can give these, each rounded to bf16; compared are
// elements `begin` to `end` - 1.
bool equal_but_for_order(const std::vector<uint16_t>& x, const std::vector<uint16_t>& y,
                         size_t begin, size_t end) {
  float largest = 0;
  for (const uint16_t code : y) largest = std::fmax(largest, std::fabs(bf16_decode(code)));
  for (size_t i = begin; i < end; ++i) {
    const float a = bf16_decode(x[i]), b = bf16_decode(y[i]);
    if (!(std::fabs(a - b) <= 0x1p-7f * std::fabs(b) + 0x1p-20f * largest)) return false;
  }
  return true;
}

}  // namespace

// Sequences of one buffer, with gaps between them, give the bits that each gives by itself. A
// sequence by itself begins with the first key block. dQ of those with heads that begin with the
// last one in the batch (interleaving.h) is the sum of the same terms in another order.
int check_ragged(int dim, int dim_v, int step) {
  const std::vector<int> lengths = {5, 0, 700, 64, 129, 1, 0, 333, 192, 527, 80};
  std::vector<int> starts;
  int tokens = 0;
  for (const int n : lengths) {
    tokens += 3;  // a gap
    starts.push_back(tokens);
    tokens += n;
  }
  starts.push_back(tokens);
  tokens += 9;
  const Heads kHeads[] = {{1, 4, 2}, {1, 3, 3}};
  for (int number = 0; number < 16; number += step) {
    const BackwardCase c = {{dim,
                             dim_v,
                             Type::kBf16,
                             kRules[number % 8],
                             {tokens, tokens},
                             kHeads[number / 8],
                             Layout::kBshd},
                            true};
    BackwardData x(c);
    for (Tensor* const t : {&x.q, &x.k, &x.v, &x.dout}) {
      std::fill(t->memory.begin(), t->memory.end(), kNaN);
      for (size_t i = 0; i < lengths.size(); ++i) fill(*t, c, {starts[i], starts[i] + lengths[i]});
    }
    BackwardLaunch ragged(c, x);
    const Buffer<int> cu_seqlens(running_sum(lengths)), offsets(starts);
    set_ragged(ragged.f, layout(TEA_RAGGED, cu_seqlens, &offsets, 700, tokens));
    ragged.f.batch = static_cast<int64_t>(lengths.size());
    ragged.prepare();
    note_work(c.name());
    expect(ragged.run(), c.name() + "ragged runs");
    finish(c.name());
    const Gradients got = read(ragged);
    x.o.memory = ragged.forward_pass.o.read();
    x.lse = ragged.forward_pass.lse.read();
    Gradients want;
    for (int i = 0; i < 3; ++i) want[i].assign(got[i].size(), 0);  // gaps are zeros
    const int64_t rows[] = {x.dq.at_row, x.dk.at_row, x.dv.at_row};
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (lengths[s] == 0) continue;
      const Gradients one = run_dense(c, x, 0, starts[s], {lengths[s], lengths[s]});
      for (int i = 0; i < 3; ++i)
        copy_rows(one[i], want[i], starts[s] * rows[i], lengths[s] * rows[i]);
    }
    namespace backward = hopper::backward;
    const int parts = backward::group_parts(ragged.f);
    const auto order = backward::interleave(ragged.f, backward::find_tile(dim, dim_v), parts);
    const int heads = ragged.f.heads_kv * parts;
    const size_t reordered = static_cast<size_t>((order.descending_heads + heads - 1) / heads);
    const auto first = static_cast<size_t>(starts[reordered] * rows[0]);
    expect(equal_but_for_order(got[0], want[0], 0, first),
           c.name() + "ragged equals dense but for the order of sums: gradient 0");
    expect(std::equal(got[0].begin() + static_cast<int64_t>(first), got[0].end(),
                      want[0].begin() + static_cast<int64_t>(first)),
           c.name() + "ragged equals dense, bit by bit: gradient 0");
    for (int i = 1; i < 3; ++i)
      expect(got[i] == want[i],
             c.name() + "ragged equals dense, bit by bit: gradient " + std::to_string(i));
    // Invalid metadata, by which sequences share row blocks, lets no tile wait for ever.
    const Buffer<int> overlapping(std::vector<int>{0, 700, 3, 700, 3, 700, 3, 700, 3, 700, 3, 700});
    set_ragged(ragged.f, layout(TEA_RAGGED, overlapping, nullptr, 700, tokens));
    ragged.poison_workspace();
    expect(ragged.run(), c.name() + "ragged with overlapping sequences ends");
    finish(c.name());
  }
  return report("ragged", dim, dim_v);
}

// Padded sequences, with NaN in the padding, give the bits that each gives by itself, and zeros.
int check_padded(int dim, int dim_v, int step) {
  const std::vector<int> queries = {500, 1, 0, 333}, keys = {129, 700, 64, 0};
  for (int number = 0; number < 8; number += step) {
    const BackwardCase c = {
        {dim, dim_v, Type::kFp16, kRules[number], {500, 700}, {4, 4, 2}, Layout::kBshd}, true};
    BackwardData x(c);
    for (Tensor* const t : {&x.q, &x.k, &x.v, &x.dout}) {
      fill(*t, c, {0, t->rows});
      for (int b = 0; b < 4; ++b) keep_rows(*t, b, (t->rows == 500 ? queries : keys)[b]);
    }
    BackwardLaunch padded(c, x);
    const Buffer<int> cu_q(running_sum(queries)), cu_kv(running_sum(keys));
    padded.f.queries = layout(TEA_PADDED, cu_q, nullptr, 500, 0);
    padded.f.keys = layout(TEA_PADDED, cu_kv, nullptr, 700, 0);
    padded.f.is_uniform = 0;
    padded.prepare();
    note_work(c.name());
    expect(padded.run(), c.name() + "padded runs");
    finish(c.name());
    const Gradients got = read(padded);
    x.o.memory = padded.forward_pass.o.read();
    x.lse = padded.forward_pass.lse.read();
    Gradients want;
    for (int i = 0; i < 3; ++i) want[i].assign(got[i].size(), 0);
    const Tensor* const tensors[] = {&x.dq, &x.dk, &x.dv};
    for (int b = 0; b < 4; ++b) {
      if (queries[b] == 0 || keys[b] == 0) continue;
      const Gradients one = run_dense(c, x, b, 0, {queries[b], keys[b]});
      for (int i = 0; i < 3; ++i)
        copy_rows(one[i], want[i], b * tensors[i]->at_batch,
                  (i == 0 ? queries : keys)[b] * tensors[i]->at_row);
    }
    for (int i = 0; i < 3; ++i)
      expect(got[i] == want[i],
             c.name() + "padded equals dense, bit by bit: gradient " + std::to_string(i));
  }
  return report("padded", dim, dim_v);
}

namespace {

// Cases that between them use everything that CTAs and warps pass to each other: groups as a whole
// and in parts, several tiles per CTA, masks, LSE gradients and sinks.
std::vector<BackwardCase> shared_cases(int dim, int dim_v) {
  std::vector<BackwardCase> cases;
  const Heads kHeads[] = {{2, 6, 6}, {2, 6, 2}, {1, 8, 1}, {16, 8, 8}};
  for (const Type type : {Type::kBf16, Type::kFp16})
    for (const int rule : {0, 1, 3})
      for (int way = 0; way < 4; ++way)
        cases.push_back({{dim, dim_v, type, kRules[rule], {700, 911}, kHeads[way], Layout::kBshd},
                         way > 0,
                         way == 2});
  return cases;
}

}  // namespace

namespace {

// dQ, dK and dV in fp32 of `count` keys from `first` on, with O and LSE of all keys.
std::array<std::vector<float>, 3> run_part(const BackwardCase& c, const BackwardData& x, int first,
                                           int count) {
  BackwardLaunch l(c, x);
  upload(l.forward_pass.lse, x.lse);
  AttentionArguments& f = l.f;
  const Buffer<float> dq(l.dq.size), dk(l.dk.size), dv(l.dv.size);
  f.dq.data = dq.data, f.dk.data = dk.data + first * f.dk.seq;
  f.dv.data = dv.data + first * f.dv.seq;
  for (StridedTensor* const t : {&f.dq, &f.dk, &f.dv}) t->dtype = TEA_FP32;
  for (StridedTensor* const t : {&f.k, &f.v})
    t->data = static_cast<uint16_t*>(t->data) + first * t->seq;
  set_dense(f, c.n.rows_q, count);
  f.origin[3] = first, f.is_uniform = 0;
  l.prepare();
  expect(l.run_backward().code == 0, c.name() + "a part of the keys runs");
  finish(c.name());
  return {dq.read(), dk.read(), dv.read()};
}

// Whether rows of a tensor are the same bits: `count` rows from `first` on of each batch entry.
bool rows_are_equal(const Tensor& t, int first, int count, const std::vector<float>& a,
                    const std::vector<float>& b) {
  for (int batch = 0; batch < t.batch; ++batch) {
    const size_t at = t.index(batch, 0, first, 0), n = static_cast<size_t>(count * t.at_row);
    if (memcmp(&a[at], &b[at], n * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace

// Keys in two parts, as context parallelism has them, with O and LSE of all keys: dK and dV have
// the bits of one run over all keys, and the sum of dQ differs from that run's by roundings alone.
int check_parts(int dim, int dim_v, int step) {
  constexpr int kRows = 500, kKeys = 700, kFirst = 384;  // a multiple of every block
  for (int number = 0; number < 4; number += step) {
    const Type type = number / 2 ? Type::kFp16 : Type::kBf16;
    const BackwardCase c = {
        {dim, dim_v, type, kRules[number % 2], {kRows, kKeys}, {2, 3, 3}, Layout::kBshd}, true};
    BackwardData x(c);
    BackwardLaunch whole(c, x);
    whole.prepare();
    note_work(c.name());
    expect(whole.run_forward().code == 0, c.name() + "forward runs");
    finish(c.name());
    x.o.memory = whole.forward_pass.o.read();
    x.lse = whole.forward_pass.lse.read();
    const auto all = run_part(c, x, 0, kKeys), low = run_part(c, x, 0, kFirst),
               high = run_part(c, x, kFirst, kKeys - kFirst);
    const Tensor* const tensors[] = {&x.dq, &x.dk, &x.dv};
    for (const int i : {1, 2}) {
      const Tensor& t = *tensors[i];
      expect(rows_are_equal(t, 0, kFirst, low[i], all[i]) &&
                 rows_are_equal(t, kFirst, kKeys - kFirst, high[i], all[i]),
             c.name() + "parts have the bits of the whole: gradient " + std::to_string(i));
    }
    double error = 0, size = 0;
    for (size_t i = 0; i < all[0].size(); ++i) {
      const double sum = double{low[0][i]} + high[0][i] - all[0][i];
      error += sum * sum, size += double{all[0][i]} * all[0][i];
    }
    expect(size > 0 && error <= size * 1e-12, c.name() + "dQ of the parts adds up to the whole's");
  }
  return report("parts", dim, dim_v);
}

namespace {

void check_numbers_of_ctas(BackwardLaunch& l, const std::string& what) {
  uint64_t first = 0;
  for (const int ctas : {132, 66, 7, 1}) {
    const std::string name = what + std::to_string(ctas) + " CTAs";
    note_work(name);
    l.poison_workspace();
    bool ran = l.run_forward().code == 0;
    ran &= l.run_backward(nullptr, ctas).code == 0;
    finish(name);
    const uint64_t bits = digest(l);
    if (ctas == 132) first = bits;
    expect(ran && bits == first, name + ": the same bits as 132");
  }
}

}  // namespace

// The same bits from any number of CTAs. Also of causal sequences that are declared to be longer
// than they are, so that not all heads are interleaved, with heads in four parts: some heads begin
// with the last key block, and all parts of a head must.
int check_ctas(int dim, int dim_v, int step) {
  const std::vector<BackwardCase> cases = shared_cases(dim, dim_v);
  for (size_t i = 0; i < cases.size(); i += static_cast<size_t>(step)) {
    const BackwardData x(cases[i]);
    BackwardLaunch l(cases[i], x);
    l.prepare();
    check_numbers_of_ctas(l, cases[i].name());
  }
  const std::vector<int> lengths(8, 300);
  const std::vector<int> sums = running_sum(lengths);
  const BackwardCase c = {
      {dim, dim_v, Type::kBf16, kRules[1], {sums.back(), sums.back()}, {1, 4, 1}, Layout::kBshd},
      true};
  const BackwardData x(c);
  BackwardLaunch l(c, x);
  const Buffer<int> cu_seqlens(sums);
  set_ragged(l.f, layout(TEA_RAGGED, cu_seqlens, nullptr, 2816, sums.back()));
  l.f.batch = static_cast<int64_t>(lengths.size());
  l.prepare();
  check_numbers_of_ctas(l, c.name() + "ragged, four parts, ");
  return report("ctas", dim, dim_v);
}

// The same bits from several runs of every kernel, and their digest, which is that of other builds.
int check_digests(int dim, int dim_v, int) {
  for (const BackwardCase& c : shared_cases(dim, dim_v)) {
    const BackwardData x(c);
    BackwardLaunch l(c, x);
    l.prepare();
    note_work(c.name());
    uint64_t first = 0;
    for (int run = 0; run < 8; ++run) {
      l.poison_workspace();
      for (const auto* const to : l.gradients()) cudaMemset(to->data, 0xA5, to->size * 2);
      const bool launched = l.run();
      finish(c.name());
      const uint64_t now = digest(l);
      if (run == 0) first = now;
      expect(launched && now == first, c.name() + "the same bits from run " + std::to_string(run));
    }
    printf("digest %s%016llx\n", c.name().c_str(), static_cast<unsigned long long>(first));
  }
  return report("digests", dim, dim_v);
}

}  // namespace tea::primitives
