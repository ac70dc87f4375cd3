// Which of TransformerEngine's backends a call counts as. It decides what the auxiliary tensors
// hold; which kernel runs is the planner's choice.
#pragma once
#include "nvte/call.h"

namespace tea::nvte {

// NVTE_No_Backend where the executor would refuse on any device.
NVTE_Fused_Attn_Backend backend_of(const Work& work);

// The same for the executor: throws what the selector only reports.
NVTE_Fused_Attn_Backend accepted_backend(const Work& work);

// That of the forward whose pack this is: it had the maxima returned, or was told so otherwise, if
// the pack of NVTE_F16_max512_seqlen holds more than its one tensor.
NVTE_Fused_Attn_Backend accepted_backend(const Work& work, const NVTETensorPack& pack);

// Whether some engine runs on the GPU that this thread would use, as TransformerEngine asks of its
// current one. Where this process uses none, its memory is the host's.
bool runs_on_device_in_use();

}  // namespace tea::nvte
