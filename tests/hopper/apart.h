// Work on the device in a process of its own: a fault there ends all work of the process.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace tea {

// The exit status of `work`, or 128 + its signal. The caller must not have touched the device.
template <class Work>
int run_apart(Work&& work) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) exit(work());
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace tea
