// The forward pass on sm_90a for 16-bit types: FlashAttention-3's plan (Shah et al., 2024) in the
// words of device/.
//
// A block of threads stays on its processor and takes tile after tile; a tile is 64 query rows for
// each of its consumer warpgroups, of one head. Warpgroup 0 is the producer: one thread claims
// tiles and copies Q, and K and V in blocks of `cols` keys, last block first, through rings.
//
//   producer     K3 Q | K2 V3 | K1 V2 | K0 V1 | V0 | K3 Q of the next tile
//   consumer 0   S3    | S2 and O += P3 V3, softmax 2 | S1 and O += P2 V2, softmax 1 | ...
//   consumer 1           S3 | ... half a step later, so that one has the matrix units while the
//                other does softmax: with `turns`, named barriers pass the turn around.
//
// Shared memory: q[q_stages][consumers], each 64 rows, reused for O on its way out; k[2]; v[2]; the
// barriers. Tiles lie in slabs, one swizzle wide.
#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "hopper/device/scheduler.cuh"
#include "hopper/device/softmax.cuh"
#include "hopper/device/wgmma.cuh"
#include "hopper/forward.h"
#include "hopper/tensor_map.h"

namespace tea::hopper {
namespace {

// One row of the table: a shape of tile that fits the registers and the shared memory.
struct Row {
  int dim, dim_v, consumers, cols, q_stages;
  bool turns;          // consumers take turns at the matrix units
  bool rescale_early;  // O shrinks while the next scores are computed, else once O is there
  bool skips = false;  // a consumer hands back blocks that none of its own rows sees
};

constexpr Row kTable[] = {
    // dim  v  consumers cols q_stages turns early
    {64, 64, 3, 128, 2, true, false},   {96, 96, 2, 128, 2, true, false},
    {128, 128, 2, 128, 2, true, false}, {192, 128, 2, 128, 1, false, true},
    {192, 192, 2, 112, 1, false, true}, {256, 256, 2, 80, 1, false, true},
};

// What names a kernel. `masked`: the band is bounded, so that any block may need the mask.
struct Config {
  Row row;
  Type type;
  bool masked;
};

struct Parameters {
  TensorMap q, k, v, o;
  Strided lse;
  TileOrder order;
  Band band;
  int* counter;  // null: tiles are dealt round
  int rows_q, rows_kv, group;
  float scale_log2;
};

// Blocks of keys that a tile attends to.
struct Blocks {
  int begin, end;
};

enum NamedBarrier { kFirstTurn = 1, kFirstOwn = 4 };  // one of each per consumer

template <Config C>
struct Kernel {
  static constexpr int kDim = C.row.dim, kDimV = C.row.dim_v, kCols = C.row.cols;
  static constexpr int kConsumers = C.row.consumers, kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 + 128 * kConsumers;
  static constexpr Swizzle kSwizzle = kDim % 64 == 0 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlab = width(kSwizzle), kSlabDim = kSlab / 2;
  static_assert(kDim % kSlabDim == 0 && kDimV % kSlabDim == 0 && kDimV <= kDim);
  using Scores = float[kCols / 2];
  using Weights = uint32_t[kCols / 16][4];
  using Output = float[kDimV / 2];

  struct Smem {
    alignas(1024) uint8_t q[C.row.q_stages][kConsumers][64 * kDim * 2];
    alignas(1024) uint8_t k[2][kCols * kDim * 2];
    alignas(1024) uint8_t v[2][kCols * kDimV * 2];
    Ring<C.row.q_stages> ring_q[kConsumers];
    Ring<2> ring_k, ring_v;
    TileMail mail;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "the shared-memory plan does not fit");

  // Of `rows` rows from `first` on.
  static TEA_DEVICE Blocks blocks(const Parameters& p, int first, int rows) {
    if constexpr (!C.masked) return {0, (p.rows_kv + kCols - 1) / kCols};
    const int last = min(first + rows, p.rows_q) - 1;
    const int64_t begin = visible_columns(p.band, first, p.rows_kv).begin;
    const int64_t end = visible_columns(p.band, last, p.rows_kv).end;
    if (begin >= end) return {0, 0};
    return {static_cast<int>(begin) / kCols, (static_cast<int>(end) + kCols - 1) / kCols};
  }

  struct Producer {
    const Parameters& p;
    Smem& s;
    Position<C.row.q_stages> at_q{};
    Position<2> at_k{}, at_v{}, at_mail{};

