// Every order in which agents can proceed through their programs, for models of which warp waits
// for which.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace tea::hopper::backward {

// How many events of its program each agent has behind it.
template <size_t kAgents>
using Positions = std::array<uint8_t, kAgents>;

// The first fault of any order; empty if there is none. returns(agent, event, positions): whether
// the event does not wait (any more). find_fault(agent, event, positions): what is wrong if it
// happens then, or an empty text.
template <class Event, size_t kAgents, class Returns, class FindFault>
std::string explore_orders(const std::array<std::vector<Event>, kAgents>& programs,
                           Returns&& returns, FindFault&& find_fault) {
  std::set<Positions<kAgents>> seen = {Positions<kAgents>{}};
  std::vector<Positions<kAgents>> open = {Positions<kAgents>{}};
  while (!open.empty()) {
    const Positions<kAgents> at = open.back();
    open.pop_back();
    bool moved = false, ended = true;
    for (int agent = 0; agent < static_cast<int>(kAgents); ++agent) {
      if (at[agent] == programs[agent].size()) continue;
      ended = false;
      const Event& event = programs[agent][at[agent]];
      if (!returns(agent, event, at)) continue;
      if (const std::string wrong = find_fault(agent, event, at); !wrong.empty()) return wrong;
      Positions<kAgents> next = at;
      ++next[agent];
      moved = true;
      if (seen.insert(next).second) open.push_back(next);
    }
    if (!moved && !ended) return "deadlock";
  }
  return "";
}

}  // namespace tea::hopper::backward
