// Merging partial results by LSE: split keys, and context parallelism on ragged batches.
#include <algorithm>
#include <vector>

#include "torch/ops.h"
#include "torch/report.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

int64_t batch_of(const Tensor& cu_seqlens) { return cu_seqlens.numel() - 1; }

// The number of elements of dimensions `from` to the last.
int64_t product(const View& t, int from) {
  int64_t n = 1;
  for (int i = from; i < t.rank; ++i) n *= t.size[i];
  return n;
}

struct Slabs {
  int64_t slabs, tokens, row;  // row: elements
};
// [tokens, ...], or with `slabs` [slabs, tokens, ...].
Slabs slabs_of(const char* name, const View& t, bool slabs) {
  const int tokens = slabs ? 1 : 0;
  if (t.rank <= tokens)
    refuse(name, "of shape " + shape_text(t), slabs ? "[slabs, tokens, ...]" : "[tokens, ...]");
  return {slabs ? t.size[0] : 1, t.size[tokens], product(t, tokens + 1)};
}

struct Lse {
  bool packed;
  int64_t batch, heads, length;
};
// packed: [heads, length]; else [batch, heads, length].
Lse lse_of(const char* name, const Tensor& lse, bool packed) {
  const View t(lse);
  if (t.rank != (packed ? 2 : 3))
    refuse(name, "of shape " + shape_text(t),
           packed ? "[heads, length]" : "[batch, heads, length]");
  return {packed, packed ? 1 : t.size[0], t.size[t.rank - 2], t.size[t.rank - 1]};
}

}  // namespace

void merge(Stack& stack) {
  const std::vector<Tensor> parts = stack.tensors(), lses = stack.tensors();
  if (parts.empty() || parts.size() != lses.size())
    refuse("o", std::to_string(parts.size()) + " parts and " + std::to_string(lses.size()) + " lse",
           "one lse for each part, at least one");
  const Place place("o", parts[0]);
  const View first(parts[0]), first_lse(lses[0]);
  if (first.rank != 4 || first_lse.rank != 3)
    refuse("o, lse", shape_text(first) + ", " + shape_text(first_lse),
           "[batch, rows, heads, dim] and [batch, heads, rows]");
  std::vector<const void*> o, lse;
  const int32_t dtype = dtype_of(parts[0]);
  const int32_t lse_dtype = torch_dtype(dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (shape_text(View(parts[i])) != shape_text(first) ||
        shape_text(View(lses[i])) != shape_text(first_lse))
      refuse("o, lse", "of different shapes", shape_text(first) + ", " + shape_text(first_lse));
    o.push_back(place.memory("o", parts[i], torch_dtype(dtype)));
    lse.push_back(place.memory("lse", lses[i], lse_dtype));
  }
  const Tensor out = empty_contiguous_like(parts[0]), out_lse = empty_contiguous_like(lses[0]);
  auto args = sized<tea_merge>();
  args.part_dtype = dtype;
  args.parts = static_cast<int32_t>(parts.size());
  args.part_o = o.data(), args.part_lse = lse.data();
  args.o = out.data_ptr(), args.lse = out_lse.data_ptr();
  args.batch = first.size[0], args.rows = first.size[1];
  args.heads = first.size[2], args.dim = first.size[3];
  if (first_lse.size[0] != args.batch || first_lse.size[1] != args.heads ||
      first_lse.size[2] != args.rows)
    refuse("lse", "of shape " + shape_text(first_lse),
           "[batch, heads, rows] of o " + shape_text(first));
  require(tea_merge_parts(&args, place.where.device, place.where.stream));
  stack.give(out, out_lse);
}

namespace {

// O [batch, rows, heads, dim] and LSE [batch, heads, rows] as views: the strides are read,
// contiguity is not needed.
struct PartView {
  frontend::Tensor o, lse;

