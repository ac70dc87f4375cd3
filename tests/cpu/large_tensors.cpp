// Tensors of more than 2^31 elements, and strides beyond 2^31, compared with sums in double at
// sampled rows: forward on every engine of the CPU but the reference, which takes too long,
// backward on the first. Needs 14 GiB; `make large` runs it.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/plan.h"
#include "kit/check.h"
#include "math/formats.h"

namespace tea {
namespace {

constexpr int64_t kDim = 64;
constexpr int64_t kElements = (int64_t{1} << 31) + (int64_t{1} << 20);

std::vector<std::string> tiled_engines() {
  std::vector<std::string> out = kit::host_engines();
  std::erase(out, "reference");
  return out;
}

// Small bf16 numbers that follow from their index. K and V share them: inputs may.
struct Numbers {
  std::unique_ptr<uint16_t[]> data{new uint16_t[kElements]};
  Numbers() {
    for (int64_t i = 0; i < kElements; ++i) data[i] = bf16_encode(value(i));
  }
  static float value(int64_t i) {
    const auto mixed = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u >> 40;
    return static_cast<float>(mixed) * 0x1p-24f * 2 - 1;
  }
  double operator[](int64_t i) const { return double{bf16_decode(data[i])}; }
};
const Numbers& numbers() {
  static const Numbers made;
  return made;
}

double dot(const std::vector<double>& a, int64_t at) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * numbers()[at + static_cast<int64_t>(d)];
  return sum;
}

std::vector<double> row(int64_t at) {
  std::vector<double> out(kDim);
  for (int64_t d = 0; d < kDim; ++d) out[static_cast<size_t>(d)] = numbers()[at + d];
  return out;
}

// One row's softmax over keys [begin, end) that lie `stride` apart from `base` on.
struct Truth {
  double lse = 0;
  std::vector<double> o = std::vector<double>(kDim);

  Truth(const std::vector<double>& q, int64_t base, int64_t stride, int64_t begin, int64_t end) {
    double sum = 0;  // logits are small: no maximum needed
    for (int64_t j = begin; j < end; ++j) {
      const double p = std::exp(dot(q, base + j * stride) / 8);
      sum += p;
      for (int64_t d = 0; d < kDim; ++d)
        o[static_cast<size_t>(d)] += p * numbers()[base + j * stride + d];
    }
    for (double& x : o) x /= sum;
    lse = std::log(sum);
  }
};

struct Call {
  explicit Call(const std::string& options) : text("dtype=bf16 dim_qk=64 " + options) {
    run.struct_size = sizeof run, run.tensor_count = TEA_TENSOR_COUNT;
    run.tensors = tensors.data();
    tensors[TEA_K] = tensors[TEA_V] = numbers().data.get();
  }
  void* of(const void* memory) { return const_cast<void*>(memory); }
  PlanRef plan(const std::string& engine) const {
    return planner().plan(Problem::parse(text), kHost, engine);
  }
  std::string text;
  std::array<void*, TEA_TENSOR_COUNT> tensors{};
  tea_run run{};
};

// One head of 2^25 keys; its row sees the last ones, or a twentieth of all, beyond and before 2^31.
TEST(LargeTensors, OneHeadOfManyKeys) {
  constexpr int64_t keys = kElements / kDim;
  for (const int64_t seen : {int64_t{1000}, keys / 20})
    for (const std::string& engine : tiled_engines()) {
      Call call("heads_q=1 heads_kv=1 batch=1 seqlen_q=1 seqlen_kv=" + std::to_string(keys) +
                " bottom_right=1 causal=1 window_left=" + std::to_string(seen));
      alignas(64) std::array<uint16_t, kDim> o{};
      call.tensors[TEA_Q] = call.of(numbers().data.get() + 640), call.tensors[TEA_O] = o.data();
      forward(*call.plan(engine), &call.run);
      const Truth truth(row(640), 0, kDim, keys - seen, keys);
      for (size_t d = 0; d < kDim; ++d)
        ASSERT_NEAR(double{bf16_decode(o[d])}, truth.o[d], 2e-5 + std::fabs(truth.o[d]) / 200)
            << engine << " " << seen << " " << d;
    }
}

// Two sequences and heads whose strides alone pass 2^30 elements: the last one begins beyond 2^31.
TEST(LargeTensors, StridesBeyond31Bits) {
  constexpr int64_t batch = (int64_t{1} << 31) - 8192, head = 4096, keys = 60;
  for (const std::string& engine : tiled_engines()) {
    const std::string strides = std::to_string(batch) + ",64," + std::to_string(head);
    Call call("heads_q=2 heads_kv=2 batch=2 seqlen_q=40 seqlen_kv=60 k=" + strides +
              " v=" + strides + " q=" + strides);
    std::vector<uint16_t> o(2 * 40 * 2 * kDim + 8);
    auto* at = o.data();
    while (reinterpret_cast<uintptr_t>(at) % 16) ++at;
    call.tensors[TEA_Q] = call.tensors[TEA_K], call.tensors[TEA_O] = at;
    forward(*call.plan(engine), &call.run);
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < 2; ++h)
        for (const int64_t i : {0, 39}) {
          const int64_t base = b * batch + h * head;
          const Truth truth(row(base + i * 64), base, 64, 0, keys);
          for (int64_t d = 0; d < kDim; ++d) {
            const double want = truth.o[static_cast<size_t>(d)];
            ASSERT_NEAR(double{bf16_decode(at[((b * 40 + i) * 2 + h) * kDim + d])}, want,
                        1e-3 + std::fabs(want) / 200)
                << engine;
          }
        }
  }
}

