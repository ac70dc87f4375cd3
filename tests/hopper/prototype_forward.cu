// A first forward pass in the words of src/hopper/device: bf16, head dimension 128, full or causal,
// checked on sampled rows against double precision and timed.
//
// A block owns 128 query rows of one head. Warpgroup 0 is the producer: one thread copies Q, and K
// and V in blocks of kCols keys, last block first, each through a ring of two stages. Warpgroups 1
// and 2 own 64 rows each and take turns: while one has the matrix units, the other does softmax.
// Within one, the scores of a block are computed while the block before is multiplied with V.
// O leaves through Q's shared memory, which is free by then.
#include <algorithm>
#include <cmath>

#include "hopper/device/scheduler.cuh"
#include "hopper/device/softmax.cuh"
#include "hopper/device/wgmma.cuh"
#include "hopper/tensor_map.h"
#include "hopper/words.h"
#include "math/formats.h"

namespace tea::words {
namespace {

using namespace tea::hopper;

constexpr int kRows = 128, kDim = 128, kThreads = 384;
constexpr Swizzle kSwizzle = Swizzle::k128;
constexpr int kSlab = width(kSwizzle);  // bytes of a row of a slab: 64 values

struct Config {
  int cols;
  bool causal;
};

struct Parameters {
  TensorMap q, k, v, o;
  float* lse;  // [batch][heads][rows_q]
  TileOrder order;
  int rows_q, rows_kv;
  float scale_log2;
};

enum NamedBarrier { kFirstTurn = 1, kFirstOwn = 3 };  // two of each, by consumer

template <Config C>
struct Forward {
  static constexpr int kTileBytes = C.cols * kDim * 2;
  using Scores = float[C.cols / 2];
  using Weights = uint32_t[C.cols / 16][4];
  using Output = float[kDim / 2];

  struct Smem {
    alignas(1024) uint8_t q[kRows * kDim * 2];
    alignas(1024) uint8_t k[2][kTileBytes];
    alignas(1024) uint8_t v[2][kTileBytes];
    Ring<1> ring_q;
    Ring<2> ring_k, ring_v;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "the shared-memory plan does not fit");

  static TEA_DEVICE int blocks(const Parameters& p, const Tile& t) {
    const int visible = t.row_block * kRows + kRows + p.rows_kv - p.rows_q;
    const int keys = C.causal ? min(visible, p.rows_kv) : p.rows_kv;
    return (keys + C.cols - 1) / C.cols;
  }

  // One tile of keys or values in two slabs.
  static TEA_DEVICE void load_keys(void* to, const TensorMap& map, Barrier& full, int row,
                                   const Tile& t) {
    for (int slab = 0; slab < 2; ++slab)
      load(static_cast<uint8_t*>(to) + slab * C.cols * kSlab, map, full,
           {64 * slab, row, t.head, t.batch}, Cache::kEvictLast);
  }

  static TEA_DEVICE void produce(const Parameters& p, Smem& s) {
    Position<1> at_q;
    Position<2> at_k, at_v;
    const auto load_k = [&](int block, const Tile& t) {
      s.ring_k.wait_empty(at_k);
      s.ring_k.fill(at_k, kTileBytes);
      load_keys(s.k[at_k.stage], p.k, s.ring_k.full[at_k.stage], block * C.cols, t);
      at_k.advance();
    };
    const auto load_v = [&](int block, const Tile& t) {
      s.ring_v.wait_empty(at_v);
      s.ring_v.fill(at_v, kTileBytes);
      load_keys(s.v[at_v.stage], p.v, s.ring_v.full[at_v.stage], block * C.cols, t);
      at_v.advance();
    };
    StaticTiles tiles;
    for (int n = tiles.take(); n < p.order.count(); n = tiles.take()) {
      const Tile t = p.order.at(n);
      s.ring_q.wait_empty(at_q);
      s.ring_q.fill(at_q, sizeof s.q);
      for (int slab = 0; slab < 2; ++slab)
        load(s.q + slab * kRows * kSlab, p.q, s.ring_q.full[0],
             {64 * slab, t.row_block * kRows, t.head, t.batch}, Cache::kEvictFirst);
      at_q.advance();
      const int count = blocks(p, t);
      load_k(count - 1, t);
      for (int block = count - 2; block >= 0; --block) {
        load_k(block, t);
        load_v(block + 1, t);
      }
      load_v(0, t);
    }
  }

