// One attention problem three times: as logical arrays for the oracle, as buffers in the memory
// order that a layout's name spells, and as the handles of a call. Everything that must not be read
// is NaN, and so is every output before the call.
#pragma once
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "kit/bounds.h"
#include "math/load_store.h"
#include "nvte/memory_order.h"

namespace tea::test {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

inline bool is_padding(NVTE_Mask_Type mask) {
  return mask == NVTE_PADDING_MASK || mask == NVTE_PADDING_CAUSAL_MASK ||
         mask == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
}
inline bool is_causal(NVTE_Mask_Type mask) {
  return mask != NVTE_NO_MASK && mask != NVTE_PADDING_MASK;
}
inline bool is_bottom_right(NVTE_Mask_Type mask) {
  return mask == NVTE_CAUSAL_BOTTOM_RIGHT_MASK || mask == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
}

// The FP8 scalars of K, V, dK and dV: their own, none, or those of Q and dQ.
enum class Sharing { kOwn, kNone, kSameMemory };

struct Question {
  NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD;
  NVTE_Bias_Type bias = NVTE_NO_BIAS;
  NVTE_Mask_Type mask = NVTE_NO_MASK;
  NVTE_Softmax_Type softmax = NVTE_VANILLA_SOFTMAX;
  int64_t window_left = -1, window_right = -1;
  bool bottom_right = false;
  bool training = true, max_logit = false, gaps = true, gqa = false;
  float dropout = 0;
  DType type = DType::kBFloat16;
  DType o_type = DType::kNumTypes, dout_type = DType::kNumTypes, dqkv_type = DType::kNumTypes;
  bool bias_per_batch = false, bias_per_head = true, bias_per_row = true;
  int64_t max_q = 5, max_kv = 7, dim_qk = 8, dim_v = 16;
  uint64_t seed = 1;
  Sharing sharing = Sharing::kOwn;

  Order order() const { return order_of(layout); }
  bool fp8() const { return type == DType::kFloat8E4M3 || type == DType::kFloat8E5M2; }
  bool has_bias() const { return bias == NVTE_PRE_SCALE_BIAS || bias == NVTE_POST_SCALE_BIAS; }
};

struct TypeRow {
  DType nvte;
  tea_dtype tea;
  oracle::Type oracle;
  int64_t bytes;
};
inline const TypeRow& type_row(DType type) {
  static constexpr TypeRow kRows[] = {{DType::kFloat16, TEA_FP16, oracle::Type::kFp16, 2},
                                      {DType::kBFloat16, TEA_BF16, oracle::Type::kBf16, 2},
                                      {DType::kFloat32, TEA_FP32, oracle::Type::kFp32, 4},
                                      {DType::kFloat8E4M3, TEA_E4M3, oracle::Type::kE4m3, 1},
                                      {DType::kFloat8E5M2, TEA_E5M2, oracle::Type::kE5m2, 1}};
  for (const TypeRow& row : kRows)
    if (row.nvte == type) return row;
  throw std::invalid_argument("no such type in tests");
}

// Memory of one type, all NaN at first, aligned as allocators do.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType type, int64_t elements) : row_(&type_row(type)), elements_(elements) {
    memory_.resize(static_cast<size_t>(elements * row_->bytes / 8 + 33), ~uint64_t{0});
  }
  char* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<char*>((address + 255) / 256 * 256);
  }
  double load(int64_t i) { return load_real(data(), row_->tea, i); }
  void store(int64_t i, double x) { store_real(data(), row_->tea, i, x); }
  int64_t elements() const { return elements_; }
  DType type() const { return row_->nvte; }

 private:
  const TypeRow* row_ = nullptr;
  int64_t elements_ = 0;
  std::vector<uint64_t> memory_;
};

// The position of element (b, h, s, d) of one tensor in its buffer.
struct Place {
  Letters strides;
  int64_t index = 0;                             // among the tensors of the buffer
  const std::vector<int32_t>* starts = nullptr;  // of ragged sequences
  const std::vector<int32_t>* table = nullptr;   // of pages
  int64_t page_size = 0, columns = 0;

  int64_t stride(char letter) const {
    const auto it = strides.find(letter);
    return it == strides.end() ? 0 : it->second;
  }
  int64_t origin() const { return index * (stride('3') + stride('2')); }
  int64_t at(int64_t b, int64_t h, int64_t s, int64_t d) const {
    int64_t token = 0;
    if (starts) {
      token = ((*starts)[static_cast<size_t>(b)] + s) * stride('t');
    } else if (table) {
      const int64_t page = (*table)[static_cast<size_t>(b * columns + s / page_size)];
      token = page * stride('b') + s % page_size * stride('s');
    } else {
      token = b * stride('b') + s * stride('s');
    }
    return origin() + token + h * stride('h') + d;
  }
};

