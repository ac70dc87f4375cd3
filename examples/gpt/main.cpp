// The demo: trains a byte-level GPT with attention from TE Attention, generates text through a
// paged KV cache, and checks the loss, the cached logits and the attention of one layer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "check.h"
#include "format.h"
#include "generate.h"
#include "options.h"
#include "plot.h"
#include "progress.h"
#include "train.h"

namespace gpt {
namespace {

// The held-out loss must be below the unigram entropy by this fraction. A model that knows only the
// preceding byte reaches 0.22, so the check fails unless attention uses more of the context.
constexpr double kBelowUnigram = 0.25;
constexpr double kCacheTolerance = 1e-4;  // of logits, relative to the largest
constexpr int kEvaluations = 20;          // points of the held-out curve
constexpr int64_t kSmoothing = 25;        // steps to either side
constexpr const char* kPrompt = "Book III\n\nSing, Heavenly Muse, ";

void heading(const char* name) {
  std::printf("\n%s%s%s\n", on_terminal() ? "\x1b[1m" : "", name, on_terminal() ? "\x1b[0m" : "");
}

struct History {
  std::vector<std::pair<double, double>> training, held_out;  // (step, loss)
};

// Moving average: each loss becomes the mean of up to kSmoothing losses on either side and itself.
std::vector<std::pair<double, double>> smooth(const std::vector<std::pair<double, double>>& raw) {
  auto out = raw;
  const int64_t n = std::ssize(raw);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t reach = std::min({i, n - 1 - i, kSmoothing});
    double sum = 0;
    for (int64_t j = i - reach; j <= i + reach; ++j) sum += raw[j].second;
    out[i].second = sum / static_cast<double>(2 * reach + 1);
  }
  return out;
}

// Prints words in lines that fit a terminal.
void print_wrapped(const std::string& text) {
  constexpr size_t kColumns = 96;
  std::istringstream words(text);
  std::string line = " ";
  for (std::string word; words >> word; line += " " + word) {
    if (line.size() + 1 + word.size() <= kColumns) continue;
    std::printf("%s\n", line.c_str());
    line = " ";
  }
  std::printf("%s\n", line.c_str());
}

void show_problem(const CausalAttention& attention) {
  heading("Attention of a layer");
  print_wrapped(attention.text());
  std::printf("  runs on '%s', the first engine that accepts this problem:\n", attention.engine());
  std::istringstream lines(attention.explain());
  for (std::string line; std::getline(lines, line);) std::printf("    %s\n", line.c_str());
}

History train(Trainer& trainer, const Text& text, const Config& c, int seconds) {
  History history;
  Progress progress;
  Stopwatch watch;
  bool last = false;
  for (int step = 1; !last; ++step) {
    const double loss = trainer.step();
    if (!std::isfinite(loss))
      throw std::runtime_error(format("the loss of step %d is %f", step, loss));
    history.training.emplace_back(step, loss);
    const double share = std::max(double(step) / c.steps, watch.seconds() / seconds);
    last = share >= 1;
    if (last || step % std::max(1, c.steps / kEvaluations) == 0) {
      history.held_out.emplace_back(step, trainer.evaluate(text.held_out()));
    }
    const double rate = double(step) * c.batch * c.context / watch.seconds();
    progress.update(std::min(share, 1.0),
                    format("step %d/%d  loss %.3f  %.0f tok/s", step, c.steps, loss, rate));
  }
  if (std::ssize(history.training) < c.steps) {
    std::printf("  the limit of %d seconds (--seconds) ended training before the last step\n",
                seconds);
  }
  return history;
}

void plot(const History& history, double entropy, const std::string& engine,
          const std::string& path) {
  write_svg({.title = "A byte-level GPT learns Paradise Lost",
             .subtitle = "attention by TE Attention, engine '" + engine + "'",
             .x_name = "step",
             .y_name = "loss, nats per byte",
             .curves = {{"", "#b9cdf5", 1, history.training},
                        {"training", "#2f6bdc", 2.2, smooth(history.training)},
                        {"held out", "#d9622b", 2.2, history.held_out, true}},
             .levels = {{format("unigram entropy %.3f", entropy), entropy}}},
            path);
  std::printf("  loss curve: %s\n", path.c_str());
}

// Returns whether the logits agree with those of a forward pass without the cache.
bool write_text(const Model& model) {
  heading("Text, through the paged KV cache");
  std::printf("  | ");
  const auto show = [](uint8_t byte) {
    if (byte == '\n')
      std::printf("\n  | ");
    else
      std::putchar(byte >= ' ' && byte < 127 ? byte : '?');
    std::fflush(stdout);
  };
  for (const char* c = kPrompt; *c; ++c) show(static_cast<uint8_t>(*c));
  const Generation g = generate(model, kPrompt, show);
  const size_t prompt = std::string(kPrompt).size();
  std::printf(
      "\n\n  prefill %zu tokens, %.0f tokens/s; decode %d tokens, %.0f tokens/s; %lld pages\n",
      prompt, double(prompt) / g.prefill_seconds, model.config.generated,
      model.config.generated / g.decode_seconds, static_cast<long long>(g.pages));
  const double difference = difference_without_cache(model, g);
  std::printf("  logits with and without the cache differ by %.1e of the largest; allowed: %.0e\n",
              difference, kCacheTolerance);
  return difference <= kCacheTolerance;
}

// Returns whether every element of the last layer's tensors is within the oracle's bounds.
bool check_attention(Trainer& trainer, const Config& config) {
  heading("One trained layer against the float64 oracle");
  trainer.gradient();
  const int layer = config.layers - 1;
  bool right = true;
  for (const Compared& each : compare_with_oracle(config, trainer.activations().blocks[layer])) {
    std::printf("  %-4s worst error %.1e, %5.3f of its bound (right up to 2)%s\n",
                each.name.c_str(), each.error, each.share, each.right ? "" : "  WRONG");
    right = right && each.right;
  }
  return right;
}

int run(const Options& options) {
  Config config;
  config.steps = options.steps;
  if (!std::ofstream(options.out, std::ios::app)) {  // fail before the training, not after it
    throw std::runtime_error("cannot write " + options.out);
  }
  const Text text(GPT_TEXT);
  Model model(config);
  Trainer trainer(model, text);
  std::printf("TE Attention %s: a byte-level GPT with %lld weights learns Paradise Lost\n",
              tea_version(), static_cast<long long>(model.layout.size));
  show_problem(trainer.attention());

  heading("Training");
  const double entropy = unigram_entropy(text.all());
  const History history = train(trainer, text, config, options.seconds);
  plot(history, entropy, trainer.attention().engine(), options.out);
  const bool cache_right = write_text(model);
  const bool attention_right = check_attention(trainer, config);

  heading("Result");
  const double loss = trainer.evaluate(text.held_out());
  const bool learned = loss <= (1 - kBelowUnigram) * entropy;
  if (!learned)
    std::printf("  WRONG: the loss must be %.0f %% below the entropy\n", 100 * kBelowUnigram);
  if (!cache_right) std::printf("  WRONG: the paged KV cache changes the logits\n");
  if (!attention_right) std::printf("  WRONG: attention is outside the oracle's bounds\n");
  std::printf("  held-out loss %.3f nats per byte, unigram entropy %.3f: %.0f %% %s\n", loss,
              entropy, 100 * std::abs(1 - loss / entropy), loss < entropy ? "lower" : "higher");
  return learned && cache_right && attention_right ? 0 : 1;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  gpt::Options options{.steps = gpt::Config().steps, .out = GPT_OUT};
  try {
    options = gpt::parse(argc, argv, options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  if (options.help) {
    std::printf("%s", gpt::usage(options).c_str());
    return 0;
  }
  try {
    return gpt::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "\nerror: %s\n", error.what());
    return 1;
  }
}
