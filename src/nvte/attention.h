// Forward and backward of a gathered call: the query of sizes, or a plan and its run.
#pragma once
#include "nvte/call.h"

namespace tea::nvte {

// A call without memory in its workspace sets the workspace's shape and returns. A forward whose
// pack is empty describes the pack as well. After a run the workspace's shape is [1].
void forward(const ForwardCall& call, const Work& work, NVTE_Fused_Attn_Backend backend);
void backward(const BackwardCall& call, const Work& work);

}  // namespace tea::nvte
