// The small kernels around cuDNN's graphs, by themselves: what they write against a plain loop. A
// sanitizer watches them here, where no kernel of cuDNN runs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cudnn/prepare.h"
#include "kit/gpu.h"
#include "te_attention.h"

namespace tea::cudnn {
namespace {

constexpr int kGpu = 0;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Arrays on the GPU, each in an allocation of its own.
class Memory {
 public:
  ~Memory() { gpu_.release(); }
  template <class T>
  T* put(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    auto* const there = gpu_.separate(bytes);
    const auto block = gpu_.block(bytes);
    std::memcpy(block.host, values.data(), bytes);
    gpu_.upload(there, block.host, bytes);
    gpu_.wait();
    return reinterpret_cast<T*>(there);
  }
  template <class T>
  std::vector<T> get(const T* there, size_t count) {
    const auto block = gpu_.block(count * sizeof(T));
    gpu_.download(block.host, reinterpret_cast<const uint8_t*>(there), count * sizeof(T));
    gpu_.wait();
    const T* const here = reinterpret_cast<const T*>(block.host);
    return {here, here + count};
  }
  void* stream() const { return gpu_.stream(); }

 private:
  kit::Gpu& gpu_ = kit::gpu_of_thread(kGpu);
};

// Three sequences in a graph for five; the second is empty and the third runs out of tokens.
void expect_lengths_and_starts() {
  Memory memory;
  Prepare p = {};
  const Side side{memory.put<int32_t>({0, 5, 5, 12}), memory.put<int32_t>({1, 8, 15}), 9, 20,
                  TEA_RAGGED};
  p.q.side = p.kv.side = side;
  p.q.lengths = memory.put<int32_t>(std::vector<int32_t>(5, -1));
  p.q.starts[0] = {memory.put<int64_t>(std::vector<int64_t>(6, -1)), 24};
  p.batch = 3, p.graph_batch = 5;
  p.status = memory.put<int32_t>({0});
  prepare(p, memory.stream());
  EXPECT_EQ(memory.get(p.q.lengths, 5), (std::vector<int32_t>{5, 0, 5, 0, 0}));
  EXPECT_EQ(memory.get(p.q.starts[0].out, 6),
            (std::vector<int64_t>{24, 0, 15 * 24, 20 * 24, 20 * 24, 20 * 24}));
  EXPECT_EQ(memory.get(p.status, 1)[0], TEA_STATUS_BAD_LENGTHS);
}

// Entries past the end are not looked at; those before it are clamped.
void expect_tables_and_sinks() {
  Memory memory;
  Prepare p = {};
  p.kv.side = {memory.put<int32_t>({0, 30, 40}), nullptr, 48, 0, TEA_PAGED};
  p.k_table = {memory.put<int32_t>({3, 99, 77, -5, 88, 66}), nullptr, 3, 7};
  p.k_table.out = memory.put<int32_t>(std::vector<int32_t>(12, -1));
  p.given_columns = 3, p.columns = 4, p.page_size = 16;
  p.batch = 2, p.graph_batch = 3, p.heads = 2;
  p.zero_sink = memory.put<float>({1, 1});
  p.status = memory.put<int32_t>({0});
  prepare(p, memory.stream());
  EXPECT_EQ(memory.get(p.k_table.out, 12),
            (std::vector<int32_t>{3, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(memory.get(p.zero_sink, 2), (std::vector<float>{0, 0}));
  EXPECT_EQ(memory.get(p.status, 1)[0], TEA_STATUS_BAD_PAGE);
}

void expect_amaxes() {
  Memory memory;
  Prepare p = {};
  p.scalars = memory.put<float>(std::vector<float>(3 * kScalarStep, 9)), p.zeros = 2;
  prepare(p, memory.stream());
  const auto scalars = memory.get(p.scalars, 3 * kScalarStep);
  EXPECT_EQ(scalars[0], 1);
  EXPECT_EQ(scalars[kScalarStep], 0);
  EXPECT_EQ(scalars[2 * kScalarStep], 0);
  EXPECT_EQ(scalars[1], 9);
  const float* const found = memory.put<float>({2, 5, NAN, 7});
  float* const kept = memory.put<float>({3, 4, 1});
  raise({{found, found + 1, found + 2, found + 3}, {kept, kept + 1, kept + 2, nullptr}},
        memory.stream());
  const auto largest = memory.get(kept, 3);
  EXPECT_EQ(largest[0], 3);
  EXPECT_EQ(largest[1], 5);
  EXPECT_EQ(largest[2], 1);
  raise({{found, found + 3}, {kept, kept}}, memory.stream());  // two into one
  EXPECT_EQ(memory.get(kept, 1)[0], 7);
}

void expect_finite_numbers() {
  Memory memory;
  Prepare p = {};
  p.lse = {memory.put<float>({1, -kInfinity, -3, kInfinity}), memory.put<float>({9, 9, 9, 9}), 4};
  prepare(p, memory.stream());
  EXPECT_EQ(memory.get(p.lse.out, 4), (std::vector<float>{1, 0, -3, kInfinity}));
}

// A NaN that only the sum has, an infinity, a row without a result; two heads of two rows.
void expect_finished() {
  Memory memory;
  float* const max = memory.put<float>({1, 2, kInfinity, -kInfinity});
  const float* const sum = memory.put<float>({4, NAN, NAN, 0});
  float* const lse = memory.put<float>({9, 9, 9, 9});
  finish({max, sum, lse, 4, 2, 1, 1, 2, 2}, memory.stream());
  const auto largest = memory.get(max, 4), made = memory.get(lse, 4);
  EXPECT_EQ(largest[0], 1);
  EXPECT_TRUE(std::isnan(largest[1]));
  EXPECT_EQ(largest[2], kInfinity);
  EXPECT_EQ(largest[3], -kInfinity);
  EXPECT_FLOAT_EQ(made[0], 1 + std::log(4.0f));
  EXPECT_TRUE(std::isnan(made[1]) && std::isnan(made[2]));
  EXPECT_EQ(made[3], -kInfinity);
  finish({max, sum, nullptr, 4, 2, 1, 1, 2, 2}, memory.stream());
  EXPECT_EQ(memory.get(lse, 4)[0], made[0]);
}

// Rows of padded queries and keys without a visible key, or past the end, against a loop over
// pairs.
void expect_cleared(bool keys, const MaskRule& mask) {
  constexpr int64_t kBatch = 3, kRows = 70, kHeads = 2, kDim = 3;
  const std::vector<int32_t> lens_q{0, 65, 70, 75}, lens_kv{0, 70, 73, 143};  // 65, 5, 5; 70, 3, 70
  Memory memory;
  const Side q{memory.put(lens_q), nullptr, kRows, 0, TEA_PADDED};
  const Side kv{memory.put(lens_kv), nullptr, kRows, 0, TEA_PADDED};
  const auto elements = static_cast<size_t>(kBatch * kRows * kHeads * kDim);
  Clear work{keys ? kv : q, keys ? q : kv, keys, {}, mask, kBatch};
  auto* const wide = memory.put<uint16_t>(std::vector<uint16_t>(elements, 7));
  auto* const lse = memory.put<float>(std::vector<float>(elements / kDim, 7));
  const float* const sink = memory.put<float>({0.5f, 0.25f});
  work.tensor[0] = {wide, kRows * kHeads * kDim, kHeads * kDim, kDim, kHeads, kDim, 2, 0, nullptr};
  auto* const narrow = memory.put<uint8_t>(std::vector<uint8_t>(elements, 7));
  work.tensor[2] = {narrow, kRows * kHeads * kDim, kHeads * kDim, kDim, kHeads, kDim, 1, 0,
                    nullptr};
  work.tensor[1] = {lse, kHeads * kRows, 1, kRows, kHeads, 1, 4, -kInfinity, sink};
  // The same once more as the second side of one launch.
  auto* const again = memory.put<uint16_t>(std::vector<uint16_t>(elements, 7));
  Clear second = work;
  second.tensor[0].data = again, second.tensor[1] = second.tensor[2] = {};
  clear(work, keys ? &second : nullptr, memory.stream());
  if (keys) {
    EXPECT_EQ(memory.get(again, elements), memory.get(wide, elements));
  }
  const auto got = memory.get(wide, elements);
  const auto bytes = memory.get(narrow, elements);
  const auto numbers = memory.get(lse, elements / kDim);
  for (size_t b = 0; b < kBatch; ++b) {
    const int64_t nq = lens_q[b + 1] - lens_q[b], nkv = lens_kv[b + 1] - lens_kv[b];
    const Band bound = band(mask, diagonal(mask.bottom_right, nq, nkv), 0, 0);
    for (int64_t row = 0; row < kRows; ++row) {
      const bool valid = row < (keys ? nkv : nq);
      bool seen = false;
      for (int64_t other = 0; other < (keys ? nq : nkv); ++other)
        seen |= keys ? visible(bound, other, row) : visible(bound, row, other);
      const bool kept = valid && seen;
      for (int64_t h = 0; h < kHeads; ++h) {
        const auto at = (static_cast<int64_t>(b) * kRows + row) * kHeads + h;
        EXPECT_EQ(got[static_cast<size_t>(at * kDim + 2)], kept ? 7 : 0) << b << " row " << row;
        EXPECT_EQ(bytes[static_cast<size_t>(at * kDim + 2)], kept ? 7 : 0) << b << " row " << row;
        const float left = valid ? (h ? 0.25f : 0.5f) : -kInfinity;
        EXPECT_EQ(numbers[b * kHeads * kRows + static_cast<size_t>(h * kRows + row)],
                  kept ? 7 : left)
            << b << " row " << row;
      }
    }
  }
}

void expect_all() {
  expect_lengths_and_starts();
  expect_tables_and_sinks();
  expect_amaxes();
  expect_finite_numbers();
  expect_finished();
  for (const bool keys : {false, true})
    for (const MaskRule& mask :
         {MaskRule{}, MaskRule{1, 1, 0, 0}, MaskRule{0, 0, 3, 2}, MaskRule{1, 0, 4, 0}})
      expect_cleared(keys, mask);
}

// The names by which test_gpu.py chooses what a sanitizer watches.
TEST(Sanitized, KernelsAroundCudnn) { expect_all(); }
TEST(Races, KernelsAroundCudnn) { expect_all(); }

}  // namespace
}  // namespace tea::cudnn