  PartView(const char* name_o, const Tensor& tensor_o, const char* name_lse,
           const Tensor& tensor_lse)
      : o(view_of(name_o, tensor_o)), lse(view_of(name_lse, tensor_lse)) {
    if (o.rank != 4 || o.stride[3] != 1)
      refuse(name_o, "of shape " + shape_text(o),
             "[batch, rows, heads, dim], contiguous last dimension");
    require_shape(name_lse, lse, {3, {o.size[0], o.size[2], o.size[1]}});
    const int32_t statistic = o.type == TEA_FP64 ? TEA_FP64 : TEA_FP32;
    if (lse.type != statistic)
      refuse(std::string(name_lse) + ".dtype", frontend::type_text(lse.type),
             frontend::type_text(statistic));
  }
  tea_strides o_strides() const { return {o.stride[0], o.stride[1], o.stride[2]}; }
  tea_strides lse_strides() const { return {lse.stride[0], lse.stride[2], lse.stride[1]}; }
};

void require_like(const char* name, const frontend::Tensor& part, const frontend::Tensor& of,
                  bool has_same_strides) {
  frontend::Shape shape{of.rank, {}};
  std::copy_n(of.size, of.rank, shape.size);
  require_shape(name, part, shape);
  for (int i = 0; has_same_strides && i < of.rank; ++i)
    if (part.size[i] > 1 && part.stride[i] != of.stride[i])
      refuse(name, "of other strides", "those of what it is merged into");
  frontend::require_device(name, part, of.device);
}

void merge_views(const Tensor& o, const PartView& of, const frontend::Tensor& to,
                 const std::vector<const void*>& parts, const std::vector<const void*>& lses,
                 void* to_lse) {
  auto args = sized<tea_merge>();
  args.part_dtype = of.o.type, args.o_dtype = to.type;
  args.parts = static_cast<int32_t>(parts.size());
  args.part_o = parts.data(), args.part_lse = lses.data();
  args.o = to.data, args.lse = to_lse;
  args.batch = to.size[0], args.rows = to.size[1], args.heads = to.size[2], args.dim = to.size[3];
  args.part_o_stride = of.o_strides();
  args.o_stride = {to.stride[0], to.stride[1], to.stride[2]};
  args.part_lse_stride = args.lse_stride = of.lse_strides();
  const Where where = where_is("o", o);
  require(tea_merge_parts(&args, where.device, where.stream));
}

}  // namespace

// In place. Slices of tensors whose other slices are merged by other calls.
void merge_into(const Tensor& o, const Tensor& lse, const Tensor& part_o, const Tensor& part_lse) {
  const PartView to("o", o, "lse", lse), from("part_o", part_o, "part_lse", part_lse);
  require_like("part_o", from.o, to.o, true), require_like("part_lse", from.lse, to.lse, true);
  if (from.o.type != to.o.type)
    refuse("part_o.dtype", frontend::type_text(from.o.type), frontend::type_text(to.o.type));
  merge_views(o, to, to.o, {to.o.data, from.o.data}, {to.lse.data, from.lse.data}, to.lse.data);
}

// O in another type: a part that is merged with no other.
void round_o(const Tensor& o, const Tensor& sums, const Tensor& lse) {
  const PartView from("sums", sums, "lse", lse);
  const frontend::Tensor to = view_of("o", o);
  require_like("o", to, from.o, false);
  if (to.stride[3] != 1) refuse("o", "of other strides", "a contiguous last dimension");
  merge_views(o, from, to, {from.o.data}, {from.lse.data}, nullptr);
}

void round_o(Stack& stack) {
  const Tensor o = stack.tensor(), sums = stack.tensor(), lse = stack.tensor();
  round_o(o, sums, lse);
}

void merge_into(Stack& stack) {
  const Tensor o = stack.tensor(), lse = stack.tensor(), part_o = stack.tensor(),
               part_lse = stack.tensor();
  merge_into(o, lse, part_o, part_lse);
}

void cp_read_half(Stack& stack) {
  const Tensor tensor = stack.tensor(), cu_seqlens = stack.tensor();
  const bool second = stack.flag(), has_slabs = stack.flag();
  const Place place("tensor", tensor);
  const View view(tensor);
  const Slabs s = slabs_of("tensor", view, has_slabs);
  std::vector<int64_t> sizes(view.size, view.size + view.rank);
  sizes[has_slabs] /= 2;
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  const Tensor half = empty(tensor, dtype, view.rank, sizes.data());
  auto args = sized<tea_cp_half>();
  args.second = second;
  args.tensor = place.memory("tensor", tensor);
  args.half = half.data_ptr();
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.slabs = s.slabs, args.tokens = s.tokens;
  args.row_bytes = s.row * static_cast<int64_t>(tensor.element_size());
  run_reported(tea_cp_read_half, args, cu_seqlens, place.where);
  stack.give(half);
}

