// te-attn: what the library would do with a problem, whether it does it right, and how fast.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "commands.h"
#include "core/error.h"
#include "core/registry.h"

namespace {

using tea::tool::Options;

struct Command {
  std::string_view name;
  const char* argument;  // or NULL; in brackets if an option may stand for it
  const char* meaning;
  std::string_view options;  // those that it takes
  int (*run)(const Options&);
};

constexpr Command kCommands[] = {
    {"info", nullptr, "the version, the engines, the CPU, the settings", "--json", tea::tool::info},
    {"explain", "PROBLEM",
     "which engine would run it, and why the others would not; -: a line each",
     "--engine, --device, --json", tea::tool::explain},
    {"check", "[CASE]", "run it and compare every output with the float64 oracle; -: a line each",
     "--engine, --device, --replay, --parts, --decoding, --prefill, --training, --json",
     tea::tool::check},
    {"time", "CASE", "median time of forward and backward", "--engine, --device, --json",
     tea::tool::time},
    {"fuzz", "[COUNT]", "check so many random cases",
     "--engine, --device, --count, --seed, --parts, --decoding, --prefill, --training, --json",
     tea::tool::fuzz},
    {"bench", "SUITE",
     "time a suite of bench/ and compare it with PyTorch: mha-16k, cudnn, models, fp8, cpu, "
     "front-end",
     "--engine", tea::tool::bench},
};

constexpr const char* kNames = "info, explain, check, time, fuzz or bench";

void print_usage(std::FILE* to) {
  std::fprintf(to, "usage: te-attn COMMAND [ARGUMENT] [OPTIONS]\n\n");
  for (const Command& c : kCommands)
    std::fprintf(to, "  %-8s %-8s %s\n", std::string(c.name).c_str(), c.argument ? c.argument : "",
                 c.meaning);
  std::fprintf(
      to,
      "\n  --engine NAME   run on this engine\n"
      "  --device N      on GPU N (default: the host)\n"
      "  --count N       so many random cases, likewise\n"
      "  --seed SEED     of the first random case; each is one integer (default: 1)\n"
      "  --replay SEED   check the random case of this seed\n"
      "  --parts         random parts of problems: results in fp32, an origin for each sequence\n"
      "  --decoding      random cases of decoding: few queries, many keys, often in pages\n"
      "  --prefill       random cases of prefill over keys and values in pages\n"
      "  --training      random cases of training that the backward kernels of hopper serve\n"
      "  --json          one JSON object per line\n\n"
      "PROBLEM: \"dtype=bf16 batch=2 heads_q=8 heads_kv=2 dim_qk=64 seqlen_q=128 "
      "seqlen_kv=128 causal=1\"\n"
      "CASE: a problem, and after a bar what it runs on: \"... | seed=7 values=outliers\"\n"
      "Exit code: 0; 1 for a wrong result or a problem that no engine runs; 2 for a bad "
      "argument.\n");
}

template <class T>
T number(const std::string& name, const char* text) {
  T x{};
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, x);
  TEA_REQUIRE(error == std::errc() && stop == end, name, "\"" + std::string(text) + "\"",
              "a number");
  return x;
}

const Command& command_of(int argc, char** argv) {
  TEA_REQUIRE(argc > 1, "COMMAND", "missing", kNames);
  for (const Command& c : kCommands)
    if (c.name == argv[1]) return c;
  tea::refuse_argument("COMMAND", "\"" + std::string(argv[1]) + "\"", kNames);
}

bool takes(const Command& command, std::string_view option) {
  for (std::string_view rest = command.options; !rest.empty();) {
    const size_t end = std::min(rest.find(", "), rest.size());
    if (rest.substr(0, end) == option) return true;
    rest.remove_prefix(std::min(end + 2, rest.size()));
  }
  return false;
}

// bench takes several, and knows those of its suites itself.
void check_engine(const Command& command, const std::string& name) {
  if (name.empty() || command.run == tea::tool::bench) return;
  std::string names;
  for (const tea::Engine& engine : tea::engines()) {
    if (engine.name == name) return;
    names += (names.empty() ? "" : ", ") + std::string(engine.name);
  }
  tea::refuse_argument("--engine", "\"" + name + "\"", "one of " + names);
}

Options options_of(const Command& command, int argc, char** argv) {
  Options out;
  bool has_argument = false;
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      TEA_REQUIRE(i + 1 < argc, word, "without a value", "one after it");
      return argv[++i];
    };
    if (word.starts_with("--"))
      TEA_REQUIRE(takes(command, word), "option", "\"" + word + "\"",
                  std::string(command.options) + " with " + std::string(command.name));
    if (word == "--json") {
      out.json = true;
    } else if (word == "--parts" || word == "--decoding" || word == "--prefill" ||
               word == "--training") {
      TEA_REQUIRE(out.draws.empty(), word, "given with " + out.draws, "one of both");
      out.draws = word;
    } else if (word == "--engine") {
      out.engine = value();
    } else if (word == "--device") {
      out.device = number<int>(word, value());
    } else if (word == "--count") {
      out.count = number<uint64_t>(word, value());
    } else if (word == "--seed") {
      out.seed = number<uint64_t>(word, value());
    } else if (word == "--replay") {
      out.replay = number<uint64_t>(word, value());
    } else {
      TEA_REQUIRE(command.argument && !has_argument, "argument", "\"" + word + "\"",
                  command.argument ? "only one (quote it)" : "none for this command");
      out.argument = word;
      has_argument = true;
    }
  }
  check_engine(command, out.engine);
  const bool optional = !command.argument || command.argument[0] == '[';
  TEA_REQUIRE(optional || has_argument, command.argument, "missing", "it after the command");
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0) {
      print_usage(stdout);
      return 0;
    }
  if (argc == 2 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("te-attention %s\n", tea_version());
    return 0;
  }
  try {
    const Command& command = command_of(argc, argv);
    return command.run(options_of(command, argc, argv));
  } catch (const tea::Error& e) {
    std::fprintf(stderr, "te-attn: %s\n", e.what());
    return e.status == TEA_INVALID ? 2 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "te-attn: %s\n", e.what());
    return 1;
  }
}
