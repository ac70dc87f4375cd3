// The plans that this thread used last. The C API's own cache validates a problem before the
// lookup, which takes longer than a small attention.
#pragma once
#include <string>

#include "te_attention.h"

namespace tea::torch_ops {

struct Planned {
  const tea_plan* plan;
  uint64_t workspace_forward, workspace_backward;  // bytes
};

// `run` is NULL for a dense problem; otherwise its sizes determine the workspace. The plan stays
// valid until this thread plans another problem. Throws with the text of tea_error().
Planned planned(const tea_problem& problem, const tea_run* run, int device,
                const std::string& engine);

}  // namespace tea::torch_ops
