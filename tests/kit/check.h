// One case on one engine against the oracle: every output, twice under different poison.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/tensors.h"
#include "kit/bounds.h"
#include "kit/case.h"
#include "kit/mirror.h"

namespace tea::kit {

// How close one output tensor came: its worst error as a multiple of the oracle's bound (right up
// to 2), and where.
struct Closeness {
  std::string tensor;
  double ratio = 0;
  int64_t elements = 0;
};

struct Report {
  std::string line;    // the case, ready to be run again
  std::string engine;  // that ran it
  std::vector<Closeness> tensors;
  std::vector<std::string> failures;  // a line each: tensor, element, got, want, bound
  int device = kHost;
  bool refused = false;  // no plan, or sizes and origins of the run refused; the only failure
  bool lost = false;     // the GPU does not answer any more: nothing else can run in this process
  bool ok() const { return failures.empty(); }
  std::string text() const;
};

// The known rounding of an engine. The reference computes in double and keeps P and dS.
oracle::Precision precision_of(std::string_view engine, const Problem& problem);

// Whether an engine multiplies the contents of padding, gaps and unused pages by zero, so that they
// must be finite (docs/kernels/cudnn.md). For other engines they are NaN.
bool needs_finite_padding(std::string_view engine);

// Whether an engine's forward pass has the same bits each time although the problem does not ask
// for it (docs/kernels/cudnn.md).
bool repeats_forward(std::string_view engine, const Problem& problem);

// The mask of an engine's own dropout on a GPU, [batch][head][row][column]: true where O is not
// zero when all scores are alike and V is the identity, for dim_v keys after the other. Throws
// Error.
std::vector<char> kept_by(const Case& c, std::string_view engine, int device,
                          const std::function<void(Inputs&)>& change = {});

// Bytes for one execution: what tea_workspace_bound() says, or more if the engine that runs it
// needs more because it runs only where it is named. Throws Error.
uint64_t workspace_for(const Problem& problem, const tea_run& run, int device,
                       std::string_view engine, Direction direction);

// Whether the library runs a valid problem on every GPU: not in double precision, and not where the
// gradient of O is in another type than 16-bit inputs.
bool runs_on_gpus(const Problem& problem);

// The engines that run on the host, by name. Each accepts every valid problem, so that a test runs
// every case on every one of them.
std::vector<std::string> host_engines();
// Those that run on a device. On a GPU the first choice of the library accepts whatever
// runs_on_gpus(); others may refuse.
std::vector<std::string> engines_of(int device);

// Called after each direction, before anything is compared: what a faulty engine might do, so that
// the kit's own tests can show that it is noticed.
using Tamper = std::function<void(Inputs& inputs, Written direction, Poison poison)>;

using Solve = oracle::Result (*)(const oracle::Case&, const oracle::Precision&);

// Where a case runs, and what happens there.
struct Stage {
  int device = kHost;
  Around around = Around::kRedzones;  // on a GPU
  Tamper tamper = {};
  Solve solve = oracle::solve;
  // Plan as if the GPU had no more shared memory than this, as smaller ones do; 0: what it has. The
  // engine must be named.
  int shared_bytes = 0;
};

// Compares every output of both directions; what is off joins the report, whose engine ran it.
// `kept`: by an engine whose dropout is its own, of kept_by().
void compare(const Inputs& inputs, Report& report, Solve solve = oracle::solve,
             const std::vector<char>& kept = {});

// Runs forward, and backward if the problem is for training. An empty name: the engine that the
// library would choose. Never throws for what the engine does. Thread-safe.
Report check(const Case& c, std::string_view engine, const Stage& stage = {});
// The same for several engines, one after the other on the same inputs.
std::vector<Report> check(const Case& c, const std::vector<std::string>& engines,
                          const Stage& stage = {});

}  // namespace tea::kit
