// The validity rules of a Problem, and its canonical form.
#include <bit>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/geometry.h"
#include "core/growth.h"
#include "core/problem.h"

namespace tea {
namespace {

// Checks that depend only on a field's row of the table.
void check_enums(const Problem& p) {
  for (const Field& f : problem_fields()) {
    if (f.kind != Kind::kEnum && f.kind != Kind::kBits) continue;
    uint32_t value;
    std::memcpy(&value, reinterpret_cast<const char*>(&p) + f.offset, sizeof value);
    const uint32_t end = f.kind == Kind::kEnum ? static_cast<uint32_t>(f.names.size())
                                               : uint32_t{1} << f.names.size();
    if (value < end) continue;
    std::string known;
    for (const auto name : f.names) known += (known.empty() ? "" : ", ") + std::string(name);
    refuse_argument(std::string(f.name), value_text(p, f),
                    (f.kind == Kind::kEnum ? "one of " : "a sum of ") + known);
  }
}

uint32_t bit(int32_t dtype) { return 1u << dtype; }

void check_type(const char* name, int32_t dtype, uint32_t allowed) {
  if (!dtype || (allowed & bit(dtype))) return;
  std::string needed;
  for (int32_t t = TEA_FP16; t <= TEA_E5M2; ++t)
    if (allowed & bit(t)) needed += (needed.empty() ? "" : ", ") + std::string(dtype_name(t));
  refuse_argument(name, dtype_name(dtype), needed + " for this dtype");
}

void check_types(const Problem& p) {
  TEA_REQUIRE(p.dtype, "dtype", "default", "an explicit type");
  const uint32_t any8 =
      bit(TEA_FP16) | bit(TEA_BF16) | bit(TEA_FP32) | bit(TEA_E4M3) | bit(TEA_E5M2);
  // Partial results may be wider than the inputs, so that what is merged or summed is rounded once.
  const bool narrow = p.dtype == TEA_FP16 || p.dtype == TEA_BF16;
  const uint32_t io = p.is_fp8() ? any8 : bit(p.dtype) | (narrow ? bit(TEA_FP32) : 0);
  check_type("o_dtype", p.o_dtype, io);
  check_type("dout_dtype", p.dout_dtype, io);
  check_type("dqkv_dtype", p.dqkv_dtype, io);
  // A product of two types exists for 16-bit Q only.
  const uint32_t cache = narrow ? bit(TEA_E4M3) | bit(TEA_E5M2) : 0;
  check_type("kv_dtype", p.kv_dtype, bit(p.dtype) | cache);
  const bool mixed = p.kv_type() != p.dtype;
  TEA_REQUIRE(!mixed || !p.training, "training", p.training,
              "0: keys and values of another type (kv_dtype) have no gradient");
  TEA_REQUIRE(mixed || !p.kv_scale, "kv_scale", "head",
              "a kv_dtype that is not dtype: other scales are per tensor");
  check_type(
      "bias_dtype", p.bias_dtype,
      p.is_fp8() ? bit(TEA_FP16) | bit(TEA_BF16) | bit(TEA_FP32) : bit(p.dtype) | bit(TEA_FP32));
}

void check_dim(const Problem& p, const char* name, int32_t dim, bool required) {
  if (!dim && !required) return;
  const int32_t most = p.training ? kMostDimOfTraining : kMostDim, up = (dim + 7) / 8 * 8;
  const bool ok = dim > 0 && dim % 8 == 0 && dim <= most;
  const std::string limit = shown(most) + (p.training ? " with training = 1" : "");
  TEA_REQUIRE(ok, name, dim,
              dim > 0 && up <= most
                  ? "a multiple of 8, at most " + limit + " (pad to " + shown(up) +
                        (required ? " with zeros, and give scale: its default "
                                    "follows dim_qk)"
                                  : " with zeros)")
                  : "a multiple of 8 from 8 to " + limit);
}

void check_heads(const Problem& p) {
  TEA_REQUIRE(p.heads_q > 0, "heads_q", p.heads_q, "at least 1");
  TEA_REQUIRE(p.heads_kv > 0, "heads_kv", p.heads_kv, "at least 1");
  TEA_REQUIRE(p.heads_q % p.heads_kv == 0, "heads_q", p.heads_q,
              "a multiple of heads_kv, which is " + shown(p.heads_kv));
  check_dim(p, "dim_qk", p.dim_qk, true);
  check_dim(p, "dim_v", p.dim_v, false);
}

void check_size(const char* name, int64_t size, bool from_run) {
  TEA_REQUIRE(size >= 0, name, size, "0 or more");
  TEA_REQUIRE(!from_run || size == 0, name, size,
              "0: with a ragged or paged side this size is given in tea_run");
}

void check_forms(const Problem& p) {
  TEA_REQUIRE(p.q_form != TEA_PAGED, "q_form", "paged", "dense, padded or ragged");
  check_size("batch", p.batch, p.varies());
  check_size("seqlen_q", p.seqlen_q, p.varies_q());
  check_size("seqlen_kv", p.seqlen_kv, p.varies_kv());
  const bool paged = p.kv_form == TEA_PAGED,
             ragged = p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED;
  TEA_REQUIRE(!p.gaps || ragged, "gaps", p.gaps, "a ragged q_form or kv_form");
  TEA_REQUIRE(paged ? p.page_size > 0 : p.page_size == 0, "page_size", p.page_size,
              paged ? "at least 1" : "0 unless kv_form is paged");
  TEA_REQUIRE(!paged || !p.training, "training", p.training,
              "0: paged keys and values have no gradient (use ragged or padded ones)");
}

// Engines compute in fp32, but for fp64 problems. There a number that overflows would be infinite,
// and a soft cap that underflows would be none.
bool fits_arithmetic(const Problem& p, double x) {
  const auto rounded = static_cast<float>(x);
  return p.dtype == TEA_FP64 || (std::isfinite(rounded) && (rounded == 0) == (x == 0));
}
constexpr const char* kFp32Range = "a number in the range of fp32, unless dtype is fp64";

void check_numbers(const Problem& p) {
  TEA_REQUIRE(p.window_left >= 0, "window_left", p.window_left, "0 (none) or the bound + 1");
  TEA_REQUIRE(p.window_right >= 0, "window_right", p.window_right, "0 (none) or the bound + 1");
  TEA_REQUIRE(p.softcap >= 0 && std::isfinite(p.softcap), "softcap", p.softcap,
              "0 or more, finite");
  TEA_REQUIRE(p.dropout >= 0 && p.dropout < 1, "dropout", p.dropout, "at least 0 and below 1");
  TEA_REQUIRE(std::isfinite(p.scale), "scale", p.scale, "a finite number");
  TEA_REQUIRE(fits_arithmetic(p, p.softcap), "softcap", p.softcap, kFp32Range);
  TEA_REQUIRE(fits_arithmetic(p, p.scale), "scale", p.scale, kFp32Range);
  TEA_REQUIRE(p.has_scale || p.scale == 0, "scale", p.scale, "has_scale = 1, else 0");
  TEA_REQUIRE(p.max_ctas >= 0, "max_ctas", p.max_ctas, "0 (no limit) or more");
  const auto alignment = static_cast<uint32_t>(p.alignment);
  const auto element = static_cast<uint32_t>(dtype_bytes(p.dtype));
  TEA_REQUIRE(
      !alignment || (std::has_single_bit(alignment) && alignment >= element && p.alignment > 0),
      "alignment", p.alignment, "0 or a power of two, at least the size of an element");
}

bool set(const tea_strides& s) { return s.batch || s.seq || s.head; }
bool set(const tea_bias_strides& s) { return s.batch || s.head || s.row || s.col; }

// A field without effect is an error of the caller, and is refused.
void check_effects(const Problem& p) {
  const bool paged = p.kv_form == TEA_PAGED;
  const struct {
    const char* name;
    bool given, effective;
    const char* needed;
  } rows[] = {
      {"bias_broadcast", p.bias_broadcast != 0, p.bias != 0, "a bias"},
      {"bias_dtype", p.bias_dtype != 0, p.bias != 0, "a bias"},
      {"bias_stride", set(p.bias_stride), p.bias != 0, "a bias"},
      {"dbias_stride", set(p.dbias_stride), p.bias && p.training, "a bias and training = 1"},
      {"dout", set(p.dout), p.training != 0, "training = 1"},
      {"dq", set(p.dq), p.training != 0, "training = 1"},
      {"dk", set(p.dk), p.training != 0, "training = 1"},
      {"dv", set(p.dv), p.training != 0, "training = 1"},
      {"dout_dtype", p.dout_dtype != 0, p.training != 0, "training = 1"},
      {"dqkv_dtype", p.dqkv_dtype != 0, p.training != 0, "training = 1"},
      {"lse_gradient", p.lse_gradient != 0, p.training != 0, "training = 1"},
      {"lse", set(p.lse), p.outputs || p.training, "LSE, MAX or SUM_EXP among the outputs"},
      {"slopes_stride", p.slopes_stride != 0, p.alibi == TEA_ALIBI_SLOPES, "alibi = slopes"},
      {"table_k_stride", p.table_k_stride != 0, paged, "kv_form = paged"},
      {"table_v_stride", p.table_v_stride != 0, paged, "kv_form = paged"},
  };
  for (const auto& row : rows)
    if (row.given && !row.effective)
      for (const Field& f : problem_fields())
        if (f.name == row.name) refuse_argument(row.name, value_text(p, f), row.needed);
}

template <class T>
void fold(T& value, const T& synonym) {
  if (std::memcmp(&value, &synonym, sizeof value) == 0) value = T{};
}

void fold_mask(Problem& p) {
  if (p.causal && p.window_right) p.window_right = 0;  // causal already bounds the right side at 0
  if (p.window_right == 1) {
    p.window_right = 0;
    p.causal = 1;
  }
  const bool has_diagonal = p.causal || p.window_left || p.window_right || p.alibi;
  const bool dense = p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE;
  if (!has_diagonal || (dense && p.seqlen_q == p.seqlen_kv)) p.bottom_right = 0;
}

void fold_strides(Problem& p) {
  Problem defaults = p;
  const tea_strides none{};
  for (tea_strides* s : {&defaults.q, &defaults.k, &defaults.v, &defaults.o, &defaults.dout,
                         &defaults.dq, &defaults.dk, &defaults.dv, &defaults.lse})
    *s = none;
  defaults.bias_stride = defaults.dbias_stride = {};
  const Geometry g = default_geometry(defaults);
  fold(p.q, g.q), fold(p.k, g.k), fold(p.v, g.v), fold(p.o, g.o);
  fold(p.dout, g.dout), fold(p.dq, g.dq), fold(p.dk, g.dk), fold(p.dv, g.dv);
  fold(p.lse, g.lse);
  if (p.varies()) return;  // the default strides of a bias depend on sizes of the run
  fold(p.bias_stride, g.bias), fold(p.dbias_stride, g.dbias);
}

}  // namespace

Problem Problem::import(const tea_problem* caller) {
  Problem p{as_known(caller, {"problem", "tea_problem", "a tea_problem"})};
  p.struct_size = sizeof(tea_problem);
  return p;
}

void Problem::check() const {
  check_enums(*this);
  check_types(*this);
  check_heads(*this);
  check_forms(*this);
  check_numbers(*this);
  check_effects(*this);
  check_strides(*this);
  if (!varies()) geometry(*this, nullptr);
}

Problem Problem::normalised() const {
  Problem p = *this;
  if (!p.training) p.dropout = 0;
  // Negative zeros of other fields also become 0, so that they are the same key.
  for (double* x : {&p.softcap, &p.dropout, &p.scale})
    if (*x == 0) *x = 0;
  if (p.bias_dtype == (is_fp8() ? TEA_FP32 : dtype)) p.bias_dtype = 0;
  if (p.dout_dtype == o_type()) p.dout_dtype = 0;
  if (p.o_dtype == dtype) p.o_dtype = 0;
  if (p.dqkv_dtype == dtype) p.dqkv_dtype = 0;
  if (p.kv_dtype == dtype) p.kv_dtype = 0;
  if (p.dim_v == dim_qk) p.dim_v = 0;
  if (p.training) p.outputs &= ~TEA_OUTPUT_LSE;  // training always writes LSE
  if (p.alignment == kDefaultAlignment) p.alignment = 0;
  fold_mask(p);
  fold_strides(p);
  return p;
}

}  // namespace tea
