// The tiled kernels for the matrix unit (AMX) of recent Xeons, for bf16: products in its tiles,
// everything between them in AVX-512. As in flash_kernel.h, query rows lie across the lanes. Keys
// and values are packed once per kv head; P and dS are rounded to bf16 for the second products.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/amx_target.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/amx.h"
#include "cpu/amx_vectors.h"
#include "cpu/amx_operands.h"
#include "cpu/amx_forward.h"
#include "cpu/amx_backward.h"
// clang-format on

double attend_amx(const View& view, const RowBlock& block, Columns columns, Partial<float> out,
                  float* scratch) {
  const Configured unit;
  const Subnormals none(false);
  Walk(view, block, columns, out, scratch)();
  return 0;
}

int64_t scratch_amx(const Problem& p) {
  return std::max(Walk::scratch(p), p.training ? WalkBack::scratch(p) : 0);
}

// The gradient of a bias is left to AVX-512, which reads K and V as they lie.
void backward_amx(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch) {
  if (g.dbias) return kAvx512.single->backward(view, block, g, scratch);
  const Configured unit;
  const Subnormals none(false);
  WalkBack walk(view, block, g, scratch);
  walk();
  store_dq(view, block, walk.dq(), g);
}

constexpr Kernels<float> kAmxKernels{scratch_amx,   packed_bytes, pack_head,        attend_amx,
                                     finish<float>, backward_amx, store_keys<float>};
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {

// The kernel hands the tile registers out on request, once per process.
bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool available() {
  static const bool yes = [] {
    if (!kAvx512.available() || !__builtin_cpu_supports("avx512bf16")) return false;
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    return (d & kBf16) && (d & kTile) && permitted();
  }();
  return yes;
}
}  // namespace
const InstructionSet kAmx{"cpu-amx", available, &kAmxKernels, nullptr, &kAvx512};
}  // namespace tea::cpu
#else
namespace tea::cpu {
const InstructionSet kAmx{"cpu-amx", [] { return false; }, nullptr, nullptr};
}
#endif

namespace tea::cpu {
Attempt plan_amx(const Problem& p, const Device& d) { return plan_with(kAmx, p, d); }
}  // namespace tea::cpu
