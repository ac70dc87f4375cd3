// The tiled kernels for any machine: 4 floats a vector, in whatever the compiler's baseline offers.
#include "cpu/flash_common.h"

namespace tea::cpu {
namespace {
#define TEA_MULTIPLY_EVEN(a, b) (((VQ)(a)&0xFFFFFFFFu) * ((VQ)(b)&0xFFFFFFFFu))
#define TEA_WIDEN_FP16(from, to) \
  for (int lane = 0; lane < 8; ++lane) (to)[lane] = fp16_decode((from)[lane])
constexpr int kBytes = 16, kTall = 4, kStrip = 2;
#include "cpu/vector_kernels.h"
bool available() { return true; }
}  // namespace
const InstructionSet kGeneric{"cpu-generic", available, &kKernels<float>, &kKernels<double>};

Attempt plan_generic(const Problem& p, const Device& d) { return plan_with(kGeneric, p, d); }
}  // namespace tea::cpu
