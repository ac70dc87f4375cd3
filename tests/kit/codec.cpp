// Encoding by arithmetic on doubles instead of bit tricks.
#include "kit/codec.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "te_attention.h"

namespace tea::kit {
namespace {

struct Format {
  int bytes, exponent, mantissa;
  bool infinity;  // all ones in the exponent are infinities and NaNs
  bool saturates;
};

constexpr Format kFormats[] = {{},
                               {2, 5, 10, true, false},   // fp16
                               {2, 8, 7, true, false},    // bf16
                               {4, 8, 23, true, false},   // fp32
                               {8, 11, 52, true, false},  // fp64
                               {1, 4, 3, false, true},    // e4m3
                               {1, 5, 2, true, true}};    // e5m2

const Format& format(int32_t dtype) { return kFormats[dtype]; }
int bias(const Format& f) { return (1 << (f.exponent - 1)) - 1; }
uint64_t ones(int n) { return (uint64_t{1} << n) - 1; }
uint64_t infinity_code(const Format& f) { return ones(f.exponent) << f.mantissa; }
uint64_t largest_code(const Format& f) {
  return f.infinity ? infinity_code(f) - 1 : ones(f.exponent + f.mantissa) - 1;
}

double magnitude(const Format& f, uint64_t code) {
  const uint64_t exponent = code >> f.mantissa, mantissa = code & ones(f.mantissa);
  if (f.infinity && exponent == ones(f.exponent))
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : std::numeric_limits<double>::infinity();
  if (!f.infinity && code == ones(f.exponent + f.mantissa))
    return std::numeric_limits<double>::quiet_NaN();
  const auto significand =
      static_cast<double>(exponent ? mantissa + (uint64_t{1} << f.mantissa) : mantissa);
  return std::ldexp(significand, static_cast<int>(exponent ? exponent : 1) - bias(f) - f.mantissa);
}

// decode() of every code of a small format, which is a float, made once: loads are most of what the
// kit does.
const std::vector<float>& all_codes(int32_t dtype) {
  static const std::array<std::vector<float>, std::size(kFormats)> tables = [] {
    std::array<std::vector<float>, std::size(kFormats)> out;
    for (const int32_t t : {TEA_FP16, TEA_BF16, TEA_E4M3, TEA_E5M2})
      for (uint64_t code = 0; code < uint64_t{1} << 8 * kFormats[t].bytes; ++code)
        out[static_cast<size_t>(t)].push_back(static_cast<float>(decode(t, code)));
    return out;
  }();
  return tables[static_cast<size_t>(dtype)];
}

}  // namespace

uint64_t encode(int32_t dtype, double x) {
  if (dtype == TEA_FP64) return std::bit_cast<uint64_t>(x);
  if (dtype == TEA_FP32) return std::bit_cast<uint32_t>(static_cast<float>(x));
  const Format& f = format(dtype);
  const uint64_t sign = uint64_t{std::signbit(x)} << (f.exponent + f.mantissa);
  if (std::isnan(x)) return sign | ones(f.exponent + f.mantissa);
  const double size = std::fabs(x);
  if (size == 0) return sign;
  const uint64_t over = f.saturates ? largest_code(f) : infinity_code(f);
  if (std::isinf(size)) return sign | over;
  // By bits and by a sum that rounds to an integer: calls of libm took much of the time of a check.
  const int lowest = 1 - bias(f);
  const int exponent =
      std::max(static_cast<int>(std::bit_cast<uint64_t>(size) >> 52) - 1023, lowest);
  if (exponent > bias(f) + 1) return sign | over;
  const auto power = static_cast<uint64_t>(f.mantissa - exponent + 1023) << 52;
  // The significand as an integer; subnormals fall out of the clamped exponent.
  const double significand = (size * std::bit_cast<double>(power) + 0x1p52) - 0x1p52;
  const uint64_t code =
      (static_cast<uint64_t>(exponent - lowest) << f.mantissa) + static_cast<uint64_t>(significand);
  return sign | (code > largest_code(f) ? over : code);
}

double decode(int32_t dtype, uint64_t bits) {
  const Format& f = format(dtype);
  const int width = f.exponent + f.mantissa;
  const double size = magnitude(f, bits & ones(width));
  return bits >> width & 1 ? -size : size;
}

int bytes_of(int32_t dtype) { return format(dtype).bytes; }
double largest_of(int32_t dtype) { return magnitude(format(dtype), largest_code(format(dtype))); }
double smallest_of(int32_t dtype) { return magnitude(format(dtype), 1); }

// Little endian, as every machine that the library runs on. Each width by itself: a copy of a
// size that the compiler does not know is a call.
void store(void* base, int32_t dtype, int64_t index, double x) {
  const auto bytes = static_cast<size_t>(bytes_of(dtype));
  const uint64_t bits = encode(dtype, x);
  char* const to = static_cast<char*>(base) + static_cast<size_t>(index) * bytes;
  switch (bytes) {
    case 1:
      std::memcpy(to, &bits, 1);
      break;
    case 2:
      std::memcpy(to, &bits, 2);
      break;
    case 4:
      std::memcpy(to, &bits, 4);
      break;
    default:
      std::memcpy(to, &bits, 8);
  }
}

namespace {
template <class T>
T value_at(const void* base, int64_t index) {
  T x;
  std::memcpy(&x, static_cast<const char*>(base) + static_cast<size_t>(index) * sizeof x, sizeof x);
  return x;
}
}  // namespace

double load(const void* base, int32_t dtype, int64_t index) {
  switch (bytes_of(dtype)) {
    case 1:
      return all_codes(dtype)[value_at<uint8_t>(base, index)];
    case 2:
      return all_codes(dtype)[value_at<uint16_t>(base, index)];
    case 4:
      return value_at<float>(base, index);
    default:
      return value_at<double>(base, index);
  }
}

}  // namespace tea::kit
