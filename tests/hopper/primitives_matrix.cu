// Tests of wgmma.cuh: every width, type, order of operands and swizzle, on small integers, so that
// every sum is exact and results must be equal to the host's.
#include <cfloat>
#include <cmath>

#include "hopper/device/accumulator.cuh"
#include "hopper/device/wgmma.cuh"
#include "hopper/primitives.h"
#include "math/formats.h"

namespace tea::primitives {
namespace {

using namespace tea::hopper;

constexpr int kSteps = 4;  // instructions in a row, each 32 bytes of K

struct Product {
  WgmmaShape shape;
  Swizzle swizzle = Swizzle::k128;
  bool registers = false;  // A from registers
  constexpr int k() const { return kSteps * 32 / bytes(shape.a); }
  constexpr int elements() const { return width(swizzle) / bytes(shape.a); }  // of a row of a slab
  constexpr int operand_bytes(int outer) const { return outer * k() * bytes(shape.a); }
};

// Where step `step` of an operand with `outer` rows or columns starts, and its distance of slabs.
template <Product P>
TEA_DEVICE uint64_t operand(const void* p, Major major, int outer, int step) {
  constexpr int kWidth = width(P.swizzle);
  if (major == Major::kMN)
    return advance_descriptor(make_descriptor(p, P.swizzle, P.k() * kWidth), step * 16 * kWidth);
  const int at = step * 32;
  return advance_descriptor(make_descriptor(p, P.swizzle),
                            at / kWidth * outer * kWidth + at % kWidth);
}

// d[64][n] = a b, or old + a b. fragments: A as registers, [step][thread][4].
template <class C>
__global__ void multiply_once(const uint8_t* a, const uint8_t* b, const uint32_t* fragments,
                              float* d, bool sum) {
  constexpr Product P = C::kProduct;
  constexpr WgmmaShape S = P.shape;
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr int kA = P.operand_bytes(64), kB = P.operand_bytes(S.n);
  for (int i = threadIdx.x; i < kA; i += 128) shared[i] = a[i];
  for (int i = threadIdx.x; i < kB; i += 128) shared[kA + i] = b[i];
  fence_proxy_async();
  __syncthreads();
  float acc[S.n / 2];
#pragma unroll
  for (int i = 0; i < S.n / 2; ++i) acc[i] = d[accumulator_row(i) * S.n + accumulator_column(i)];
  uint32_t from[kSteps][4];
  for (int step = 0; step < kSteps; ++step)
    for (int r = 0; r < 4; ++r) from[step][r] = fragments[(step * 128 + threadIdx.x) * 4 + r];
  wgmma_fence_operand(acc);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t right = operand<P>(shared + kA, S.major_b, S.n, step);
    if constexpr (P.registers)
      wgmma<S>(acc, from[step], right, sum || step > 0);
    else
      wgmma<S>(acc, operand<P>(shared, S.major_a, 64, step), right, sum || step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(acc);
#pragma unroll
  for (int i = 0; i < S.n / 2; ++i) d[accumulator_row(i) * S.n + accumulator_column(i)] = acc[i];
}

uint16_t code(Type t, float x) {
  switch (t) {
    case Type::kBf16:
      return bf16_encode(x);
    case Type::kFp16:
      return fp16_encode(x);
    default:
      return fp8_encode(x, t == Type::kE4M3 ? kE4M3 : kE5M2);
  }
}

// An operand's bytes in shared memory; values[outer][k].
std::vector<uint8_t> image(const Product& p, Type type, Major major,
                           const std::vector<float>& values) {
  const int size = bytes(type), k = p.k(), outer = static_cast<int>(values.size()) / k;
  const int high = major == Major::kK ? outer : k;
  std::vector<uint8_t> out(values.size() * size);
  for (int o = 0; o < outer; ++o)
    for (int i = 0; i < k; ++i) {
      const int row = major == Major::kK ? o : i, at = major == Major::kK ? i : o;
      const int offset = at / p.elements() * high * width(p.swizzle) +
                         swizzled(p.swizzle, row, at % p.elements() * size);
      const uint16_t c = code(type, values[o * k + i]);
      for (int byte = 0; byte < size; ++byte) out[offset + byte] = c >> (8 * byte) & 0xFF;
    }
  return out;
}

// A's registers as PTX defines them: rows l/4 and 8 below, 4 bytes of K at 4(l%4) and 16 further.
std::vector<uint32_t> fragments(const Product& p, const std::vector<float>& a) {
  const int size = bytes(p.shape.a), per = 4 / size;
  std::vector<uint32_t> out(kSteps * 128 * 4, 0);
  for (int i = 0; i < static_cast<int>(out.size()); ++i) {
    const int step = i / 512, thread = i / 4 % 128, r = i % 4, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4 + r % 2 * 8;
    const int k = (step * 32 + r / 2 * 16) / size + lane % 4 * per;
    for (int e = 0; e < per; ++e)
      out[i] |= uint32_t{code(p.shape.a, a[row * p.k() + k + e])} << (8 * size * e);
  }
  return out;
}

template <class C>
void check(const char* name) {
  constexpr Product P = C::kProduct;
  const int n = P.shape.n, k = P.k();
  std::vector<float> a(64 * k), b(n * k), start(64 * n);
  for (auto* v : {&a, &b, &start})
    for (float& x : *v) x = static_cast<float>(random_int(-4, 4));
  const Buffer<uint8_t> device_a(image(P, P.shape.a, P.shape.major_a, a)),
      device_b(image(P, P.shape.b, P.shape.major_b, b));
  const Buffer<uint32_t> registers(fragments(P, a));
  for (const bool sum : {false, true}) {
    const Buffer<float> d(start);
    launch(multiply_once<C>, 1, 128, P.operand_bytes(64) + P.operand_bytes(n), device_a.data,
           device_b.data, registers.data, d.data, sum);
    finish(name);
    std::vector<float> want(64 * n);
    for (int i = 0; i < 64 * n; ++i) {
      want[i] = sum ? start[i] : 0;
      for (int j = 0; j < k; ++j) want[i] += a[i / n * k + j] * b[i % n * k + j];
    }
    expect(d.read() == want, std::string(name) + " n=" + std::to_string(n) + " swizzle=" +
                                 std::to_string(width(P.swizzle)) + " sum=" + std::to_string(sum));
  }
}

// A class-type value may be part of a kernel's type argument, but not its argument.
template <Product P>
struct With {
  static constexpr Product kProduct = P;
};

constexpr Major kS = Major::kK, kO = Major::kMN;
constexpr Type kBf = Type::kBf16, kHf = Type::kFp16, k4 = Type::kE4M3, k5 = Type::kE5M2;

template <int... kN>
void check_widths() {
  (check<With<Product{{kN, kBf, kBf, kS, kO}}>>("bf16"), ...);
  (check<With<Product{{kN, kBf, kBf}, Swizzle::k128, true}>>("bf16, A in registers"), ...);
  (check<With<Product{{kN, k4, k4}}>>("e4m3"), ...);
}

template <Type kType, Swizzle kSwizzle>
void check_orders() {
  check<With<Product{{64, kType, kType, kS, kS}, kSwizzle}>>("A summed, B summed");
  check<With<Product{{128, kType, kType, kS, kO}, kSwizzle}>>("A summed, B outer");
  check<With<Product{{64, kType, kType, kO, kS}, kSwizzle}>>("A outer, B summed");
  check<With<Product{{128, kType, kType, kO, kO}, kSwizzle}>>("A outer, B outer");
  check<With<Product{{128, kType, kType, kS, kO}, kSwizzle, true}>>("A in registers, B outer");
}

template <Type kA, Type kB>
void check_fp8() {
  check<With<Product{{128, kA, kB}}>>("fp8");
  check<With<Product{{64, kA, kB}, Swizzle::k64}>>("fp8");
  check<With<Product{{64, kA, kB}, Swizzle::k32, true}>>("fp8, A in registers");
}

// Each thread has a word of its consumer_blocks.
__global__ void follow_each(const float* x, uint32_t* out) {
  __shared__ uint32_t spare[8];
  spare[threadIdx.x] = 7;
  wait_after(x[threadIdx.x], spare[threadIdx.x]);
  out[threadIdx.x] = spare[threadIdx.x];
}

// No weight of a softmax is written down for; that a larger number is shows that the store exists.
void test_follow() {
  const Buffer<float> x({0, 0.5f, 1, 1.0000001f, -INFINITY, NAN, FLT_MAX, INFINITY});
  const Buffer<uint32_t> out(8);
  follow_each<<<1, 8>>>(x.data, out.data);
  finish("wait_after");
  expect(out.read() == std::vector<uint32_t>{7, 7, 7, 7, 7, 7, 0, 0}, "wait_after");
}

}  // namespace

void test_matrices() {
  test_follow();
  check_widths<64, 128, 192, 256>();
  // Not a multiple of a slab's 64 columns: only summed-major operands have such widths.
  check<With<Product{{16, kBf, kBf}}>>("bf16");
  check<With<Product{{80, kBf, kBf}}>>("bf16");
  check<With<Product{{96, kBf, kBf}}>>("bf16");
  check<With<Product{{112, kBf, kBf}}>>("bf16");
  check<With<Product{{144, kBf, kBf}}>>("bf16");
  check<With<Product{{160, kBf, kBf}}>>("bf16");
  check<With<Product{{176, kBf, kBf}}>>("bf16");
  check<With<Product{{208, kBf, kBf}}>>("bf16");
  check<With<Product{{224, k4, k4}}>>("e4m3");
  check<With<Product{{240, kHf, kHf}}>>("fp16");
  check<With<Product{{96, kBf, kBf, kS, kO}, Swizzle::k64}>>("bf16, outer-major B");
  check<With<Product{{80, kBf, kBf, kS, kO}, Swizzle::k32}>>("bf16, outer-major B");
  check_orders<kBf, Swizzle::k128>();
  check_orders<kBf, Swizzle::k64>();
  check_orders<kHf, Swizzle::k32>();
  check_fp8<k4, k4>();
  check_fp8<k4, k5>();
  check_fp8<k5, k4>();
  check_fp8<k5, k5>();
}

}  // namespace tea::primitives
