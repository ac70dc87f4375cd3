// The translation of a call into a Problem and the sizes of its run, or the reason of a refusal.
#pragma once
#include <string>

#include "core/problem.h"
#include "nvte/call.h"

namespace tea::nvte {

struct Mask {
  bool padding, causal, bottom_right;
};
// Throws Error for a value outside the enum.
Mask mask_of(NVTE_Mask_Type type);

// TEA_DTYPE_DEFAULT for types that attention does not take.
tea_dtype dtype_of(NVTEDType type);

// Throws Error for inconsistent work; the Problem must still be checked. The options must be values
// of their enums.
Problem problem_of(const Work& work);
tea_run run_of(const Work& work);  // sizes only

// The reason of a refusal, with TransformerEngine's text if it has one; empty if the work is
// accepted. Both the selector and the executor call it, so that they agree. Throws Error for a
// value outside an enum.
std::string refusal(const Work& work);

}  // namespace tea::nvte