    // A tile of `rows` rows in slabs.
    template <int kDims, int kHeight>
    TEA_DEVICE void load_slabs(uint8_t* to, const TensorMap& map, Barrier& full, int row, int head,
                               int batch, Cache cache) {
#pragma unroll
      for (int slab = 0; slab < kDims / kSlabDim; ++slab)
        load(to + slab * kHeight * kSlab, map, full, {slab * kSlabDim, row, head, batch}, cache);
    }
    TEA_DEVICE void load_q(const Tile& t) {
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        s.ring_q[c].wait_empty(at_q);
        s.ring_q[c].fill(at_q, 64 * kDim * 2);
        load_slabs<kDim, 64>(s.q[at_q.stage][c], p.q, s.ring_q[c].full[at_q.stage],
                             t.row_block * kRows + 64 * c, t.head, t.batch, Cache::kEvictFirst);
      }
      at_q.advance();
    }
    TEA_DEVICE void load_k(const Tile& t, int block) {
      s.ring_k.wait_empty(at_k);
      s.ring_k.fill(at_k, kCols * kDim * 2);
      load_slabs<kDim, kCols>(s.k[at_k.stage], p.k, s.ring_k.full[at_k.stage], block * kCols,
                              t.head / p.group, t.batch, Cache::kEvictLast);
      at_k.advance();
    }
    TEA_DEVICE void load_v(const Tile& t, int block) {
      s.ring_v.wait_empty(at_v);
      s.ring_v.fill(at_v, kCols * kDimV * 2);
      load_slabs<kDimV, kCols>(s.v[at_v.stage], p.v, s.ring_v.full[at_v.stage], block * kCols,
                               t.head / p.group, t.batch, Cache::kEvictLast);
      at_v.advance();
    }
    TEA_DEVICE int claim(int tile) {
      const int blocks = static_cast<int>(gridDim.x);
      return p.counter ? blocks + claim_tile(p.counter) : tile + blocks;
    }
    TEA_DEVICE void run() {
      int tile = static_cast<int>(blockIdx.x);
      while (tile < p.order.count()) {
        s.mail.post(at_mail, tile);
        const Tile t = p.order.at(tile);
        tile = claim(tile);  // its latency hides behind the loads
        const Blocks b = blocks(p, t.row_block * kRows, kRows);
        if (b.begin == b.end) {
          load_q(t);
          continue;
        }
        load_k(t, b.end - 1);  // before Q, whose memory may be in use for longer
        load_q(t);
        for (int block = b.end - 1; block > b.begin; --block) {
          load_k(t, block - 1);
          load_v(t, block);
        }
        load_v(t, b.begin);
      }
      s.mail.post(at_mail, tile);  // past the last: the consumers stop
    }
  };

  struct Consumer {
    const Parameters& p;
    Smem& s;
    const int number;
    Position<C.row.q_stages> at_q{};
    Position<2> at_k{}, at_v{}, at_mail{};

    TEA_DEVICE void wait_turn() {
      if constexpr (C.row.turns) named_sync(kFirstTurn + number, 256);
    }
    TEA_DEVICE void pass_turn() {
      if constexpr (C.row.turns)
        named_arrive(kFirstTurn + (number + 1 == kConsumers ? 0 : number + 1), 256);
    }
    // The matrix units have read it; one thread of each warp says so.
    TEA_DEVICE void release(Ring<2>& ring, Position<2>& at) {
      if (lane() == 0) ring.release(at);
      at.advance();
    }

    // scores = q k^T, issued; K is there.
    TEA_DEVICE void multiply_qk(Scores& scores) {
      const uint64_t left = descriptor(s.q[at_q.stage][number], kSwizzle);
      const uint64_t right = descriptor(s.k[at_k.stage], kSwizzle);
      matrix_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int slab = step * 32 / kSlab, at = step * 32 % kSlab;
        multiply<Shape{kCols, C.type, C.type}>(scores, advanced(left, slab * 64 * kSlab + at),
                                               advanced(right, slab * kCols * kSlab + at),
                                               step > 0);
      }
      matrix_commit();
    }
    // o += p v, issued.
    TEA_DEVICE void multiply_pv(Output& o, const Weights& weights) {
      s.ring_v.wait_full(at_v);
      const uint64_t right = descriptor(s.v[at_v.stage], kSwizzle, kCols * kSlab);
      pin(o);
      matrix_fence();
#pragma unroll
      for (int step = 0; step < kCols / 16; ++step)
        multiply<Shape{kDimV, C.type, C.type, Major::kSummed, Major::kOuter}>(
            o, weights[step], advanced(right, step * 16 * kSlab), true);
      matrix_commit();
    }

