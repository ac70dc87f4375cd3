// The staging buffers of the backward pass (epilogue.cuh): every order in which the warps of the
// consumers, the store warps and TMA can proceed. A wait names only the parity of a phase, so that
// it is right only if the phase before that one is known to have ended. Here each barrier counts
// its phases, and a wait that returns too early is found. This is a model of which warp waits for
// which, not the kernel's code.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "hopper/backward/config.h"
#include "hopper/backward/orders.h"

namespace tea::hopper::backward {
namespace {

constexpr int kConsumers = 2, kWarps = 2, kStoreWarps = 2;  // two of a consumer's warps are enough
constexpr int kAgents = kConsumers * kWarps + 2 * kStoreWarps;  // TMA reads for each store warp
constexpr int store_warp_of(int pair) { return kConsumers * kWarps + pair % kStoreWarps; }
constexpr int tma_of(int pair) { return store_warp_of(pair) + kStoreWarps; }

// A wait, or a barrier, that is left out: the model must then find a fault.
enum class Mistake { kNone, kDoesNotMeet, kReleasesAtOnce };

// kArriveDs and kWaitDs: a consumer's own dS, and that of the other one. kRead: TMA has read a pair
// of units, though perhaps not added it; kWaitRead: a store warp waits for that.
enum class Action {
  kMeet,
  kArriveDs,
  kWaitDs,
  kAcquire,
  kPublish,
  kWaitFull,
  kWaitRead,
  kRelease,
  kRead,
};
struct Step {
  Action action;
  int unit;  // the number of a unit among all that the CTA stages; of kMeet and of reads a pair's,
             // of dS a step's
};
using Program = std::vector<Step>;
using Positions = backward::Positions<kAgents>;

class Model {
 public:
  // Two tiles of so many steps, one pair of units each; behind the first one pairs of dV and dK.
  Model(const TileConfig& tile, int steps, int gradients, Mistake mistake = Mistake::kNone)
      : stages_(tile.dq_stages) {
    int pair = 0, before = 0;  // pairs, and steps, of the tile before
    for (const int behind : {gradients, 0}) {
      if (tile.ping_pong)
        add_ping_pong_steps(pair, before, steps);
      else
        for (int i = 0; i < steps; ++i)
          for (int agent = 0; agent < kConsumers * kWarps; ++agent) {
            programs_[agent].push_back({Action::kMeet, pair + i});
            stage(agent, 2 * (pair + i) + agent / kWarps);
          }
      for (int i = pair + steps; i < pair + steps + behind; ++i)
        for (int agent = 0; agent < kConsumers * kWarps; ++agent) {
          if (mistake != Mistake::kDoesNotMeet) programs_[agent].push_back({Action::kMeet, i});
          stage(agent, 2 * i + ((agent / kWarps) ^ (tile.ping_pong ? 1 : 0)));
        }
      pair += steps + behind, before += steps;
    }
    for (int i = 0; i < pair; ++i) {
      Program& program = programs_[store_warp_of(i)];
      for (const int unit : {2 * i, 2 * i + 1}) program.push_back({Action::kWaitFull, unit});
      if (mistake != Mistake::kReleasesAtOnce) program.push_back({Action::kWaitRead, i});
      for (const int unit : {2 * i, 2 * i + 1}) program.push_back({Action::kRelease, unit});
      programs_[tma_of(i)].push_back({Action::kRead, i});
    }
  }

  // The first fault of any order; empty if there is none.
  std::string explore() const {
    return explore_orders(
        programs_, [this](auto... x) { return returns(x...); },
        [this](auto... x) { return find_fault(x...); });
  }

 private:
  void stage(int agent, int unit) {
    programs_[agent].push_back({Action::kAcquire, unit});
    programs_[agent].push_back({Action::kPublish, unit});
  }
  // Consumer 0 is ahead, and stages its unit of a step, the second one of the pair, a step late.
  void add_ping_pong_steps(int pair, int step, int steps) {
    for (int agent = 0; agent < kConsumers * kWarps; ++agent) {
      const bool ahead = agent / kWarps == 0;
      Program& program = programs_[agent];
      for (int i = 0; i < steps; ++i) {
        const bool waits = !ahead || i > 0;
        if (waits) program.push_back({Action::kWaitDs, step + i - ahead});
        program.push_back({Action::kArriveDs, step + i});
        pair_of_step_[step + i] = pair + i;
        if (waits) stage(agent, 2 * (pair + i - ahead) + ahead);
      }
      if (!ahead) continue;
      program.push_back({Action::kWaitDs, step + steps - 1});
      stage(agent, 2 * (pair + steps - 1) + 1);
    }
  }
  // Where an agent's program has a step.
  int find(int agent, Action action, int unit) const {
    const Program& program = programs_[agent];
    int i = 0;
    while (program[i].action != action || program[i].unit != unit) ++i;
    return i;
  }

