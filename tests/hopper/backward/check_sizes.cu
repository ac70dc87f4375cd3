// Tests of src/hopper/backward/ with strides and a workspace beyond 2^31 elements.
#include "hopper/apart.h"
#include "hopper/backward/backward_case.h"
#include "hopper/chain.cuh"

namespace tea::primitives {
namespace {

struct Extent {
  int64_t batch, rows, heads, dim;
};

__global__ void copy_elements(StridedTensor to, StridedTensor from, Extent n) {
  const int64_t count = n.batch * n.rows * n.heads * n.dim;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t d = i % n.dim, h = i / n.dim % n.heads, r = i / n.dim / n.heads % n.rows,
                  b = i / n.dim / n.heads / n.rows;
    static_cast<uint16_t*>(to.data)[b * to.batch + r * to.seq + h * to.head + d] =
        static_cast<const uint16_t*>(from.data)[b * from.batch + r * from.seq + h * from.head + d];
  }
}

// Elements that differ from those of the period before.
__global__ void count_aperiodic(const uint16_t* x, size_t period, size_t n, int* count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = period + size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    if (x[i] != x[i - period]) atomicAdd(count, 1);
}

// Tensors whose stride of one dimension places elements beyond 2^31 give the bits of compact ones.
// All of them are in one buffer, each in the gaps of the others.
void check_stride(const BackwardCase& c, int dimension, Buffer<uint16_t>& big) {
  const std::string name = c.name() + "large stride " + std::to_string(dimension);
  note_work(name);
  const BackwardData x(c);
  BackwardLaunch compact(c, x), strided(c, x);
  compact.prepare();
  expect(compact.run(), name + ": the compact one runs");
  const int64_t heads = c.h.heads, rows = c.n.rows_q, row = heads * c.dim;
  // In the order batch, row, head, as large as the largest tensor needs.
  const int64_t strides[3][3] = {{(int64_t{1} << 31) + 64, row, c.dim},
                                 {row, (int64_t{1} << 23) + 64, c.dim},
                                 {rows * c.dim, c.dim, (int64_t{1} << 31) + 64}};
  const int64_t slots[3] = {rows * row, c.h.batch * row, c.h.batch * rows * c.dim};
  const auto place = [&](StridedTensor& t, int slot) {
    const int64_t* const s = strides[dimension];
    t.data = big.data + slot * slots[dimension];
    t.batch = s[0], t.seq = s[1], t.head = s[2];
  };
  const auto extent = [&](int i) {
    const bool of_v = i == 1 || i == 2 || i == 5 || i == 7;
    return Extent{c.h.batch, i < 4 ? c.n.rows_q : c.n.rows_kv, i < 4 ? c.h.heads : c.h.heads_kv,
                  of_v ? c.dim_v : c.dim};
  };
  cudaMemset(big.data, 0xFF, big.size * 2);
  const std::array<StridedTensor*, 8> from = strided.tensors();
  std::array<StridedTensor, 8> own;
  for (int i = 0; i < 8; ++i) {
    own[i] = *from[i];
    place(*from[i], i);
    copy_elements<<<1024, 256>>>(*from[i], own[i], extent(i));
  }
  strided.prepare();
  expect(strided.run(), name + ": runs");
  for (const int i : {3, 6, 7}) copy_elements<<<1024, 256>>>(own[i], *from[i], extent(i));
  finish(name);
  expect(digest(strided) == digest(compact), name + ": the bits of compact tensors");
}

void check_strides() {
  Buffer<uint16_t> big(size_t{300} * ((1 << 23) + 64) + (1 << 23));
  for (const int dim : {64, 128})
    for (int dimension = 0; dimension < 3; ++dimension)
      check_stride({{dim, dim, Type::kBf16, kRules[1], {300, 300}, {2, 2, 2}, Layout::kBshd}, true},
                   dimension, big);
}

// Sums of dQ, gradients and counters of more sequences than 2^31 sums have room for. All sequences
// have the same inputs, so that all must have the same gradients.
void check_workspace() {
  constexpr int kBatch = 33000, kHeads = 8;
  for (const int dim : {64, 128}) {
    const BackwardCase c = {
        {dim, dim, Type::kBf16, kRules[1], {16, 24}, {1, kHeads, kHeads}, Layout::kBshd}, true};
    note_work(c.name());
    const BackwardData x(c);
    BackwardLaunch one(c, x), many(c, x);
    one.prepare();
    expect(one.run() && many.run_forward().code == 0, c.name() + "one sequence runs");
    const size_t sizes[] = {one.dq.size, one.dk.size, one.dv.size};
    Buffer<uint16_t> out[] = {Buffer<uint16_t>(sizes[0] * kBatch),
                              Buffer<uint16_t>(sizes[1] * kBatch),
                              Buffer<uint16_t>(sizes[2] * kBatch)};
    AttentionArguments& f = many.f;
    for (StridedTensor* const t : {&f.q, &f.k, &f.v, &f.o, &f.dout}) t->batch = 0;
    f.statistics.batch = 0;
    StridedTensor* const to[] = {&f.dq, &f.dk, &f.dv};
    for (int i = 0; i < 3; ++i)
      to[i]->data = out[i].data, to[i]->batch = static_cast<int64_t>(sizes[i]);
    f.batch = kBatch;
    many.prepare();
    expect(many.workspace->size > size_t{1} << 33, c.name() + "the workspace is large");
    expect(many.run_backward().code == 0, c.name() + "many sequences run");
    const Buffer<int> differences(std::vector<int>{0});
    for (int i = 0; i < 3; ++i) {
      count_aperiodic<<<1024, 256>>>(out[i].data, sizes[i], out[i].size, differences.data);
      count_differences<<<64, 256>>>(out[i].data, one.gradients()[i]->data, sizes[i],
                                     differences.data);
    }
    finish(c.name());
    expect(differences.read() == std::vector<int>{0}, c.name() + "the same gradients each time");
  }
}

}  // namespace

int check_sizes() {
  check_strides();
  check_workspace();
  return report("sizes", 64, 128);
}

}  // namespace tea::primitives
