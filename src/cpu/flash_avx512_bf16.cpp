// The kernels for processors that multiply pairs of bf16 numbers by AVX-512. bf16 uses the loops
// over packed keys of the AMX kernels: P and dS are rounded to bf16 for the second products. Few
// rows of bf16 and fp8 have a separate kernel. The AVX-512 kernels compute everything else.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
#include "cpu/avx512_bf16_target.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/vector_kernels.h"
#include "cpu/amx_vectors.h"
#include "cpu/packed_tiles.h"
#include "cpu/dots.h"
#include "cpu/amx_operands.h"
#include "cpu/amx_forward.h"
#include "cpu/amx_backward.h"
#include "cpu/decode_pairs.h"
// clang-format on

double attend_pairs(const View& view, const RowBlock& block, Columns columns, Partial<float> out,
                    float* scratch) {
  const Subnormals none(false);
  Walk<1> walk(view, block, columns, out, scratch);
  walk();
  if (walk.is_beyond()) kAvx512.single->attend(view, block, columns, out, scratch);
  return 0;
}

void backward_pairs(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch) {
  if (g.dbias) return kAvx512.single->backward(view, block, g, scratch);
  WalkBack<1> walk(view, block, g, scratch);
  const Subnormals none(false);
  walk();
  store_dq(view, block, walk.dq(), g);
}

int64_t scratch_pairs(const Problem& p) {
  return std::max(Walk<1>::scratch(p), p.training ? WalkBack<1>::scratch(p) : 0);
}

// The kernels convert Q, K and V by the rule of one type.
bool reads_pairs(const Problem& p) { return !p.kv_dtype && (p.dtype == TEA_BF16 || p.is_fp8()); }

template <class Body>
auto with_pair_type(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TEA_E4M3:
      return body(Number<TEA_E4M3>{});
    case TEA_E5M2:
      return body(Number<TEA_E5M2>{});
    default:
      return body(Number<TEA_BF16>{});
  }
}

// The AVX-512 kernels run the types whose numbers are not pairs of bf16.
void few_scores_pairs(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  if (!reads_pairs(view.p)) return kAvx512.single->few_scores(view, heads, columns);
  with_pair_type(view.p.dtype,
                 [&]<int T>(Number<T>) { scores_of<PairRows<T>>(view, heads, columns); });
}

void few_values_pairs(const View& view, std::span<FewHead<float>> heads, Columns columns) {
  if (!reads_pairs(view.p)) return kAvx512.single->few_values(view, heads, columns);
  with_pair_type(view.p.dtype,
                 [&]<int T>(Number<T>) { values_of<PairRows<T>>(view, heads, columns); });
}

constexpr Kernels<float> kPairKernels{scratch_pairs,     packed_bytes<1>,  pack_head<1>,
                                      attend_pairs,      finish<float>,    backward_pairs,
                                      store_keys<float>, few_scores_pairs, few_values_pairs};
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {
bool available() {
  return kAvx512.available() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}
bool multiplies(int32_t dtype) { return dtype == TEA_BF16; }
}  // namespace
const InstructionSet kAvx512Bf16{"cpu-avx512-bf16", available, &kPairKernels,
                                 nullptr,           &kAvx512,  multiplies};
}  // namespace tea::cpu
#endif

namespace tea::cpu {
bool pairs_are_fast() {
#if defined(__x86_64__)
  return kAvx512Bf16.available() && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

Attempt plan_avx512_bf16(const Problem& p, const Device& d) { return plan_with(kAvx512Bf16, p, d); }
}  // namespace tea::cpu
