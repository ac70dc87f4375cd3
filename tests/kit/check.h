// One case on one engine against the oracle: every output, twice under different poison.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kit/case.h"
#include "kit/inputs.h"
#include "kit/oracle.h"

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
  bool ok() const { return failures.empty(); }
  std::string text() const;
};

// What the engine is known to round. The reference computes in double and keeps P and dS.
oracle::Precision precision_of(std::string_view engine, const Problem& problem);

// The engines that run on the host, by name. Each accepts every valid problem, so that a test runs
// every case on every one of them.
std::vector<std::string> host_engines();

// Called after each direction, before anything is compared: what a faulty engine might do, so that
// the kit's own tests can show that it is noticed.
using Tamper = std::function<void(Inputs& inputs, Written direction, Poison poison)>;

// Runs forward, and backward if the problem is for training, on the host. An empty name: the
// engine that the library would choose. Never throws for what the engine does. Thread-safe.
Report check(const Case& c, std::string_view engine, const Tamper& tamper = {});

}  // namespace tea::kit
