// The field table, and equality, hash and text, which are generated from it.
#include "core/problem.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/error.h"

namespace tea {
namespace {

constexpr std::string_view kDtypes[] = {"default", "fp16", "bf16", "fp32", "fp64", "e4m3", "e5m2"};
constexpr int kDtypeBytes[] = {0, 2, 2, 4, 8, 1, 1};
constexpr std::string_view kBool[] = {"0", "1"};
constexpr std::string_view kForms[] = {"dense", "padded", "ragged", "paged"};
constexpr std::string_view kBias[] = {"none", "pre_scale", "post_scale"};
constexpr std::string_view kAlibi[] = {"none", "standard", "slopes"};
constexpr std::string_view kSoftmax[] = {"vanilla", "off_by_one", "learnable"};
constexpr std::string_view kKvScale[] = {"tensor", "head"};
constexpr std::string_view kOutputs[] = {"lse", "max", "sum_exp"};
constexpr std::string_view kBroadcast[] = {"batch", "head", "row", "col"};

#define ROW(kind, name, count, names) \
  { #name, offsetof(tea_problem, name), Kind::kind, count, names }
#define PLAIN(kind, name) ROW(kind, name, 1, {})
#define NAMED(kind, name, names) ROW(kind, name, 1, names)
#define STRIDE(name, count) ROW(kInt64, name, count, {})
constexpr Field kFields[] = {
    PLAIN(kSize, struct_size),
    NAMED(kEnum, dtype, kDtypes),
    NAMED(kEnum, o_dtype, kDtypes),
    NAMED(kEnum, dout_dtype, kDtypes),
    NAMED(kEnum, dqkv_dtype, kDtypes),
    NAMED(kEnum, bias_dtype, kDtypes),
    NAMED(kEnum, training, kBool),
    NAMED(kEnum, deterministic, kBool),
    NAMED(kBits, outputs, kOutputs),
    NAMED(kEnum, lse_gradient, kBool),
    NAMED(kEnum, q_form, kForms),
    NAMED(kEnum, kv_form, kForms),
    NAMED(kEnum, gaps, kBool),
    PLAIN(kInt32, page_size),
    PLAIN(kInt32, heads_q),
    PLAIN(kInt32, heads_kv),
    PLAIN(kInt32, dim_qk),
    PLAIN(kInt32, dim_v),
    PLAIN(kInt64, batch),
    PLAIN(kInt64, seqlen_q),
    PLAIN(kInt64, seqlen_kv),
    NAMED(kEnum, causal, kBool),
    NAMED(kEnum, bottom_right, kBool),
    PLAIN(kInt64, window_left),
    PLAIN(kInt64, window_right),
    NAMED(kEnum, bias, kBias),
    NAMED(kBits, bias_broadcast, kBroadcast),
    NAMED(kEnum, alibi, kAlibi),
    NAMED(kEnum, softmax, kSoftmax),
    PLAIN(kReal, softcap),
    PLAIN(kReal, dropout),
    PLAIN(kReal, scale),
    NAMED(kEnum, has_scale, kBool),
    PLAIN(kInt32, alignment),
    STRIDE(q, 3),
    STRIDE(k, 3),
    STRIDE(v, 3),
    STRIDE(o, 3),
    STRIDE(dout, 3),
    STRIDE(dq, 3),
    STRIDE(dk, 3),
    STRIDE(dv, 3),
    STRIDE(lse, 3),
    STRIDE(bias_stride, 4),
    STRIDE(dbias_stride, 4),
    PLAIN(kInt64, slopes_stride),
    PLAIN(kInt64, table_k_stride),
    PLAIN(kInt64, table_v_stride),
    NAMED(kEnum, kv_dtype, kDtypes),
    NAMED(kEnum, kv_scale, kKvScale),
    NAMED(kEnum, batch_invariant, kBool),
    PLAIN(kInt32, max_ctas),
};
#undef ROW
#undef PLAIN
#undef NAMED
#undef STRIDE

// A field added to tea_problem but not to this table, or a padding byte, fails to compile.
constexpr bool covers_every_byte() {
  size_t end = 0;
  for (const Field& f : kFields) {
    if (f.offset != end) return false;
    end += f.bytes();
  }
  return end == sizeof(tea_problem);
}
static_assert(covers_every_byte(), "kFields must list every field of tea_problem, in order");
static_assert(sizeof(Problem) == sizeof(tea_problem) && std::is_trivially_copyable_v<Problem>);
static_assert(sizeof(tea_problem) == 488, "the layout of tea_problem is frozen; it may only grow");

template <class T>
T get(const Problem& p, const Field& f, int i) {
  T x;
  std::memcpy(&x, reinterpret_cast<const char*>(&p) + f.offset + sizeof(T) * static_cast<size_t>(i),
              sizeof x);
  return x;
}
template <class T>
void set(Problem& p, const Field& f, int i, T x) {
  std::memcpy(reinterpret_cast<char*>(&p) + f.offset + sizeof(T) * static_cast<size_t>(i), &x,
              sizeof x);
}

bool is_zero(const Problem& p, const Field& f) {
  const char* at = reinterpret_cast<const char*>(&p) + f.offset;
  for (size_t i = 0; i < f.bytes(); ++i)
    if (at[i]) return false;
  return true;
}

template <class T>
std::string number_text(T x) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x);  // shortest that round-trips
  return {buffer, end.ptr};
}

std::string bits_text(uint32_t bits, std::span<const std::string_view> names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i)
    if (bits >> i & 1) out += (out.empty() ? "" : "+") + std::string(names[i]);
  if (const uint32_t rest = bits >> names.size() << names.size(); rest || out.empty())
    out += (out.empty() ? "" : "+") + number_text(rest);
  return out;
}

