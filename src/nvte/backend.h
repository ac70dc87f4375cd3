// TransformerEngine's backend of a call. It determines the auxiliary tensors; the planner selects
// the kernel.
#pragma once
#include "nvte/call.h"

namespace tea::nvte {

// NVTE_No_Backend if the executor would refuse the call on every device.
NVTE_Fused_Attn_Backend backend_of(const Work& work);

// backend_of() for the executor: throws instead of returning NVTE_No_Backend.
NVTE_Fused_Attn_Backend accepted_backend(const Work& work);

// The backend of the forward that wrote `pack`. NVTE_F16_max512_seqlen has no rng_state, so a pack
// with one is of NVTE_F16_arbitrary_seqlen, whatever the environment selects now.
NVTE_Fused_Attn_Backend accepted_backend(const Work& work, const NVTETensorPack& pack);

// Whether an engine supports the current GPU of this thread, as TransformerEngine's selector checks
// it. True if this process uses no GPU, because its memory is on the host then.
bool runs_on_device_in_use();

}  // namespace tea::nvte
