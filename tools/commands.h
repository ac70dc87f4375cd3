// The commands of te-attn. Each prints to standard output and returns the exit code: 0, or 1 for a
// problem that no engine runs or a result that is wrong. Mistakes of the user throw Error (code 2).
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace tea::tool {

struct Options {
  std::string argument;  // the problem or the case
  std::string engine;    // empty: the one that the library chooses
  bool json = false;
  std::string draws;  // the option that selects the random cases; empty: of every kind
  int device = -1;
  uint64_t count = 0;              // random cases
  uint64_t seed = 1;               // of the first one
  std::optional<uint64_t> replay;  // the seed of one random case, instead of a case in words
};

int info(const Options& options);
int explain(const Options& options);
int check(const Options& options);
int time(const Options& options);
int fuzz(const Options& options);
int bench(const Options& options);  // becomes the suite: returns only by Error

}  // namespace tea::tool