// 64 heads, whose dK and dV have more than 2^31 elements each.
TEST(LargeTensors, GradientsOfManyKeys) {
  constexpr int64_t heads = 64, keys = kElements / kDim / heads, rows = 2;
  Call call("training=1 heads_q=64 heads_kv=64 batch=1 seqlen_q=2 seqlen_kv=" +
            std::to_string(keys));
  const int64_t small = rows * heads * kDim;
  std::vector<uint16_t> o(static_cast<size_t>(small) + 8), dq(o);
  const std::unique_ptr<uint16_t[]> dk(new uint16_t[kElements]), dv(new uint16_t[kElements]);
  std::vector<float> lse(rows * heads);
  call.tensors[TEA_Q] = call.of(numbers().data.get() + 64000);
  call.tensors[TEA_DOUT] = call.of(numbers().data.get() + 128000);
  const auto aligned = [](uint16_t* at) {
    while (reinterpret_cast<uintptr_t>(at) % 16) ++at;
    return at;
  };
  call.tensors[TEA_O] = aligned(o.data()), call.tensors[TEA_DQ] = aligned(dq.data());
  call.tensors[TEA_DK] = dk.get(), call.tensors[TEA_DV] = dv.get();
  call.tensors[TEA_LSE] = lse.data();
  const PlanRef plan = call.plan("cpu");
  forward(*plan, &call.run);
  backward(*plan, &call.run);
  for (const int64_t h : {int64_t{0}, heads - 1}) {
    std::vector<double> q[rows], dout[rows];
    double log_sum[rows], delta[rows] = {};
    for (int64_t i = 0; i < rows; ++i) {
      q[i] = row(64000 + (i * heads + h) * kDim), dout[i] = row(128000 + (i * heads + h) * kDim);
      const Truth truth(q[i], h * kDim, heads * kDim, 0, keys);
      log_sum[i] = truth.lse;
      for (size_t d = 0; d < kDim; ++d) delta[i] += truth.o[d] * dout[i][d];
      EXPECT_NEAR(double{lse[static_cast<size_t>(h * rows + i)]}, truth.lse, 1e-3);
    }
    for (int64_t j = keys - 1; j >= 0; j -= 4099) {
      const int64_t at = (j * heads + h) * kDim;
      for (int64_t d = 0; d < kDim; ++d) {
        double want_k = 0, want_v = 0, size_k = 0, size_v = 0;
        for (int64_t i = 0; i < rows; ++i) {
          const double p = std::exp(dot(q[i], at) / 8 - log_sum[i]);
          const double v = p * dout[i][static_cast<size_t>(d)];
          const double k = p * (dot(dout[i], at) - delta[i]) / 8 * q[i][static_cast<size_t>(d)];
          want_v += v, want_k += k, size_v += std::fabs(v);
          size_k += p * (std::fabs(dot(dout[i], at)) + std::fabs(delta[i]) + 1) / 8;
        }
        ASSERT_NEAR(double{bf16_decode(dv[at + d])}, want_v, size_v / 100) << h << " " << j;
        ASSERT_NEAR(double{bf16_decode(dk[at + d])}, want_k, size_k / 100) << h << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace tea