  bool is_read(int pair, const Positions& at) const {
    return at[tma_of(pair)] > find(tma_of(pair), Action::kRead, pair);
  }
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

  // Whether a step of an agent does not wait (any more).
  bool returns(int agent, const Step& step, const Positions& at) const {
    const int round = step.unit / stages_;
    if (step.action == Action::kAcquire) return empty(step.unit, at) % 2 != (round + 1) % 2;
    if (step.action == Action::kWaitFull) return full(step.unit, at) % 2 != round % 2;
    if (step.action == Action::kWaitRead) return is_read(step.unit, at);
    if (step.action == Action::kRead)
      return at[agent - kStoreWarps] >
             find(agent - kStoreWarps, Action::kWaitFull, 2 * step.unit + 1);
    if (step.action != Action::kMeet && step.action != Action::kWaitDs) return true;
    for (int other = 0; other < kConsumers * kWarps; ++other) {
      const bool arrives = step.action == Action::kWaitDs && other / kWarps != agent / kWarps;
      const int to = find(other, arrives ? Action::kArriveDs : step.action, step.unit);
      if (at[other] < to + arrives) return false;
    }
    return true;
  }
  std::string find_fault(int agent, const Step& step, const Positions& at) const {
    const int round = step.unit / stages_;
    const std::string unit = " unit " + std::to_string(step.unit);
    if (step.action == Action::kAcquire && empty(step.unit, at) < round)
      return "a buffer is acquired before its release:" + unit;
    if (step.action == Action::kAcquire && round > 0 && !is_read((step.unit - stages_) / 2, at))
      return "a buffer is overwritten before TMA has read it:" + unit;
    if (step.action == Action::kWaitFull && full(step.unit, at) <= round)
      return "a buffer is read before it is full:" + unit;
    if (step.action == Action::kPublish && full(step.unit, at) != round)
      return "two units share a phase:" + unit;
    if (step.action == Action::kArriveDs) return find_fault_of_ds(step.unit, agent, at);
    return "";
  }

  // A consumer has written dS of a step where that of two steps before was.
  std::string find_fault_of_ds(int step, int agent, const Positions& at) const {
    for (int other = 0; other < kConsumers * kWarps; ++other) {
      const bool ahead = other / kWarps == 0;
      if (step > 1 &&
          at[other] <= find(other, Action::kPublish, 2 * pair_of_step_.at(step - 2) + ahead))
        return "dS is overwritten before dQ was computed: step " + std::to_string(step);
      // A named barrier would count the arrivals of two steps as those of one.
      if (step > 0 && ahead != (agent / kWarps == 0) &&
          at[other] <= find(other, Action::kWaitDs, step - 1))
        return "dS is published before that of the step before was awaited: step " +
               std::to_string(step);
    }
    return "";
  }

  const int stages_;
  std::map<int, int> pair_of_step_;  // with ping-pong
  std::array<Program, kAgents> programs_;
};

TEST(Staging, NoOrderOfWarpsReusesABufferTooEarly) {
  for (const TileConfig& tile : kTiles) {
    const int gradients = 2 * units_per_row(tile.dim);  // pairs of units of dV and dK
    EXPECT_EQ(Model(tile, 3, gradients).explore(), "") << tile.dim;
    // Without a barrier between them, the second consumer overtook a store warp by a whole round.
    EXPECT_NE(Model(tile, 3, gradients, Mistake::kDoesNotMeet).explore(), "") << tile.dim;
    EXPECT_NE(Model(tile, 3, gradients, Mistake::kReleasesAtOnce).explore(), "") << tile.dim;
  }
}
TEST(Staging, NoOrderOfWarpsFailsInTilesOfOneStep) {
  for (const TileConfig& tile : kTiles)
    for (const int gradients : {0, 2})
      EXPECT_EQ(Model(tile, 1, gradients).explore(), "") << tile.dim << ' ' << gradients;
}

}  // namespace
}  // namespace tea::hopper::backward
