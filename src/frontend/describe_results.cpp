// Types, shapes and memory layouts of O, the gradients and the row statistics.
#include <algorithm>

#include "frontend/describe.h"

namespace tea::frontend {

int32_t Description::type_of(tea_tensor index) const {
  const auto or_else = [](int32_t type, int32_t usual) { return type ? type : usual; };
  const int32_t o = or_else(problem.o_dtype, problem.dtype);
  if (index == TEA_O) return o;
  if (index == TEA_DOUT) return or_else(problem.dout_dtype, o);
  if (index == TEA_K || index == TEA_V) return or_else(problem.kv_dtype, problem.dtype);
  const bool gradient = index == TEA_DQ || index == TEA_DK || index == TEA_DV;
  return gradient ? or_else(problem.dqkv_dtype, problem.dtype) : problem.dtype;
}

void Description::add_row_statistic(tea_tensor index, const char* name, const Tensor& tensor) {
  require_shape(name, tensor, row_statistic_shape());
  pointers_[index] = memory(name, tensor, statistic_type());
}

tea_strides Description::row_statistic_strides(const char* name, const Tensor& tensor) const {
  const Shape needed = row_statistic_shape();
  if (tensor.elements()) {  // an empty tensor may have any strides
    for (int i = 0; i < tensor.rank && i < needed.rank; ++i)
      if (tensor.stride[i] < 0) refuse(name, "of negative strides", "strides of 0 or more");
  }
  require_shape(name, tensor, needed);
  if (tensor.type != statistic_type())
    refuse(std::string(name) + ".dtype", type_text(tensor.type), type_text(statistic_type()));
  return needed.rank == 3 ? tea_strides{tensor.stride[0], tensor.stride[2], tensor.stride[1]}
                          : tea_strides{0, tensor.stride[0], tensor.stride[1]};
}

Layout Description::o_layout() const {
  const DimensionOrder& order = order_q_;
  Layout out{order.rank, {}, {}};
  const int64_t heads = problem.heads_q, dim = problem.dim_v;
  std::copy_n(q_.size, order.rank, out.size);
  out.size[order.dim] = dim;
  const int64_t rows = std::max<int64_t>(q_.size[order.seq], 1);
  const bool is_seq_major = order.batch > order.seq;  // sbhd
  out.stride[order.dim] = 1;
  out.stride[order.head] = dim;
  out.stride[order.seq] = heads * dim * (is_seq_major ? std::max<int64_t>(batch_, 1) : 1);
  if (order.batch >= 0) out.stride[order.batch] = heads * dim * (is_seq_major ? 1 : rows);
  return out;
}

Shape Description::row_statistic_shape() const {
  const int64_t heads = problem.heads_q, rows = q_.size[order_q_.seq];
  return order_q_.batch >= 0 ? Shape{3, {batch_, heads, rows}} : Shape{2, {rows, heads}};
}

}  // namespace tea::frontend