  // s = q k^T, issued.
  static TEA_DEVICE void multiply_qk(Scores& scores, const uint8_t* q, const uint8_t* k) {
    const uint64_t left = descriptor(q, kSwizzle), right = descriptor(k, kSwizzle);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int slab = step / 4, at = step % 4 * 32;
      multiply<Shape{C.cols, Type::kBf16, Type::kBf16}>(
          scores, advanced(left, slab * kRows * kSlab + at),
          advanced(right, slab * C.cols * kSlab + at), step > 0);
    }
    matrix_commit();
  }
  // o += p v, issued.
  static TEA_DEVICE void multiply_pv(Output& o, const Weights& p, const uint8_t* v) {
    const uint64_t right = descriptor(v, kSwizzle, C.cols * kSlab);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < C.cols / 16; ++step)
      multiply<Shape{kDim, Type::kBf16, Type::kBf16, Major::kSummed, Major::kOuter}>(
          o, p[step], advanced(right, step * 16 * kSlab), true);
    matrix_commit();
  }

  // Columns beyond the keys, or beyond the diagonal, where the block holds any.
  static TEA_DEVICE void mask(Scores& scores, const Parameters& p, int first_row, int block) {
    const int column = block * C.cols;
    const int end = C.causal ? min(p.rows_kv, first_row + 1 + p.rows_kv - p.rows_q) : p.rows_kv;
    if (column + C.cols <= end) return;
#pragma unroll
    for (int i = 0; i < C.cols / 2; ++i) {
      const int c = column + column_of(i);
      const int row_end =
          C.causal ? min(p.rows_kv, first_row + row_of(i) + 1 + p.rows_kv - p.rows_q) : p.rows_kv;
      if (c >= row_end) scores[i] = kMinusInfinity;
    }
  }

