// The staging buffers of the backward pass (epilogue.cuh): every order in which the warps of the
// consumers and the store warps can proceed. A wait names only the parity of a phase, so that it is
// right only if the phase before that one is known to have ended. Here each barrier counts its
// phases, and a wait that returns too early is found. This is a model of which warp waits for
// which, not the kernel's code.
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <vector>

#include "hopper/backward/config.h"

namespace tea::hopper::backward {
namespace {

constexpr int kConsumers = 2, kWarps = 2, kStoreWarps = 2;  // two of a consumer's warps are enough
constexpr int kAgents = kConsumers * kWarps + kStoreWarps;

enum class Action { kMeet, kAcquire, kPublish, kWaitFull, kRelease };
struct Step {
  Action action;
  int unit;  // the number of a unit among all that the CTA stages; of kMeet: of a pair
};
using Program = std::vector<Step>;
using Positions = std::array<uint8_t, kAgents>;

class Model {
 public:
  // The steps of a tile, one pair of units each, then the pairs of dV and dK, then further steps.
  Model(int stages, int steps, int gradients, bool meet_between_gradients) : stages_(stages) {
    const int pairs = steps + gradients + 2;
    for (int i = 0; i < pairs; ++i) {
      const bool is_step = i < steps || i >= steps + gradients;
      for (int agent = 0; agent < kConsumers * kWarps; ++agent) {
        const int unit = 2 * i + agent / kWarps;
        if (is_step || meet_between_gradients) programs_[agent].push_back({Action::kMeet, i});
        programs_[agent].push_back({Action::kAcquire, unit});
        programs_[agent].push_back({Action::kPublish, unit});
      }
      Program& store = programs_[kConsumers * kWarps + i % kStoreWarps];
      for (const Action action : {Action::kWaitFull, Action::kRelease})
        for (const int unit : {2 * i, 2 * i + 1}) store.push_back({action, unit});
    }
  }

  // The first fault of any order; empty if there is none.
  std::string explore() const {
    std::set<Positions> seen = {Positions{}};
    std::vector<Positions> open = {Positions{}};
    while (!open.empty()) {
      const Positions at = open.back();
      open.pop_back();
      bool moved = false, ended = true;
      for (int agent = 0; agent < kAgents; ++agent) {
        if (at[agent] == programs_[agent].size()) continue;
        ended = false;
        const Step& step = programs_[agent][at[agent]];
        if (!returns(step, at)) continue;
        if (const std::string wrong = find_fault(step, at); !wrong.empty()) return wrong;
        Positions next = at;
        ++next[agent];
        moved = true;
        if (seen.insert(next).second) open.push_back(next);
      }
      if (!moved && !ended) return "deadlock";
    }
    return "";
  }

 private:
  // How often agents have done something with a unit's buffer.
  int count(Action action, int unit, const Positions& at) const {
    int n = 0;
    for (int agent = 0; agent < kAgents; ++agent)
      for (int i = 0; i < at[agent]; ++i) {
        const Step& step = programs_[agent][i];
        n += step.action == action && step.unit % stages_ == unit % stages_;
      }
    return n;
  }
  // The phases of a barrier that have ended.
  int full(int unit, const Positions& at) const {
    return count(Action::kPublish, unit, at) / kWarps;
  }
  int empty(int unit, const Positions& at) const { return count(Action::kRelease, unit, at); }

  // Whether a step does not wait (any more).
  bool returns(const Step& step, const Positions& at) const {
    const int round = step.unit / stages_;
    if (step.action == Action::kAcquire) return empty(step.unit, at) % 2 != (round + 1) % 2;
    if (step.action == Action::kWaitFull) return full(step.unit, at) % 2 != round % 2;
    if (step.action != Action::kMeet) return true;
    for (int agent = 0; agent < kConsumers * kWarps; ++agent) {
      const Program& program = programs_[agent];
      int i = 0;
      while (program[i].action != Action::kMeet || program[i].unit != step.unit) ++i;
      if (at[agent] < i) return false;
    }
    return true;
  }
  std::string find_fault(const Step& step, const Positions& at) const {
    const int round = step.unit / stages_;
    const std::string unit = " unit " + std::to_string(step.unit);
    if (step.action == Action::kAcquire && empty(step.unit, at) < round)
      return "a buffer is acquired before its release:" + unit;
    if (step.action == Action::kWaitFull && full(step.unit, at) <= round)
      return "a buffer is read before it is full:" + unit;
    if (step.action == Action::kPublish && full(step.unit, at) != round)
      return "two units share a phase:" + unit;
    return "";
  }

  const int stages_;
  std::array<Program, kAgents> programs_;
};

TEST(Staging, NoOrderOfWarpsReusesABufferTooEarly) {
  for (const TileConfig& tile : kTiles) {
    const int gradients = 2 * units_per_row(tile.dim);  // pairs of units of dV and dK
    EXPECT_EQ(Model(tile.dq_stages, 3, gradients, true).explore(), "") << tile.dim;
    // Without a barrier between them, the second consumer overtook a store warp by a whole round.
    EXPECT_NE(Model(tile.dq_stages, 3, gradients, false).explore(), "") << tile.dim;
  }
}

}  // namespace
}  // namespace tea::hopper::backward
