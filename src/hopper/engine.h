// The engine of GPUs with compute capability 9.0: the forward pass of forward.h for 16-bit types.
// It does not train yet, and has no pages and no fp8.
#pragma once
#include "core/engine.h"

namespace tea::hopper {

// The Executable does forward only. Of what the problem says of gradients nothing is used.
Attempt plan(const Problem& problem, const Device& device);
// Of forward.
uint64_t workspace(const Problem& problem, const Geometry& size);

// All values of an enum, or all bits, below n.
constexpr uint32_t first(int n) { return (uint32_t{1} << n) - 1; }

inline constexpr Known kKnows[] = {
    {"dtype", 1u << TEA_FP16 | 1u << TEA_BF16},
    {"bias_dtype", 1u << TEA_FP32},
    {"training", first(2)},
    {"deterministic", first(2)},
    {"outputs", first(3)},
    {"lse_gradient", first(2)},
    {"q_form", first(3)},
    {"kv_form", first(3)},
    {"gaps", first(2)},
    {"heads_q"},
    {"heads_kv"},
    {"dim_qk"},
    {"dim_v"},
    {"batch"},
    {"seqlen_q"},
    {"seqlen_kv"},
    {"causal", first(2)},
    {"bottom_right", first(2)},
    {"window_left"},
    {"window_right"},
    {"bias", first(3)},
    {"bias_broadcast", first(4)},
    {"alibi", first(3)},
    {"softmax", first(3)},
    {"softcap"},
    {"dropout"},
    {"scale"},
    {"has_scale", first(2)},
    {"q"},
    {"k"},
    {"v"},
    {"o"},
    {"dout"},
    {"dq"},
    {"dk"},
    {"dv"},
    {"lse"},
    {"bias_stride"},
    {"dbias_stride"},
    {"slopes_stride"},
    {"alignment"},
};

}  // namespace tea::hopper
