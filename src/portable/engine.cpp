// The plan of the portable engine. It prepares nothing, so that the first call costs no more than
// later ones.
#include "portable/engine.h"

#include "core/driver.h"
#include "core/error.h"
#include "core/registry.h"
#include "portable/backward/backward.h"
#include "portable/backward/limits.h"
#include "portable/forward/forward.h"

namespace tea::portable {
namespace {

struct Portable final : Executable {
  Problem problem;
  Device device;

  Portable(const Problem& p, const Device& d) : problem(p), device(d) {}
  void forward(const Run& run) const override {
    const driver::OnDevice here(device.index);
    portable::forward(problem, run);
  }
  void backward(const Run& run) const override {
    const driver::OnDevice here(device.index);
    portable::backward(problem, device, run);
  }
};

constexpr Known kKnown[] = {
    {"dtype", kDtypes},
    {"o_dtype", kDtypes},
    {"dout_dtype", kDtypes},
    {"dqkv_dtype", kDtypes},
    {"bias_dtype", kDtypes},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"lse_gradient", below(2)},
    {"q_form", below(3)},
    {"kv_form", below(4)},
    {"gaps", below(2)},
    {"causal", below(2)},
    {"bottom_right", below(2)},
    {"window_left"},
    {"window_right"},
    {"bias", below(3)},
    {"bias_broadcast", below(4)},
    {"alibi", below(3)},
    {"softmax", below(3)},
    {"softcap"},
    {"dropout"},
    {"scale"},
    {"has_scale", below(2)},
    {"kv_dtype", kDtypes},
    {"kv_scale", below(2)},
    {"batch_invariant", below(2)},
    {"max_ctas"},
};

}  // namespace

std::span<const Known> known_fields() { return kKnown; }

Attempt plan_portable(const Problem& problem, const Device& device) {
  TEA_REFUSE_IF(device.is_host(), "device is the host; it runs on a GPU");
  TEA_REFUSE_IF(device.sm < kLeastSm,
                "device is sm_" + shown(device.sm) + "; needs sm_" + shown(kLeastSm) + " or later");
  TEA_REFUSE_IF(problem.training && !problem.is_fp8() && problem.dout_type() != problem.dtype,
                "dout_dtype is " + std::string(dtype_name(problem.dout_type())) + "; needs " +
                    std::string(dtype_name(problem.dtype)) + ", as q");
  const std::string limit =
      problem.training ? backward_limit(problem, default_geometry(problem)) : "";
  TEA_REFUSE_IF(!limit.empty(), limit);
  return std::make_unique<Portable>(problem, device);
}

uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction) {
  return direction == Direction::kForward ? forward_workspace(problem, size)
                                          : backward_workspace(problem, size);
}

}  // namespace tea::portable
