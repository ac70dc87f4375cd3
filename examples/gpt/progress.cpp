// A progress bar with the time left.
#include "progress.h"

#include <unistd.h>

#include <cstdio>

#include "format.h"

namespace gpt {
namespace {

constexpr int kWidth = 18;       // of the bar, in characters
constexpr double kRedraw = 0.1;  // seconds
constexpr int kLines = 10;       // in place of a bar

std::string minutes(double seconds) {
  const int whole = static_cast<int>(seconds + 0.5);
  return format("%d:%02d", whole / 60, whole % 60);
}

}  // namespace

bool on_terminal() { return isatty(STDOUT_FILENO); }

void Progress::update(double done, const std::string& note) {
  const double now = watch_.seconds();
  const std::string time = done < 1 ? minutes(now / done - now) + " left" : "in " + minutes(now);
  if (on_terminal()) {
    if (done < 1 && now - drawn_ < kRedraw) return;
    drawn_ = now;
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < done * kWidth ? "█" : "░";
    std::printf("\r  %s %3.0f %%  %s  %s\x1b[K%s", bar.c_str(), 100 * done, note.c_str(),
                time.c_str(), done < 1 ? "" : "\n");
  } else if (done * kLines >= lines_ + 1) {
    lines_ = static_cast<int>(done * kLines);
    std::printf("  %3.0f %%  %s  %s\n", 100 * done, note.c_str(), time.c_str());
  }
  std::fflush(stdout);
}

}  // namespace gpt
