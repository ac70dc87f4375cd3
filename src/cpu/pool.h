// The library's own threads: a fixed set that runs the items of one call at a time.
#pragma once
#include <cstdint>
#include <functional>

namespace tea::cpu {

// Runs body(0) ... body(count - 1), each once, on the calling thread and the pool's; returns when
// all are done. An exception in a body is rethrown here after the others have finished. A call from
// inside a body, while another call has the threads, or in a forked child runs its items on the
// calling thread.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// How many threads take part, the caller included: TE_ATTENTION_THREADS, else the cores of the
// process.
int thread_count();

}  // namespace tea::cpu