namespace {

tea_cp_lse describe_lse(const Place& place, const Tensor& lse, const Tensor& half,
                        const Tensor& cu_seqlens, bool packed) {
  const Lse whole = lse_of("lse", lse, packed), part = lse_of("half_lse", half, packed);
  auto args = sized<tea_cp_lse>();
  args.packed = packed;
  args.lse = place.fp32("lse", lse), args.half_lse = place.fp32("half_lse", half);
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.heads = whole.heads;
  args.lse_len = whole.length, args.half_len = part.length;
  const bool fits = whole.heads == part.heads &&
                    (packed || (whole.batch == args.batch && part.batch == args.batch));
  if (!fits)
    refuse("lse, half_lse", "of different batch or heads", "those of cu_seqlens and of each other");
  return args;
}

}  // namespace

void cp_lse_correct(Stack& stack) {
  const Tensor lse = stack.tensor(), half = stack.tensor(), cu_seqlens = stack.tensor();
  const bool packed = stack.flag();
  const Place place("lse", lse);
  const tea_cp_lse args = describe_lse(place, lse, half, cu_seqlens, packed);
  run_reported(tea_cp_lse_correct, args, cu_seqlens, place.where);
}

void cp_lse_read(Stack& stack) {
  const Tensor lse = stack.tensor(), cu_seqlens = stack.tensor();
  const bool packed = stack.flag();
  const int64_t half_len = stack.integer();
  const Place place("lse", lse);
  const Lse shape = lse_of("lse", lse, packed);
  const int32_t fp32 = torch_dtype(TEA_FP32);
  const Tensor half = packed ? empty(lse, fp32, {shape.heads, half_len})
                             : empty(lse, fp32, {shape.batch, shape.heads, half_len});
  const tea_cp_lse args = describe_lse(place, lse, half, cu_seqlens, packed);
  const auto bytes = static_cast<uint64_t>(half.numel()) * sizeof(float);
  require(tea_fill_bytes(half.data_ptr(), 0, bytes, place.where.device, place.where.stream));
  run_reported(tea_cp_lse_read, args, cu_seqlens, place.where);
  stack.give(half);
}

void cp_out_correct(Stack& stack) {
  const Tensor out = stack.tensor(), step_out = stack.tensor(), lse = stack.tensor(),
               step_lse = stack.tensor(), cu_seqlens = stack.tensor();
  const bool only_second_half = stack.flag(), packed = stack.flag();
  const Place place("out", out);
  const View view(out), step(step_out);
  if (view.rank != 3 || step.rank != 3 ||
      step.size[0] != (only_second_half ? view.size[0] / 2 : view.size[0]))
    refuse("out, out_per_step", shape_text(view) + ", " + shape_text(step),
           "[tokens, heads, dim] and as many or half the tokens");
  const Lse whole = lse_of("lse", lse, packed), part = lse_of("lse_per_step", step_lse, packed);
  auto args = sized<tea_cp_out>();
  args.dtype = dtype_of(out);
  args.only_second_half = only_second_half;
  args.packed = packed;
  args.out = place.memory("out", out);
  args.step_out = place.memory("out_per_step", step_out, torch_dtype(args.dtype));
  args.lse = place.fp32("lse", lse), args.step_lse = place.fp32("lse_per_step", step_lse);
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.tokens = view.size[0];
  args.heads = view.size[1], args.dim = view.size[2];
  args.lse_len = whole.length, args.step_lse_len = part.length;
  if (whole.heads != args.heads || part.heads != args.heads ||
      (!packed && (whole.batch != args.batch || part.batch != args.batch)))
    refuse("lse, lse_per_step", "of other batch or heads", "those of out and cu_seqlens");
  run_reported(tea_cp_out_correct, args, cu_seqlens, place.where);
}

