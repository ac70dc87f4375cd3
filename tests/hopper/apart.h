// Work on the device in a process of its own: a fault there ends all work of the process.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace tea {

struct Apart {
  std::string name;
  pid_t child;
};

inline char work_at_hand[256] = "nothing noted";
inline unsigned time_limit = 0;  // seconds between two waits for the device; 0: none

inline void restart_limit() { alarm(time_limit); }

// The name in the message of the time limit.
inline void note_work(const std::string& what) {
  snprintf(work_at_hand, sizeof work_at_hand, "%s", what.c_str());
}

inline void say_late(int) {
  constexpr char kLate[] = "FAILED, out of time in: ";
  (void)!write(1, kLate, sizeof kLate - 1);
  (void)!write(1, work_at_hand, strlen(work_at_hand));
  (void)!write(1, "\n", 1);
  _exit(128 + SIGALRM);
}

// Starts `work` in a child that is ended `seconds` after it began or last waited for the device
// successfully (0: never): so long only a kernel that hangs takes, however many groups share the
// device. The caller must not have touched the device.
template <class Work>
Apart start_apart(const std::string& name, unsigned seconds, Work&& work) {
  fflush(stdout);
  const pid_t child = fork();
  if (child != 0) return {name, child};
  setvbuf(stdout, nullptr, _IOLBF, 0);  // what a child said survives its end
  signal(SIGALRM, say_late);
  time_limit = seconds;
  restart_limit();
  exit(work());
}

// The exit status of the work, or 128 + its signal.
inline int wait_apart(const Apart& a) {
  int status = 0;
  if (a.child < 0 || waitpid(a.child, &status, 0) != a.child) return 1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

template <class Work>
int run_apart(Work&& work) {
  return wait_apart(start_apart("", 0, work));
}

}  // namespace tea
