// The tiled kernels for AMX, the matrix extension of recent Xeons, for bf16 and fp32: products in
// its tiles, everything between them in AVX-512. As in flash_kernel.h, query rows lie across the
// lanes. Keys and values are packed once per kv head. bf16: P and dS are rounded to bf16 for the
// second products. fp32: each operand is the sum of three terms in bf16.
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
#include "cpu/row_sums.h"
#include "cpu/flash_tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/flash_kernel_backward.h"
#include "cpu/amx_vectors.h"
#include "cpu/packed_tiles.h"
#include "cpu/amx.h"
#include "cpu/amx_operands.h"
#include "cpu/amx_forward.h"
#include "cpu/amx_backward.h"
// clang-format on

// Calls body with the number of terms that an operand has.
template <class Body>
auto with_terms(const Problem& p, Body&& body) {
  return p.dtype == TEA_FP32 ? body(Number<3>{}) : body(Number<1>{});
}

template <int T>
double attend_amx(const View& view, const RowBlock& block, Columns columns, Partial<float> out,
                  float* scratch) {
  const Configured unit;
  const Subnormals none(false);
  Walk<T> walk(view, block, columns, out, scratch);
  if (walk.is_ordinary()) walk();
  if (walk.is_ordinary() && !walk.is_beyond()) return 0;
  if (walk.unit_scores().ordinary)
    attend(view, block, columns, out, scratch, walk.unit_scores());
  else
    kAvx512.single->attend(view, block, columns, out, scratch);
  return 0;
}

int64_t scratch_amx(const Problem& p) {
  return with_terms(p, [&]<int T>(Number<T>) {
    return std::max(Walk<T>::scratch(p), p.training ? WalkBack<T>::scratch(p) : 0);
  });
}

int64_t packed_bytes_amx(const Problem& p, const Group& g, Pass pass) {
  return with_terms(p, [&]<int T>(Number<T>) { return packed_bytes<T>(p, g, pass); });
}

void pack_amx(const View& view, const Group& g, Pass pass, int64_t first, std::byte* memory) {
  with_terms(view.p, [&]<int T>(Number<T>) { pack_head<T>(view, g, pass, first, memory); });
}

double attend_any(const View& view, const RowBlock& block, Columns columns, Partial<float> out,
                  float* scratch) {
  return with_terms(
      view.p, [&]<int T>(Number<T>) { return attend_amx<T>(view, block, columns, out, scratch); });
}

template <int T>
void walk_back(WalkBack<T>& walk, const View& view, const RowBlock& block, Gradients<float>& g) {
  const Subnormals none(false);
  walk();
  store_dq(view, block, walk.dq(), g);
}

template <int T>
void backward_amx(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch) {
  const Configured unit;
  WalkBack<T> walk(view, block, g, scratch);
  if (walk.is_ordinary())
    walk_back(walk, view, block, g);
  else if (walk.unit_scores().ordinary)
    backward(view, block, g, scratch, walk.unit_scores());
  else
    kAvx512.single->backward(view, block, g, scratch);
}

// AVX-512 computes the gradient of a bias, because it reads K and V without packing.
void backward_any(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch) {
  if (g.dbias) return kAvx512.single->backward(view, block, g, scratch);
  with_terms(view.p, [&]<int T>(Number<T>) { backward_amx<T>(view, block, g, scratch); });
}

// Products of pairs take these processors twice as long as multiply-adds, which only codes of fp8
// make up for.
const Kernels<float>& few_kernels(const View& view) {
  return view.p.is_fp8() ? *kAvx512Bf16.single : *kAvx512.single;
}
void few_scores_any(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  few_kernels(view).few_scores(view, heads, columns);
}
void few_values_any(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  few_kernels(view).few_values(view, heads, columns);
}

constexpr Kernels<float> kAmxKernels{scratch_amx,       packed_bytes_amx, pack_amx,
                                     attend_any,        finish<float>,    backward_any,
                                     store_keys<float>, few_scores_any,   few_values_any};
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
    if (!kAvx512Bf16.available()) return false;
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    return (d & kBf16) && (d & kTile) && permitted();
  }();
  return yes;
}

bool multiplies(int32_t dtype) { return dtype == TEA_BF16 || dtype == TEA_FP32; }
}  // namespace
const InstructionSet kAmx{"cpu-amx", available, &kAmxKernels, nullptr, &kAvx512, multiplies};
}  // namespace tea::cpu
#endif

namespace tea::cpu {
Attempt plan_amx(const Problem& p, const Device& d) { return plan_with(kAmx, p, d); }
}  // namespace tea::cpu
