#include "composite/hopper.h"

#include <algorithm>

#include "composite/either.h"
#include "portable/engine.h"
#if defined(TE_ATTENTION_CUDNN)
#include "cudnn/engine.h"
#endif

namespace tea::composite {
namespace {

// Whether runs of a problem may be served by the portable engine instead: the number of queries
// decides whether the Hopper kernels serve a run. The bits of the portable engine differ.
bool needs_portable(const Problem& p) {
  return hopper::decodes_only(p) && p.q_form == TEA_RAGGED && !p.batch_invariant;
}

}  // namespace

Attempt plan_hopper(const Problem& problem, const Device& device) {
  Attempt own = hopper::plan(problem, device);
  if (std::holds_alternative<Refusal>(own)) return own;
  if (needs_portable(problem))
    return either(
        problem, device, std::move(own), "runs with many queries are", portable::kPortable,
        [](const Problem& p, const Run& run, Direction) { return hopper::serves(p, run); });
  if (!problem.training || hopper::backward_limit(problem).empty()) return own;
  return either(problem, device, std::move(own), "backward is", portable::kPortable,
                [](const Problem&, const Run&, Direction d) { return d == Direction::kForward; });
}

uint64_t hopper_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  const uint64_t own = hopper::workspace(problem, size, direction);
  if (direction == Direction::kForward && !needs_portable(problem)) return own;
  return std::max(own, portable::workspace(problem, size, direction));
}

#if defined(TE_ATTENTION_CUDNN)
namespace {

// An engine for backward alone, so that attempt() also refuses the fields that cuDNN does not know.
constexpr Engine kCudnnBackward{"cudnn", cudnn::known_fields, cudnn::plan_backward};

}  // namespace

Attempt plan_hopper_cudnn(const Problem& problem, const Device& device) {
  Attempt without_cudnn = plan_hopper(problem, device);
  if (std::holds_alternative<Refusal>(without_cudnn)) return without_cudnn;
  return either(problem, device, std::move(without_cudnn), "backward is", kCudnnBackward,
                [](const Problem& p, const Run& run, Direction d) {
                  return d == Direction::kForward || !cudnn::takes_origin(p, run);
                });
}

uint64_t hopper_cudnn_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  const uint64_t own = hopper_workspace(problem, size, direction);
  return direction == Direction::kForward ? own
                                          : std::max(own, cudnn::backward_workspace(problem, size));
}
#endif

}  // namespace tea::composite
