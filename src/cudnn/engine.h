// The engine that runs cuDNN's attention, forward and backward, for 16-bit types and FP8. Building
// a graph for given sizes takes time, and we do not control its kernels. It therefore runs only if
// it is selected explicitly, and in plans of hopper-cudnn and portable-cudnn (src/composite).
#pragma once
#include "core/engine.h"
#include "cudnn/library.h"

namespace tea::cudnn {

Attempt plan(const Problem& problem, const Device& device);
Attempt plan_with(const Library& library, const Problem& problem, const Device& device);
uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction);

// An Executable that does backward only, where faster.h has a row for it. Its graph is built: runs
// can be captured, the plan's first one too.
Attempt plan_backward(const Problem& problem, const Device& device);
// Of backward; 0 where faster.h has no row.
uint64_t backward_workspace(const Problem& problem, const Geometry& size);

// An Executable for FP8, where faster.h has a row for it, with s_amax by the contract: 1. Its
// graphs are built.
Attempt plan_fp8(const Problem& problem, const Device& device);
uint64_t fp8_workspace(const Problem& problem, const Geometry& size, Direction direction);

// cuDNN counts everything from the shard's own corner: whether an origin moves no mask and no
// dropout. (ALiBi is there only with a causal mask.)
bool takes_origin(const Problem& problem, const Run& run);

// The fields of a Problem that the engine supports.
std::span<const Known> known_fields();

inline constexpr Engine kCudnn{"cudnn", known_fields, plan, workspace, true};

}  // namespace tea::cudnn
