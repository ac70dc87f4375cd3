// The plans that this thread used last: the C API's own cache checks a problem before it looks,
// which takes longer than a small attention does.
#pragma once
#include <string>

#include "te_attention.h"

namespace tea::torch_ops {

struct Planned {
  const tea_plan* plan;
  uint64_t workspace_forward, workspace_backward;  // bytes
};

// `run` is NULL where the problem is dense; else its sizes are read, for the workspace. The plan
// stays alive until this thread plans another problem. Throws with the text of tea_error().
Planned planned(const tea_problem& problem, const tea_run* run, int device,
                const std::string& engine);

}  // namespace tea::torch_ops