std::string enum_text(int32_t value, std::span<const std::string_view> names) {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? std::string(names[index]) : number_text(value);
}

std::string one_value(const Problem& p, const Field& f, int i) {
  switch (f.kind) {
    case Kind::kInt64:
      return number_text(get<int64_t>(p, f, i));
    case Kind::kReal:
      return number_text(get<double>(p, f, i));
    case Kind::kEnum:
      return enum_text(get<int32_t>(p, f, i), f.names);
    case Kind::kBits:
      return bits_text(get<uint32_t>(p, f, i), f.names);
    case Kind::kInt32:
      return number_text(get<int32_t>(p, f, i));
    case Kind::kSize:
      break;
  }
  return number_text(get<uint32_t>(p, f, i));
}

[[noreturn]] void malformed(std::string_view word, const std::string& needed) {
  throw Error(TEA_INVALID, "problem text: \"" + std::string(word) + "\": needs " + needed);
}

// Whether all of the text is a number, which it then stores.
template <class T>
bool reads(std::string_view text, T& x) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  return error == std::errc() && end == text.data() + text.size();
}

template <class T>
T number(std::string_view word, std::string_view value) {
  T x{};
  if (!reads(value, x))
    malformed(word, std::is_floating_point_v<T> ? "a number" : "an integer that fits the field");
  return x;
}

std::string joined(std::span<const std::string_view> names) {
  std::string out;
  for (const auto name : names) out += (out.empty() ? "one of " : ", ") + std::string(name);
  return out;
}

// A name of the list, or an integer (the text of an unknown value).
int32_t named(std::string_view word, std::string_view value,
              std::span<const std::string_view> names) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == value) return static_cast<int32_t>(i);
  int32_t x;
  if (!reads(value, x)) malformed(word, joined(names));
  return x;
}

uint32_t named_bits(std::string_view word, std::string_view value,
                    std::span<const std::string_view> names) {
  uint32_t bits = 0;
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find('+', begin), value.size());
    const std::string_view name = value.substr(begin, end - begin);
    uint32_t bit = 0;
    for (size_t i = 0; i < names.size(); ++i)
      if (names[i] == name) bit = 1u << i;
    if (!bit && !reads(name, bit)) malformed(word, joined(names) + ", joined by +");
    bits |= bit;
    begin = end + 1;
  }
  return bits;
}

