// The memory in which dV and dK of a tile wait for TMA (epilogue.cuh): every order in which the
// load warp, the consumers and TMA can proceed. A stage of Q and dO holds staged slabs behind the
// last step of a tile, and its release is withheld until TMA has read them. This is a model of
// which agent waits for which, not the kernel's code: Q and dO are one operand, a consumer is one
// agent.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "hopper/backward/orders.h"

namespace tea::hopper::backward {
namespace {

// A wait, or a barrier, that is left out: the model must then find a fault.
enum class Mistake { kNone, kReleasesAtOnce, kDoesNotMeet, kWritesDsAtOnce };

// The numbers are those of steps, counted over all tiles, or of tiles.
enum class Action {
  kAcquire,     // load warp: the stage of a step is empty
  kLoad,        // and is filled
  kWaitFull,    // consumer: the operands of a step are there
  kWaitOther,   // the other consumer's dS of a step is there, with ping-pong
  kMeet,        // both consumers have written dS of a step
  kWriteDs,     // of a step
  kComputeDq,   // of a step: reads dS of both
  kUse,         // the last product with the operands of a step has completed
  kRelease,     // the stage of a step
  kMeetAtEnd,   // both consumers have finished with the steps of a tile
  kStage,       // dV and dK of a tile
  kWaitStores,  // TMA has read what was staged for a tile
  kRead,        // TMA: the consumer's slabs of a tile
};
struct Event {
  Action action;
  int number;
  bool operator==(const Event&) const = default;
};
using Program = std::vector<Event>;

constexpr int kStages = 2, kLoadWarp = 2, kAgents = 5;  // consumers 0 and 1, load warp, TMA of each
constexpr int tma_of(int consumer) { return 3 + consumer; }
using Positions = backward::Positions<kAgents>;

class Model {
 public:
  Model(const std::vector<int>& steps_of_tiles, bool ping_pong, Mistake mistake)
      : ping_pong_(ping_pong) {
    int first = 0;
    for (const int steps : steps_of_tiles) {
      last_.push_back(first + steps - 1);
      for (int m = first; m < first + steps; ++m) {
        programs_[kLoadWarp].push_back({Action::kAcquire, m});
        programs_[kLoadWarp].push_back({Action::kLoad, m});
      }
      for (const int c : {0, 1}) add_tile(c, first, steps, mistake);
      first += steps;
    }
  }

  // The first fault of any order; empty if there is none.
  std::string explore() const {
    return explore_orders(
        programs_, [this](auto... x) { return returns(x...); },
        [this](int agent, const Event& e, const Positions& at) {
          const std::string wrong = find_fault(agent, e, at);
          return wrong.empty() ? wrong : wrong + ": " + std::to_string(e.number);
        });
  }

 private:
  void add_tile(int c, int first, int steps, Mistake mistake) {
    Program& program = programs_[c];
    const auto add = [&](Action action, int number) { program.push_back({action, number}); };
    const int tile = static_cast<int>(last_.size()) - 1;
    const bool ahead = ping_pong_ && c == 0;
    const auto finish_stores = [&] {
      if (tile == 0) return;
      if (mistake != Mistake::kWritesDsAtOnce) add(Action::kWaitStores, tile - 1);
      if (mistake != Mistake::kReleasesAtOnce) add(Action::kRelease, first - 1);
    };
    if (ping_pong_) finish_stores();
    for (int m = first; m < first + steps; ++m) {
      const bool has_dq = !(ahead && m == first), last = m + 1 == first + steps;
      add(Action::kWaitFull, m);
      if (ping_pong_ && has_dq) add(Action::kWaitOther, ahead ? m - 1 : m);
      if (!ping_pong_ && m == first) finish_stores();
      add(Action::kWriteDs, m);
      if (!ping_pong_) add(Action::kMeet, m);
      if (has_dq) add(Action::kComputeDq, ahead ? m - 1 : m);
      add(Action::kUse, m);
      if (!last || mistake == Mistake::kReleasesAtOnce) add(Action::kRelease, m);
    }
    if (ahead) {
      add(Action::kWaitOther, first + steps - 1);
      add(Action::kComputeDq, first + steps - 1);
    }
    if (mistake != Mistake::kDoesNotMeet) add(Action::kMeetAtEnd, tile);
    add(Action::kStage, tile);
    programs_[tma_of(c)].push_back({Action::kRead, tile});
  }