void cp_grad_correct(Stack& stack) {
  const Tensor grad = stack.tensor(), step = stack.tensor(), cu_seqlens = stack.tensor();
  const std::string first = stack.text(), second = stack.text();
  const bool has_slabs = stack.flag();
  const auto action = [](const std::string& name) {
    if (name == "none") return TEA_CP_NONE;
    if (name == "add") return TEA_CP_ADD;
    if (name == "copy") return TEA_CP_COPY;
    refuse("first_half or second_half", "\"" + name + "\"", "none, add or copy");
  };
  const Place place("grad", grad);
  const Slabs s = slabs_of("grad", View(grad), has_slabs);
  auto args = sized<tea_cp_grad>();
  args.dtype = dtype_of(grad);
  args.first = action(first), args.second = action(second);
  const bool half = args.first == TEA_CP_NONE || args.second == TEA_CP_NONE;
  const Slabs t = slabs_of("grad_per_step", View(step), has_slabs);
  if (t.slabs != s.slabs || t.row != s.row || t.tokens != (half ? s.tokens / 2 : s.tokens))
    refuse("grad_per_step", "of shape " + shape_text(View(step)),
           half ? "half the tokens of grad" : "the shape of grad");
  args.grad = place.memory("grad", grad);
  args.step_grad = place.memory("grad_per_step", step, torch_dtype(args.dtype));
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.slabs = s.slabs, args.tokens = s.tokens;
  args.row_elements = s.row;
  run_reported(tea_cp_grad_correct, args, cu_seqlens, place.where);
}

void cp_partition_indices(Stack& stack) {
  const Tensor cu_seqlens = stack.tensor();
  const int64_t tokens = stack.integer(), world = stack.integer(), rank = stack.integer();
  if (world < 1) refuse("world_size", std::to_string(world), "at least 1");
  const Place place("cu_seqlens", cu_seqlens);
  const Tensor out = empty(cu_seqlens, torch_int32(), {tokens / world});
  auto args = sized<tea_cp_partition>();
  args.world = static_cast<int32_t>(world), args.rank = static_cast<int32_t>(rank);
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.indices = static_cast<int32_t*>(out.data_ptr());
  args.batch = batch_of(cu_seqlens), args.tokens = tokens;
  run_reported(tea_cp_partition_indices, args, cu_seqlens, place.where);
  stack.give(out);
}

namespace {

void reorder(Stack& stack, tea_status (*verb)(const tea_cp_order*, int, void*)) {
  const Tensor input = stack.tensor(), cu_seqlens = stack.tensor();
  const int64_t world = stack.integer();
  const Place place("input", input);
  const Slabs s = slabs_of("input", View(input), false);
  const Tensor out = empty_contiguous_like(input);
  auto args = sized<tea_cp_order>();
  args.world = static_cast<int32_t>(world);
  args.input = place.memory("input", input);
  args.output = out.data_ptr();
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.tokens = s.tokens;
  args.row_bytes = s.row * static_cast<int64_t>(input.element_size());
  run_reported(verb, args, cu_seqlens, place.where);
  stack.give(out);
}

}  // namespace

void cp_to_rank_order(Stack& stack) { reorder(stack, tea_cp_to_rank_order); }

void cp_to_sequence_order(Stack& stack) { reorder(stack, tea_cp_to_sequence_order); }

void cp_copy_valid(Stack& stack) {
  const Tensor input = stack.tensor(), output = stack.tensor(), padded = stack.tensor(),
               cu_seqlens = stack.tensor();
  const Place place("input", input);
  const Slabs s = slabs_of("input", View(input), false);
  if (shape_text(View(input)) != shape_text(View(output)) ||
      input.element_size() != output.element_size())
    refuse("output", "of shape " + shape_text(View(output)), "the shape and dtype of input");
  auto args = sized<tea_cp_valid>();
  args.input = place.memory("input", input);
  args.output = place.memory("output", output);
  args.cu_seqlens_padded = place.int32("cu_seqlens_padded", padded);
  args.cu_seqlens = place.int32("cu_seqlens", cu_seqlens);
  args.batch = batch_of(cu_seqlens), args.tokens = s.tokens;
  args.row_bytes = s.row * static_cast<int64_t>(input.element_size());
  run_reported(tea_cp_copy_valid, args, cu_seqlens, place.where);
}

}  // namespace tea::torch_ops
