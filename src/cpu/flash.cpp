// The tiled engine. Its work is distributed over threads by a partition that depends only on the
// problem, not on the number of threads, so that the results do not depend on it either.
#include "cpu/flash.h"

#include <memory>
#include <span>

#include "cpu/flash_backward.h"
#include "cpu/flash_forward.h"

namespace tea::cpu {
namespace {

template <class Real>
struct Flash : Executable {
  Problem problem;
  const Kernels<Real>&kernels, &few;
  Flash(const Problem& p, const Kernels<Real>& k, const Kernels<Real>& f)
      : problem(p), kernels(k), few(f) {}

  void forward(const Run& run) const override {
    const View view(problem, run);
    FlashForward<Real>{view, kernels, few}();
  }
  void backward(const Run& run) const override {
    const View view(problem, run);
    FlashBackward<Real>{view, kernels}();
  }
};

constexpr Known kKnown[] = {
    {"dtype", below(7)},
    {"o_dtype", below(7)},
    {"dout_dtype", below(7)},
    {"dqkv_dtype", below(7)},
    {"bias_dtype", below(7)},
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
    {"kv_dtype", below(7)},
    {"kv_scale", below(2)},
    {"batch_invariant", below(2)},
    {"max_ctas"},
};

}  // namespace

std::span<const Known> flash_known_fields() { return kKnown; }

#if !defined(__x86_64__)  // sets that other processors do not have
const InstructionSet kAmx{"cpu-amx", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx512Bf16{"cpu-avx512-bf16", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx512{"cpu-avx512", [] { return false; }, nullptr, nullptr};
const InstructionSet kAvx2{"cpu-avx2", [] { return false; }, nullptr, nullptr};
#endif

Attempt plan_with(const InstructionSet& set, const Problem& problem, const Device& device) {
  TEA_REFUSE_IF(!device.is_host(), "device is a GPU; it runs on the host");
  TEA_REFUSE_IF(!set.available(), "this processor lacks the instructions");
  const InstructionSet *tiles = &set, *few = &set;
  // Sets that multiply pairs of 16-bit numbers expect K, V and dO in the type of Q. They also
  // rescale all rows of a block at once, so that the bits of a row depend on the other rows.
  const bool excludes_pairs = problem.kv_dtype || problem.batch_invariant ||
                              (problem.training && problem.dout_type() != problem.dtype);
  while (tiles->others && (excludes_pairs || !tiles->multiplies(problem.dtype)))
    tiles = tiles->others;
  if (problem.dtype == TEA_FP64)
    return std::make_unique<Flash<double>>(problem, *tiles->twice, *tiles->twice);
  while (!few->single->few_scores) few = few->others;
  return std::make_unique<Flash<float>>(problem, *tiles->single, *few->single);
}

Attempt plan_flash(const Problem& p, const Device& d) {
  const InstructionSet* const wide = pairs_are_fast() ? &kAvx512Bf16 : &kAvx512;
  for (const InstructionSet* set : {&kAmx, wide, &kAvx2, &kGeneric})
    if (set->available()) return plan_with(*set, p, d);
  return Refusal{"no instruction set fits this processor"};
}

}  // namespace tea::cpu
