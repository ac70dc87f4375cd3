// The parts of examples/gpt: the gradient of every layer against finite differences, the optimizer,
// the text, the KV cache, and a short training.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>

#include "gpt/check.h"
#include "gpt/generate.h"
#include "gpt/options.h"
#include "gpt/plot.h"
#include "gpt/progress.h"
#include "gpt/train.h"

namespace gpt {
namespace {

using Floats = std::vector<float>;

Floats draw(int64_t size, Random& random) {
  Floats out(size);
  for (float& x : out) x = 2 * random.uniform() - 1;
  return out;
}

double dot(In a, In b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += double(a[i]) * b[i];
  return sum;
}

// The slope of f along `direction`, by a central difference.
double slope(const std::function<double()>& f, Out x, In direction, float h = 1.0f / 128) {
  const Floats at(x.begin(), x.end());
  const auto value = [&](float step) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = at[i] + step * direction[i];
    return f();
  };
  const double difference = value(h) - value(-h);
  std::copy(at.begin(), at.end(), x.begin());
  return difference / (2 * h);
}

// Expects `gradient` to be the gradient of f at x: slopes along random directions must agree.
void expect_gradient(const std::function<double()>& f, Out x, In gradient, double tolerance) {
  Random random(7);
  for (int i = 0; i < 5; ++i) {
    const Floats direction = draw(x.size(), random);
    const double size = std::sqrt(dot(gradient, gradient) * dot(direction, direction));
    ASSERT_GT(size, 0);
    EXPECT_NEAR(slope(f, x, direction), dot(gradient, direction), tolerance * size);
  }
}

Config tiny() {
  Config c;
  c.model_dim = 24;
  c.heads_q = 2, c.heads_kv = 1, c.head_dim = 8;
  c.hidden_dim = 40;
  c.context = 12;
  c.batch = 4, c.shards = 2;
  c.page_size = 4;
  c.generated = 30;
  return c;
}

std::string data_file() { return TE_ATTENTION_SOURCE_DIR "/examples/gpt/data/paradise_lost.txt"; }

TEST(Matmul, MatchesTheDefinitionAtSizesWithRemainders) {
  Random random(1);
  for (const Linear& s : {Linear{5, 7, 19}, Linear{4, 16, 16}, Linear{1, 3, 33}, Linear{9, 1, 1}}) {
    const Floats x = draw(s.rows * s.in, random), w = draw(s.in * s.out, random);
    Floats y(s.rows * s.out, 9);
    matmul(s, x, w, y);
    for (int64_t i = 0; i < s.rows; ++i) {
      for (int64_t o = 0; o < s.out; ++o) {
        double sum = 0;
        for (int64_t k = 0; k < s.in; ++k) sum += double(x[i * s.in + k]) * w[k * s.out + o];
        EXPECT_NEAR(y[i * s.out + o], sum, 1e-5);
      }
    }
  }
}

TEST(Matmul, Gradients) {
  Random random(2);
  const Linear s = {6, 10, 21};
  Floats x = draw(60, random), w = draw(210, random), y(126), dx(60), dw(210);
  const Floats dy = draw(126, random);
  const auto f = [&] { return matmul(s, x, w, y), dot(y, dy); };
  matmul_backward_input(s, dy, w, dx);
  matmul_backward_weight(s, x, dy, dw);
  expect_gradient(f, x, dx, 1e-4);
  expect_gradient(f, w, dw, 1e-4);
  const Floats once = dw;
  matmul_backward_weight(s, x, dy, dw);
  EXPECT_FLOAT_EQ(dw[17], 2 * once[17]);  // +=
}

TEST(RmsNorm, Gradients) {
  Random random(3);
  Floats x = draw(5 * 12, random), gain = draw(12, random), y(60), dx(60), dgain(12);
  const Floats dy = draw(60, random);
  const auto f = [&] { return rms_norm(x, gain, y), dot(y, dy); };
  rms_norm_backward(x, gain, dy, dx, dgain);
  expect_gradient(f, x, dx, 1e-3);
  expect_gradient(f, gain, dgain, 1e-4);
}

TEST(RmsNorm, RowsHaveUnitMeanSquare) {
  Random random(4);
  const Floats x = draw(2 * 64, random), gain(64, 1.0f);
  Floats y(128);
  rms_norm(x, gain, y);
  EXPECT_NEAR(dot(In(y).last(64), In(y).last(64)) / 64, 1, 1e-3);
}

TEST(Activate, Gradient) {
  Random random(5);
  Floats x = draw(50, random), y(50), dx(50);
  const Floats dy = draw(50, random);
  const auto f = [&] { return activate(x, y), dot(y, dy); };
  activate_backward(x, dy, dx);
  expect_gradient(f, x, dx, 2e-3);
}

TEST(Embed, Gradient) {
  Random random(6);
  const std::vector<uint8_t> bytes = {3, 0, 3, 7};
  Floats table = draw(8 * 5, random), y(20), dtable(40);
  const Floats dy = draw(20, random);
  const auto f = [&] { return embed(bytes, table, y), dot(y, dy); };
  embed_backward(bytes, dy, dtable);
  expect_gradient(f, table, dtable, 1e-4);
}

TEST(CrossEntropy, Gradient) {
  Random random(7);
  const std::vector<uint8_t> targets = {2, 0, 10};
  Floats logits = draw(33, random), gradient = logits;
  const auto f = [&] {
    Floats copy = logits;
    return cross_entropy(targets, 1, copy);
  };
  cross_entropy(targets, 1, gradient);
  expect_gradient(f, logits, gradient, 1e-3);
}

TEST(CrossEntropy, OfNoKnowledgeIsTheLogarithmOfTheClasses) {
  const std::vector<uint8_t> targets = {0, 4};
  Floats logits(10, 3.0f);
  EXPECT_NEAR(cross_entropy(targets, 0.5f, logits), 2 * std::log(5), 1e-6);
  EXPECT_FLOAT_EQ(logits[0], 0.5f * (0.2f - 1));
}

// The whole model with the library's attention: the gradient of every weight.
TEST(Model, Gradients) {
  const Config c = tiny();
  Model model(c);
  Random random(8);
  for (const Layout::Block& b : model.layout.blocks)  // gains other than 1
    for (float& w : b.norm1.in(Out(model.weights))) w += 0.3f * random.uniform();
  const CausalAttention attention(c, 2, c.context);
  Activations a(c, 2 * c.context);
  Batch batch(2, c.context);
  batch.draw(Text(data_file()).training(), random);
  const auto loss = [&] {
    model.forward(
        batch.bytes,
        [&](int layer, In qkv, Out o) { attention.forward(qkv, o, a.blocks[layer].lse); }, a);
    return cross_entropy(batch.targets, 1, a.logits);
  };
  loss();
  Floats gradient(model.layout.size);
  model.backward(batch.bytes, attention, a, gradient);
  const auto expect = [&](const char* name, const Piece& piece) {
    SCOPED_TRACE(name);
    expect_gradient(loss, piece.in(Out(model.weights)), piece.in(Out(gradient)), 3e-3);
  };
  const Layout& l = model.layout;
  expect("embedding", l.embedding);
  for (const Layout::Block& b : l.blocks) {
    expect("norm1", b.norm1);
    expect("qkv", b.qkv);
    expect("out", b.out);
    expect("norm2", b.norm2);
    expect("up", b.up);
    expect("down", b.down);
  }
  expect("norm", l.norm);
  expect("head", l.head);
}

TEST(Optimizer, FindsTheMinimumOfAQuadratic) {
  Config c;
  c.steps = 400, c.rate = 0.1f, c.last_rate = 1e-3f, c.decay = 0;
  Optimizer optimizer(c, 2, 2);
  Floats x = {3, -4};
  for (int i = 0; i < c.steps; ++i) {
    const Floats gradient = {2 * (x[0] - 1), 20 * (x[1] - 2)};
    optimizer.update(gradient, x);
  }
  EXPECT_NEAR(x[0], 1, 1e-2);
  EXPECT_NEAR(x[1], 2, 1e-2);
}

TEST(Optimizer, DecaysMatricesOnly) {
  Config c;
  c.warm_up = 0, c.rate = 0.1f, c.decay = 0.5f;
  Optimizer optimizer(c, 2, 1);
  Floats x = {1, 1};
  optimizer.update(Floats{0, 0}, x);
  EXPECT_FLOAT_EQ(x[0], 1 - 0.1f * 0.5f);
  EXPECT_FLOAT_EQ(x[1], 1);
}

TEST(Optimizer, RateRisesThenFalls) {
  Config c;
  c.steps = 100, c.warm_up = 0.1f, c.rate = 1, c.last_rate = 0.1f;
  const Optimizer optimizer(c, 1, 1);
  EXPECT_GT(optimizer.rate(0), 0);
  EXPECT_LT(optimizer.rate(0), optimizer.rate(5));
  EXPECT_NEAR(optimizer.rate(9), 1, 1e-6);
  EXPECT_NEAR(optimizer.rate(99), 0.1, 1e-6);
}

TEST(Text, UnigramEntropy) {
  const std::string even = "abab", one = "aaaa";
  const auto bytes = [](const std::string& s) {
    return Bytes(reinterpret_cast<const uint8_t*>(s.data()), s.size());
  };
  EXPECT_NEAR(unigram_entropy(bytes(even)), std::log(2), 1e-12);
  EXPECT_EQ(unigram_entropy(bytes(one)), 0);
}

TEST(Text, HoldsOutWhatIsNotTrainedOn) {
  const Text text(data_file());
  EXPECT_LE(text.all().size(), 100000u);
  EXPECT_EQ(text.training().data() + text.training().size(), text.held_out().data());
  EXPECT_EQ(text.training().size() + text.held_out().size(), text.all().size());
  EXPECT_GT(text.held_out().size(), 8000u);
  EXPECT_THROW(Text("no such file"), std::runtime_error);
}

TEST(Text, TargetsAreTheNextBytes) {
  const Text text(data_file());
  Random random(9);
  Batch batch(3, 10);
  batch.draw(text.training(), random);
  for (int64_t i = 0; i < 30; ++i) {
    if (i % 10 == 9) continue;  // the last byte of a window
    EXPECT_EQ(batch.targets[i], batch.bytes[i + 1]);
  }
}

// The text spans several pages and is longer than the window, and query heads share KV heads (GQA).
TEST(Generate, CacheGivesTheLogitsOfAPassWithoutIt) {
  const Model model(tiny());
  Generation g = generate(model, "A prompt of many pages", [](uint8_t) {});
  ASSERT_EQ(g.bytes.size(), 22u + 30u);
  EXPECT_EQ(g.pages, 13);
  EXPECT_LT(difference_without_cache(model, g), 1e-5);
  g.logits[5] += 1;
  EXPECT_GT(difference_without_cache(model, g), 1e-2);
  g.logits[5] = NAN;
  EXPECT_GT(difference_without_cache(model, g), 1e-2);
}

TEST(Train, LossFallsAndIsTheSameOnEveryRun) {
  Config c = tiny();
  c.steps = 60, c.rate = 0.02f;
  const Text text(data_file());
  const auto train = [&] {
    Model model(c);
    Trainer trainer(model, text);
    double last = 0;
    for (int i = 0; i < c.steps; ++i) last = trainer.step();
    return std::pair(last, trainer.evaluate(text.held_out()));
  };
  const auto [batch, held_out] = train();
  EXPECT_LT(held_out, unigram_entropy(text.all()));
  EXPECT_EQ(train(), std::pair(batch, held_out));
}

TEST(Check, AgreesWithTheOracleAndDetectsAnError) {
  const Config c = tiny();
  Model model(c);
  const Text text(data_file());
  Trainer trainer(model, text);
  trainer.gradient();
  Activations::Block block = trainer.activations().blocks[1];
  for (const Compared& each : compare_with_oracle(c, block)) {
    EXPECT_TRUE(each.right) << each.name;
    EXPECT_GT(each.error, 0) << each.name;
  }
  block.dqkv.back() *= 1.001f;  // in dV
  const std::vector<Compared> wrong = compare_with_oracle(c, block);
  EXPECT_EQ(wrong.back().name, "dV");
  EXPECT_FALSE(wrong.back().right);
  EXPECT_TRUE(wrong.front().right);
}

Options parsed(std::vector<std::string> words) {
  words.insert(words.begin(), "gpt");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return parse(static_cast<int>(argv.size()), argv.data(), {5, 6, "loss.svg", false});
}

TEST(Options, AcceptsKnownArgumentsAndRejectsOthers) {
  EXPECT_EQ(parsed({}).seconds, 6);
  EXPECT_EQ(parsed({}).out, "loss.svg");
  const Options o = parsed({"--seconds", "9", "--out", "a.svg"});
  EXPECT_EQ(o.steps, 5);
  EXPECT_EQ(o.seconds, 9);
  EXPECT_EQ(o.out, "a.svg");
  EXPECT_TRUE(parsed({"--help"}).help);
  EXPECT_THROW(parsed({"--stpes", "9"}), std::invalid_argument);
  EXPECT_THROW(parsed({"--steps"}), std::invalid_argument);
  EXPECT_THROW(parsed({"--steps", "0"}), std::invalid_argument);
  EXPECT_THROW(parsed({"--steps", "9x"}), std::invalid_argument);
}

TEST(Plot, WritesCurvesAndEscapesText) {
  const std::string path = testing::TempDir() + "gpt_plot.svg";
  Plot plot;
  plot.title = "a < b & c";
  plot.curves = {{"one", "#123456", 2, {{0, 1}, {10, 3}}, true}};
  write_svg(plot, path);
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(text.find("a &lt; b &amp; c"), std::string::npos);
  EXPECT_NE(text.find("stroke=\"#123456\""), std::string::npos);
  EXPECT_EQ(text.find("nan"), std::string::npos);
  EXPECT_THROW(write_svg({}, testing::TempDir() + "no/such/folder.svg"), std::runtime_error);
}

TEST(Progress, IsPlainLinesWithoutATerminal) {
  testing::internal::CaptureStdout();
  Progress progress;
  for (int i = 1; i <= 1000; ++i) progress.update(i / 1000.0, "note");
  const std::string text = testing::internal::GetCapturedStdout();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10);
  EXPECT_EQ(text.find_first_of("\r\x1b"), std::string::npos);
  EXPECT_NE(text.find("100 %  note"), std::string::npos);
}

}  // namespace
}  // namespace gpt
