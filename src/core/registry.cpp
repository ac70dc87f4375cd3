// The table of engines: the first that accepts, runs.
#include "core/registry.h"

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

#endif

constexpr Engine kEngines[] = {
#if defined(TE_ATTENTION_CUDA)
    kHopper,         portable::kPortable,
#if defined(TE_ATTENTION_CUDNN)
    cudnn::kCudnn,
#endif
#endif

    cpu::kFlash,     cpu::kFlashAmx,      cpu::kFlashAvx512,
    cpu::kFlashAvx2, cpu::kFlashGeneric,  cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
