#include "composite/hopper.h"

#include <algorithm>

#include "portable/engine.h"
#if defined(TE_ATTENTION_CUDNN)
#include "cudnn/engine.h"
#endif

namespace tea::composite {
namespace {

// The number of queries decides whether the Hopper kernels serve a run.
struct HopperOrPortable final : Executable {
  Problem problem;
  std::unique_ptr<Executable> hopper, portable;
  HopperOrPortable(const Problem& p, std::unique_ptr<Executable> h, std::unique_ptr<Executable> q)
      : problem(p), hopper(std::move(h)), portable(std::move(q)) {
    yields = hopper->yields;
  }
  void forward(const Run& run) const override {
    (hopper::serves(problem, run) ? hopper : portable)->forward(run);
  }
  void backward(const Run&) const override {}  // paged problems have none
};

// Whether runs of a problem may be served by the portable engine instead.
bool needs_portable(const Problem& p) { return p.kv_form == TEA_PAGED && p.q_form == TEA_RAGGED; }

struct HopperThenPortable final : Executable {
  std::unique_ptr<Executable> hopper, portable;
  HopperThenPortable(std::unique_ptr<Executable> h, std::unique_ptr<Executable> p)
      : hopper(std::move(h)), portable(std::move(p)) {
    yields = hopper->yields;
  }
  void forward(const Run& run) const override { hopper->forward(run); }
  void backward(const Run& run) const override { portable->backward(run); }
};

}  // namespace

Attempt plan_hopper(const Problem& problem, const Device& device) {
  Attempt forward = hopper::plan(problem, device);
  if (std::holds_alternative<Refusal>(forward)) return forward;
  if (needs_portable(problem)) {
    Attempt other = portable::kPortable.attempt(problem, device);
    if (const auto* refusal = std::get_if<Refusal>(&other))
      return Refusal{"runs with many queries are by portable, which refuses: " + refusal->why};
    return std::make_unique<HopperOrPortable>(problem, std::move(std::get<1>(forward)),
                                              std::move(std::get<1>(other)));
  }
  if (!problem.training || hopper::backward_limit(problem).empty()) return forward;
  Attempt backward = portable::kPortable.attempt(problem, device);
  if (const auto* refusal = std::get_if<Refusal>(&backward))
    return Refusal{"backward is by portable, which refuses: " + refusal->why};
  return std::make_unique<HopperThenPortable>(std::move(std::get<1>(forward)),
                                              std::move(std::get<1>(backward)));
}

uint64_t hopper_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  const uint64_t own = hopper::workspace(problem, size, direction);
  if (direction == Direction::kForward && !needs_portable(problem)) return own;
  return std::max(own, portable::workspace(problem, size, direction));
}

#if defined(TE_ATTENTION_CUDNN)
namespace {

struct HopperThenCudnn final : Executable {
  Problem problem;
  std::unique_ptr<Executable> without_cudnn, cudnn;
  HopperThenCudnn(const Problem& p, std::unique_ptr<Executable> without,
                  std::unique_ptr<Executable> with)
      : problem(p), without_cudnn(std::move(without)), cudnn(std::move(with)) {
    yields = without_cudnn->yields;
  }
  void forward(const Run& run) const override { without_cudnn->forward(run); }
  void backward(const Run& run) const override {
    (cudnn::takes_origin(problem, run) ? cudnn : without_cudnn)->backward(run);
  }
};

// An engine for backward alone, so that attempt() also refuses the fields that cuDNN does not know.
constexpr Engine kCudnnBackward{"cudnn", cudnn::known_fields, cudnn::plan_backward};

}  // namespace

Attempt plan_hopper_cudnn(const Problem& problem, const Device& device) {
  Attempt without_cudnn = plan_hopper(problem, device);
  if (std::holds_alternative<Refusal>(without_cudnn)) return without_cudnn;
  Attempt backward = kCudnnBackward.attempt(problem, device);
  if (const auto* refusal = std::get_if<Refusal>(&backward))
    return Refusal{"backward is by cudnn, which refuses: " + refusal->why};
  return std::make_unique<HopperThenCudnn>(problem, std::move(std::get<1>(without_cudnn)),
                                           std::move(std::get<1>(backward)));
}

uint64_t hopper_cudnn_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  const uint64_t own = hopper_workspace(problem, size, direction);
  return direction == Direction::kForward ? own
                                          : std::max(own, cudnn::backward_workspace(problem, size));
}
#endif

}  // namespace tea::composite
