// The threads that run the items of a call: the library's own threads, a fixed set that runs the
// items of one call at a time, or on the caller's.
#pragma once
#include <cstdint>
#include <functional>

#include "te_attention.h"

namespace tea::cpu {

struct Threads {
  tea_parallel_for run = nullptr;  // NULL: the library's own
  void* context = nullptr;
  int64_t most = 0;  // of the library's own, the caller included; 0: as OMP_NUM_THREADS says
};

// Runs body(0) ... body(count - 1), each once, on the calling thread and the pool's; returns when
// all are done. An exception in a body is rethrown here after the others have finished. A call from
// inside a body, while another call has the threads, or in a forked child runs its items on the
// calling thread. Throws Error(TEA_FAILED) if the caller's threads leave items out, repeat them or
// invent them; no such item runs.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body,
                  const Threads& threads = {});

// How many threads may take part, the caller included: TE_ATTENTION_THREADS, else the cores of the
// process.
int thread_count();
// How many do at most in a call with that bound: all if TE_ATTENTION_THREADS is set.
int thread_count(int64_t most);

}  // namespace tea::cpu
