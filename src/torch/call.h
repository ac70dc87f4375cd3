// One call of an operator of attention: PyTorch's tensors, their description, memory and the run.
#pragma once
#include <array>
#include <string>

#include "frontend/describe.h"
#include "torch/tensor.h"

namespace tea::torch_ops {

// The options in the order of the schema, which owns the tensors.
using Arguments = frontend::OptionsOf<Tensor>;
Arguments read_arguments(Stack& stack);
// Every option absent; format and mask must be set.
Arguments default_arguments(const Tensor& q, const Tensor& k, const Tensor& v);

// A run as data, which is repeated with other memory (replay.cpp).
struct Launch {
  tea_problem problem;
  tea_run run;  // without tensors, workspace and stream
  char engine[32];
  int32_t is_forward;
  int32_t has_run_sizes;  // see frontend::Description
};

// Memory for runs that follow each other in one stream.
class Workspace {
 public:
  // most: bytes that are kept for the next run.
  explicit Workspace(uint64_t most) : most_(most) {}
  // So many bytes, aligned, for a run. `like`: a tensor on the device.
  void* of(uint64_t bytes, const Tensor& like);
  // After a run.
  void release_if_large() {
    if (bytes_ > most_) reset();
  }
  void reset() { memory_.reset(), bytes_ = 0; }

 private:
  const uint64_t most_;
  uint64_t bytes_ = 0;
  std::optional<Tensor> memory_;
};

// One direction on `where`, with workspace from PyTorch's allocator. False: the plan cannot
// accumulate as the run says, and nothing ran. `like`: a tensor on that device.
bool run_planned(const tea_problem& problem, tea_run& run, bool has_run_sizes,
                 const std::string& engine, const Tensor& like, const Where& where, bool is_forward,
                 Workspace* workspace);

class Call {
 public:
  // `arguments` must outlive the call.
  explicit Call(const Arguments& arguments);
  // With other memory in place of q, k and v.
  Call(const Arguments& arguments, const std::array<frontend::Tensor, 3>& qkv);

  tea_problem& problem() { return description_.problem; }
  void add(tea_tensor index, const char* name, const Tensor& tensor) {
    description_.add(index, name, view_of(name, tensor));
  }
  tea_strides add_rows(tea_tensor index, const char* name, const Tensor& tensor) {
    return description_.add_rows(index, name, view_of(name, tensor));
  }
  tea_strides add_rows(tea_tensor index, const char* name, const frontend::Tensor& view) {
    return description_.add_rows(index, name, view);
  }
  void add_row_statistic(tea_tensor index, const char* name, const Tensor& tensor) {
    description_.add_row_statistic(index, name, view_of(name, tensor));
  }
  // Adds LSE, or MAX with the strides of LSE, as a slice of a larger tensor.
  void add_row_statistic_slice(tea_tensor index, const char* name, const Tensor& tensor);
  void add_scale(tea_tensor index, const char* name, const std::optional<Tensor>& tensor);
  void add_memory(tea_tensor index, void* memory) { description_.add_memory(index, memory); }

  frontend::Layout o_layout() const { return description_.o_layout(); }
  Tensor new_o();  // allocates O and adds it
  Tensor new_row_statistic() const;
  // One direction.
  void forward() { run(true); }
  // The same, with bits TEA_ACCUMULATE_*. False: the plan cannot accumulate, and nothing ran.
  bool forward(int accumulate) {
    description_.run.accumulate = accumulate;
    return run(true);
  }
  bool backward(int accumulate = 0) {
    description_.run.accumulate = accumulate;
    return run(false);
  }
  // The call as data, and its memory by tea_tensor.
  Launch recorded(int accumulate, bool is_forward, int64_t (&memory)[TEA_TENSOR_COUNT]);
  // O and LSE of backward are of more keys than those of this call.
  void set_partial() { description_.run.partial = 1; }
  std::string explain();  // the problem's line, then the answer of each engine

 private:
  bool run(bool is_forward);

  const Arguments& in_;
  const frontend::Options options_;
  const Where where_;
  frontend::Description description_;
};

}  // namespace tea::torch_ops