void set_value(Problem& p, const Field& f, int i, std::string_view word, std::string_view value) {
  switch (f.kind) {
    case Kind::kInt64:
      return set(p, f, i, number<int64_t>(word, value));
    case Kind::kReal:
      return set(p, f, i, number<double>(word, value));
    case Kind::kEnum:
      return set(p, f, i, named(word, value, f.names));
    case Kind::kBits:
      return set(p, f, i, named_bits(word, value, f.names));
    case Kind::kInt32:
      return set(p, f, i, number<int32_t>(word, value));
    case Kind::kSize:
      return set(p, f, i, number<uint32_t>(word, value));
  }
}

void parse_word(Problem& p, std::string_view word, uint64_t& seen) {
  const size_t equals = word.find('=');
  const Field* field = nullptr;
  for (const Field& f : kFields)
    if (f.kind != Kind::kSize && f.name == word.substr(0, equals)) field = &f;
  if (!field || equals == word.npos) malformed(word, "field=value with a field of tea_problem");
  const uint64_t bit = uint64_t{1} << (field - kFields);
  if (seen & bit) malformed(word, "each field once");
  seen |= bit;
  std::string_view values = word.substr(equals + 1);
  for (int i = 0; i < field->count; ++i) {
    const size_t comma = values.find(',');
    if ((comma == values.npos) != (i == field->count - 1))
      malformed(word, number_text(field->count) + " values separated by commas");
    set_value(p, *field, i, word, values.substr(0, comma));
    if (comma != values.npos) values.remove_prefix(comma + 1);
  }
}

}  // namespace

std::span<const Field> problem_fields() { return kFields; }

bool Problem::operator==(const Problem& other) const {
  return std::memcmp(this, &other, sizeof *this) == 0;
}

// Multiply and fold. A Problem is looked up in every call, so the words are distributed over four
// sums with independent dependency chains.
size_t Problem::hash() const {
  constexpr size_t kChains = 4;
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
  uint64_t chain[kChains] = {1, 2, 3, 4}, word;
  for (size_t i = 0; i < sizeof *this / sizeof word; ++i) {
    std::memcpy(&word, reinterpret_cast<const char*>(this) + i * sizeof word, sizeof word);
    uint64_t& h = chain[i % kChains];
    h = (h ^ word) * kFactor;
    h ^= h >> 32;
  }
  uint64_t h = 0;
  for (const uint64_t x : chain) h = (h ^ x) * kFactor, h ^= h >> 32;
  return h;
}
static_assert(sizeof(Problem) % sizeof(uint64_t) == 0, "hash() reads whole words");

std::string value_text(const Problem& p, const Field& f) {
  std::string out;
  for (int i = 0; i < f.count; ++i) out += (i ? "," : "") + one_value(p, f, i);
  return out;
}

std::string Problem::text() const {
  std::string out;
  for (const Field& f : kFields) {
    if (f.kind == Kind::kSize || is_zero(*this, f)) continue;
    out += (out.empty() ? "" : " ") + std::string(f.name) + "=" + value_text(*this, f);
  }
  return out;
}

Problem Problem::parse(std::string_view text) {
  Problem p{};
  p.struct_size = sizeof(tea_problem);
  uint64_t seen = 0;
  static_assert(std::size(kFields) <= 64);
  while (true) {
    const size_t begin = text.find_first_not_of(" \t\r\n");
    if (begin == text.npos) return p;
    text.remove_prefix(begin);
    const std::string_view word = text.substr(0, text.find_first_of(" \t\r\n"));
    parse_word(p, word, seen);
    text.remove_prefix(word.size());
  }
}

double Problem::scale_value() const {
  return has_scale ? scale : 1.0 / std::sqrt(static_cast<double>(dim_qk));
}

const char* dtype_name(int32_t dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kDtypes) ? kDtypes[index].data() : "unknown";
}

int dtype_bytes(int32_t dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < std::size(kDtypeBytes) ? kDtypeBytes[index] : 0;
}

}  // namespace tea
