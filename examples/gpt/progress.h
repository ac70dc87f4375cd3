// A progress bar with the time left; plain lines where the output is not a terminal.
#pragma once
#include <chrono>
#include <string>

namespace gpt {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

bool on_terminal();  // standard output

class Progress {
 public:
  // `done` in [0, 1] never falls; the last call has 1.
  void update(double done, const std::string& note);

 private:
  Stopwatch watch_;
  double drawn_ = -1;  // seconds
  int lines_ = 0;
};

}  // namespace gpt
