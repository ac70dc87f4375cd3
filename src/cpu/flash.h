// The fast engine of the CPU: tiled attention that trains with every option, in memory linear in
// the sequence lengths, on vectors as wide as the machine has.
#pragma once
#include <cstddef>
#include <span>

#include "core/engine.h"
#include "cpu/reference.h"
#include "cpu/schedule.h"

namespace tea::cpu {

inline constexpr int kPad = 16;  // rows are padded to whole vectors and tiles of any width

constexpr int64_t padded(int64_t dim) { return (dim + kPad - 1) / kPad * kPad; }

// The softmax of a block over some of its keys: O not yet divided, [dim_v][kRows]; by lane the
// largest logit and the sum of exponentials relative to it.
template <class Real>
struct Partial {
  Real *o, *max, *sum;
};

// The part of one kv head in an attention of few rows: its rows, logits [row][few_stride(columns)],
// maxima and results, and memory of few_scratch() for itself. `amax`: the largest P.
template <class Real>
struct FewHead {
  const RowBlock* block;
  Real* s;
  Partial<Real> out;
  Real* scratch;
  double amax;
};

// Results of forward in addition to its outputs.
struct Amax {
  double s = 0, o = 0;
};

// The memory to which backward adds: dK and dV of one kv head, [length][padded dim]; dsink by lane.
// If `dbias` is set, only the gradient of the bias is computed, with the two strides below (0 where
// it is summed).
template <class Real>
struct Gradients {
  Real *dk, *dv, *dbias;
  int64_t dbias_row, dbias_col;
  double dsink[kRows];
  double dp_amax, dq_amax;
};

enum class Pass { kForward, kBackward };

// The tiled algorithm for one instruction set and one type of arithmetic.
template <class Real>
struct Kernels {
  // How many Reals of scratch `attend` and `backward` need, aligned to a cache line and owned by
  // the calling thread.
  int64_t (*scratch)(const Problem&);
  // Where keys and values are rearranged once per kv head: the bytes of a head, and what packs keys
  // [first, first + kPackedKeys) of Group::visible into them. Null: they are read as they lie.
  int64_t (*packed_bytes)(const Problem&, const Group&, Pass);
  void (*pack)(const View&, const Group&, Pass, int64_t first, std::byte* packed);
  // Attends to `columns` of the block; initialises `out`.
  double (*attend)(const View&, const RowBlock&, Columns columns, Partial<Real> out, Real* scratch);
  // Divides, and writes O, LSE, MAX and SUM_EXP of the block. Returns the largest |O| (FP8 only).
  double (*finish)(const View&, const RowBlock&, Partial<Real> all);
  // Adds to `g`, and writes dQ of the block.
  void (*backward)(const View&, const RowBlock&, Gradients<Real>& g, Real* scratch);
  // Writes dK or dV of one head from [length][padded dim], which it may overwrite. Returns the
  // largest magnitude (FP8 only).
  double (*store_keys)(const View&, tea_tensor, tea_tensor scale, const Group&, Real* rows);
  // Blocks of few rows, where there are functions for them: the logits over `columns` and their
  // maxima; then, with out.max as large or larger, the rest of what `attend` does. Of several kv
  // heads of a sequence that follow each other: adjacent keys are read together.
  void (*few_scores)(const View&, std::span<FewHead<Real>> heads, Columns columns) = nullptr;
  void (*few_values)(const View&, std::span<FewHead<Real>> heads, Columns columns) = nullptr;
};
constexpr int64_t few_stride(Columns columns) {
  return columns.begin < columns.end ? (columns.end - columns.begin + kCols - 1) / kCols * kCols
                                     : 0;
}
inline constexpr int64_t kPackedKeys = 256;

// Q and O of few rows, in units of 64 elements.
inline int64_t few_scratch(const Problem& p) {
  const auto units = [](int64_t dim) { return (dim + 63) / 64 * 64; };
  return kFewRows * (units(p.dim_qk) + units(p.v_dim()));
}

template <class Real>
int64_t scratch_reals(const Problem& p) {
  const int64_t d = padded(p.dim_qk) + padded(p.v_dim());
  return 3 * d * kRows + d * kCols + 5 * int64_t{kCols} * kRows + 16 * kRows;
}

struct InstructionSet {
  const char* engine;  // the engine's name when it is chosen by hand
  bool (*available)();
  const Kernels<float>* single;
  const Kernels<double>* twice;
  // If need be: what runs all types but those that this set multiplies, and few rows, if it has no
  // kernel for them.
  const InstructionSet* others = nullptr;
  bool (*multiplies)(int32_t dtype) = nullptr;
};
extern const InstructionSet kAmx, kAvx512Bf16, kAvx512, kAvx2, kGeneric;

// Whether the engine prefers products of pairs of bf16 to multiply-adds of fp32. Intel's processors
// do half as many of them in a cycle, so that nothing is gained.
bool pairs_are_fast();

// The engine on one instruction set; refuses where the processor lacks it.
Attempt plan_with(const InstructionSet& set, const Problem& problem, const Device& device);

std::span<const Known> flash_known_fields();

Attempt plan_flash(const Problem& problem, const Device& device);
Attempt plan_amx(const Problem& problem, const Device& device);
Attempt plan_avx512_bf16(const Problem& problem, const Device& device);
Attempt plan_avx512(const Problem& problem, const Device& device);
Attempt plan_avx2(const Problem& problem, const Device& device);
Attempt plan_generic(const Problem& problem, const Device& device);

inline constexpr Engine kFlash{"cpu", flash_known_fields, plan_flash};
inline constexpr Engine kFlashAmx{"cpu-amx", flash_known_fields, plan_amx, nullptr, true};
inline constexpr Engine kFlashAvx512Bf16{"cpu-avx512-bf16", flash_known_fields, plan_avx512_bf16,
                                         nullptr, true};
inline constexpr Engine kFlashAvx512{"cpu-avx512", flash_known_fields, plan_avx512, nullptr, true};
inline constexpr Engine kFlashAvx2{"cpu-avx2", flash_known_fields, plan_avx2, nullptr, true};
inline constexpr Engine kFlashGeneric{"cpu-generic", flash_known_fields, plan_generic, nullptr,
                                      true};

}  // namespace tea::cpu
