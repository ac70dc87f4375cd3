#include "composite/portable.h"

#include <algorithm>

#if defined(TE_ATTENTION_CUDNN)
#include "cudnn/engine.h"

namespace tea::composite {
namespace {

struct CudnnOrPortable final : Executable {
  Problem problem;
  std::unique_ptr<Executable> cudnn, portable;
  CudnnOrPortable(const Problem& p, std::unique_ptr<Executable> c, std::unique_ptr<Executable> own)
      : problem(p), cudnn(std::move(c)), portable(std::move(own)) {}
  // Both passes of a run have the same origin, so they run on the same engine.
  const Executable& of(const Run& run) const {
    return cudnn::takes_origin(problem, run) ? *cudnn : *portable;
  }
  void forward(const Run& run) const override { of(run).forward(run); }
  void backward(const Run& run) const override { of(run).backward(run); }
};

// An engine of its own, so that attempt() also refuses the fields that cuDNN does not know.
constexpr Engine kCudnnFp8{"cudnn", cudnn::known_fields, cudnn::plan_fp8};

}  // namespace

Attempt plan_portable_cudnn(const Problem& problem, const Device& device) {
  Attempt with = kCudnnFp8.attempt(problem, device);
  if (std::holds_alternative<Refusal>(with)) return with;
  Attempt own = portable::kPortable.attempt(problem, device);
  if (std::holds_alternative<Refusal>(own)) return own;
  return std::make_unique<CudnnOrPortable>(problem, std::move(std::get<1>(with)),
                                           std::move(std::get<1>(own)));
}

uint64_t portable_cudnn_workspace(const Problem& problem, const Geometry& size,
                                  Direction direction) {
  return std::max(portable::workspace(problem, size, direction),
                  cudnn::fp8_workspace(problem, size, direction));
}

}  // namespace tea::composite
#endif
