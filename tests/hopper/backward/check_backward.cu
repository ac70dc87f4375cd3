// Tests of src/hopper/backward/ on the device: head dimensions, types, masks, odd lengths, layouts,
// groups of heads, LSE gradients and sinks, against double precision on sampled rows and keys; then
// every length from 1 to 1100. check_bits.cu, check_launches.cu and check_sizes.cu compare bits.
// One process per group. Every option is tested through the engine, by tests/gpu and te-attn fuzz.
// Built with -DTEA_PERTURB=1, every role sleeps for a random time at each point where another may
// overtake it; the digests of the two builds must be equal.
//
// usage: check_backward [STEP [WORD]]    runs every STEP-th case, of the groups named with WORD
#include "hopper/apart.h"
#include "hopper/backward/config.h"
#include "hopper/backward/exact.h"

namespace tea::primitives {
namespace {

constexpr unsigned kSeconds = 150;  // a kernel that hangs is ended, and its case named

// The largest error of sampled rows and keys, in bounds; more than 2 fails.
class Comparison {
 public:
  Comparison(const BackwardCase& c, const BackwardData& x) : c_(c), x_(x), exact_(c, x) {}

  double worst(int samples) {
    for (int sample = 0; sample < samples; ++sample) {
      const int b = random_int(0, c_.h.batch - 1);
      if (c_.n.rows_q > 0) row(b, random_int(0, c_.h.heads - 1), pick(sample, c_.n.rows_q));
      if (c_.n.rows_kv > 0) key(b, random_int(0, c_.h.heads_kv - 1), pick(sample, c_.n.rows_kv));
    }
    if (c_.sink)
      for (int h = 0; h < c_.h.heads; ++h) note(x_.dsink[h], exact_.dsink(h));
    return worst_;
  }

 private:
  static int pick(int sample, int count) {
    return sample == 0 ? 0 : sample == 1 ? count - 1 : random_int(0, count - 1);
  }
  void note(double got, const Bounded& want) {
    if (got == want.value) return;
    const double error = std::fabs(got - want.value) / want.error;
    worst_ = std::isnan(error) ? INFINITY : std::max(worst_, error);
  }
  void compare(const Tensor& t, int b, int h, int r, const BoundedVector& want) {
    for (int d = 0; d < t.dim; ++d) note(c_.decode(t.memory[t.index(b, h, r, d)]), want[d]);
  }
  void row(int b, int h, int r) { compare(x_.dq, b, h, r, exact_.dq(b, h, r)); }
  void key(int b, int h, int r) {
    BoundedVector dk, dv;
    exact_.dkv(b, h, r, &dk, &dv);
    compare(x_.dk, b, h, r, dk);
    compare(x_.dv, b, h, r, dv);
  }

