// The command line.
#pragma once
#include <string>

namespace gpt {

struct Options {
  int steps = 0;
  int seconds = 60;  // training time limit
  std::string out;   // file of the loss curve
  bool help = false;
};

std::string usage(const Options& defaults);

// Throws std::invalid_argument with the argument, the value seen and the value needed.
Options parse(int argc, char** argv, const Options& defaults);

}  // namespace gpt
