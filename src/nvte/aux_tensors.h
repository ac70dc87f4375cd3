// The pack of auxiliary tensors that forward leaves for backward: what lies at which position, and
// the reading and writing of it.
#pragma once
#include <vector>

#include "nvte/call.h"

namespace tea::nvte {

enum class Aux {
  kLse,
  kMax,
  kSumExp,
  kUnused,  // FP8's second tensor, which nobody writes or reads
  kRngState,
  kBias,
  kSoftmaxOffset,
  kOpaque  // of NVTE_F16_max512_seqlen: LSE, then rng_state, in a tensor of the size of P
};

struct AuxEntry {
  Aux what;
  NVTEDType dtype;
  NVTEShape shape;
};

// What the pack holds, in order.
std::vector<AuxEntry> aux_entries(const Work& work, NVTE_Fused_Attn_Backend backend);

// First call of forward: shapes, dtypes, NULL pointers and the size.
void describe_aux(NVTETensorPack& pack, const std::vector<AuxEntry>& entries);

// "Unexpected Aux_CTX_Tensors->size." For the 16-bit class a pack may be smaller than what it
// holds: JAX's is.
void check_aux_size(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                    NVTE_Fused_Attn_Backend backend);

// The entries that are forward's own inputs point at them, without a copy.
void point_aux_at_inputs(NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                         const ForwardCall& call);

// Memory of one entry; NULL if the pack has none.
void* aux_data(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries, Aux what);

// The state of the random numbers inside the opaque tensor.
void* opaque_rng_state(void* opaque, const Sizes& sizes);

// What forward left. Only pointers count: callers label the shapes as they like.
BackwardAux read_aux(const NVTETensorPack& pack, const Work& work, NVTE_Fused_Attn_Backend backend);

}  // namespace tea::nvte
