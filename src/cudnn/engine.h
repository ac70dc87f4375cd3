// The engine that runs cuDNN's attention, forward and backward, for types of 16 bits and FP8. Its
// graphs are built for sizes, which takes time, and its kernels are not ours: so it runs where it
// is named, and its backward pass in plans of hopper-cudnn (composite/hopper.h).
#pragma once
#include "core/engine.h"
#include "cudnn/library.h"

namespace tea::cudnn {

Attempt plan(const Problem& problem, const Device& device);
Attempt plan_with(const Library& library, const Problem& problem, const Device& device);
uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction);

// An Executable that does backward only, where faster.h has a row for it. Its graph is built: runs
// can be captured, the plan's first one too.
Attempt plan_backward(const Problem& problem, const Device& device);
// Of backward; 0 where faster.h has no row.
uint64_t backward_workspace(const Problem& problem, const Geometry& size);

// cuDNN counts everything from the shard's own corner: whether an origin moves no mask and no
// dropout. (ALiBi is there only with a causal mask.)
bool takes_origin(const Problem& problem, const Run& run);

inline constexpr Known kKnows[] = {
    {"dtype", 1u << TEA_FP16 | 1u << TEA_BF16 | 1u << TEA_E4M3 | 1u << TEA_E5M2},
    {"o_dtype"},
    {"dout_dtype"},
    {"dqkv_dtype"},
    {"bias_dtype", 1u << TEA_FP32},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
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
    {"bias", 1u << TEA_BIAS_NONE | 1u << TEA_BIAS_POST_SCALE},
    {"bias_broadcast", below(4)},
    {"alibi", 1u << TEA_ALIBI_NONE | 1u << TEA_ALIBI_STANDARD},
    {"softmax", below(3)},
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
    {"table_k_stride"},
    {"table_v_stride"},
    {"alignment"},
};

inline constexpr Engine kCudnn{"cudnn", kKnows, plan, workspace, true};

}  // namespace tea::cudnn
