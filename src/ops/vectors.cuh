// Vectors of elements in registers: loaded and stored with the widest accesses that their alignment
// permits, and converted with the GPU's conversion instructions. The values are those of
// math/formats.h, except that the sign of a NaN may be lost.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "math/formats.h"
#include "te_attention.h"

namespace tea {

// Real: the type of arithmetic. Small formats convert two elements with one instruction.
template <int32_t dtype>
struct Element;

template <>
struct Element<TEA_FP16> {
  using Bits = uint16_t;
  using Real = float;
  __device__ static float decode(Bits x) { return __half2float(__ushort_as_half(x)); }
  __device__ static float2 decode_pair(uint32_t x) {
    return __half22float2(__halves2half2(__ushort_as_half(static_cast<Bits>(x)),
                                         __ushort_as_half(static_cast<Bits>(x >> 16))));
  }
  __device__ static Bits encode(float x) { return __half_as_ushort(__float2half_rn(x)); }
  __device__ static uint32_t encode(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return uint32_t{__half_as_ushort(pair.y)} << 16 | __half_as_ushort(pair.x);
  }
};

template <>
struct Element<TEA_BF16> {
  using Bits = uint16_t;
  using Real = float;
  __device__ static float decode(Bits x) { return bf16_decode(x); }
  __device__ static float2 decode_pair(uint32_t x) {
    return {bits_float(x << 16), bits_float(x & 0xFFFF0000u)};
  }
  __device__ static Bits encode(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  __device__ static uint32_t encode(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return uint32_t{__bfloat16_as_ushort(pair.y)} << 16 | __bfloat16_as_ushort(pair.x);
  }
};

template <class Number>
struct PlainElement {
  using Bits = Number;
  using Real = Number;
  __device__ static Number decode(Bits x) { return x; }
  __device__ static Bits encode(Number x) { return x; }
};
template <>
struct Element<TEA_FP32> : PlainElement<float> {};
template <>
struct Element<TEA_FP64> : PlainElement<double> {};

template <__nv_fp8_interpretation_t kind>
struct Fp8Element {
  using Bits = uint8_t;
  using Real = float;
  __device__ static float decode(Bits x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, kind)));
  }
  __device__ static float2 decode_pair(uint16_t x) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(x, kind)));
  }
  __device__ static Bits encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind); }
  __device__ static uint16_t encode(float low, float high) {
    return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, kind);
  }
};
template <>
struct Element<TEA_E4M3> : Fp8Element<__NV_E4M3> {};
template <>
struct Element<TEA_E5M2> : Fp8Element<__NV_E5M2> {};

// Calls body with a value of the widest type whose size divides `bytes` and is at most `access`.
template <int bytes, class Body>
__device__ __forceinline__ void with_unit(int access, const Body& body) {
  if (bytes % 16 == 0 && access >= 16) return body(uint4{});
  if (bytes % 8 == 0 && access >= 8) return body(uint2{});
  if (bytes % 4 == 0 && access >= 4) return body(uint32_t{});
  if (bytes % 2 == 0 && access >= 2) return body(uint16_t{});
  body(uint8_t{});
}

// Loads and stores kSize elements, of which memory has `left`; the others are 0. `access`: maximum
// bytes of one access.
template <class Bits, int kSize>
__device__ __forceinline__ void load_bits(Bits (&to)[kSize], const Bits* from, int64_t left,
                                          int access) {
  if (left >= kSize)
    with_unit<kSize * sizeof(Bits)>(access, [&](auto unit) {
      using Unit = decltype(unit);
#pragma unroll
      for (int i = 0; i < int(kSize * sizeof(Bits) / sizeof(Unit)); ++i)
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    });
  else
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = i < left ? from[i] : Bits{};
}
template <class Bits, int kSize>
__device__ __forceinline__ void store_bits(Bits* to, const Bits (&from)[kSize], int64_t left,
                                           int access) {
  if (left >= kSize)
    with_unit<kSize * sizeof(Bits)>(access, [&](auto unit) {
      using Unit = decltype(unit);
#pragma unroll
      for (int i = 0; i < int(kSize * sizeof(Bits) / sizeof(Unit)); ++i)
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    });
  else
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i < left) to[i] = from[i];
}

