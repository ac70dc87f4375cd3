// Decoding: loads of elements of a row of K or V as floats, in any type, and what is done to them.
// Included once per instruction set, after flash_kernel.h.
#pragma once

typedef uint16_t VH __attribute__((vector_size(kBytes / 2)));
typedef int8_t VB __attribute__((vector_size(kBytes / 4)));

inline constexpr int kVector = kLanes<float>;
inline constexpr int kLine = 64;  // bytes of a cache line
inline constexpr int kHeld = 4;   // rows whose sums are in registers at a time
// Of keys that are worked on while the next are fetched; but at least kVector keys of each head
// that takes its turn.
inline constexpr int64_t kBytesAtOnce = 8192;

constexpr bool is_e4m3(int32_t dtype) { return dtype == TEA_E4M3; }
// E4M3 becomes half by its bits, whose exponent is biased by 8 more.
constexpr float unit_of(int32_t dtype) { return is_e4m3(dtype) ? 256 : 1; }

template <class Vec>
TEA_PRIMITIVE Vec read(const char* from) {
  Vec v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

#ifndef TEA_HALVES_TO_FLOATS  // a set without instructions for it
#define TEA_HALVES_TO_FLOATS(x) from_halves(x)
#define TEA_U16_TO_U32(x) __builtin_convertvector(x, VU)
#define TEA_I8_TO_I16(x) __builtin_convertvector(x, VH)
TEA_PRIMITIVE VF from_halves(VH halves) {
  VF out{};
  for (int i = 0; i < kVector; ++i) out[i] = fp16_decode(halves[i]);
  return out;
}
#endif

// kVector elements as floats, in units of unit_of(T).
template <int32_t T>
TEA_PRIMITIVE VF widen(const char* from) {
  if constexpr (T == TEA_FP32) {
    return read<VF>(from);
  } else if constexpr (T == TEA_BF16) {
    return (VF)(TEA_U16_TO_U32(read<VH>(from)) << 16);
  } else if constexpr (T == TEA_FP16) {
    return TEA_HALVES_TO_FLOATS(read<VH>(from));
  } else {
    const VH code = TEA_I8_TO_I16(read<VB>(from));
    if constexpr (T == TEA_E5M2) return TEA_HALVES_TO_FLOATS(code << 8);
    // The sign is above the exponent's highest bit, which only the NaN, all ones, turns on.
    const VH half = code << 7, top = (half & 0x3F80) + 0x80;
    return TEA_HALVES_TO_FLOATS((half & 0xBFFF) | (top & 0x4000));
  }
}

template <int32_t T>
inline constexpr int64_t kElementBytes = T == TEA_FP32                    ? 4
                                         : T == TEA_FP16 || T == TEA_BF16 ? 2
                                                                          : 1;

// The elements of a row from `at` on. The last vector may reach beyond the row, where it is zero.
template <int32_t T>
TEA_PRIMITIVE VF elements(const char* row, int64_t at) {
  return widen<T>(row + at * kElementBytes<T>);
}
template <int32_t T>
TEA_PRIMITIVE VF last_elements(const char* row, int64_t at, int64_t dim) {
  constexpr int64_t bytes = kElementBytes<T>;
  char rest[kVector * bytes] = {};
  std::memcpy(rest, row + at * bytes, static_cast<size_t>((dim - at) * bytes));
  return widen<T>(rest);
}

// Prefetches keys into the L2 cache, line by line, while others are processed. Kernels read several
// keys at a time, but memory serves this order three times faster.
// Not into the first: then each line waits in one of the few places for what that cache misses, and
// the processor no longer fetches on its own.
class Fetch {
 public:
  Fetch(const char* const* keys, int64_t count, int64_t bytes)
      : key_(keys), end_(keys + count), bytes_(bytes) {}
  inline __attribute__((always_inline)) void lines(int64_t count) {
    for (int64_t i = 0; i < count && key_ != end_; ++i) {
      __builtin_prefetch(*key_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, ++key_;
    }
  }
  void rest() {
    while (key_ != end_) lines(1);
  }

 private:
  const char *const *key_, *const *const end_;
  const int64_t bytes_;
  int64_t at_ = 0;
};

// From two vectors the sums of both halves of each block of 2 n lanes: a's, then b's.
template <int n, int... lane>
TEA_PRIMITIVE VF fold(VF a, VF b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane % (2 * n) < n ? lane : lane - n + kVector)...) +
         __builtin_shufflevector(a, b, (lane % (2 * n) < n ? lane + n : lane + kVector)...);
}

// Lane i of the result: the sum of the lanes of v[i].
template <int n = kVector / 2>
TEA_PRIMITIVE VF sums_of_lanes(VF (&v)[kVector]) {
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i)
    v[i] = fold<n>(v[i], v[i + n], std::make_integer_sequence<int, kVector>{});
  if constexpr (n == 1)
    return v[0];
  else
    return sums_of_lanes<n / 2>(v);
}

// x >= 0 as an fp8 type holds it: to nearest even, saturated; NaN stays.
TEA_PRIMITIVE VF rounded_to_fp8(VF x, int32_t dtype) {
  const int dropped = is_e4m3(dtype) ? 20 : 21;                    // bits of the significand
  const VF smallest = splat(is_e4m3(dtype) ? 0x1p-6f : 0x1p-14f);  // of full precision
  const VF magic = splat(is_e4m3(dtype) ? 0x1.8p14f : 0x1.8p7f);   // its last bit is a subnormal's
  const VU bits = (VU)x, half = VU{} + ((1u << (dropped - 1)) - 1);
  const VU normal = (bits + half + (bits >> dropped & 1)) >> dropped << dropped;
  const VF rounded = x < smallest ? (x + magic) - magic : (VF)normal;
  return x == x ? at_most(rounded, splat(is_e4m3(dtype) ? 448.0f : 57344.0f)) : x;
}

template <class Body>
void with_type(int32_t dtype, Body&& body) {
  switch (dtype) {
    case TEA_FP32:
      return body(std::integral_constant<int32_t, TEA_FP32>{});
    case TEA_BF16:
      return body(std::integral_constant<int32_t, TEA_BF16>{});
    case TEA_FP16:
      return body(std::integral_constant<int32_t, TEA_FP16>{});
    case TEA_E4M3:
      return body(std::integral_constant<int32_t, TEA_E4M3>{});
    default:
      return body(std::integral_constant<int32_t, TEA_E5M2>{});
  }
}

// Rows in the largest groups that their sums fit.
template <class Body>
void by_rows(int count, Body&& body) {
  int row = 0;
  for (; row + kHeld <= count; row += kHeld) body(row, std::integral_constant<int, kHeld>{});
  for (; row + 2 <= count; row += 2) body(row, std::integral_constant<int, 2>{});
  for (; row < count; ++row) body(row, std::integral_constant<int, 1>{});
}
