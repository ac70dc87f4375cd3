// Known wrong results of cuDNN: where a row applies, the engine refuses.
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>

#include "core/problem.h"
#include "cudnn/bucket.h"

namespace tea::cudnn {

struct Erratum {
  size_t first, last;     // versions, both included
  int least_sm, most_sm;  // GPUs, both included
  bool (*applies)(const Problem&);
  const char* what;
  const char* link;
};

inline constexpr size_t kAnyVersion = ~size_t{0};
inline constexpr const char* kFrontend =
    "https://github.com/NVIDIA/cudnn-frontend/blob/main/include/cudnn_frontend/node/"
    "sdpa_support_surface.h";
// Seen with 9.19 on sm_90; refused everywhere until a run elsewhere clears them.
inline constexpr const char* kMeasured = "bench/results/h200/cudnn-checks.jsonl";
inline constexpr const char* kOneQuery = "bench/results/h100/cudnn-one-query.jsonl";

inline bool is_ragged(const Problem& p) {
  return p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED;
}
// Rows that would attend to keys past the last one, if there are no lengths.
inline bool looks_behind_the_keys(const Problem& p) {
  if (!is_dense(p)) return false;
  if (!p.causal && !p.window_right) return true;
  const int64_t ahead = p.causal ? 0 : p.window_right - 1;
  return (p.bottom_right ? p.seqlen_kv : p.seqlen_q) + ahead > p.seqlen_kv;
}
// One query of a group of heads, by a kernel of its own.
inline bool decodes_groups(const Problem& p) {
  return !p.varies_q() && p.seqlen_q == 1 && p.heads_q > p.heads_kv;
}

inline constexpr Erratum kErrata[] = {
    {91000, 91001, 0, 999, [](const Problem&) { return true; },
     "attention is wrong in 9.10.0 and 9.10.1", kFrontend},
    {91400, 91400, 0, 999,
     [](const Problem& p) {
       return p.window_left && !p.causal && (p.varies_kv() || p.seqlen_kv > 1024);
     },
     "windows that are not causal are wrong beyond 1024 keys in 9.14.0", kFrontend},
    {0, 91500, 0, 999,
     [](const Problem& p) { return p.training && is_dense(p) && p.seqlen_kv % 128; },
     "gradients of a part of a tile of keys read memory that is not theirs in a captured graph",
     "https://github.com/NVIDIA/cudnn-frontend/releases/tag/v1.16.0"},
    {0, 91799, 90, 90, [](const Problem& p) { return p.training && is_ragged(p); },
     "NaN in ragged gradients, from workspace that was not written",
     "https://github.com/NVIDIA/TransformerEngine/issues/2186"},
    {0, 91899, 0, 999, [](const Problem& p) { return decodes_groups(p) && p.causal; },
     "one query with a causal mask is wrong where heads share keys",
     "https://docs.nvidia.com/deeplearning/cudnn/backend/v9.18.1/release-notes.html"},
    {0, kAnyVersion, 100, 109, [](const Problem& p) { return decodes_groups(p) && p.heads_kv < 8; },
     "one query is wrong where heads share less than 8 heads of keys",
     "https://github.com/pytorch/pytorch/issues/193893"},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) { return p.deterministic && !p.varies_q() && p.seqlen_q == 1; },
     "one query that does not repeat its bits", kOneQuery},
    {0, kAnyVersion, 120, 129, [](const Problem& p) { return p.training && is_ragged(p); },
     "wrong ragged gradients", "https://github.com/NVIDIA/TransformerEngine/issues/3333"},
    {0, kAnyVersion, 100, 109,
     [](const Problem& p) { return p.is_fp8() && std::max(p.dim_qk, p.v_dim()) > 192; },
     "wrong results of fp8 with a head dimension of 256",
     "https://github.com/NVIDIA/cudnn-frontend/issues/981"},
    {0, kAnyVersion, 90, 90,
     [](const Problem& p) {
       return p.training && p.bias && (p.seqlen_q % 128 == 64 || p.seqlen_kv % 128 == 64);
     },
     "NaN in dQ with a bias and half a tile of rows",
     "https://github.com/pytorch/pytorch/issues/196678"},
    {0, kAnyVersion, 90, 90,
     [](const Problem& p) {
       return p.training && p.seqlen_kv % 128 == 64 && looks_behind_the_keys(p);
     },
     "NaN in dQ of rows with a small LSE, where keys end with half a tile and no mask hides the "
     "rest",
     "https://github.com/NVIDIA/cudnn-frontend/pull/628"},
    {92500, 92699, 90, 90, [](const Problem& p) { return p.training && p.seqlen_q == 1; },
     "NaN in dK and dV with one query", "https://github.com/NVIDIA/cudnn-frontend/issues/1072"},
    {0, kAnyVersion, 90, 90,
     [](const Problem& p) {
       return p.training && p.dim_qk > 128 && (p.window_left || (p.window_right && !p.causal));
     },
     "NaN in gradients with a window and a head dimension of 256",
     "https://github.com/NVIDIA-NeMo/Automodel/issues/3232"},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) {
       return p.training && is_ragged(p) && std::max(p.dim_qk, p.v_dim()) > 128;
     },
     "ragged gradients without the columns from 128 on", kMeasured},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) { return p.training && p.deterministic && p.softmax; },
     "a deterministic backward pass with a sink that is not", kMeasured},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) { return p.training && p.bias && p.dtype == TEA_FP16; },
     "a gradient of a bias that was multiplied by the scale in fp16, and so lost digits",
     kMeasured},
    {0, kAnyVersion, 0, 999, [](const Problem& p) { return p.drops() && p.softmax; },
     "a gradient of the sink that dropout makes smaller by its probability", kMeasured},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) {
       return p.is_fp8() && p.outputs & (TEA_OUTPUT_MAX | TEA_OUTPUT_SUM_EXP);
     },
     "a maximum in base 2 with fp8", kMeasured},
    {0, kAnyVersion, 0, 999, [](const Problem& p) { return p.is_fp8() && p.softmax; },
     "fp8 probabilities that leave out the sink", kMeasured},
    {0, kAnyVersion, 0, 999,
     [](const Problem& p) {
       const bool whole = is_dense(p) && p.seqlen_q % 128 == 0 && p.seqlen_kv % 128 == 0;
       return p.is_fp8() && p.training && !whole;
     },
     "fp8 gradients of a part of a tile: columns that stay zero, amaxes of rows that are not there",
     kMeasured},
};

// The first row that applies, or NULL.
inline const Erratum* erratum(const Problem& problem, size_t version, int sm,
                              std::span<const Erratum> rows = kErrata) {
  for (const Erratum& row : rows)
    if (version >= row.first && version <= row.last && sm >= row.least_sm && sm <= row.most_sm &&
        row.applies(problem))
      return &row;
  return nullptr;
}

}  // namespace tea::cudnn
