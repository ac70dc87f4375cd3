// The status word of an operation, which clamps invalid lengths, pages and origins when it runs,
// and reports them. The host refuses them. For a GPU, where reading the word synchronises, they
// are refused only with TE_ATTENTION_CHECK=1.
#pragma once
#include <optional>

#include "torch/tensor.h"

namespace tea::torch_ops {

class Report {
 public:
  Report(const Tensor& like, const Where& where);
  int32_t* word() { return word_; }  // the status word of the run; NULL: not requested
  // Raises if the run has reported an error. `lengths`: the names of the length arguments.
  void refuse_invalid(const char* lengths);

 private:
  int32_t host_ = 0, *word_ = &host_;
  std::optional<Tensor> device_;
};

// Runs an operation whose arguments have a status word, on lengths in `cu_seqlens`.
template <class Args>
void run_reported(tea_status (*verb)(const Args*, int, void*), Args args, const Tensor& cu_seqlens,
                  const Where& where, const char* lengths = "cu_seqlens") {
  Report report(cu_seqlens, where);
  args.status = report.word();
  require(verb(&args, where.device, where.stream));
  report.refuse_invalid(lengths);
}

}  // namespace tea::torch_ops
