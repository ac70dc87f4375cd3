// Tests of ptx.cuh and barrier.cuh: one kernel per group of words.
#include <cmath>

#include "hopper/device/accumulator.cuh"
#include "hopper/device/pipeline.cuh"
#include "hopper/primitives.h"
#include "math/formats.h"

namespace tea::primitives {
namespace {

using namespace tea::hopper;

__global__ void functions(const float* x, float* exp2s, float* log2s, float* tanhs) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  exp2s[i] = exp2_fast(x[i]);
  log2s[i] = log2_fast(fabsf(x[i]));
  tanhs[i] = tanh_fast(x[i]);
}

void test_functions() {
  std::vector<float> x(4096);
  for (float& v : x) v = 8 * random_normal();
  const Buffer<float> in(x), exp2s(x.size()), log2s(x.size()), tanhs(x.size());
  functions<<<16, 256>>>(in.data, exp2s.data, log2s.data, tanhs.data);
  finish("functions");
  const auto e = exp2s.read(), l = log2s.read(), t = tanhs.read();
  double worst_e = 0, worst_l = 0, worst_t = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    worst_e = std::fmax(worst_e, std::fabs(e[i] / std::exp2(v) - 1));
    worst_l = std::fmax(worst_l, std::fabs(l[i] - std::log2(std::fabs(v))));
    worst_t = std::fmax(worst_t, std::fabs(t[i] - std::tanh(v)));
  }
  // PTX gives 2^-22 relative for both logarithm and power, and about 2^-11 for the tangent.
  expect(worst_e < 5e-7, "exp2_fast, worst " + std::to_string(worst_e * 1e9) + "e-9");
  expect(worst_l < 1e-6, "log2_fast, worst " + std::to_string(worst_l * 1e9) + "e-9");
  expect(worst_t < 1e-3, "tanh_fast, worst " + std::to_string(worst_t * 1e9) + "e-9");
}

__global__ void packs(const float* x, uint32_t* out) {
  const int i = threadIdx.x;
  const float a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2], d = x[4 * i + 3];
  out[4 * i] = pack<Type::kBf16>(a, b);
  out[4 * i + 1] = pack<Type::kFp16>(a, b);
  out[4 * i + 2] = pack<Type::kE4M3>(a, b, c, d);
  out[4 * i + 3] = pack<Type::kE5M2>(a, b, c, d);
}

void test_packs() {
  std::vector<float> x(4 * 256);
  for (float& v : x) v = std::ldexp(random_normal(), random_int(-12, 12));
  x[0] = INFINITY;
  x[1] = -INFINITY;
  const Buffer<float> in(x);
  const Buffer<uint32_t> out(x.size());
  packs<<<1, 256>>>(in.data, out.data);
  finish("packs");
  const auto got = out.read();
  int wrong[4] = {};
  for (int i = 0; i < 256; ++i) {
    const float* v = &x[4 * i];
    wrong[0] += got[4 * i] != (uint32_t{bf16_encode(v[1])} << 16 | bf16_encode(v[0]));
    wrong[1] += got[4 * i + 1] != (uint32_t{fp16_encode(v[1])} << 16 | fp16_encode(v[0]));
    for (int e = 0; e < 4; ++e) {
      wrong[2] += (got[4 * i + 2] >> 8 * e & 0xFF) != fp8_encode(v[e], kE4M3);
      wrong[3] += (got[4 * i + 3] >> 8 * e & 0xFF) != fp8_encode(v[e], kE5M2);
    }
  }
  const char* names[] = {"bf16", "fp16", "e4m3", "e5m2"};
  for (int i = 0; i < 4; ++i)
    expect(wrong[i] == 0, std::string("pack ") + names[i] + ": as src/math/formats.h rounds, " +
                              std::to_string(wrong[i]) + " differ");
}

// Lane l holds elements (l/4, 2(l%4)) and the next of an 8x8 matrix m[i][j] = 8i + j.
__global__ void transposes(uint32_t* out) {
  __shared__ __align__(16) uint16_t matrices[4][8][8];
  const int l = lane(), row = l / 4, column = l % 4 * 2;
  const uint32_t held = (8 * row + column) | (8 * row + column + 1) << 16;
  out[l] = movmatrix_trans(held);
  const uint32_t four[4] = {held, held + 0x00400040, held + 0x00800080, held + 0x00C000C0};
  const uint32_t at = shared_address(matrices[l / 8][l % 8]);
  stmatrix_x4_trans(at, four);
  __syncwarp();
  uint32_t back[4];
  ldmatrix_x4_trans(back, at);
  for (int i = 0; i < 4; ++i) out[32 + 32 * i + l] = back[i] == four[i];
  out[160 + l] = matrices[l / 8][l % 8][3] == 8 * 3 + l % 8 + 64 * (l / 8);
  __syncwarp();
  stmatrix_x4(at, four);
  __syncwarp();
  ldmatrix_x4(back, at);
  for (int i = 0; i < 4; ++i) out[192 + 32 * i + l] = back[i] == four[i];
  out[320 + l] = matrices[l / 8][l % 8][3] == 8 * (l % 8) + 3 + 64 * (l / 8);
}