// A tensor inside a buffer, which others may share.
struct Stored {
  std::shared_ptr<Buffer> buffer;
  Place place;
  std::vector<size_t> shape;

  char* data() const { return buffer->data() + place.origin() * type_row(buffer->type()).bytes; }
  double load(int64_t b, int64_t h, int64_t s, int64_t d) const {
    return buffer->load(place.at(b, h, s, d));
  }
  void store(int64_t b, int64_t h, int64_t s, int64_t d, double x) const {
    buffer->store(place.at(b, h, s, d), x);
  }
};

// The scalars of FP8. Powers of two, so that what is stored is what was meant.
struct Scales {
  float q_inv = 0.5f, k_inv = 0.25f, v_inv = 2.0f;
  float s = 128.0f, s_inv = 1 / 128.0f, o = 16.0f, o_inv = 1 / 16.0f;
  float dout_inv = 0.5f, dp = 64.0f, dp_inv = 1 / 64.0f, dq = 8.0f, dk = 8.0f, dv = 8.0f;
  float s_amax = 0, o_amax = 0, dp_amax = 0, dq_amax = 0, dk_amax = 0, dv_amax = 0;
};

struct Mismatches {
  int64_t compared = 0, wrong = 0;
  std::string first;
  void add(const std::string& name, bool right, const std::string& detail) {
    ++compared;
    if (right) return;
    if (wrong++ == 0) first = name + detail;
  }
  Mismatches& operator+=(const Mismatches& other) {
    compared += other.compared;
    if (wrong == 0) first = other.first;
    wrong += other.wrong;
    return *this;
  }
};

// The handles of a call, in the order of the API's parameters.
struct ForwardHandles {
  TensorWrapper q, k, v, bias, sink, s, o, cu_q, cu_kv, starts_q, starts_kv, table_k, table_v, rng;
};
struct BackwardHandles {
  TensorWrapper q, k, v, o, dout, s, dp, dq, dk, dv, dbias, dsink, cu_q, cu_kv, starts_q, starts_kv;
};

class AttentionCall {
 public:
  explicit AttentionCall(const Question& setup) : s(setup), random_(setup.seed) {
    sizes();
    lengths();
    draw();
    place();
    write_inputs();
    nvte_tensor_pack_create(&pack);
  }
  virtual ~AttentionCall() { nvte_tensor_pack_destroy(&pack); }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  void forward() {
    call_forward();
    give_memory();
    call_forward();
  }
  void backward() {
    workspace = std::make_unique<TensorWrapper>();
    call_backward();
    give_workspace();
    call_backward();
  }

  // One forward or backward call with whatever is in `workspace` and `pack`.
  virtual void call_forward();
  virtual void call_backward();
  ForwardHandles forward_handles();
  BackwardHandles backward_handles();
  void run(const ForwardHandles& h, cudaStream_t stream);
  void run(const BackwardHandles& h, cudaStream_t stream);
  // The selector's backend for this call.
  NVTE_Fused_Attn_Backend backend() const;
  // Allocates what the first call asked for.
  void give_memory();
  void give_workspace() {
    workspace_memory.assign(workspace->bytes() + workspace->numel() + 64, '\x5a');
    const auto address = reinterpret_cast<uintptr_t>(workspace_memory.data());
    // 16 bytes are promised, no more.
    char* const data = reinterpret_cast<char*>((address + 31) / 32 * 32 + 16);
    workspace->set_rowwise_data(data, DType::kByte, workspace->shape());
  }

  oracle::Result solve() const { return oracle::solve(c, precision()); }
  oracle::Precision precision() const {
    oracle::Precision p = oracle::precision(type_row(s.type).oracle);
    if (s.fp8()) {
      p.p = oracle::rounding(oracle::Type::kExact);
      p.o = oracle::rounding(type_row(o_type()).oracle);
      p.dqkv = oracle::rounding(type_row(dqkv_type()).oracle);
      p.dbias = oracle::rounding(oracle::Type::kFp32);
    }
    return p;
  }
  // The oracle's backward is to see the O that forward stored.
  void keep_o();
  Mismatches check_forward(const oracle::Result& r);
  Mismatches check_backward(const oracle::Result& r);

  DType o_type() const { return s.o_type == DType::kNumTypes ? s.type : s.o_type; }
  DType dout_type() const { return s.dout_type == DType::kNumTypes ? o_type() : s.dout_type; }
  DType dqkv_type() const { return s.dqkv_type == DType::kNumTypes ? s.type : s.dqkv_type; }

