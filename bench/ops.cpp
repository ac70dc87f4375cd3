// Times the supporting operations on a GPU, each compared with a copy of as many bytes:
// ops [MiB of the main tensor] [part of the operations' names]. One JSON line each; bytes are those
// that the operation must read and write.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/driver.h"
#include "kit/gpu.h"
#include "te_attention_ops.h"

namespace tea::kit {
namespace {

// In units of the main tensor: what an operation may use, and each side of the copy that it is
// compared with.
constexpr size_t kOperands = 7, kCopies = 3;
constexpr int64_t kHeads = 16, kDim = 128, kRow = kHeads * kDim;  // bf16: 4 KiB a token

class Bench {
 public:
  Bench(int64_t mebibytes, std::string only)
      : gpu_(gpu_of_thread(0)),
        only_(std::move(only)),
        bytes_(mebibytes << 20),
        operands_(kOperands * unit()),
        memory_(gpu_.scratch(operands_ + 2 * kCopies * unit())) {
    gpu_.fill(memory_, 0x3c3c3c3c, operands_);  // about 0.01 in every format
  }

  int64_t bytes() const { return bytes_; }
  int64_t tokens() const { return bytes_ / 2 / kRow; }
  // The next operation starts: all memory is free.
  void next() { used_ = 0; }
  template <class T>
  T* memory(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 4095) / 4096 * 4096;
    if (used_ > operands_) throw std::runtime_error("more memory than there is");
    return reinterpret_cast<T*>(memory_ + at);
  }
  template <class T>
  const T* numbers(const std::vector<T>& all) {
    T* const to = memory<T>(static_cast<int64_t>(all.size()));
    gpu_.upload(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(all.data()),
                all.size() * sizeof(T));
    gpu_.wait();
    return to;
  }
  // Starting at 0, `count` steps of `step`.
  const int32_t* steps(int64_t count, int64_t step) {
    std::vector<int32_t> all;
    for (int64_t i = 0; i <= count; ++i) all.push_back(static_cast<int32_t>(i * step));
    return numbers(all);
  }
  void* stream() const { return gpu_.stream(); }

  // The median of three blocks, each after a block of copies of as many bytes.
  void time(const char* name, const std::string& shape, int64_t moved,
            const std::function<tea_status()>& call) {
    if (std::string(name).find(only_) == std::string::npos) return;
    const size_t half = static_cast<size_t>(moved) / 2;
    if (half > kCopies * unit()) throw std::runtime_error("a larger copy than there is memory for");
    uint8_t* const from = memory_ + operands_;
    std::vector<double> ours, copies;
    for (int block = 0; block < 3; ++block) {
      ours.push_back(run([&] {
        if (call() != TEA_OK) throw std::runtime_error(tea_error());
      }));
      copies.push_back(run([&] { driver::copy(from + kCopies * unit(), from, half, stream()); }));
    }
    std::sort(ours.begin(), ours.end()), std::sort(copies.begin(), copies.end());
    const auto rate = [&](double ms) { return static_cast<double>(moved) / ms / 1e6; };
    std::printf(
        "{\"op\": \"%s\", \"shape\": \"%s\", \"bytes\": %lld, \"ms\": %.4f, \"gb_s\": %.0f, "
        "\"copy_gb_s\": %.0f, \"of_copy\": %.3f}\n",
        name, shape.c_str(), static_cast<long long>(moved), ours[1], rate(ours[1]), rate(copies[1]),
        copies[1] / ours[1]);
    std::fflush(stdout);
  }

 private:
  template <class Call>
  double run(const Call& call) {
    constexpr int kCalls = 10;
    call();
    gpu_.start_clock();
    for (int i = 0; i < kCalls; ++i) call();
    return gpu_.stop_clock() / kCalls;
  }

  // The metadata of an operation is small compared with its tensors.
  size_t unit() const { return static_cast<size_t>(bytes_) + (size_t{16} << 20); }

