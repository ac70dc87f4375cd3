// The pack of auxiliary tensors from forward to backward: its order, reading and writing.
#pragma once
#include <vector>

#include "nvte/call.h"

namespace tea::nvte {

enum class Aux {
  kLse,
  kMax,
  kSumExp,
  kUnused,  // FP8's second tensor, which is not written or read
  kRngState,
  kBias,
  kSoftmaxOffset,
  kOpaque  // NVTE_F16_max512_seqlen: LSE, then rng_state, in a tensor of the size of P
};

struct AuxEntry {
  Aux what;
  NVTEDType dtype;
  NVTEShape shape;
};

// The entries of the pack, in order.
std::vector<AuxEntry> aux_entries(const Work& work, NVTE_Fused_Attn_Backend backend);

// First call of forward: shapes, dtypes, NULL pointers and the size.
void describe_aux(NVTETensorPack& pack, const std::vector<AuxEntry>& entries);

// Throws "Unexpected Aux_CTX_Tensors->size.". For the 16-bit class, `size` may be smaller than the
// number of entries, as in JAX.
void check_aux_size(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                    NVTE_Fused_Attn_Backend backend);

// Sets the entries that are inputs of forward to point to these inputs, without a copy.
void point_aux_at_inputs(NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                         const ForwardCall& call);

// Memory of one entry; NULL if the pack has none.
void* aux_data(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries, Aux what);

// The state of the random numbers inside the opaque tensor.
void* opaque_rng_state(void* opaque, const Sizes& sizes);

// Reads the entries that forward wrote. Only their pointers are used, because callers set arbitrary
// shapes.
BackwardAux read_aux(const NVTETensorPack& pack, const Work& work, NVTE_Fused_Attn_Backend backend);

}  // namespace tea::nvte
