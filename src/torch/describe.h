// From tensors and options to a Problem and a Run: the describe step of the PyTorch front end.
#pragma once
#include <array>
#include <optional>
#include <string>

#include "torch/tensor.h"

namespace tea::torch_ops {

// What every operator of attention takes, in the order of its schema: members are read from the
// stack as they are declared.
struct Arguments {
  Tensor q, k, v;
  std::string format;  // "bhsd", "bshd", "sbhd", "thd"; or two of them, "thd_bshd": q, then k and v
  std::string mask;    // "none", "causal", "bottom_right", "causal_bottom_right"
  bool training;
  std::optional<double> scale;
  int64_t window_left, window_right;  // -1: no bound
  double dropout;
  std::optional<Tensor> rng_state, bias, sink, cu_seqlens_q, cu_seqlens_kv;
  int64_t max_seqlen_q, max_seqlen_kv;  // -1: as many as there are tokens or slots
  std::optional<Tensor> table_k;
  double softcap;
  std::optional<Tensor> slopes;
  bool alibi;
  std::optional<Tensor> offsets_q, offsets_kv, table_v, origin;
  bool pre_scale_bias, off_by_one, max_logit, deterministic;
  std::string engine;

  explicit Arguments(Stack& stack);
};

// Which dimension of a tensor is which; -1: it has none.
struct Order {
  int rank = 0, batch = -1, seq = -1, head = -1, dim = -1;
};

// A shape of at most four dimensions.
struct Sizes {
  int rank;
  int64_t size[4];
};

// The arguments as the C API takes them. Points into the tensors of the Arguments, which must live
// as long.
class Work {
 public:
  explicit Work(const Arguments& arguments);
  tea_problem problem{};

  // Adds a tensor of the operation; the engines count on how well a large one is aligned.
  void add(tea_tensor index, const char* name, const Tensor& tensor) {
    add(index, name, tensor, View(tensor));
  }
  void add_small(tea_tensor index, void* memory) { pointers_[index] = memory; }
  // Adds one that has the shape of q, k or v (o and dout: with the head dim of v) and the type that
  // the problem says, and returns its strides.
  tea_strides add_rows(tea_tensor index, const char* name, const Tensor& tensor) {
    return add_rows(index, name, tensor, View(tensor));
  }
  // Adds a scale of FP8, if there is one.
  void add_scale(tea_tensor index, const char* name, const std::optional<Tensor>& tensor);
  // Adds one that has a number for each row and head, as LSE has.
  void add_per_row(tea_tensor index, const char* name, const Tensor& tensor);

  Tensor new_o();  // memory for O, in the order of the format, added
  Tensor new_per_row() const;
  // One direction, with workspace from PyTorch's allocator.
  void forward();
  void backward();
  std::string explain();  // the problem's line, then what each engine says

 private:
  int64_t size(const View& view, int dimension) const {
    return dimension < 0 ? 1 : view.size[dimension];
  }
  void add(tea_tensor index, const char* name, const Tensor& tensor, const View& view);
  tea_strides add_rows(tea_tensor index, const char* name, const Tensor& tensor, const View& view);
  void describe_queries();
  void describe_keys();
  void describe_pages();
  void describe_mask();
  void describe_bias();
  void describe_scores();
  void add_integers(tea_tensor index, const char* name, const std::optional<Tensor>& tensor);
  void settle_sizes();
  void settle_alignment();
  struct Layout {
    int64_t size[4], stride[4];
  };
  Layout layout_of_o() const;
  Sizes per_row() const;
  int32_t type_of(tea_tensor index) const;
  void run(tea_status (*verb)(const tea_plan*, const tea_run*), bool is_forward);
  bool varies() const {
    return problem.q_form == TEA_RAGGED || problem.kv_form == TEA_RAGGED ||
           problem.kv_form == TEA_PAGED;
  }

  const Arguments& in_;
  View q_, k_, v_;
  Order order_q_, order_kv_;
  Where where_;
  int64_t batch_ = 0, rows_q_ = 0, rows_kv_ = 0;  // of a dense side, else the bound of its lengths
  std::array<void*, TEA_TENSOR_COUNT> pointers_{};
  uintptr_t addresses_ = 0;  // OR of the addresses of the large tensors: how well all are aligned
  tea_run run_{};
};

}  // namespace tea::torch_ops
