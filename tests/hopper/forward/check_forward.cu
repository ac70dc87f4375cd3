// Tests of src/hopper/forward/ on the device: every head dimension, type and mask, odd lengths,
// layouts and groups of heads, against double precision on sampled rows. Memory around the tensors,
// and keys that no row attends to, are NaN. Then every length from 1 to 1100, ragged sequences
// against dense ones bit by bit, reruns under contention, and launches that begin while their
// predecessor grid runs. One process per head dimension. The effect of every option is tested
// through the engine, by tests/gpu and te-attn fuzz. Built with -DTEA_PERTURB=1, every role sleeps
// for a random time at each point where another may overtake it; the digests of the two builds must
// be equal.
// usage: check_forward [STEP [WORD]]    runs every STEP-th case, of the groups named with WORD
#include <algorithm>
#include <cmath>

#include "hopper/apart.h"
#include "hopper/chain.cuh"
#include "hopper/forward/forward_case.h"

namespace tea::primitives {
namespace {

constexpr unsigned kSeconds = 150;  // a kernel that hangs is ended, and its case named

Outcome run(const Case& c, Data& x) {
  const Launchable on_device(c, x);
  const Outcome outcome = forward(on_device.f, nullptr);
  if (outcome.code) return outcome;
  finish(c.name());
  x.o.memory = on_device.o.read();
  x.lse = on_device.lse.read();
  return outcome;
}

// The expected row, and the bound of its rounding error.
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
double worst_error(const Case& c, const Data& x, int samples) {
  double worst = 0;
  for (int sample = 0; sample < samples; ++sample) {
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

void check(const Case& c) {
  Data x(c);
  note_work(c.name());
  const Outcome outcome = run(c, x);
  const bool ran = outcome.code == 0;
  expect(ran, c.name() + (ran ? "runs" : std::string(outcome.what) + ": " + outcome.text));
  if (!ran || c.n.rows_q == 0) return;
  const double error = worst_error(c, x, 14);
  expect(error <= 2, c.name() + "error in bounds: " + std::to_string(error));
  expect(wrote_all_of(x.o), c.name() + "writes O, all of it and nothing else");
}

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

// Every number of rows and of keys from 1 to 1100, under one mask.
int check_lengths(int dim, int dim_v, int rule, int step) {
  constexpr int kMost = 1100;
  for (int n = 1; n <= kMost; n += step) {
    const int keys = rule % 2 ? n : n * 7 % kMost + 1;
    const Case c = {dim,          dim_v,     n % 2 ? Type::kBf16 : Type::kFp16,
                    kRules[rule], {n, keys}, {1, 2, 1},
                    Layout::kBshd};
    Data x(c);
    note_work(c.name());
    const Outcome outcome = run(c, x);
    expect(outcome.code == 0 && worst_error(c, x, 4) <= 2 && wrote_all_of(x.o), c.name());
  }
  printf("lengths, mask %d, dim %d, %d: %d passed, %d failed\n", rule, dim, dim_v, passed, failed);
  return failed != 0;
}

// Sequences of one buffer, with gaps between them, give the bits that each gives by itself.
// Where the most that a sequence may have chooses the kernel, its length alone chooses the same.
int check_ragged(int dim, int dim_v, int step) {
  const std::vector<int> any = {5, 0, 700, 64, 129, 1, 0, 333, 192, 1027, 80},
                         apart = {5, 0, 64, 129, 1, 0, 192, 1027, 80}, many = {1100, 0, 1025, 1027},
                         few = {200, 0, 333, 500, 412, 256};
  for (int number = 0; number < 16; number += step) {
    const MaskRule rule = kRules[number % 8];
    const bool is_few = number >= 8;
    const std::vector<int>& lengths = is_few ? few : dim == 64 ? apart : dim == 256 ? many : any;
    std::vector<int> cu = {0}, starts;
    int tokens = 0;
    for (const int n : lengths) {
      tokens += 3;  // a gap
      starts.push_back(tokens);
      tokens += n;
      cu.push_back(cu.back() + n);
    }
    starts.push_back(tokens);
    tokens += 9;
    Case all = {dim, dim_v, Type::kBf16, rule, {tokens, tokens}, {1, 4, 2}, Layout::kBshd};
    Data x(all);
    for (Tensor* t : {&x.q, &x.k, &x.v}) {
      std::fill(t->memory.begin(), t->memory.end(), kNaN);
      for (size_t i = 0; i < lengths.size(); ++i)
        fill(*t, all, {starts[i], starts[i] + lengths[i]});
    }
    Launchable ragged(all, x);
    const Buffer<int> cu_seqlens(cu), offsets(starts);
    const int batch = static_cast<int>(lengths.size());
    set_ragged(ragged.f, {.cu_seqlens = cu_seqlens.data,
                          .offsets = offsets.data,
                          .max_seqlen = is_few ? 500 : 1100,
                          .tokens = tokens,
                          .form = TEA_RAGGED,
                          .page_size = 0});
    ragged.f.batch = batch;
    const Outcome outcome = forward(ragged.f, nullptr);
    expect(outcome.code == 0, all.name() + "ragged runs");
    finish(all.name());
    const std::vector<uint16_t> got = ragged.o.read();
    std::vector<uint16_t> want(got.size(), 0);  // gaps are zeros
    for (int i = 0; i < batch; ++i) {
      if (lengths[i] == 0) continue;
      Launchable dense(all, x);
      const auto at = [&](StridedTensor& t) {
        t.data = static_cast<uint16_t*>(t.data) + starts[i] * t.seq;
      };
      for (StridedTensor* t : {&dense.f.q, &dense.f.k, &dense.f.v, &dense.f.o}) at(*t);
      set_dense(dense.f, lengths[i], lengths[i]);
      forward(dense.f, nullptr);
      finish(all.name());
      const std::vector<uint16_t> one = dense.o.read();
      const int64_t row = x.o.at_row;
      std::copy_n(one.begin() + starts[i] * row, lengths[i] * row, want.begin() + starts[i] * row);
    }
    expect(got == want, all.name() + "ragged equals dense, bit by bit");
  }
  printf("ragged, dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

// The same bits from a thousand runs, while another stream keeps half the device busy.
int check_reruns(int dim, int dim_v, int step) {
  const Case c = {dim, dim_v, Type::kBf16, kRules[1], {700, 911}, {2, 6, 2}, Layout::kBshd};
  Data x(c);
  const Launchable first(c, x), again(c, x), other(c, x);
  const Buffer<int> differences(std::vector<int>{0});
  cudaStream_t stream, busy;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking);
  forward(first.f, nullptr);
  finish(c.name());
  int launched = 0;
  for (int i = 0; i < 1000; i += step) {
    if (i % 3 == 0) forward(other.f, busy);
    launched += forward(again.f, stream).code == 0;
    count_differences<<<64, 256, 0, stream>>>(first.o.data, again.o.data, first.o.size,
                                              differences.data);
  }
  finish(c.name());
  expect(launched == (999 / step) + 1, c.name() + "all reruns were launched");
  expect(differences.read() == std::vector<int>{0}, c.name() + "the same bits each time");
  printf("reruns, dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

// The run-time values of a kernel in device memory, in addition to its tensors.
struct Metadata {
  int64_t rng[2];
  int cu_seqlens[9];
  float sinks[8];
  int cu_seqlens_kv[5];
  int pages[4][43];  // of 16 rows of four sequences
};
Metadata make_metadata(int which) {
  static constexpr Metadata kValues[] = {
      {{1, 2}, {0, 700, 701, 1034, 1546, 1610, 2010, 2139, 2739}, {0, 1, 2, 3}, {}, {}},
      {{9, 8}, {0, 12, 712, 1362, 1362, 1662, 1884, 2584, 2683}, {5, 4, -3, 1}, {}, {}}};
  Metadata x = kValues[which];
  for (int b = 0; b < 4; ++b) {
    x.cu_seqlens_kv[b + 1] = x.cu_seqlens_kv[b] + 688 - 57 * b * (1 + which);
    for (int i = 0; i < 43; ++i) x.pages[b][i] = (b * 43 + i * (which ? 26 : 11)) % 175;
  }
  return x;
}
enum class Way { kPlain, kSinks, kRagged, kPaged, kCapped, kGeneral, kDropped };

// A launch that reads all of that.
struct Link {
  Launchable l;
  Buffer<Metadata> metadata;

  Link(const Case& c, const Data& x, const Metadata& t, Way way)
      : l(c, x), metadata(std::vector{t}) {
    AttentionArguments& f = l.f;
    if (way == Way::kSinks) f.softmax = TEA_SOFTMAX_LEARNABLE, f.sink = metadata.data->sinks;
    if (way >= Way::kGeneral) set_dropout(f, 0.25f, metadata.data->rng);
    if (way == Way::kCapped || way == Way::kGeneral) f.softcap = 20;
    if (way == Way::kPaged)
      set_pages(f, 16, metadata.data->pages[0], 43, metadata.data->cu_seqlens_kv);
    if (way != Way::kRagged) return;
    const int tokens = c.h.batch * c.n.rows_q;
    f.statistics.batch = 0, f.statistics.head = tokens;
    f.batch = 8;
    set_ragged(f, {.cu_seqlens = metadata.data->cu_seqlens,
                   .offsets = nullptr,
                   .max_seqlen = c.n.rows_q,
                   .tokens = tokens,
                   .form = TEA_RAGGED,
                   .page_size = 0});
  }
};

// A launch begins while its predecessor grid runs: it must take nothing that this one still writes,
// and write nothing that this one still reads. So what it works on changes right before it, or what
// it wrote is read right before the next one writes it.
void check_chain(const Case& c, const Data& x, const Data& y, Way way, int rounds) {
  const std::string name = c.name() + "way " + std::to_string(static_cast<int>(way));
  note_work(name);
  const Link links[] = {{c, x, make_metadata(0), way}, {c, y, make_metadata(1), way}},
             link(c, x, make_metadata(0), way);
  const Buffer<int> differences(std::vector<int>{0});
  for (const Link& l : links) expect(forward(l.l.f, nullptr).code == 0, name);
  finish(name);
  const auto turn_to = [&](const Link& l) {
    bring<<<16, 256>>>(Copies{{copy(link.l.q, l.l.q), copy(link.l.k, l.l.k), copy(link.l.v, l.l.v),
                               copy(link.metadata, l.metadata)}});
  };
  const auto look = [&](const Link& l) {
    const auto halves = [](const Buffer<float>& x) {
      return reinterpret_cast<const uint16_t*>(x.data);
    };
    count_differences<<<16, 256>>>(link.l.o.data, l.l.o.data, l.l.o.size, differences.data, true);
    count_differences<<<1, 256>>>(halves(link.l.lse), halves(l.l.lse), l.l.lse.size * 2,
                                  differences.data, true);
  };
  int launched = forward(link.l.f, nullptr).code == 0, wanted = 1;
  for (int i = 0; i < rounds; ++i) {
    const Link &now = links[i % 2], &next = links[1 - i % 2];
    if (i / 2 % 2) turn_to(next);
    look(now);
    if (i / 2 % 2 == 0) turn_to(next);
    for (int again = 0; again <= i % 3; ++again, ++wanted)
      launched += forward(link.l.f, nullptr).code == 0;
  }
  finish(name);
  expect(launched == wanted, name + ": all were launched");
  expect(differences.read() == std::vector<int>{0}, name + ": the same bits as alone");
}
int check_chains(int dim, int dim_v, int step) {
  constexpr Way kWays[] = {Way::kPlain,  Way::kSinks,   Way::kRagged, Way::kPaged,
                           Way::kCapped, Way::kGeneral, Way::kDropped};
  for (const int rule : {0, 1}) {
    const Case c = {dim, dim_v, Type::kBf16, kRules[rule], {700, 700}, {4, 8, 2}, Layout::kBshd};
    const Data x(c), y(c);
    for (const Way way : kWays) check_chain(c, x, y, way, std::max(1, 100 / step));
  }
  printf("chains, dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

uint64_t digest(const Launchable& l) { return hash(l.lse.read(), hash(l.o.read())); }

// The same bits from several runs of every kernel, and their digest, which is that of other builds.
int check_digests(int dim, int dim_v, int) {
  const Buffer<int64_t> rng(std::vector<int64_t>{1234, 5678});
  constexpr const char* kWays[] = {"plain",   "general", "biased", "capped",
                                   "dropped", "few",     "many",   "paged"};
  std::vector<int> entries;  // of two sequences of 57 pages of 16 rows
  for (int i = 0; i < 114; ++i) entries.push_back(i * 37 % 114);
  const Buffer<int> pages(entries), cu_seqlens_kv(std::vector<int>{0, 900, 1631});
  for (const Type type : {Type::kBf16, Type::kFp16})
    for (const int rule : {0, 1, 3})
      for (int way = 0; way < 8; ++way) {
        const bool by_lengths = way == 5 || way == 6;  // they choose the kernel
        if (by_lengths && dim != 64) continue;
        const Lengths n = way == 5   ? Lengths{400, 500}
                          : way == 6 ? Lengths{1100, 1200}
                          : way == 7 ? Lengths{700, 912}
                                     : Lengths{700, 911};
        const Case c = {dim, dim_v, type, kRules[rule], n, {2, 6, 2}, Layout::kBshd};
        const std::string name = c.name() + kWays[way];
        Data x(c);
        if (way == 7)  // any page may be attended to
          for (Tensor* t : {&x.k, &x.v}) fill(*t, c, {0, n.rows_kv});
        Launchable l(c, x);
        AttentionArguments& f = l.f;
        const int row = 912;  // of a bias, a multiple of 16 bytes: loaded by TMA
        const Buffer<uint16_t> bias(normals(c));
        if (way == 1 || way == 4) set_dropout(f, 0.25f, rng.data);
        if (way == 7) set_pages(f, 16, pages.data, 57, cu_seqlens_kv.data);
        if (way == 1) f.alibi = TEA_ALIBI_STANDARD;
        if (way == 1 || way == 3) f.softcap = 20;
        if (way == 2) {
          f.bias.data = bias.data, f.bias.kind = TEA_BIAS_POST_SCALE, f.bias.dtype = f.q.dtype;
          f.bias.stride = {.batch = 0, .head = 24, .row = row, .col = 1};
        }
        note_work(name);
        uint64_t first = 0;
        for (int run = 0; run < 8; ++run) {
          cudaMemset(l.o.data, 0xA5, l.o.size * 2);
          const bool launched = forward(l.f, nullptr).code == 0;
          finish(name);
          const uint64_t now = digest(l);
          if (run == 0) first = now;
          expect(launched && now == first,
                 name + ": the same bits from run " + std::to_string(run));
        }
        printf("digest %s %016llx\n", name.c_str(), static_cast<unsigned long long>(first));
      }
  printf("digests, dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

int check_refusals() {
  AttentionArguments f = {};
  f.batch = f.heads_q = f.heads_kv = 1;
  f.queries.max_seqlen = f.keys.max_seqlen = 1;
  f.dim_qk = f.dim_v = 264;
  f.scale = 1;
  const auto refused = [&](const std::string& why) {
    const Outcome o = forward(f, nullptr);
    expect(o.code == cudaErrorInvalidValue && o.what == why,
           why + ", got " + (o.what ? o.what : "none"));
  };
  refused("head dimensions beyond the table");
  f.dim_qk = f.dim_v = 64;
  refused("tiles of different lengths without a counter");  // the last of 192 rows may be shorter
  f.dim_qk = f.dim_v = 128;
  f.q = f.k = f.v = f.o = {reinterpret_cast<void*>(8), 128, 128, 128, TEA_BF16, 0};
  refused("cuTensorMapEncodeTiled of q");  // pointers that are no multiple of 16
  f.mask.causal = 1;
  refused("tiles of different lengths without a counter");
  f.batch = 1 << 30;
  f.queries.max_seqlen = 1 << 12;
  refused("more tiles than can be counted");
  printf("refusals: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tea::primitives

int main(int count, char** arguments) {
  using namespace tea::primitives;
  const int step = count > 1 ? std::max(1, atoi(arguments[1])) : 1;
  constexpr int kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256},
                              {8, 8},   {72, 40}, {80, 96},   {64, 128},  {160, 160}, {248, 200}};
  const std::string word = count > 2 ? arguments[2] : "";
  std::vector<tea::Apart> groups;  // at once: most of the time is the host's
  const auto start_group = [&](const std::string& name, auto&& work) {
    if (name.find(word) != name.npos) groups.push_back(tea::start_apart(name, kSeconds, work));
  };
  start_group("refusals", check_refusals);
  start_group("large", [=] { return check_large(step); });
  const auto start = [&](const char* what, int (*check)(int, int, int), const int(&d)[2]) {
    const std::string name = what + std::to_string(d[0]) + ", " + std::to_string(d[1]);
    start_group(name, [=, dim = d[0], dim_v = d[1]] { return check(dim, dim_v, step); });
  };
  for (const auto& d : kDims) start("dim ", check_dims, d);
  for (int i = 0; i < 6; ++i) {  // one of each row of the table
    start("ragged ", check_ragged, kDims[i]);
    start("reruns ", check_reruns, kDims[i]);
    start("digests ", check_digests, kDims[i]);
    start("chains ", check_chains, kDims[i]);
    for (int rule = 0; rule < 4; ++rule) {
      const int dim = kDims[i][0], dim_v = kDims[i][1];
      start_group("lengths " + std::to_string(dim) + ", " + std::to_string(dim_v),
                  [=] { return check_lengths(dim, dim_v, rule, step); });
    }
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
