// FP8 on cuDNN where that was measured to be faster (cudnn/faster.h), and on the portable engine
// for runs that cuDNN does not support. The choice depends on the plan and the run alone.
#pragma once
#include "portable/engine.h"

namespace tea::composite {

// Parts of a library that is built with cuDNN's headers.
Attempt plan_portable_cudnn(const Problem& problem, const Device& device);
uint64_t portable_cudnn_workspace(const Problem& problem, const Geometry& size,
                                  Direction direction);
#if defined(TE_ATTENTION_CUDNN)
inline constexpr Engine kPortableCudnn{"portable-cudnn", portable::known_fields,
                                       plan_portable_cudnn, portable_cudnn_workspace};
#endif

}  // namespace tea::composite
