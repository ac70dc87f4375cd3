// The command line.
#pragma once
#include <string>

namespace gpt {

struct Options {
  int steps = 0;
  int seconds = 200;  // of training, at most
  std::string out;    // the loss curve
  bool help = false;
};

std::string usage(const Options& defaults);

// Throws std::invalid_argument that names the argument, the value seen and the value needed.
Options parse(int argc, char** argv, const Options& defaults);

}  // namespace gpt