    // Columns that a row does not see become -infinity, where the block holds any such.
    TEA_DEVICE void mask(Scores& scores, int first_row, int block) {
      const int column = block * kCols;
      const Columns top = visible_columns(p.band, first_row, p.rows_kv);
      const Columns bottom = visible_columns(p.band, first_row + 63, p.rows_kv);
      if (column >= bottom.begin && column + kCols <= top.end) return;
      int begin[2], end[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Columns c = visible_columns(p.band, first_row + row_of(2 * r), p.rows_kv);
        begin[r] = static_cast<int>(min(c.begin - column, int64_t{kCols})) - column_of(0);
        end[r] = static_cast<int>(max(c.end - column, int64_t{0})) - column_of(0);
      }
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) {
        const int c = i / 4 * 8 + i % 2, r = half_of(i);
        if (c < begin[r] || c >= end[r]) scores[i] = kMinusInfinity;
      }
    }

    static TEA_DEVICE void weigh(Weights& weights, const Scores& scores) {
#pragma unroll
      for (int c = 0; c < kCols / 16; ++c) columns_as_operand<C.type>(weights[c], scores, c);
    }

    // All blocks of a tile, the last first.
    TEA_DEVICE void attend(Output& o, OnlineSoftmax& softmax, int first_row, Blocks b) {
      Scores scores;
      Weights weights;
      float shrink[2];
      int block = b.end - 1;
      s.ring_k.wait_full(at_k);
      multiply_qk(scores);
      matrix_wait<0>();
      pin(scores);
      release(s.ring_k, at_k);
      mask(scores, first_row, block);
      softmax.update(scores, p.scale_log2, shrink);
      weigh(weights, scores);
      while (--block >= b.begin) {
        s.ring_k.wait_full(at_k);
        wait_turn();
        multiply_qk(scores);
        if constexpr (C.row.rescale_early) scale_rows(o, shrink);
        multiply_pv(o, weights);
        pass_turn();
        matrix_wait<1>();
        pin(scores);
        release(s.ring_k, at_k);
        if constexpr (C.masked) mask(scores, first_row, block);
        softmax.update(scores, p.scale_log2, shrink);
        matrix_wait<0>();
        pin(o);
        release(s.ring_v, at_v);
        if constexpr (!C.row.rescale_early) scale_rows(o, shrink);
        weigh(weights, scores);
      }
      if constexpr (C.row.rescale_early) scale_rows(o, shrink);
      multiply_pv(o, weights);
      matrix_wait<0>();
      pin(o);
      release(s.ring_v, at_v);
    }

    // Hands back blocks that none of the consumer's rows sees. A turn passes for each, since the
    // others count on it; the last block of a tile has none.
    TEA_DEVICE void skip(int count, bool turn_after_last) {
      for (int i = 0; i < count; ++i) {
        s.ring_k.wait_full(at_k);
        release(s.ring_k, at_k);
        if (i + 1 < count || turn_after_last) {
          wait_turn();
          pass_turn();
        }
        s.ring_v.wait_full(at_v);
        release(s.ring_v, at_v);
      }
    }
    TEA_DEVICE void attend_own(Output& o, OnlineSoftmax& softmax, int first_row, Blocks b) {
      const Blocks own = first_row < p.rows_q ? blocks(p, first_row, 64) : Blocks{0, 0};
      if (own.begin >= own.end) return skip(b.end - b.begin, false);
      skip(b.end - own.end, true);
      attend(o, softmax, first_row, own);
      skip(own.begin - b.begin, true);  // the first block attended had none
    }

