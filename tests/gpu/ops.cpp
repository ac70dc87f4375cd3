// The neighbours of attention on a GPU: the same results as on the host, draw by draw.
#include <gtest/gtest.h>

#include "ops_cases.h"

namespace tea::kit {
namespace {

TEST(Ops, AsOnTheHost) {
  for (const OpCase& c : kOpCases)
    for (uint64_t seed = 1; seed <= 200; ++seed)
      if (const std::string found = host_and_gpu(c, seed); !found.empty()) {
        ADD_FAILURE() << found;
        break;
      }
}

}  // namespace
}  // namespace tea::kit
