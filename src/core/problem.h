// Problem: the value that describes an attention operation. It is imported from the caller, checked
// and normalised once, then never changed. It is compared and hashed as bytes; its text round-trips
// exactly.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "math/load_store.h"
#include "math/mask.h"
#include "te_attention.h"

namespace tea {

// The largest head dimensions; no engine computes gradients of larger ones than the second.
inline constexpr int32_t kMostDim = 1024, kMostDimOfTraining = 512;

// The type of a field, which determines the form of its text.
enum class Kind : uint8_t { kSize, kInt32, kInt64, kReal, kEnum, kBits };

struct Field {
  std::string_view name;
  size_t offset;
  Kind kind;
  int count;                                // number of values; strides have several
  std::span<const std::string_view> names;  // names of enum values 0.. or of bits 0..

  constexpr size_t bytes() const {
    const bool wide = kind == Kind::kInt64 || kind == Kind::kReal;
    return static_cast<size_t>(count) * (wide ? 8 : 4);
  }
};

// Every field of tea_problem, in order; engines, text and documentation are generated from it.
std::span<const Field> problem_fields();

struct Problem : tea_problem {
  bool operator==(const Problem& other) const;
  size_t hash() const;

  // "dtype=bf16 batch=2 heads_q=8 ...", without the fields that are zero.
  std::string text() const;
  // The inverse of text(); throws on an unknown field, a repeated one or a malformed value.
  static Problem parse(std::string_view text);

  // Applies the growth rules of te_attention.h.
  static Problem import(const tea_problem* caller);
  // Throws Error(TEA_INVALID) that names the field, the value seen and the value needed.
  void check() const;
  // The canonical form of a valid problem: synonyms removed, defaults folded to zero.
  Problem normalised() const;

  // The values of defaults.
  int32_t o_type() const { return o_dtype ? o_dtype : dtype; }
  int32_t dout_type() const { return dout_dtype ? dout_dtype : o_type(); }
  int32_t dqkv_type() const { return dqkv_dtype ? dqkv_dtype : dtype; }
  int32_t kv_type() const { return kv_dtype ? kv_dtype : dtype; }
  int32_t bias_type() const { return bias_dtype ? bias_dtype : is_fp8() ? TEA_FP32 : dtype; }
  // Of LSE and the other numbers that a row has, of the sink, its gradient and slopes.
  int32_t statistic_type() const { return dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32; }
  int32_t v_dim() const { return dim_v ? dim_v : dim_qk; }
  double scale_value() const;
  bool is_fp8() const { return tea::is_fp8(dtype); }  // Q, K and V, not K and V alone
  bool drops() const { return training && dropout > 0; }
  bool writes_lse() const { return training || (outputs & TEA_OUTPUT_LSE); }
  MaskRule mask() const { return {causal, bottom_right, window_left, window_right}; }
  // Whether sizes are specified by the run.
  bool varies_q() const { return q_form == TEA_RAGGED; }
  bool varies_kv() const { return kv_form == TEA_RAGGED || kv_form == TEA_PAGED; }
  bool varies() const { return varies_q() || varies_kv(); }
};

// The value of a field as text: "bf16", "17", "64,16,8"; for messages and refusals.
std::string value_text(const Problem& problem, const Field& field);

const char* dtype_name(int32_t dtype);
int dtype_bytes(int32_t dtype);

}  // namespace tea