  const BackwardCase& c_;
  const BackwardData& x_;
  const Exact exact_;
  double worst_ = 0;
};

void check(const BackwardCase& c, int samples) {
  BackwardData x(c);
  note_work(c.name());
  const Outcome outcome = run(c, x);
  const bool ran = outcome.code == 0;
  expect(ran, c.name() + (ran ? "runs" : std::string(outcome.what) + ": " + outcome.text));
  if (!ran) return;
  const double error = Comparison(c, x).worst(samples);
  expect(error <= 2, c.name() + "error in bounds: " + std::to_string(error));
  expect(wrote_all_of(x.dq) && wrote_all_of(x.dk) && wrote_all_of(x.dv),
         c.name() + "writes the gradients, all of them and nothing else");
}

const Lengths kLengths[] = {{1, 1},     {1, 300},   {300, 1},   {200, 500},
                            {500, 200}, {129, 129}, {384, 384}, {700, 911},
                            {192, 640}, {65, 0},    {0, 65},    {1100, 1024}};
// Groups of 2, 4 and 8 heads are divided into parts where there are few key blocks. The preprocess
// kernel takes chunks of 8, 16 or 32 heads.
const Heads kHeads[] = {{2, 3, 3}, {1, 6, 2}, {1, 8, 1}, {3, 5, 1},  {1, 12, 4},
                        {2, 8, 4}, {1, 8, 2}, {2, 2, 2}, {1, 17, 17}};

int check_dims(int dim, int dim_v, int step) {
  int number = 0;
  for (const Type type : {Type::kBf16, Type::kFp16})
    for (const MaskRule& rule : kRules)
      for (const Lengths& n : kLengths) {
        const Heads& h = kHeads[number % std::size(kHeads)];
        const Layout layout = static_cast<Layout>(number / 3 % 4);
        const bool dlse = number / 2 % 2, sink = number / 5 % 2;
        if (number++ % step == 0) check({{dim, dim_v, type, rule, n, h, layout}, dlse, sink}, 8);
      }
  printf("dim %d, %d: %d passed, %d failed\n", dim, dim_v, passed, failed);
  return failed != 0;
}

// More tiles than SMs, groups that are not divided, and lengths of thousands.
int check_large(int step) {
  int number = 0;
  for (const int dim : {64, 96, 128})
    for (const MaskRule& rule : {kRules[2], kRules[0]})
      for (const Lengths& n : {Lengths{512, 512}, Lengths{2048, 2048}, Lengths{3000, 4100}})
        if (number++ % step == 0)
          check({{dim, dim, Type::kBf16, rule, n, {4, 16, 4}, Layout::kBshd}, true, false}, 6);
  printf("large: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

// Every number of rows and of keys from 1 to 1100, under one mask; even ones with groups in parts.
int check_lengths(int dim, int dim_v, int rule, int step) {
  constexpr int kMost = 1100;
  for (int n = 1; n <= kMost; n += step) {
    const int keys = rule % 2 ? n : n * 7 % kMost + 1;
    const Type type = n / 2 % 2 ? Type::kBf16 : Type::kFp16;
    check({{dim, dim_v, type, kRules[rule], {n, keys}, {1, 2, n % 2 + 1}, Layout::kBshd}}, 5);
  }
  printf("lengths, mask %d, dim %d, %d: %d passed, %d failed\n", rule, dim, dim_v, passed, failed);
  return failed != 0;
}

int check_refusals() {
  AttentionArguments f = {};
  f.batch = f.heads_q = f.heads_kv = 1;
  f.queries.max_seqlen = f.keys.max_seqlen = 1;
  f.dim_qk = f.dim_v = 136;
  f.scale = 1;
  const auto limited = [&](const char* why) {
    const std::string got = hopper::backward::limit(f);
    expect(got == why, std::string(why) + ", got " + got);
  };
  limited("dim_qk is 136 and dim_v 136; needs at most 128");
  f.dim_qk = f.dim_v = 64;
  limited("");
  f.softcap = 1;
  limited("the problem has a bias, ALiBi or a soft cap; needs none");
  f.softcap = 0, f.has_dropout = 1;
  limited("the problem has dropout; needs none");
  f.has_dropout = 0;
  f.batch = 1 << 30;
  f.keys.max_seqlen = 1 << 12;
  const Outcome o = hopper::backward::run(f, nullptr);
  const std::string what = "more tiles than can be counted";
  expect(o.code == cudaErrorInvalidValue && o.what == what,
         what + ", got " + (o.what ? o.what : "none"));
  printf("refusals: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tea::primitives

int main(int count, char** arguments) {
  using namespace tea::primitives;
  const int step = count > 1 ? std::max(1, atoi(arguments[1])) : 1;
  const std::string word = count > 2 ? arguments[2] : "";
  constexpr int kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {8, 8},
                              {72, 40}, {80, 96}, {64, 128},  {40, 8}};
  std::vector<tea::Apart> groups;  // at once: most of the time is the host's
  const auto start_group = [&](const std::string& name, auto&& work) {
    if (name.find(word) != name.npos) groups.push_back(tea::start_apart(name, kSeconds, work));
  };
  const auto start = [&](const char* what, int (*check)(int, int, int), const int(&d)[2]) {
    const std::string name = what + std::to_string(d[0]) + ", " + std::to_string(d[1]);
    start_group(name, [=, dim = d[0], dim_v = d[1]] { return check(dim, dim_v, step); });
  };
  start_group("refusals", check_refusals);
  start_group("large", [=] { return check_large(step); });
  start_group("sizes", check_sizes);
  start_group("priorities", check_priorities);
  for (const auto& d : kDims) start("dim ", check_dims, d);
  for (int i = 0; i < tea::hopper::backward::kNumTiles; ++i) {  // one of each configuration
    start("ragged ", check_ragged, kDims[i]);
    start("padded ", check_padded, kDims[i]);
    start("parts ", check_parts, kDims[i]);
    start("ctas ", check_ctas, kDims[i]);
    start("reruns ", check_reruns, kDims[i]);
    start("chains ", check_chains, kDims[i]);
    start("digests ", check_digests, kDims[i]);
    for (int rule = 0; rule < 4; ++rule) {
      const int dim = kDims[i][0], dim_v = kDims[i][1];
      start_group("lengths " + std::to_string(dim) + ", " + std::to_string(dim_v),
                  [=] { return check_lengths(dim, dim_v, rule, step); });
    }
  }
  int bad = groups.empty();
  for (const tea::Apart& group : groups) {
    const int status = tea::wait_apart(group);
    bad += status != 0;
    if (status != 0) printf("FAILED group %s: %d\n", group.name.c_str(), status);
  }
  printf("%d of %zu groups failed\n", bad, groups.size());
  return bad != 0;
}
