// The reference engine: attention and its gradients in double, one row at a time, written to be
// read as the definition. It accepts every valid problem.
#pragma once
#include "core/engine.h"

namespace tea::cpu {

Attempt plan_reference(const Problem& problem, const Device& device);

inline constexpr Known kReferenceKnows[] = {
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
    {"page_size"},
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
    {"table_k_stride"},
    {"table_v_stride"},
    {"alignment"},
};

inline constexpr Engine kReference{"reference", kReferenceKnows, plan_reference};

}  // namespace tea::cpu
