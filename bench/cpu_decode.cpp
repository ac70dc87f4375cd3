// Times decoding on the CPU, and the bandwidth at which the same threads read the same keys and
// values. One row of 32 heads over 8 kv heads, head dimension 128, by dtype and layout.
//
// usage: bench_cpu_decode [KEYS [RUNS [ENGINE]]]
// Prints a line of JSON per figure; `ratio` is the median over runs of decoding's speed over
// reading's, the two taking turns.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "te_attention.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kHeads = 32, kHeadsKv = 8, kDim = 128;

struct Layout {
  const char* name;
  int page_size;    // 0: one dense sequence
  bool head_major;  // [head, key, dim], not [key, head, dim]
};
constexpr Layout kLayouts[] = {
    {"bhsd", 0, true}, {"bshd", 0, false}, {"paged 16", 16, false}, {"paged 1", 1, false}};
constexpr struct {
  const char* name;
  int bytes;
} kTypes[] = {{"bf16", 2}, {"fp16", 2}, {"fp32", 4}, {"e4m3", 1}};

void require(tea_status status) {
  if (status == TEA_OK) return;
  std::fprintf(stderr, "%s\n", tea_error());
  std::exit(1);
}

template <class Body>
double seconds(Body&& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int threads() {
  const char* text = tea_setting("TE_ATTENTION_THREADS");
  return *text ? std::atoi(text) : static_cast<int>(std::thread::hardware_concurrency());
}

uint64_t sum(const uint64_t* from, size_t n) {
  uint64_t out[8] = {};
  for (size_t i = 0; i + 8 <= n; i += 8)
    for (size_t j = 0; j < 8; ++j) out[j] += from[i + j];
  return std::accumulate(out, out + 8, uint64_t{0});
}

// Every byte once, by as many threads as decoding has; each takes the next 256 KiB.
void read(const std::vector<uint64_t>& memory) {
  constexpr size_t kChunk = 32768;
  static std::atomic<uint64_t> sink;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    uint64_t all = 0;
    for (size_t i; (i = next++ * kChunk) < memory.size();)
      all += sum(memory.data() + i, std::min(kChunk, memory.size() - i));
    sink += all;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads(); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
}

std::string problem_text(const Layout& layout, const char* dtype, int64_t keys) {
  const int64_t width = kHeadsKv * kDim;
  std::string text =
      "dtype=" + std::string(dtype) + " heads_q=32 heads_kv=8 dim_qk=128 alignment=8";
  if (std::string(dtype) == "e4m3") text += " o_dtype=bf16";
  if (layout.page_size)
    return text + " kv_form=paged page_size=" + std::to_string(layout.page_size) + " seqlen_q=1";
  text += " batch=1 seqlen_q=1 seqlen_kv=" + std::to_string(keys);
  if (!layout.head_major) return text;
  const std::string strides =
      std::to_string(keys * width) + "," + std::to_string(kDim) + "," + std::to_string(keys * kDim);
  return text + " k=" + strides + " v=" + strides;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Small numbers whose bits are harmless in every type, and not all alike.
void fill(std::vector<uint64_t>& memory, int bytes) {
  uint64_t state = 1;
  const uint64_t mask = bytes == 4   ? 0x007FFFFF007FFFFFu
                        : bytes == 2 ? 0x007F007F007F007Fu
                                     : 0x0707070707070707u;
  const uint64_t one = bytes == 4   ? 0x3F0000003F000000u
                       : bytes == 2 ? 0x3800380038003800u
                                    : 0x3030303030303030u;
  for (uint64_t& word : memory) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    word = (state & mask) | one;
  }
}

void measure(const Layout& layout, const char* dtype, int bytes, int64_t keys, int runs,
             const char* engine) {
  tea_problem problem{};
  require(tea_problem_parse(problem_text(layout, dtype, keys).c_str(), &problem));
  tea_plan* plan = nullptr;
  require(tea_plan_create(&problem, -1, engine, &plan));
  const size_t side = static_cast<size_t>(keys * kHeadsKv * kDim * bytes) / sizeof(uint64_t);
  std::vector<uint64_t> memory(2 * side), q(kHeads * kDim / 2), o(kHeads * kDim / 2);
  fill(memory, bytes), fill(q, bytes);
  std::vector<int32_t> table(static_cast<size_t>(keys)), cu_kv = {0, static_cast<int32_t>(keys)};
  // Pages in an order that is not theirs in memory.
  const int64_t pages = layout.page_size ? keys / layout.page_size : 0;
  for (int64_t i = 0; i < pages; ++i)
    table[static_cast<size_t>(i)] = static_cast<int32_t>(i * 7919 % pages);
  void* tensors[TEA_TENSOR_COUNT] = {};
  tensors[TEA_Q] = q.data(), tensors[TEA_O] = o.data();
  tensors[TEA_K] = memory.data(), tensors[TEA_V] = memory.data() + side;
  if (pages) tensors[TEA_TABLE_K] = table.data(), tensors[TEA_CU_SEQLENS_KV] = cu_kv.data();
  tea_run run{};
  run.struct_size = sizeof run, run.tensors = tensors, run.tensor_count = TEA_TENSOR_COUNT;
  if (pages) run.batch = 1, run.max_kv = keys, run.pages_k = run.pages_v = pages;
  std::vector<double> decoding, reading, ratios;
  const double size = static_cast<double>(memory.size() * sizeof(uint64_t)) / 1e9;
  for (int i = 0; i <= runs; ++i) {  // the first run warms up
    const double read_s = seconds([&] { read(memory); });
    const double decode_s = seconds([&] { require(tea_forward(plan, &run)); });
    if (i == 0) continue;
    decoding.push_back(size / decode_s), reading.push_back(size / read_s);
    ratios.push_back(read_s / decode_s);
  }
  std::printf(
      "{\"case\": \"decode\", \"what\": \"%s %s b=1 h=32/8 keys=%lld d=128\", \"engine\": \"%s\", "
      "\"threads\": %d, \"runs\": %d, \"gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, \"ratio\": "
      "%.3f, \"bar\": 0.7}\n",
      dtype, layout.name, static_cast<long long>(keys), tea_plan_engine(plan), threads(), runs,
      median(decoding), median(reading), median(ratios));
  std::fflush(stdout);
  tea_plan_release(plan);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t keys = argc > 1 ? std::atoll(argv[1]) : 32768;
  const int runs = argc > 2 ? std::atoi(argv[2]) : 20;
  const char* engine = argc > 3 ? argv[3] : "";
  for (const Layout& layout : kLayouts)
    for (const auto& type : kTypes) measure(layout, type.name, type.bytes, keys, runs, engine);
}