void test_transposes() {
  const Buffer<uint32_t> out(352);
  transposes<<<1, 32>>>(out.data);
  finish("transposes");
  const auto got = out.read();
  bool moved = true, stored = true;
  for (uint32_t l = 0; l < 32; ++l) {
    const uint32_t row = l / 4, column = l % 4 * 2;
    moved = moved && got[l] == ((8 * column + row) | (8 * column + 8 + row) << 16);
  }
  for (int i = 32; i < 352; ++i) stored = stored && got[i] == 1;
  expect(moved, "movmatrix_trans");
  expect(stored, "stmatrix_x4 and ldmatrix_x4, plain and transposed");
}

// Warps of a block elect; warpgroups trade registers and meet at named barriers.
__global__ void __launch_bounds__(384, 1) roles(int* out) {
  __shared__ int elected, handed;
  if (threadIdx.x == 0) elected = handed = 0;
  __syncthreads();
  if (elect_one()) atomicAdd(&elected, 1);
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<24>();
    named_barrier_sync(2, 384);
    if (threadIdx.x == 0) handed = 42;
    __threadfence_block();
    named_barrier_arrive(1, 384);
  } else {
    warpgroup_reg_alloc<240>();
    named_barrier_arrive(2, 384);
    named_barrier_sync(1, 384);
    if (threadIdx.x == 128) {
      out[0] = elected;
      out[1] = handed;
    }
  }
}

void test_roles() {
  const Buffer<int> out(2);
  roles<<<1, 384>>>(out.data);
  finish("roles");
  expect(out.read()[0] == 12, "elect_one: one thread of each warp");
  expect(out.read()[1] == 42, "setmaxnreg, named_barrier_sync, named_barrier_arrive");
}

// A producer thread hands `count` numbers through a ring of three to 64 consumers, who add them up.
__global__ void ring_sum(int count, long long* out) {
  __shared__ Pipeline<3> ring;
  __shared__ volatile int value[3];
  if (threadIdx.x == 0) {
    ring.init(1, 64);
    fence_barrier_init();
  }
  __syncthreads();
  PipelineState<3> at;
  if (threadIdx.x < 32) {
    for (int i = 0; threadIdx.x == 0 && i < count; ++i, at.advance()) {
      ring.producer_acquire(at);
      value[at.stage] = i * i;
      arrive(ring.full[at.stage]);
    }
  } else {
    long long sum = 0;
    for (int i = 0; i < count; ++i, at.advance()) {
      ring.consumer_wait(at);
      sum += value[at.stage];
      ring.consumer_release(at);
    }
    out[threadIdx.x - 32] = sum;
  }
}

void test_ring() {
  const Buffer<long long> out(64);
  const long long count = 1000;
  ring_sum<<<1, 96>>>(static_cast<int>(count), out.data);
  finish("ring");
  const long long want = (count - 1) * count * (2 * count - 1) / 6;
  bool all = true;
  for (const long long sum : out.read()) all = all && sum == want;
  expect(all, "Pipeline: every consumer sees every stage of every pass");
}

// Each block of a pair writes into the other's memory and arrives at the other's barrier.
__global__ void __cluster_dims__(2) greet(int* out) {
  __shared__ Barrier signalled;
  __shared__ int word;
  if (threadIdx.x == 0) {
    init(signalled, 1);
    fence_barrier_init();
  }
  cluster_arrive();
  cluster_wait();
  const uint32_t other = cluster_cta_rank() ^ 1;
  if (threadIdx.x == 0) {
    asm volatile("st.shared::cluster.u32 [%0], %1;\n" ::"r"(
                     map_shared_address(shared_address(&word), other)),
                 "r"(100 + cluster_cta_rank())
                 : "memory");
    arrive_remote(signalled, other);
    while (!try_wait(signalled, 0)) {
    }
    asm volatile("fence.acq_rel.cluster;\n" ::: "memory");
    out[cluster_cta_rank()] = *const_cast<volatile int*>(&word);
  }
  cluster_arrive();
  cluster_wait();
}

void test_clusters() {
  const Buffer<int> out(2);
  greet<<<2, 32>>>(out.data);
  finish("clusters");
  expect(out.read() == std::vector<int>{101, 100}, "arrive_remote, map_shared_address");
}

}  // namespace

void test_ptx() {
  test_functions();
  test_packs();
  test_transposes();
  test_roles();
}

void test_barriers() {
  test_ring();
  test_clusters();
}

}  // namespace tea::primitives
