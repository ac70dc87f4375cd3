// The commands of te-attn. Each prints to standard output and returns the exit code: 0, or 1 for a
// problem that no engine runs or a result that is wrong. Mistakes of the user throw Error (code 2).
#pragma once
#include <cstdint>
#include <string>

namespace tea::tool {

struct Options {
  std::string argument;  // the problem, the case or the count
  std::string engine;    // empty: the one that the library chooses
  bool json = false;
  int device = -1;
  uint64_t first = 1;  // seed of the first random case
};

int info(const Options& options);
int explain(const Options& options);
int check(const Options& options);
int time(const Options& options);
int fuzz(const Options& options);

}  // namespace tea::tool
