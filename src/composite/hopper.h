// Engines that run forward on the Hopper kernels and backward on another engine. LSE and the bits
// of dropout are the same on every engine, so that any of them can continue from a forward pass.
#pragma once
#include "hopper/engine.h"

namespace tea::composite {

// Backward by the Hopper kernels where they serve the problem, else by the portable engine.
Attempt plan_hopper(const Problem& problem, const Device& device);
uint64_t hopper_workspace(const Problem& problem, const Geometry& size, Direction direction);
inline constexpr Engine kHopper{"hopper", hopper::known_fields, plan_hopper, hopper_workspace};

#if defined(TE_ATTENTION_CUDNN)
// Backward by cuDNN where that was measured to be faster (cudnn/faster.h), and by the portable
// engine for runs that cuDNN does not support. The choice depends on the plan and the run alone,
// never on whether the run is captured in a graph.
Attempt plan_hopper_cudnn(const Problem& problem, const Device& device);
uint64_t hopper_cudnn_workspace(const Problem& problem, const Geometry& size, Direction direction);
inline constexpr Engine kHopperCudnn{"hopper-cudnn", hopper::known_fields, plan_hopper_cudnn,
                                     hopper_cudnn_workspace};
#endif

}  // namespace tea::composite
