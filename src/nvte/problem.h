// The translation of a call into the core's terms: the Problem, the sizes of its run, and why there
// is none.
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

// Throws Error where the work makes no sense; the Problem still has to be checked. The options are
// values of their enums.
Problem problem_of(const Work& work);
tea_run run_of(const Work& work);  // sizes only

// Why the work is refused, in TransformerEngine's words where it has some; empty if it is not. The
// selector and the executor both ask here, so that they cannot disagree. Throws Error for a value
// outside an enum.
std::string refusal(const Work& work);

}  // namespace tea::nvte