  // Whether an agent is at an event, or behind it. True if it has no such event.
  bool reached(int agent, const Event& event, const Positions& at, bool behind) const {
    const Program& program = programs_[agent];
    for (size_t i = 0; i < program.size(); ++i)
      if (program[i] == event) return behind ? at[agent] > i : at[agent] >= i;
    return true;
  }
  bool done(int agent, Action action, int number, const Positions& at) const {
    return reached(agent, {action, number}, at, true);
  }
  bool both_done(Action action, int number, const Positions& at) const {
    return done(0, action, number, at) && done(1, action, number, at);
  }
  // The phases of the barriers of a step's stage that have ended.
  int count(int agent, Action action, int step, const Positions& at) const {
    int n = 0;
    for (int i = 0; i < at[agent]; ++i) {
      const Event& e = programs_[agent][i];
      n += e.action == action && e.number % kStages == step % kStages;
    }
    return n;
  }
  int full(int step, const Positions& at) const {
    return count(kLoadWarp, Action::kLoad, step, at);
  }
  int empty(int step, const Positions& at) const {
    const int arrivals =
        count(0, Action::kRelease, step, at) + count(1, Action::kRelease, step, at);
    return arrivals / 2;
  }
  // The tile whose last step is `step`, or -1.
  int tile_that_ends_with(int step) const {
    for (size_t t = 0; t < last_.size(); ++t)
      if (last_[t] == step) return static_cast<int>(t);
    return -1;
  }

  // Whether an event does not wait (any more).
  bool returns(int agent, const Event& e, const Positions& at) const {
    const int round = e.number / kStages;
    switch (e.action) {
      case Action::kAcquire:
        return empty(e.number, at) % 2 != (round + 1) % 2;
      case Action::kWaitFull:
        return full(e.number, at) % 2 != round % 2;
      case Action::kWaitOther:
        return done(1 - agent, Action::kWriteDs, e.number, at);
      case Action::kMeet:
      case Action::kMeetAtEnd:
        return reached(1 - agent, e, at, false);
      case Action::kWaitStores:
        return done(tma_of(agent), Action::kRead, e.number, at);
      case Action::kRead:
        return done(agent - tma_of(0), Action::kStage, e.number, at);
      default:
        return true;
    }
  }
  std::string find_fault(int agent, const Event& e, const Positions& at) const {
    const int n = e.number, round = n / kStages;
    const auto read = [&](int consumer, int tile) {
      return tile < 0 || done(tma_of(consumer), Action::kRead, tile, at);
    };
    switch (e.action) {
      case Action::kAcquire:
        return empty(n, at) < round ? "a stage is acquired before its release" : "";
      case Action::kWaitFull:
        return full(n, at) <= round ? "a stage is read before it is full" : "";
      case Action::kLoad: {
        if (n < kStages) return "";
        const int before = n - kStages, tile = tile_that_ends_with(before);
        if (!both_done(Action::kUse, before, at)) return "operands are overwritten by a load";
        return read(0, tile) && read(1, tile) ? "" : "staged slabs are overwritten by a load";
      }
      case Action::kWriteDs: {
        if (n >= 2 && !both_done(Action::kComputeDq, n - 2, at))
          return "dS is overwritten before dQ was computed";
        const auto tile = std::count_if(last_.begin(), last_.end(), [&](int l) { return l < n; });
        return read(agent, static_cast<int>(tile) - 1) ? "" : "staged slabs are overwritten by dS";
      }
      case Action::kComputeDq:
        return both_done(Action::kWriteDs, n, at) ? "" : "dS is read before it was written";
      case Action::kStage:
        return both_done(Action::kUse, last_[n], at) && both_done(Action::kComputeDq, last_[n], at)
                   ? ""
                   : "operands are overwritten by slabs";
      default:
        return "";
    }
  }

  const bool ping_pong_;
  std::vector<int> last_;  // steps of the tiles
  std::array<Program, kAgents> programs_;
};

const std::vector<std::vector<int>> kTileLists = {{1, 1, 1, 1}, {1, 2, 1}, {2, 1, 2},
                                                  {3, 2},       {2, 3, 1}, {4, 1, 3}};

TEST(OutputSlabs, NoOrderReusesTheirMemoryTooEarly) {
  for (const bool ping_pong : {false, true})
    for (const std::vector<int>& steps : kTileLists)
      EXPECT_EQ(Model(steps, ping_pong, Mistake::kNone).explore(), "") << ping_pong;
}
TEST(OutputSlabs, EachMistakeIsFound) {
  for (const bool ping_pong : {false, true})
    for (const Mistake mistake :
         {Mistake::kReleasesAtOnce, Mistake::kDoesNotMeet, Mistake::kWritesDsAtOnce})
      EXPECT_NE(Model({2, 3, 1}, ping_pong, mistake).explore(), "")
          << ping_pong << ' ' << static_cast<int>(mistake);
}

}  // namespace
}  // namespace tea::hopper::backward
