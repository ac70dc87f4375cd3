// The table of engines: the first that accepts, runs.
#include "core/registry.h"

#include <algorithm>

#include "cpu/flash.h"
#include "cpu/reference.h"
#if defined(TE_ATTENTION_CUDA)
#if defined(TE_ATTENTION_CUDNN)
#include "cudnn/engine.h"
#endif
#include "hopper/engine.h"
#include "portable/engine.h"
#endif

namespace tea {
namespace {

#if defined(TE_ATTENTION_CUDA)

// Forward by the one, backward by the other: LSE and the bits of dropout are the same everywhere.
struct Pair final : Executable {
  std::unique_ptr<Executable> ahead, back;
  Pair(std::unique_ptr<Executable> a, std::unique_ptr<Executable> b)
      : ahead(std::move(a)), back(std::move(b)) {
    yields = ahead->yields;
  }
  void forward(const Run& run) const override { ahead->forward(run); }
  void backward(const Run& run) const override { back->backward(run); }
};

// Until the Hopper engine has a backward pass of its own, a plan that trains goes back by the
// portable one's.
Attempt plan_hopper(const Problem& problem, const Device& device) {
  Attempt ahead = hopper::plan(problem, device);
  if (!problem.training || std::holds_alternative<Refusal>(ahead)) return ahead;
  Attempt back = portable::kPortable.attempt(problem, device);
  if (const auto* refusal = std::get_if<Refusal>(&back))
    return Refusal{"backward is by portable, which refuses: " + refusal->why};
  return std::make_unique<Pair>(std::move(std::get<1>(ahead)), std::move(std::get<1>(back)));
}
uint64_t hopper_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  return direction == Direction::kForward ? hopper::workspace(problem, size)
                                          : portable::workspace(problem, size, direction);
}
constexpr Engine kHopper{"hopper", hopper::kKnows, plan_hopper, hopper_workspace};

#if defined(TE_ATTENTION_CUDNN)

// The same, and backward by cuDNN where that was measured to be faster. The portable engine's
// backward pass does the runs that cuDNN cannot: which one runs is a matter of the plan and the run
// alone, never of whether the run is captured.
struct PairOrCudnn final : Executable {
  Problem problem;
  std::unique_ptr<Executable> pair, cudnn;
  PairOrCudnn(const Problem& p, std::unique_ptr<Executable> both, std::unique_ptr<Executable> back)
      : problem(p), pair(std::move(both)), cudnn(std::move(back)) {
    yields = pair->yields;
  }
  void forward(const Run& run) const override { pair->forward(run); }
  void backward(const Run& run) const override {
    (cudnn::takes_origin(problem, run) ? cudnn : pair)->backward(run);
  }
};

// As an engine of its own, so that it too refuses the fields that cuDNN's does not know.
constexpr Engine kCudnnBackward{"cudnn", cudnn::kKnows, cudnn::plan_backward};

Attempt plan_hopper_cudnn(const Problem& problem, const Device& device) {
  Attempt pair = plan_hopper(problem, device);
  if (std::holds_alternative<Refusal>(pair)) return pair;
  Attempt back = kCudnnBackward.attempt(problem, device);
  if (const auto* refusal = std::get_if<Refusal>(&back))
    return Refusal{"backward is by cudnn, which refuses: " + refusal->why};
  return std::make_unique<PairOrCudnn>(problem, std::move(std::get<1>(pair)),
                                       std::move(std::get<1>(back)));
}
uint64_t hopper_cudnn_workspace(const Problem& problem, const Geometry& size, Direction direction) {
  const uint64_t own = hopper_workspace(problem, size, direction);
  return direction == Direction::kForward ? own
                                          : std::max(own, cudnn::backward_workspace(problem, size));
}
constexpr Engine kHopperCudnn{"hopper-cudnn", hopper::kKnows, plan_hopper_cudnn,
                              hopper_cudnn_workspace};

#endif
#endif

constexpr Engine kEngines[] = {
#if defined(TE_ATTENTION_CUDA)
#if defined(TE_ATTENTION_CUDNN)
    kHopperCudnn,
#endif
    kHopper,         portable::kPortable,
#if defined(TE_ATTENTION_CUDNN)
    cudnn::kCudnn,
#endif
#endif

    cpu::kFlash,     cpu::kFlashAmx,      cpu::kFlashAvx512Bf16, cpu::kFlashAvx512,
    cpu::kFlashAvx2, cpu::kFlashGeneric,  cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