    // The normalised rows leave; Q's memory is handed back once the copy engine has read it.
    TEA_DEVICE void finish(Output& o, OnlineSoftmax& softmax, const Tile& t) {
      float factor[2], lse[2];
      softmax.finish(factor, lse);
      scale_rows(o, factor);
      const int first_row = t.row_block * kRows + 64 * number;
      float* const out =
          static_cast<float*>(p.lse.data) + t.batch * p.lse.batch + t.head * p.lse.head;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + row_of(2 * r);
        if (lane() % 4 == 0 && row < p.rows_q) out[row * p.lse.row] = lse[r];
      }
      uint8_t* const tile = s.q[at_q.stage][number];
      store_tile<C.type>({tile, kSwizzle, 64}, 0, o);
      fence_shared_to_async();
      named_sync(kFirstOwn + number, 128);
      if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int slab = 0; slab < kDimV / kSlabDim; ++slab)
          store(p.o, tile + slab * 64 * kSlab, {slab * kSlabDim, first_row, t.head, t.batch});
        commit_stores();
        wait_stores_read<0>();
        s.ring_q[number].release(at_q);
      }
      at_q.advance();
    }

    TEA_DEVICE void run() {
      if (C.row.turns && number == kConsumers - 1) pass_turn();  // the first goes first
      for (int n = s.mail.read(at_mail); n < p.order.count(); n = s.mail.read(at_mail)) {
        const Tile t = p.order.at(n);
        const Blocks b = blocks(p, t.row_block * kRows, kRows);
        OnlineSoftmax softmax;
        softmax.start();
        Output o = {};
        s.ring_q[number].wait_full(at_q);
        if constexpr (C.row.skips)
          attend_own(o, softmax, t.row_block * kRows + 64 * number, b);
        else if (b.begin < b.end)
          attend(o, softmax, t.row_block * kRows + 64 * number, b);
        finish(o, softmax, t);
      }
    }
  };

  static TEA_DEVICE void start(Smem& s) {
    for (auto& ring : s.ring_q) ring.start(1, 1);
    s.ring_k.start(1, 4 * kConsumers);
    s.ring_v.start(1, 4 * kConsumers);
    s.mail.ring.start(1, 128 * kConsumers);
    publish_barriers();
  }

  static TEA_DEVICE void body(const Parameters& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Smem& s = *reinterpret_cast<Smem*>(memory);
    if (threadIdx.x == 0) start(s);
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (group == 0) {
      shrink_registers<kConsumers == 3 ? 32 : 40>();
      if (threadIdx.x == 0) Producer{p, s}.run();
    } else {
      grow_registers<kConsumers == 3 ? 160 : 232>();
      Consumer{p, s, group - 1}.run();
    }
  }
};

// Rows and how many kernels each has: masked or not; two more for fp16.
struct Table {
  static constexpr const auto& rows = kTable;
  static constexpr int variants = 4;
};
template <class Rows>
constexpr Config config(int number) {
  const int variant = number % Rows::variants;
  const Type type = variant / 2 ? Type::kFp16 : Type::kBf16;
  return {Rows::rows[number / Rows::variants], type, variant % 2 == 1};
}

// Named by a number, not by a Config: GCC takes a Config whose row was read from a constant array
// for another than the equal one that nvcc writes where it registers the kernel, and what is
// launched is then unknown to CUDA (cudaErrorInvalidResourceHandle). registered.py looks for that.
template <class Rows, int kNumber>
__global__ void __launch_bounds__(Kernel<config<Rows>(kNumber)>::kThreads, 1)
    entry(const __grid_constant__ Parameters p) {
  Kernel<config<Rows>(kNumber)>::body(p);
}

// Tensors as the copy engine sees them: head dimension, rows, heads, batch.
struct Extents {
  int dim, rows, heads, batch;
};

bool map(TensorMap* to, const Strided& x, const Extents& e, Type type, Swizzle s, int box_rows) {
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride) * 2; };
  const auto extent = [](int n) { return static_cast<uint64_t>(std::max(n, 1)); };
  const MapShape shape = {
      type,
      s,
      4,
      {extent(e.dim), extent(e.rows), extent(e.heads), extent(e.batch)},
      {0, bytes(x.row), bytes(x.head), bytes(x.batch)},
      {static_cast<uint32_t>(width(s) / 2), static_cast<uint32_t>(box_rows), 1, 1}};
  return encode(to, x.data, shape) == 0;
}

// Leaves out the keys that no row attends to, so that what they hold does not matter.
Forward trimmed(Forward f) {
  const Columns first = visible_columns(f.band, 0, f.rows_kv);
  const Columns last = visible_columns(f.band, f.rows_q - 1, f.rows_kv);
  if (first.begin >= last.end) {
    f.rows_kv = 0;
    return f;
  }
  for (Strided* x : {&f.k, &f.v}) x->data = static_cast<char*>(x->data) + first.begin * x->row * 2;
  f.rows_kv = static_cast<int>(last.end - first.begin);
  if (f.band.lo > -kUnbounded) f.band.lo -= first.begin;
  if (f.band.hi < kUnbounded) f.band.hi -= first.begin;
  return f;
}

// Under a mask, heads whose keys and values stay in the second-level cache go together, long tiles
// first; else tiles are equal, and a head at a time needs the least cache.
TileOrder tile_order(const Forward& f, const Config& c) {
  const int rows = 64 * c.row.consumers, row_blocks = (f.rows_q + rows - 1) / rows;
  const int64_t cache = 32 << 20, head = int64_t{f.rows_kv} * (f.dim + f.dim_v) * 2 + 1;
  const int64_t fit = std::max<int64_t>(1, cache / head) * (f.heads / f.heads_kv);
  const int together = static_cast<int>(std::min<int64_t>(fit, int64_t{f.heads} * f.batch));
  return {row_blocks, f.heads, f.batch, c.masked ? together : 1, c.masked};
}

