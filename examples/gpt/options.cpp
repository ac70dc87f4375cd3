// The command line.
#include "options.h"

#include <charconv>
#include <stdexcept>

namespace gpt {
namespace {

int positive(const std::string& name, const std::string& value) {
  int number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error == std::errc() && stop == end && number > 0) return number;
  throw std::invalid_argument(name + " is '" + value + "'; needed: a whole number above 0");
}

}  // namespace

std::string usage(const Options& defaults) {
  return "Trains a byte-level GPT with attention from TE Attention, writes text with it and "
         "checks\n"
         "its attention against a float64 oracle. The exit code is 0 if all checks pass.\n\n"
         "  --steps N       number of training steps (" +
         std::to_string(defaults.steps) +
         ")\n"
         "  --seconds N     training time limit (" +
         std::to_string(defaults.seconds) +
         ")\n"
         "  --out FILE.svg  file of the loss curve (" +
         defaults.out +
         ")\n"
         "  --help          print this text\n";
}

Options parse(int argc, char** argv, const Options& defaults) {
  Options options = defaults;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") {
      options.help = true;
      continue;
    }
    if (name != "--steps" && name != "--seconds" && name != "--out") {
      throw std::invalid_argument("unknown argument '" + name +
                                  "'; needed: --steps, --seconds, --out or --help");
    }
    if (++i == argc) throw std::invalid_argument(name + " has no value; needed: one after it");
    if (name == "--steps") options.steps = positive(name, argv[i]);
    if (name == "--seconds") options.seconds = positive(name, argv[i]);
    if (name == "--out") options.out = argv[i];
  }
  return options;
}

}  // namespace gpt
