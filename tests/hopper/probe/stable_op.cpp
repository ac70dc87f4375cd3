// An operator through LibTorch's stable ABI alone: does one binary load under every Python?
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace {

torch::stable::Tensor same(torch::stable::Tensor x) { return x; }
int64_t rows(torch::stable::Tensor x) { return x.size(0); }

STABLE_TORCH_LIBRARY(te_attention_probe, m) {
  m.def("same(Tensor x) -> Tensor");
  m.def("rows(Tensor x) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(te_attention_probe, CompositeExplicitAutograd, m) {
  m.impl("same", TORCH_BOX(&same));
  m.impl("rows", TORCH_BOX(&rows));
}

}  // namespace