// False if the copy engine cannot address a tensor.
template <Config C>
bool fill(Parameters* p, const Forward& f) {
  using K = Kernel<C>;
  p->lse = f.lse;
  p->order = tile_order(f, C);
  p->band = f.band;
  p->counter = C.masked ? f.counter : nullptr;
  p->rows_q = f.rows_q;
  p->rows_kv = f.rows_kv;
  p->group = f.heads / f.heads_kv;
  p->scale_log2 = f.scale * kLog2E;
  const auto mapped = [&](TensorMap& to, const Strided& x, int dim, int rows, int heads, int box) {
    return map(&to, x, {dim, rows, heads, f.batch}, f.type, K::kSwizzle, box);
  };
  return mapped(p->q, f.q, f.dim, f.rows_q, f.heads, 64) &&
         mapped(p->k, f.k, f.dim, f.rows_kv, f.heads_kv, K::kCols) &&
         mapped(p->v, f.v, f.dim_v, f.rows_kv, f.heads_kv, K::kCols) &&
         mapped(p->o, f.o, f.dim_v, f.rows_q, f.heads, 64);
}

template <class Rows, int kNumber>
Outcome launch(const Forward& f, cudaStream_t stream) {
  constexpr Config C = config<Rows>(kNumber);
  constexpr int kThreads = Kernel<C>::kThreads, kShared = sizeof(typename Kernel<C>::Smem);
  const auto kernel = entry<Rows, kNumber>;
  int device = 0, processors = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess) return {code, "cudaGetDevice"};
  code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (code != cudaSuccess) return {code, "cudaDeviceGetAttribute"};
  // Before the driver encodes maps, which it refuses to a thread without a context.
  code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (code != cudaSuccess) return {code, "cudaFuncSetAttribute"};
  Parameters p = {};
  if (!fill<C>(&p, trimmed(f))) return {cudaErrorInvalidValue, "cuTensorMapEncodeTiled"};
  if (p.counter) code = cudaMemsetAsync(p.counter, 0, sizeof(int), stream);
  if (code != cudaSuccess) return {code, "cudaMemsetAsync"};
  kernel<<<std::min(processors, p.order.count()), kThreads, kShared, stream>>>(p);
  return {cudaGetLastError(), "the launch"};
}

using Launch = Outcome (*)(const Forward&, cudaStream_t);
template <class Rows, int... kNumber>
constexpr std::array<Launch, sizeof...(kNumber)> launchers(std::integer_sequence<int, kNumber...>) {
  return {launch<Rows, kNumber>...};
}
template <class Rows>
constexpr int kCount = int{std::size(Rows::rows)} * Rows::variants;
template <class Rows>
constexpr auto kLaunch = launchers<Rows>(std::make_integer_sequence<int, kCount<Rows>>());

constexpr bool masked(const Band& b) { return b.lo > -kUnbounded || b.hi < kUnbounded; }
template <class Rows>
Outcome launch_row(int row, const Forward& f, cudaStream_t stream) {
  const int variant = (f.type == Type::kFp16) * 2 + masked(f.band);
  if (variant >= Rows::variants) return {cudaErrorInvalidValue, "fp16 for rows of bf16 only"};
  return kLaunch<Rows>[row * Rows::variants + variant](f, stream);
}

}  // namespace

int forward_row(int dim, int dim_v) {
  const auto serves = [&](const Row& r) { return dim <= r.dim && dim_v <= r.dim_v; };
  const Row* found = std::find_if(std::begin(kTable), std::end(kTable), serves);
  return found == std::end(kTable) ? -1 : static_cast<int>(found - kTable);
}

Outcome forward(const Forward& f, cudaStream_t stream) {
  const auto refused = [](const char* why) { return Outcome{cudaErrorInvalidValue, why}; };
  const int row = forward_row(f.dim, f.dim_v);
  if (row < 0) return refused("head dimensions beyond the table");
  if (f.type != Type::kBf16 && f.type != Type::kFp16) return refused("a type not of 16 bits");
  if (!(f.scale > 0)) return refused("a scale that is not positive");
  if (masked(f.band) && !f.counter) return refused("a mask without a counter");
  if (f.rows_q == 0 || f.heads == 0 || f.batch == 0) return {cudaSuccess, "nothing to do"};
  return launch_row<Table>(row, f, stream);
}

}  // namespace tea::hopper
