// The engine for GPUs of compute capability 9.0: the forward pass for 16-bit types, without paged
// KV and FP8. Another engine runs the backward pass of plans for training.
#pragma once
#include "core/engine.h"

namespace tea::hopper {

// The Executable does forward only. Of what the problem says of gradients nothing is used.
Attempt plan(const Problem& problem, const Device& device);
// Of forward.
uint64_t workspace(const Problem& problem, const Geometry& size);

inline constexpr Known kKnows[] = {
    {"dtype", 1u << TEA_FP16 | 1u << TEA_BF16},
    {"bias_dtype", 1u << TEA_FP32},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"lse_gradient", below(2)},
    {"q_form", below(3)},
    {"kv_form", below(3)},
    {"gaps", below(2)},
    {"heads_q"},
    {"heads_kv"},
    {"dim_qk"},
    {"dim_v"},
    {"batch"},
    {"seqlen_q"},
    {"seqlen_kv"},
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