  static TEA_DEVICE void weigh(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int c = 0; c < C.cols / 16; ++c) columns_as_operand<Type::kBf16>(weights[c], scores, c);
  }

  // The normalised rows leave; Q's memory is handed back once the copy engine has read it.
  static TEA_DEVICE void finish(const Parameters& p, Smem& s, const Tile& t, int consumer,
                                Output& o, OnlineSoftmax& softmax) {
    float factor[2], lse[2];
    softmax.finish(factor, lse);
    scale_rows(o, factor);
    const int first_row = t.row_block * kRows + 64 * consumer;
    const int64_t head = int64_t{t.batch} * p.order.heads + t.head;
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + row_of(2 * r);
      if (lane() % 4 == 0 && row < p.rows_q) p.lse[head * p.rows_q + row] = lse[r];
    }
    store_tile<Type::kBf16>({s.q, kSwizzle, kRows}, 64 * consumer, o);
    fence_shared_to_async();
    named_sync(kFirstOwn + consumer, 128);
    if (threadIdx.x % 128 != 0) return;
    for (int slab = 0; slab < 2; ++slab)
      store(p.o, s.q + slab * kRows * kSlab + 64 * consumer * kSlab,
            {64 * slab, first_row, t.head, t.batch});
    commit_stores();
    wait_stores_read<0>();
    arrive(s.ring_q.empty[0]);
  }

  static TEA_DEVICE void consume(const Parameters& p, Smem& s, int consumer) {
    Position<1> at_q;
    Position<2> at_k, at_v;
    const uint8_t* q = s.q + 64 * consumer * kSlab;
    if (consumer == 1) named_arrive(kFirstTurn, 256);  // the other goes first
    StaticTiles tiles;
    for (int n = tiles.take(); n < p.order.count(); n = tiles.take()) {
      const Tile t = p.order.at(n);
      const int first_row = t.row_block * kRows + 64 * consumer;
      OnlineSoftmax softmax;
      softmax.start();
      Scores scores;
      Weights weights;
      Output o = {};
      float shrink[2];
      int block = blocks(p, t) - 1;
      s.ring_q.wait_full(at_q);
      at_q.advance();
      s.ring_k.wait_full(at_k);
      multiply_qk(scores, q, s.k[at_k.stage]);
      matrix_wait<0>();
      pin(scores);
      s.ring_k.release(at_k);
      at_k.advance();
      mask(scores, p, first_row, block);
      softmax.update(scores, p.scale_log2, shrink);
      weigh(weights, scores);
      for (--block; block >= 0; --block) {
        s.ring_k.wait_full(at_k);
        named_sync(kFirstTurn + consumer, 256);
        multiply_qk(scores, q, s.k[at_k.stage]);
        s.ring_v.wait_full(at_v);
        pin(o);
        multiply_pv(o, weights, s.v[at_v.stage]);
        named_arrive(kFirstTurn + 1 - consumer, 256);
        matrix_wait<1>();
        pin(scores);
        s.ring_k.release(at_k);
        at_k.advance();
        mask(scores, p, first_row, block);
        softmax.update(scores, p.scale_log2, shrink);
        matrix_wait<0>();
        pin(o);
        s.ring_v.release(at_v);
        at_v.advance();
        scale_rows(o, shrink);
        weigh(weights, scores);
      }
      s.ring_v.wait_full(at_v);
      pin(o);
      multiply_pv(o, weights, s.v[at_v.stage]);
      matrix_wait<0>();
      pin(o);
      s.ring_v.release(at_v);
      at_v.advance();
      finish(p, s, t, consumer, o, softmax);
    }
  }

  static TEA_DEVICE void body(const Parameters& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Smem& s = *reinterpret_cast<Smem*>(memory);
    if (threadIdx.x == 0) {
      s.ring_q.start(1, 2);
      s.ring_k.start(1, 256);
      s.ring_v.start(1, 256);
      publish_barriers();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (group == 0) {
      shrink_registers<24>();
      if (threadIdx.x == 0) produce(p, s);
    } else {
      grow_registers<240>();
      consume(p, s, group - 1);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) entry(const __grid_constant__ Parameters p) {
  Kernel::body(p);
}

struct Dims {
  int batch, heads, rows_q, rows_kv;
  size_t q_size() const { return size_t{1} * batch * rows_q * heads * kDim; }
  size_t kv_size() const { return size_t{1} * batch * rows_kv * heads * kDim; }
};

TensorMap map_of(const Buffer<uint16_t>& x, const Dims& d, int rows, int box_rows) {
  const uint64_t head = kDim * 2, row = d.heads * head, entry = rows * row;
  const MapShape shape = {Type::kBf16,
                          kSwizzle,
                          4,
                          {kDim, static_cast<uint64_t>(rows), static_cast<uint64_t>(d.heads),
                           static_cast<uint64_t>(d.batch)},
                          {0, row, head, entry},
                          {64, static_cast<uint32_t>(box_rows), 1, 1}};
  TensorMap map;
  expect(encode(&map, x.data, shape) == 0, "encode");
  return map;
}

std::vector<uint16_t> random_bf16(size_t n) {
  std::vector<uint16_t> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = i < 1 << 22 ? bf16_encode(random_normal()) : v[i - 4194301];
  return v;
}

struct Data {
  Dims d;
  std::vector<uint16_t> q, k, v;
  Buffer<uint16_t> device_q, device_k, device_v, o;
  Buffer<float> lse;
  explicit Data(const Dims& dims)
      : d(dims),
        q(random_bf16(d.q_size())),
        k(random_bf16(d.kv_size())),
        v(random_bf16(d.kv_size())),
        device_q(q),
        device_k(k),
        device_v(v),
        o(d.q_size()),
        lse(size_t{1} * d.batch * d.heads * d.rows_q) {}
};

// The worst error of sampled rows relative to a row's norm, and of their LSE.
void check(const Data& x, bool causal, const std::string& name) {
  const auto o = x.o.read();
  const auto lse = x.lse.read();
  double worst = 0, worst_lse = 0;
  for (int sample = 0; sample < 60; ++sample) {
    const int b = random_int(0, x.d.batch - 1), h = random_int(0, x.d.heads - 1);
    const int row = sample == 0 ? 0 : sample == 1 ? x.d.rows_q - 1 : random_int(0, x.d.rows_q - 1);
    const int keys = causal ? row + 1 + x.d.rows_kv - x.d.rows_q : x.d.rows_kv;
    const auto at = [&](const std::vector<uint16_t>& t, int rows, int r, int c) {
      return double{bf16_decode(t[((size_t{1} * b * rows + r) * x.d.heads + h) * kDim + c])};
    };
    std::vector<double> score(keys), want(kDim, 0);
    double top = -INFINITY, total = 0, error = 0, norm = 0;
    for (int key = 0; key < keys; ++key) {
      for (int c = 0; c < kDim; ++c)
        score[key] += at(x.q, x.d.rows_q, row, c) * at(x.k, x.d.rows_kv, key, c);
      score[key] /= std::sqrt(double{kDim});
      top = std::max(top, score[key]);
    }
    for (int key = 0; key < keys; ++key) {
      const double weight = std::exp(score[key] - top);
      total += weight;
      for (int c = 0; c < kDim; ++c) want[c] += weight * at(x.v, x.d.rows_kv, key, c);
    }
    for (int c = 0; c < kDim; ++c) {
      error += std::pow(at(o, x.d.rows_q, row, c) - want[c] / total, 2);
      norm += std::pow(want[c] / total, 2);
    }
    const double off = std::sqrt(error / norm);
    worst = std::isnan(off) ? INFINITY : std::max(worst, off);
    const double lse_off =
        std::fabs(lse[(size_t{1} * b * x.d.heads + h) * x.d.rows_q + row] - top - std::log(total));
    worst_lse = std::isnan(lse_off) ? INFINITY : std::max(worst_lse, lse_off);
  }
  // bf16 weights and output: 2^-9 each, somewhat averaged.
  expect(worst < 8e-3, name + ": relative error " + std::to_string(worst));
  expect(worst_lse < 1e-4, name + ": LSE error " + std::to_string(worst_lse));
  printf("%s: relative error %.2e, LSE error %.2e\n", name.c_str(), worst, worst_lse);
}

template <class Kernel>
double median_ms(const Parameters& p, int blocks, int repeats) {
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) {
    cudaEventRecord(start);
    launch(entry<Kernel>, blocks, kThreads, sizeof(typename Kernel::Smem), p);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    times.push_back(0);
    cudaEventElapsedTime(&times.back(), start, end);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <Config C>
void run(const Dims& d, int repeats) {
  const Data x(d);
  const int tiles = (d.rows_q + kRows - 1) / kRows;
  const Parameters p = {map_of(x.device_q, d, d.rows_q, kRows),
                        map_of(x.device_k, d, d.rows_kv, C.cols),
                        map_of(x.device_v, d, d.rows_kv, C.cols),
                        map_of(x.o, d, d.rows_q, 64),
                        x.lse.data,
                        {tiles, d.heads, d.batch, C.causal ? 4 : 1, C.causal},
                        d.rows_q,
                        d.rows_kv,
                        kLog2E / std::sqrt(float{kDim})};
  const std::string name = std::to_string(d.batch) + " x " + std::to_string(d.heads) + " x " +
                           std::to_string(d.rows_q) + " x " + std::to_string(d.rows_kv) +
                           (C.causal ? " causal, " : " full, ") + std::to_string(C.cols) +
                           " columns";
  const int blocks = std::min(132, p.order.count());
  launch(entry<Forward<C>>, blocks, kThreads, sizeof(typename Forward<C>::Smem), p);
  finish(name);
  check(x, C.causal, name);
  if (!repeats) return;
  const double ms = median_ms<Forward<C>>(p, blocks, repeats);
  const double flop = 4.0 * d.rows_q * d.rows_kv * kDim * d.heads * d.batch / (C.causal ? 2 : 1);
  printf("{\"fact\": \"prototype %s\", \"holds\": true, \"ms\": %.4f, \"tflops\": %.1f}\n",
         name.c_str(), ms, flop / ms / 1e9);
}

}  // namespace
}  // namespace tea::words

int main() {
  using namespace tea::words;
  run<Config{176, false}>({2, 3, 200, 500}, 0);
  run<Config{128, true}>({2, 3, 200, 500}, 0);
  run<Config{128, false}>({1, 2, 1, 1}, 0);
  run<Config{128, true}>({1, 5, 1000, 1000}, 0);
  for (const int rows : {512, 2048, 4096, 16384}) {
    const Dims d = {16384 / rows, 16, rows, rows};
    run<Config{176, false}>(d, 30);
    run<Config{128, false}>(d, 30);
    run<Config{128, true}>(d, 30);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
