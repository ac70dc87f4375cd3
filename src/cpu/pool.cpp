// A parked thread set. Items are handed out by one counter, so that uneven ones balance.
#include "cpu/pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/env.h"
#include "core/error.h"

namespace tea::cpu {
namespace {

thread_local bool inside = false;

struct Job {
  int64_t count;
  const std::function<void(int64_t)>& body;
  std::atomic<int64_t> seats{0};  // threads of the pool that may still join the caller
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  void item(int64_t i) {
    const bool outer = inside;
    inside = true;
    try {
      body(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    inside = outer;
  }

  void work() {
    for (int64_t i = next++; i < count; i = next++) item(i);
  }
};

int cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int wanted_threads() {
  const std::string& text = setting(Setting::kThreads);
  if (text.empty()) return cores();
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  TEA_REQUIRE(error == std::errc() && end == text.data() + text.size() && n >= 1 && n <= 1024,
              "TE_ATTENTION_THREADS", text, "a number from 1 to 1024");
  return n;
}

// The first number of a list such as "4,2"; 0 where there is none, which OpenMP ignores too.
int64_t openmp_threads() {
  const std::string& text = setting(Setting::kOpenMp);
  int64_t n = 0;
  std::from_chars(text.data(), text.data() + text.size(), n);
  return std::max<int64_t>(n, 0);
}

// Waits for what other threads are about to do: within a call jobs follow each other closely, and
// to sleep and to be woken takes longer than the time between them, on a virtual machine above all.
template <class Condition>
void wait_briefly(Condition&& met) {
  constexpr std::chrono::microseconds kBriefly{100};
  const auto end = std::chrono::steady_clock::now() + kBriefly;
  while (!met() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { loop(); });
    } catch (...) {  // the process may start no more: those that run are enough
    }
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  // False if another call has the threads: the caller is better off alone than waiting.
  bool run(Job& job) {
    const std::unique_lock one_at_a_time(run_mutex_, std::try_to_lock);
    if (!one_at_a_time) return false;
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    wait_briefly([&] { return busy_ == 0; });
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // a thread that wakes late finds nothing
    done_.wait(lock, [&] { return busy_ == 0; });
    return true;
  }

 private:
  void loop() {
    uint64_t seen = 0;
    while (true) {
      wait_briefly([&] { return generation_ != seen; });
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || (job_ && generation_ != seen); });
      if (stop_) return;
      seen = generation_;
      Job* job = job_;
      ++busy_;
      lock.unlock();
      if (job->seats-- > 0) job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  std::mutex run_mutex_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  std::atomic<uint64_t> generation_{0};  // changed under the mutex, as is the next
  std::atomic<int> busy_{0};
  bool stop_ = false;
};

// The process's pool. A forked child inherits its memory but not its threads, and perhaps a locked
// mutex: it must neither use nor destroy it.
class Owned {
 public:
  ~Owned() {
    if (mine()) delete pool_;
  }
  bool run(Job& job) { return mine() && pool_->run(job); }

 private:
  bool mine() const { return getpid() == owner_; }
  const pid_t owner_ = getpid();
  Pool* const pool_ = new Pool(thread_count());
};

// A job on the caller's threads, which are not trusted to know how to count.
struct Lent {
  explicit Lent(Job& lent) : job(lent), ran(static_cast<size_t>(lent.count)) {}
  Job& job;
  std::vector<std::atomic<bool>> ran;
  std::atomic<int64_t> done{0}, wrong{0};

  static void item(void* self, int64_t i) {
    Lent& lent = *static_cast<Lent*>(self);
    if (i < 0 || i >= lent.job.count || lent.ran[static_cast<size_t>(i)].exchange(true)) {
      ++lent.wrong;
      return;
    }
    lent.job.item(i);
    ++lent.done;
  }
};

void run_on(const Threads& threads, Job& job) {
  Lent lent(job);
  threads.run(threads.context, job.count, Lent::item, &lent);
  if (lent.done == job.count && lent.wrong == 0) return;
  throw Error(TEA_FAILED, "run.parallel_for ran " + shown(lent.done.load()) + " of " +
                              shown(job.count) + " items, and " + shown(lent.wrong.load()) +
                              " that were not its to run; needs each once");
}

bool run_on_pool(Job& job) {
  static Owned pool;
  return pool.run(job);
}

}  // namespace

int thread_count() {
  static const int n = wanted_threads();
  return n;
}

int thread_count(int64_t most) {
  static const bool is_fixed = !setting(Setting::kThreads).empty();
  static const int64_t usual = openmp_threads();
  const int64_t bound = most ? most : usual;
  if (is_fixed || !bound) return thread_count();
  return static_cast<int>(std::min<int64_t>(bound, thread_count()));
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& body, const Threads& threads) {
  Job job{count, body, thread_count(threads.most) - 1, {}, {}, {}};
  const bool alone = inside || count <= 1;
  if (!alone && threads.run)
    run_on(threads, job);
  else if (alone || job.seats == 0 || !run_on_pool(job))
    job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tea::cpu
