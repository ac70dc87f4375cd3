// From options and tensors to a Problem and a Run: the translation that all front ends share.
#pragma once
#include <array>

#include "frontend/options.h"

namespace tea::frontend {

// The index of each dimension of a tensor; -1: the tensor does not have it.
struct DimensionOrder {
  int rank = 0, batch = -1, seq = -1, head = -1, dim = -1;
};

struct Layout {
  int rank;
  int64_t size[4], stride[4];
};

// The Problem, the Run and the tensor pointers of one call. All checks of shapes, types and devices
// happen here; every error names the argument, the value seen and the value needed. Points into the
// tensors of the options, which must live as long.
class Description {
 public:
  explicit Description(const Options& options);

  tea_problem problem = sized<tea_problem>();
  tea_run run = sized<tea_run>();  // sizes and origin; complete after finish()

  // Adds a tensor that engines access in wide pieces: its alignment becomes part of the problem.
  void add(tea_tensor index, const char* name, const Tensor& tensor);
  // Adds memory of the front end's own.
  void add_memory(tea_tensor index, void* memory) { pointers_[index] = memory; }
  // Adds a tensor with the shape of q, k or v (o and dout: with the head dim of v) and the type
  // that the problem specifies, and returns its strides.
  tea_strides add_rows(tea_tensor index, const char* name, const Tensor& tensor);
  // Adds an FP8 scale, if there is one.
  void add_scale(tea_tensor index, const char* name, const std::optional<Tensor>& tensor);
  // Adds a tensor with one element per row and head, as LSE has.
  void add_row_statistic(tea_tensor index, const char* name, const Tensor& tensor);

  // O as it is to be allocated: in the order of the format, with the heads of a token next to each
  // other also for bhsd, because the next layer reads them so.
  Layout o_layout() const;
  void set_o_strides();  // those of o_layout(), for a problem without memory for O
  // Of LSE and the other row statistics, of the sink and of slopes: float64 with float64 tensors.
  int32_t statistic_type() const { return problem.dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32; }
  Shape row_statistic_shape() const;
  // Those of a tensor with that shape, which may be a slice of a larger one.
  tea_strides row_statistic_strides(const char* name, const Tensor& tensor) const;
  int32_t type_of(tea_tensor index) const;

  int device() const { return q_.device; }
  // Ragged and paged layouts leave sizes to the run.
  bool has_run_sizes() const {
    return problem.q_form == TEA_RAGGED || problem.kv_form == TEA_RAGGED ||
           problem.kv_form == TEA_PAGED;
  }
  // Completes the problem and the run, after all tensors have been added.
  void finish();

 private:
  std::string statistic_text() const { return type_text(statistic_type()) + " "; }
  void describe_queries();
  void describe_keys();
  void describe_cache();
  void describe_pages();
  void describe_sizes();
  void describe_mask();
  void describe_bias();
  void describe_softmax();
  void describe_alibi();
  void describe_origin();
  void describe_plain();
  void add_integers(tea_tensor index, const char* name, const std::optional<Tensor>& tensor);
  // The memory of a small contiguous tensor of that type.
  void* memory(const char* name, const Tensor& tensor, int32_t type) const {
    return require_memory(name, tensor, type, device());
  }

  const Options& in_;
  const Tensor q_, k_, v_;
  DimensionOrder order_q_, order_kv_;
  int64_t batch_ = 0, rows_q_ = 0, rows_kv_ = 0;  // rows: the bound of the lengths unless dense
  std::array<void*, TEA_TENSOR_COUNT> pointers_{};
  uintptr_t addresses_ = 0;  // OR of the addresses added by add(): their common alignment
};

}  // namespace tea::frontend