// Conversion in both directions between memory's format, in pairs, and numbers.
template <class Format, int kSize>
__device__ __forceinline__ void decode(const typename Format::Bits (&bits)[kSize],
                                       typename Format::Real (&to)[kSize]) {
  if constexpr (sizeof(typename Format::Bits) <= 2) {
    using Pair = std::conditional_t<sizeof(typename Format::Bits) == 2, uint32_t, uint16_t>;
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 both = Format::decode_pair(reinterpret_cast<const Pair*>(bits)[i / 2]);
      to[i] = both.x, to[i + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = Format::decode(bits[i]);
  }
}
template <class Format, int kSize>
__device__ __forceinline__ void encode(const typename Format::Real (&x)[kSize],
                                       typename Format::Bits (&to)[kSize]) {
  if constexpr (sizeof(typename Format::Bits) <= 2) {
    using Pair = std::conditional_t<sizeof(typename Format::Bits) == 2, uint32_t, uint16_t>;
#pragma unroll
    for (int i = 0; i < kSize; i += 2)
      reinterpret_cast<Pair*>(to)[i / 2] = Format::encode(x[i], x[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = Format::encode(x[i]);
  }
}

// `count` elements, by default those of one access of 16 bytes.
template <int32_t dtype, int count = 16 / sizeof(typename Element<dtype>::Bits)>
struct VectorOf {
  using Format = Element<dtype>;
  using Bits = typename Format::Bits;
  static constexpr int kSize = count;
  typename Format::Real x[kSize];

  __device__ void load(const Bits* from, int64_t left, int access) {
    alignas(16) Bits bits[kSize];
    load_bits(bits, from, left, access);
    decode<Format>(bits, x);
  }

  __device__ void store(Bits* to, int64_t left, int access) const {
    alignas(16) Bits bits[kSize];
    encode<Format>(x, bits);
    store_bits(to, bits, left, access);
  }
  // Stores all elements, to an address aligned to their size or to 16 bytes. The intrinsic is
  // needed, because the compiler splits some 16-byte assignments into words.
  __device__ void store_whole(Bits* to) const {
    constexpr int kBytes = sizeof(Bits) * kSize;
    using Unit = std::conditional_t<kBytes % 16 == 0, uint4,
                                    std::conditional_t<kBytes == 8, uint2, uint32_t>>;
    static_assert(kBytes % sizeof(Unit) == 0);
    alignas(16) Bits bits[kSize];
    encode<Format>(x, bits);
#pragma unroll
    for (int i = 0; i < int(kBytes / sizeof(Unit)); ++i)
      __stwb(reinterpret_cast<Unit*>(to) + i, reinterpret_cast<const Unit*>(bits)[i]);
  }
};

// A vector of a row in its memory format, so that several loads can be outstanding before the first
// conversion. wide: the row and its parts are aligned to 16 bytes, so that a vector is either
// complete or absent; otherwise elements are accessed one by one. (Separate kernels keep both
// short: code for every alignment does not fit the instruction cache.)
template <int32_t dtype, bool wide>
struct alignas(16) RowVector {
  using Numbers = VectorOf<dtype>;
  using Bits = typename Numbers::Bits;
  static constexpr int kSize = Numbers::kSize;
  uint32_t word[4];  // words, because 16-bit elements would take a register each

  // `left`: the remaining elements of the row from here.
  __device__ void load(const Bits* from, int64_t left) {
    if constexpr (wide) {
      *this = left > 0 ? *reinterpret_cast<const RowVector*>(from) : RowVector{};
    } else {
      load_bits(reinterpret_cast<Bits(&)[kSize]>(word), from, left, sizeof(Bits));
    }
  }
  // The intrinsic is needed, because the compiler splits some 16-byte assignments into words.
  __device__ void store(Bits* to, int64_t left) const {
    if constexpr (!wide)
      store_bits(to, reinterpret_cast<const Bits(&)[kSize]>(word), left, sizeof(Bits));
    else if (left > 0)
      __stwb(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(word));
  }

  // Sets all but the first `left` elements to 0.
  __device__ void end_at(int left) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bits = max(left * static_cast<int>(8 * sizeof(Bits)) - 32 * i, 0);
      uint32_t ones;
      asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(ones) : "r"(bits));
      word[i] &= ones;
    }
  }
  // Forces the compiler to keep the packed bits, not the converted numbers, which need more
  // registers.
  __device__ void keep() {
#pragma unroll
    for (uint32_t& w : word) asm volatile("" : "+r"(w));
  }
  __device__ Numbers numbers() const {
    Numbers to;
    decode<typename Numbers::Format>(reinterpret_cast<const Bits(&)[kSize]>(word), to.x);
    return to;
  }
  __device__ void set(const Numbers& from) {
    encode<typename Numbers::Format>(from.x, reinterpret_cast<Bits(&)[kSize]>(word));
  }
};

// Calls body with the dtype as a compile-time constant: fp16, bf16, fp32 or fp64.
template <class Body>
void with_real(int32_t dtype, const Body& body) {
  switch (dtype) {
    case TEA_FP16:
      return body(std::integral_constant<int32_t, TEA_FP16>());
    case TEA_BF16:
      return body(std::integral_constant<int32_t, TEA_BF16>());
    case TEA_FP32:
      return body(std::integral_constant<int32_t, TEA_FP32>());
    default:
      return body(std::integral_constant<int32_t, TEA_FP64>());
  }
}
template <class Body>
void with_bool(bool value, const Body& body) {
  if (value)
    body(std::true_type());
  else
    body(std::false_type());
}
template <class Body>
void with_fp8(int32_t dtype, const Body& body) {
  if (dtype == TEA_E4M3)
    body(std::integral_constant<int32_t, TEA_E4M3>());
  else
    body(std::integral_constant<int32_t, TEA_E5M2>());
}

}  // namespace tea