  Question s;
  oracle::Case c;
  Scales scales;
  int64_t pages = 0, page_size = 3, columns = 0;
  std::vector<int32_t> cu_q, cu_kv, starts_q, starts_kv, table_k, table_v;
  int64_t tokens_q = 0, tokens_kv = 0;
  Stored q, k, v, o, dout, dq, dk, dv;
  Buffer bias, dbias;
  std::vector<float> sink, dsink;
  std::vector<int64_t> rng;
  NVTETensorPack pack;
  std::vector<std::vector<char>> aux_memory;
  std::vector<char> workspace_memory;
  std::unique_ptr<TensorWrapper> workspace = std::make_unique<TensorWrapper>();

  // Index into a tensor of statistics, [b, h, sq, 1] or [t, h, 1].
  int64_t stats_at(int64_t b, int64_t h, int64_t row) const {
    if (s.order().ragged_q()) return (starts_q[static_cast<size_t>(b)] + row) * c.heads_q + h;
    return (b * c.heads_q + h) * c.max_q + row;
  }
  float* aux_floats(size_t i) {
    return static_cast<float*>(nvte_get_tensor_param(pack.tensors[i], kNVTERowwiseData).data_ptr);
  }
  std::vector<size_t> bias_shape() const {
    return {static_cast<size_t>(s.bias_per_batch ? c.batch : 1),
            static_cast<size_t>(s.bias_per_head ? c.heads_q : 1),
            static_cast<size_t>(s.bias_per_row ? c.max_q : 1), static_cast<size_t>(c.max_kv)};
  }
  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const auto shape = bias_shape();
    if (!s.bias_per_batch) b = 0;
    if (!s.bias_per_head) h = 0;
    if (!s.bias_per_row) i = 0;
    return ((b * static_cast<int64_t>(shape[1]) + h) * static_cast<int64_t>(shape[2]) + i) *
               c.max_kv +
           j;
  }

 private:
  double normal() { return std::normal_distribution<double>()(random_); }
  void sizes();
  void lengths();
  void draw();
  void place();
  void write_inputs();
  Stored plain(DType type, int64_t dim) const;
  void write(const Stored& tensor, const std::vector<double>& values, int64_t heads, int64_t dim,
             const std::vector<int64_t>& length, int64_t rows) const;
  Mismatches compare(const char* name, const Stored& tensor, const oracle::Tensor& want,
                     int64_t heads, int64_t dim, bool on_q) const;
  void compare_one(Mismatches& m, const char* name, const oracle::Tensor& want, double got) const {
    m.add(name, want.accepts(0, got),
          " is " + std::to_string(got) + ", needs " + std::to_string(want.value[0]));
  }
  TensorWrapper wrap(const Stored& tensor) const {
    return {tensor.data(), tensor.shape, tensor.buffer->type()};
  }
  TensorWrapper wrap_scaled(const Stored& tensor, float* amax, float* scale,
                            float* scale_inv) const {
    if (!s.fp8()) return wrap(tensor);
    return {tensor.data(), tensor.shape, tensor.buffer->type(), amax, scale, scale_inv};
  }
  // The scalar that K, V, dK or dV brings: its own, none, or that of Q or dQ.
  float* scalar(float& own, float& first) const {
    if (s.sharing == Sharing::kNone) return nullptr;
    return s.sharing == Sharing::kOwn ? &own : &first;
  }
  TensorWrapper virtual_tensor(float* amax, float* scale, float* scale_inv) const;
  TensorWrapper wrap_table(std::vector<int32_t>& table) const;
  TensorWrapper wrap_starts(std::vector<int32_t>& starts, bool on_q) const;
  static TensorWrapper wrap(std::vector<int32_t>& values) {
    if (values.empty()) return TensorWrapper();
    return {values.data(), std::vector<size_t>{values.size()}, DType::kInt32};
  }
  TensorWrapper wrap_bias(Buffer& buffer) const {
    if (!s.has_bias()) return TensorWrapper();
    // Labelled as PyTorch labels it, whatever the memory holds.
    return {buffer.data(), bias_shape(), DType::kFloat32};
  }
  TensorWrapper wrap_sink(std::vector<float>& values) const {
    if (s.softmax == NVTE_VANILLA_SOFTMAX) return TensorWrapper();
    return {values.data(), std::vector<size_t>{1, values.size(), 1, 1}, DType::kFloat32};
  }

  std::mt19937_64 random_;
};

}  // namespace tea::test
