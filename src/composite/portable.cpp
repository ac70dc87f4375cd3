#include "composite/portable.h"

#include <algorithm>

#if defined(TE_ATTENTION_CUDNN)
#include "composite/either.h"
#include "cudnn/engine.h"

namespace tea::composite {
namespace {

// An engine of its own, so that attempt() also refuses the fields that cuDNN does not know.
constexpr Engine kCudnnFp8{"cudnn", cudnn::known_fields, cudnn::plan_fp8};

}  // namespace

Attempt plan_portable_cudnn(const Problem& problem, const Device& device) {
  Attempt with_cudnn = kCudnnFp8.attempt(problem, device);
  if (std::holds_alternative<Refusal>(with_cudnn)) return with_cudnn;
  // Both passes of a run have the same origin, so they run on the same engine.
  return either(problem, device, std::move(with_cudnn), "runs that cuDNN does not support are",
                portable::kPortable, [](const Problem& p, const Run& run, Direction) {
                  return cudnn::takes_origin(p, run);
                });
}

uint64_t portable_cudnn_workspace(const Problem& problem, const Geometry& size,
                                  Direction direction) {
  return std::max(portable::workspace(problem, size, direction),
                  cudnn::fp8_workspace(problem, size, direction));
}

}  // namespace tea::composite
#endif
