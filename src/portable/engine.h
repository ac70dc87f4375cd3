// The engine for any GPU from sm_80 on: tiled attention on tensor cores that trains with every
// option, in memory linear in the sequence lengths. It accepts every valid problem but double
// precision and what limits.h names.
#pragma once
#include "core/engine.h"

namespace tea::portable {

Attempt plan_portable(const Problem& problem, const Device& device);
uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction);

constexpr uint32_t kDtypes = below(7) & ~(1u << TEA_FP64);

inline constexpr Known kKnows[] = {
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

inline constexpr Engine kPortable{"portable", kKnows, plan_portable, workspace};

}  // namespace tea::portable
