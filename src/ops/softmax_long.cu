// Softmax of long causal rows, most of whose bytes are zeros. TMA loads the next rows while one row
// is processed in shared memory, and stores the row and the zeros. From sm_90 on.
#include "gpu/bulk.cuh"
#include "ops/launch.cuh"
#include "ops/softmax.cuh"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kThreads = 256, kStages = 3, kMostBlocks = 4;
constexpr int kLine =
    128;  // bytes; the boundary between loaded and zero-filled parts is a multiple
constexpr int kZeros = 4 << 10;   // bytes per store of zeros
constexpr int kLeast = 16 << 10;  // minimum bytes of a row,
constexpr int kMost = 32 << 10;   // and maximum, limited by shared memory

struct Long {
  tea_scaled_softmax a;
  double scale;
  int64_t rows;
  int stage;  // bytes of the visible part of a row of one tensor
};

// Reduces over all threads of the CTA. `side` must not be written again before another barrier.
template <class Real, class Combine>
__device__ Real over_block(const Real (&sums)[kSums], Real* side, const Combine& combine) {
  Real value = combine(combine(sums[0], sums[1]), combine(sums[2], sums[3]));
  for (int offset = kWarp / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % kWarp == 0) side[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = side[threadIdx.x % (kThreads / kWarp)];
  for (int offset = kThreads / kWarp / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// Calls body(vector, elements from its first one on that are not masked) for each vector of a row.
template <int kSize, class Body>
__device__ __forceinline__ void for_each_vector(int bytes, int visible, const Body& body) {
#pragma unroll 2
  for (int v = threadIdx.x; v < bytes / 16; v += kThreads) body(v, visible - v * kSize);
}

// Softmax of one row in shared memory, in place.
template <class Stored, class Real>
__device__ __forceinline__ void forward_row(Stored* x, int bytes, int visible, double scale,
                                            Real (&sides)[2][kThreads / kWarp]) {
  using Vector = typename Stored::Numbers;
  constexpr int kSize = Vector::kSize;
  Real sums[kSums] = {};
  const auto load = [&](int v, int left) {
    Vector scores = x[v].numbers();
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores.x[i] *= static_cast<Real>(scale);
    if (left < kSize)
#pragma unroll
      for (int i = 0; i < kSize; ++i) scores.x[i] = i < left ? scores.x[i] : Real{-INFINITY};
    return scores;
  };
  Real most[kSums] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for_each_vector<kSize>(bytes, visible, [&](int v, int left) {
    const Vector scores = load(v, left);
#pragma unroll
    for (int i = 0; i < kSize; ++i) most[i % kSums] = Largest()(most[i % kSums], scores.x[i]);
  });
  const Real largest = over_block(most, sides[0], Largest());
  for_each_vector<kSize>(bytes, visible, [&](int v, int left) {
    const Vector scores = load(v, left);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i % kSums] += exponential(scores.x[i] - largest);
  });
  const Real factor = 1 / over_block(sums, sides[1], Plus());
  for_each_vector<kSize>(bytes, visible, [&](int v, int left) {
    Vector scores = load(v, left);
#pragma unroll
    for (int i = 0; i < kSize; ++i) scores.x[i] = exponential(scores.x[i] - largest) * factor;
    Stored out;
    out.set(scores);
    if (left < kSize) out.end_at(left);
    x[v] = out;
  });
}

// The gradient of one row in shared memory, in place of dy.
template <class Stored, class Real>
__device__ __forceinline__ void backward_row(const Stored* x, Stored* dy, int bytes, int visible,
                                             float scale, Real (&sides)[2][kThreads / kWarp]) {
  using Vector = typename Stored::Numbers;
  constexpr int kSize = Vector::kSize;
  Real sums[kSums] = {};
  const auto load = [&](const Stored& from, int left) {
    Stored stored = from;
    if (left < kSize) stored.end_at(left);
    return stored.numbers();
  };
  for_each_vector<kSize>(bytes, visible, [&](int v, int left) {
    const Vector y = load(x[v], left), d = load(dy[v], left);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i % kSums] += y.x[i] * d.x[i];
  });
  const Real sum = over_block(sums, sides[0], Plus());
  for_each_vector<kSize>(bytes, visible, [&](int v, int left) {
    const Vector y = x[v].numbers();
    Vector d = dy[v].numbers();
#pragma unroll
    for (int i = 0; i < kSize; ++i) d.x[i] = Real{scale} * y.x[i] * (d.x[i] - sum);
    Stored out;
    out.set(d);
    if (left < kSize) out.end_at(left);
    dy[v] = out;
  });
}

template <int32_t dtype, bool backward>
__global__ void __launch_bounds__(kThreads) softmax_long(const __grid_constant__ Long p) {
#if __CUDA_ARCH__ >= 900
  using Stored = RowVector<dtype, true>;
  using Vector = typename Stored::Numbers;
  using Real = typename Vector::Format::Real;
  constexpr int kSize = Vector::kSize, kBytes = 16 / kSize, kTensors = backward ? 2 : 1;
  const tea_scaled_softmax& a = p.a;
  extern __shared__ __align__(kLine) uint8_t memory[];  // zeros, then the stages
  __shared__ Barrier full[kStages];
  __shared__ Real sides[2][kThreads / kWarp];
  const auto stage_of = [&](int stage) { return memory + kZeros + stage * kTensors * p.stage; };
  const int row_bytes = static_cast<int>(a.cols) * kBytes;

  // The rows of this CTA, in descending order, because the last rows of a matrix are the longest.
  const auto line_of = [&](int64_t step) { return p.rows - 1 - blockIdx.x - step * gridDim.x; };
  const auto seen_by = [&](int64_t line) {
    return static_cast<int>(visible_count(a, line - quotient(line, a.rows) * a.rows));
  };
  const auto covered = [&](int seen) {
    return min((seen * kBytes + kLine - 1) / kLine * kLine, row_bytes);
  };
  // Called by one thread: requests the row of a step and stores its zeros.
  const auto request = [&](int64_t step) {
    const int64_t line = line_of(step);
    if (line < 0) return;
    const int bytes = covered(seen_by(line)), stage = static_cast<int>(step % kStages);
    const int64_t first = line * row_bytes;
    arrive_and_expect_tx(full[stage], kTensors * bytes);
    if (bytes) {
      bulk_load(stage_of(stage), static_cast<const char*>(a.input) + first, bytes, full[stage]);
      if (backward)
        bulk_load(stage_of(stage) + p.stage, static_cast<const char*>(a.dout) + first, bytes,
                  full[stage]);
    }
    for (int at = bytes; at < row_bytes; at += kZeros)
      bulk_store(static_cast<char*>(a.output) + first + at, memory, min(kZeros, row_bytes - at));
  };

  for (int i = threadIdx.x; i < kZeros / 16; i += kThreads)
    reinterpret_cast<uint4*>(memory)[i] = uint4{};
  fence_proxy_async();
  if (threadIdx.x == 0) {
    for (Barrier& barrier : full) init(barrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int step = 0; step < kStages - 1; ++step) request(step);

  int stage = 0;
  uint32_t parity = 0;
  for (int64_t step = 0; line_of(step) >= 0; ++step) {
    const int64_t line = line_of(step);
    const int seen = seen_by(line), bytes = covered(seen);
    auto* const x = reinterpret_cast<Stored*>(stage_of(stage));
    auto* const dy = reinterpret_cast<Stored*>(stage_of(stage) + (backward ? p.stage : 0));
    wait(full[stage], parity);
    if constexpr (backward)
      backward_row(x, dy, bytes, seen, a.scale, sides);
    else
      forward_row(x, bytes, seen, p.scale, sides);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (bytes) bulk_store(static_cast<char*>(a.output) + line * row_bytes, dy, bytes);
      bulk_commit();
      bulk_wait_read<1>();  // the previous row's stage has been read
      request(step + kStages - 1);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (threadIdx.x == 0) {
    bulk_commit();
    bulk_wait_read<0>();
  }
#endif
}

template <bool backward>
bool run(const tea_scaled_softmax& a, double scale, const Place& place) {
  const Device device = device_at(place.device);
  if (a.kind != TEA_SCORE_MASK_CAUSAL && a.kind != TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT) return false;
  bool ran = false;
  with_real(a.dtype, [&](auto dtype) {
    constexpr int kBytes = sizeof(typename Element<dtype()>::Bits);
    const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
    const int64_t row_bytes = a.cols * kBytes;
    const uint64_t places = bits(a.input) | bits(a.dout) | bits(a.output);
    Long p{a, scale, a.batch * a.heads * a.rows, 0};
    if (device.sm < 90 || row_bytes < kLeast || row_bytes > kMost || !p.rows ||
        access_bytes(places | static_cast<uint64_t>(row_bytes)) < 16)
      return;
    const int64_t most = std::max(visible_count(a, a.rows - 1), int64_t{1}) * kBytes;
    p.stage = static_cast<int>((most + kLine - 1) / kLine * kLine);
    const int shared = kZeros + kStages * (backward ? 2 : 1) * p.stage;
    if (shared + 1024 > device.shared_bytes) return;
    const int on_one = std::min(kMostBlocks, (device.shared_bytes + 1024) / (shared + 2048));
    static OncePerDevice allowed;
    const driver::OnDevice here(place.device);
    const Launch how = {"softmax_long",
                        dim3(static_cast<unsigned>(
                            std::min<int64_t>(p.rows, blocks_at_once(place, std::max(on_one, 1))))),
                        dim3(kThreads), shared};
    Launch most_shared = how;
    most_shared.shared = device.shared_bytes - 1024;
    allow_shared(most_shared, softmax_long<dtype(), backward>, allowed);
    tea::launch(how, softmax_long<dtype(), backward>, static_cast<cudaStream_t>(place.stream), p);
    ran = true;
  });
  return ran;
}

}  // namespace

bool long_softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  return run<false>(args, scale, place);
}
bool long_softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  return run<true>(args, 0, place);
}

}  // namespace tea