  Gpu& gpu_;
  std::string only_;  // in the names of operations that are timed
  int64_t bytes_;
  size_t operands_;
  uint8_t* memory_;
  size_t used_ = 0;
};

template <class Args>
Args sized() {
  Args a{};
  a.struct_size = sizeof a;
  return a;
}

std::string numbers_in(std::initializer_list<int64_t> sizes) {
  std::string out;
  for (int64_t size : sizes) out += (out.empty() ? "" : "x") + std::to_string(size);
  return out;
}

void kv_cache(Bench& b) {
  const int64_t batch = 64, each = b.tokens() / batch;
  for (bool reindex : {false, true}) {
    b.next();
    auto a = sized<tea_kv_append>();
    a.dtype = TEA_BF16, a.batch = batch, a.heads = kHeads, a.dim_k = a.dim_v = kDim;
    // Sequences that change places go on by a token, as in decoding.
    a.new_form = TEA_DENSE, a.max_new = reindex ? 1 : each, a.reindex = reindex;
    a.page_size = reindex ? each : 64, a.pages_per_sequence = reindex ? 1 : each / 64;
    a.pages = batch * a.pages_per_sequence + 1;
    std::vector<int32_t> pages(static_cast<size_t>(batch * a.pages_per_sequence));
    std::iota(pages.begin(), pages.end(), 1);
    if (!reindex) std::reverse(pages.begin(), pages.end());
    a.page_table = b.numbers(pages);
    a.cu_cached = b.steps(batch, each), a.cu_new = b.steps(batch, reindex ? 0 : each);
    const int64_t cache = a.pages * a.page_size * kRow;
    a.new_k = b.memory<uint16_t>(b.bytes() / 2), a.new_v = b.memory<uint16_t>(b.bytes() / 2);
    a.k_cache = b.memory<uint16_t>(cache), a.v_cache = b.memory<uint16_t>(cache);
    b.time(reindex ? "kv_cache_append, every row moves" : "kv_cache_append, pages of 64",
           numbers_in({batch, each, kHeads, kDim}), 4 * b.bytes(),
           [&] { return tea_kv_cache_append(&a, 0, b.stream()); });
  }
}

void ragged(Bench& b) {
  const int64_t batch = 64, each = b.tokens() / batch;
  for (int zero_fill : {0, 1})
    for (bool to_bshd : {true, false}) {
      b.next();
      auto a = sized<tea_thd_convert>();
      a.dtype = TEA_BF16, a.zero_fill = zero_fill, a.batch = batch, a.seqlen = each;
      a.tokens = b.tokens(), a.heads = kHeads, a.dim = kDim;
      a.cu_seqlens = b.steps(batch, each);
      a.input = b.memory<char>(b.bytes()), a.output = b.memory<char>(b.bytes());
      b.time((std::string(to_bshd ? "thd_to_bshd" : "bshd_to_thd") + (zero_fill ? ", gaps" : ""))
                 .c_str(),
             numbers_in({batch, each, kHeads, kDim}), 2 * b.bytes(),
             [&] { return (to_bshd ? tea_thd_to_bshd : tea_bshd_to_thd)(&a, 0, b.stream()); });
    }
  for (int64_t seqlen : {int64_t{512}, b.bytes() / 64}) {
    b.next();
    auto a = sized<tea_cu_seqlens>();
    a.batch = b.bytes() / seqlen, a.seqlen = seqlen;
    a.mask = b.memory<uint8_t>(b.bytes()), a.cu_seqlens = b.memory<int32_t>(a.batch + 1);
    b.time("cu_seqlens_fill from a mask", numbers_in({a.batch, seqlen}), b.bytes(),
           [&] { return tea_cu_seqlens_fill(&a, 0, b.stream()); });
  }
}

void dropout(Bench& b) {
  b.next();
  auto a = sized<tea_dropout_mask>();
  a.dropout = 0.1f, a.batch = 1, a.heads = b.bytes() >> 22, a.rows = a.cols = 2048;
  a.keep = b.memory<uint8_t>(b.bytes()), a.rng_state = b.numbers<int64_t>({1, 2});
  b.time("dropout_keep", numbers_in({a.heads, a.rows, a.cols}), b.bytes(),
         [&] { return tea_dropout_keep(&a, 0, b.stream()); });
}

void merge(Bench& b) {
  for (int32_t parts : {2, 8}) {
    b.next();
    auto a = sized<tea_merge>();
    a.part_dtype = TEA_BF16, a.parts = parts;
    a.batch = 1, a.rows = b.tokens() / 2, a.heads = kHeads, a.dim = kDim;
    std::vector<const void*> o, lse;
    for (int32_t i = 0; i < parts; ++i) {
      o.push_back(b.memory<char>(b.bytes() / 2));
      lse.push_back(b.memory<float>(a.rows * kHeads));
    }
    a.part_o = o.data(), a.part_lse = lse.data();
    a.o = b.memory<char>(b.bytes() / 2), a.lse = b.memory<float>(a.rows * kHeads);
    b.time("merge_parts", numbers_in({parts, a.rows, kHeads, kDim}),
           (parts + 1) * (b.bytes() / 2 + 4 * a.rows * kHeads),
           [&] { return tea_merge_parts(&a, 0, b.stream()); });
  }
}

void halves(Bench& b) {
  const int64_t batch = 16, tokens = b.tokens(), each = tokens / batch;
  {
    b.next();
    auto a = sized<tea_cp_half>();
    a.second = 1, a.batch = batch, a.slabs = 2, a.tokens = tokens, a.row_bytes = 2 * kRow;
    a.tensor = b.memory<char>(2 * b.bytes()), a.half = b.memory<char>(b.bytes());
    a.cu_seqlens = b.steps(batch, each);
    b.time("cp_read_half", numbers_in({2, tokens, kHeads, kDim}), 2 * b.bytes(),
           [&] { return tea_cp_read_half(&a, 0, b.stream()); });
  }
  for (bool correct : {true, false}) {
    b.next();
    auto a = sized<tea_cp_lse>();
    const int64_t heads = 128, length = b.bytes() / 4 / heads;
    a.packed = 1, a.batch = batch, a.heads = heads, a.lse_len = length, a.half_len = length / 2;
    a.lse = b.memory<float>(heads * length), a.half_lse = b.memory<float>(heads * length / 2);
    a.cu_seqlens = b.steps(batch, length / batch);
    b.time(correct ? "cp_lse_correct" : "cp_lse_read", numbers_in({heads, length}),
           b.bytes() / 2 * (correct ? 3 : 2),
           [&] { return (correct ? tea_cp_lse_correct : tea_cp_lse_read)(&a, 0, b.stream()); });
  }
  for (int32_t second : {0, 1}) {
    b.next();
    auto a = sized<tea_cp_out>();
    a.dtype = TEA_BF16, a.only_second_half = second, a.packed = 1, a.batch = batch;
    a.tokens = tokens, a.heads = kHeads, a.dim = kDim;
    a.lse_len = tokens, a.step_lse_len = tokens / (second + 1);
    a.out = b.memory<char>(b.bytes()), a.step_out = b.memory<char>(b.bytes());
    a.lse = b.memory<float>(tokens * kHeads), a.step_lse = b.memory<float>(tokens * kHeads);
    a.cu_seqlens = b.steps(batch, each);
    b.time(second ? "cp_out_correct, second halves" : "cp_out_correct",
           numbers_in({tokens, kHeads, kDim}), (3 * b.bytes() + 8 * tokens * kHeads) / (second + 1),
           [&] { return tea_cp_out_correct(&a, 0, b.stream()); });
  }
  const int32_t actions[][2] = {{TEA_CP_ADD, TEA_CP_NONE}, {TEA_CP_COPY, TEA_CP_ADD}};
  for (const auto& action : actions) {
    b.next();
    auto a = sized<tea_cp_grad>();
    a.dtype = TEA_BF16, a.first = action[0], a.second = action[1], a.batch = batch;
    a.tokens = tokens, a.row_elements = kRow;
    a.grad = b.memory<char>(b.bytes()), a.step_grad = b.memory<char>(b.bytes());
    a.cu_seqlens = b.steps(batch, each);
    const bool one = a.second == TEA_CP_NONE;
    b.time(one ? "cp_grad_correct, add and none" : "cp_grad_correct, copy and add",
           numbers_in({tokens, kHeads, kDim}), b.bytes() / 2 * (one ? 3 : 5),
           [&] { return tea_cp_grad_correct(&a, 0, b.stream()); });
  }
}

void ranks(Bench& b) {
  const int64_t batch = 16, tokens = b.tokens();
  {
    b.next();
    auto a = sized<tea_cp_partition>();
    a.world = 4, a.rank = 1, a.batch = batch, a.tokens = b.bytes();
    a.cu_seqlens = b.steps(batch, a.tokens / batch), a.indices = b.memory<int32_t>(a.tokens / 4);
    b.time("cp_partition_indices", numbers_in({a.tokens, a.world}), b.bytes(),
           [&] { return tea_cp_partition_indices(&a, 0, b.stream()); });
  }
  for (bool to_ranks : {true, false}) {
    b.next();
    auto a = sized<tea_cp_order>();
    a.world = 4, a.batch = batch, a.tokens = tokens, a.row_bytes = 2 * kRow;
    a.cu_seqlens = b.steps(batch, tokens / batch);
    a.input = b.memory<char>(b.bytes()), a.output = b.memory<char>(b.bytes());
    b.time(to_ranks ? "cp_to_rank_order" : "cp_to_sequence_order",
           numbers_in({tokens, kHeads, kDim}), 2 * b.bytes(), [&] {
             return (to_ranks ? tea_cp_to_rank_order : tea_cp_to_sequence_order)(&a, 0, b.stream());
           });
  }
  b.next();
  auto a = sized<tea_cp_valid>();
  a.batch = batch, a.tokens = tokens, a.row_bytes = 2 * kRow;
  a.cu_seqlens_padded = a.cu_seqlens = b.steps(batch, tokens / batch);
  a.input = b.memory<char>(b.bytes()), a.output = b.memory<char>(b.bytes());
  b.time("cp_copy_valid", numbers_in({tokens, kHeads, kDim}), 2 * b.bytes(),
         [&] { return tea_cp_copy_valid(&a, 0, b.stream()); });
}

void prepare_and_fill(Bench& b) {
  for (bool forward : {true, false}) {
    b.next();
    auto a = sized<tea_flash_prepare>();
    a.dtype = TEA_BF16, a.batch = 4, a.seqlen = b.tokens() / 4, a.heads = kHeads, a.dim = kDim;
    for (int i = 0; i < (forward ? 1 : 3); ++i)
      a.input[i] = b.memory<char>((forward ? 3 : 1) * b.bytes());
    a.output = b.memory<char>(3 * b.bytes());
    b.time(forward ? "flash_prepare_forward" : "flash_prepare_backward",
           numbers_in({a.seqlen, 4, kHeads, kDim}), 6 * b.bytes(), [&] {
             return (forward ? tea_flash_prepare_forward : tea_flash_prepare_backward)(&a, 0,
                                                                                       b.stream());
           });
  }
  b.next();
  void* const data = b.memory<char>(b.bytes());
  b.time("fill_bytes", numbers_in({b.bytes()}), b.bytes(),
         [&] { return tea_fill_bytes(data, 7, static_cast<uint64_t>(b.bytes()), 0, b.stream()); });
  b.time("fill, bf16", numbers_in({b.bytes() / 2}), b.bytes(),
         [&] { return tea_fill(data, TEA_BF16, b.bytes() / 2, 0.5, 0, b.stream()); });
}

void softmax(Bench& b) {
  const char* const kinds[] = {"", ", mask", ", causal", ", bottom right"};
  for (int64_t cols : {int64_t{128}, int64_t{1024}, int64_t{4096}, int64_t{16384}})
    for (int32_t kind : {TEA_SCORE_MASK_NONE, TEA_SCORE_MASK_GIVEN, TEA_SCORE_MASK_CAUSAL}) {
      auto a = sized<tea_scaled_softmax>();
      a.dtype = TEA_BF16, a.kind = kind, a.scale = 0.5f, a.cols = cols;
      a.batch = 1, a.rows = std::min(cols, b.bytes() / 2 / cols);
      a.heads = b.bytes() / 2 / cols / a.rows;
      const std::string shape = numbers_in({a.batch, a.heads, a.rows, cols});
      // Causal rows read what they see, row r of a matrix r + 1 columns, and write all.
      const bool causal = kind == TEA_SCORE_MASK_CAUSAL;
      const int64_t read = causal ? a.heads * a.rows * (a.rows + 1) : b.bytes();
      b.next();
      a.input = b.memory<char>(b.bytes()), a.output = b.memory<char>(b.bytes());
      if (kind == TEA_SCORE_MASK_GIVEN) a.mask = b.memory<uint8_t>(a.rows * cols);
      b.time(("scaled_softmax_forward" + std::string(kinds[kind])).c_str(), shape,
             read + b.bytes() + (a.mask ? a.rows * cols : 0),
             [&] { return tea_scaled_softmax_forward(&a, 0, b.stream()); });
      if (kind == TEA_SCORE_MASK_GIVEN) continue;
      b.next();
      a.dout = b.memory<char>(b.bytes()), a.input = b.memory<char>(b.bytes());
      a.output = const_cast<void*>(a.dout);
      b.time(("scaled_softmax_backward" + std::string(kinds[kind])).c_str(), shape,
             2 * read + b.bytes(), [&] { return tea_scaled_softmax_backward(&a, 0, b.stream()); });
    }
}

void fp8(Bench& b) {
  b.next();
  auto a = sized<tea_fp8_cast>();
  a.count = b.bytes() / 2;
  void* const wide = b.memory<char>(b.bytes());
  void* const narrow = b.memory<char>(b.bytes() / 2);
  const std::string shape = numbers_in({a.count});
  a.input = wide, a.output = narrow, a.input_dtype = TEA_BF16, a.output_dtype = TEA_E4M3;
  a.scale = b.memory<float>(1), a.scale_inv = b.memory<float>(1), a.amax = b.memory<float>(1);
  b.time("fp8_quantize, bf16 to e4m3", shape, 3 * a.count,
         [&] { return tea_fp8_quantize(&a, 0, b.stream()); });
  b.time("fp8_quantize_current, bf16 to e4m3", shape, 5 * a.count,
         [&] { return tea_fp8_quantize_current(&a, 0, b.stream()); });
  b.time("amax, bf16", shape, 2 * a.count,
         [&] { return tea_amax(wide, TEA_BF16, a.count, a.amax, 0, b.stream()); });
  a.input = narrow, a.output = wide, a.input_dtype = TEA_E4M3, a.output_dtype = TEA_BF16;
  a.scale = a.amax = nullptr;
  b.time("fp8_dequantize, e4m3 to bf16", shape, 3 * a.count,
         [&] { return tea_fp8_dequantize(&a, 0, b.stream()); });
}

}  // namespace
}  // namespace tea::kit

int main(int count, char** words) {
  using namespace tea::kit;
  try {
    Bench bench(count > 1 ? std::atoll(words[1]) : 256, count > 2 ? words[2] : "");
    for (auto* const group :
         {kv_cache, ragged, dropout, merge, halves, ranks, prepare_and_fill, softmax, fp8})
      group(bench);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
