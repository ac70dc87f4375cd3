// Attention in FP8 on tensors of 16 bits, under a recipe of TransformerEngine: the casts and both
// passes as one operator for each direction, because the time of a small call is that of its calls
// of operators, its allocations and its launches.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>

#include "torch/call.h"
#include "torch/fp8_scales.h"
#include "torch/ops.h"

namespace tea::torch_ops {
namespace {

// The places of a tensor of bytes that several arrays share.
class Places {
 public:
  int64_t add(int64_t bytes) {
    constexpr int64_t kAlignment = 256;
    const int64_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// A contiguous tensor in the shape of another, with places of its own for memory.
class Rows {
 public:
  Rows(const frontend::Tensor& like, int32_t type) : view_(like) {
    if (like.rank > 4) refuse("q, k or v", "of shape " + shape_text(like), "at most 4 dimensions");
    view_.type = type;
    int64_t step = 1;
    for (int i = view_.rank - 1; i >= 0; --i) {
      stride_[i] = step;
      step *= view_.size[i] > 1 ? view_.size[i] : 1;
    }
  }
  int64_t count() const { return view_.elements(); }
  frontend::Tensor at(void* memory) const {
    frontend::Tensor out = view_;
    out.data = memory, out.stride = stride_;
    return out;
  }

 private:
  frontend::Tensor view_;
  int64_t stride_[4];
};

frontend::Tensor rows_of(const frontend::Layout& layout, int32_t type, const Place& place,
                         void* memory) {
  return {memory, type, place.where.device, layout.rank, layout.size, layout.stride};
}

// The numbers of the first place: scales as they were when the direction ran.
enum Number { kInputInverse, kFirst, kFirstInverse, kSecond, kSecondInverse, kNumbers };

// Memory for scales and maxima, which begins every tensor of bytes.
struct Head {
  int64_t numbers, maxima;

  explicit Head(Places& places)
      : numbers(places.add(kNumbers * sizeof(float))),
        maxima(places.add(TEA_FP8_MAXIMA * sizeof(float))) {}
};

using Views = std::array<frontend::Tensor, 3>;  // of q, k and v

// The arrays that forward leaves for backward: the codes of q, k and v, LSE, and the codes of O
// unless O has 16 bits.
struct Saved {
  Places places;
  Head head{places};
  std::array<Rows, 3> rows;
  int64_t codes[3], o, lse;

  Saved(const Views& of, int32_t type, bool has_o)
      : rows{Rows(of[0], type), Rows(of[1], type), Rows(of[2], type)} {
    for (int i = 0; i < 3; ++i) codes[i] = places.add(rows[i].count());
    const frontend::Tensor &q = of[0], &v = of[2];
    const int64_t dim = q.rank ? q.size[q.rank - 1] : 0;
    const int64_t lines = dim ? q.elements() / dim : 0;  // rows of all heads
    o = places.add(has_o && v.rank ? lines * v.size[v.rank - 1] : 0);
    lse = places.add(lines * static_cast<int64_t>(sizeof(float)));
  }
  Views qkv(char* base, int device) const {
    Views out;
    for (int i = 0; i < 3; ++i) {
      out[i] = rows[i].at(base + codes[i]);
      out[i].device = device;
    }
    return out;
  }
};

float* number(char* base, const Head& head, Number which) {
  return reinterpret_cast<float*>(base + head.numbers) + which;
}

tea_fp8_joint_cast cast_of(int32_t from, int32_t to) {
  auto out = sized<tea_fp8_joint_cast>();
  out.input_dtype = from, out.output_dtype = to;
  return out;
}

void add(tea_fp8_joint_cast& cast, const void* from, void* to, int64_t count) {
  cast.input[cast.tensors] = from, cast.output[cast.tensors] = to;
  cast.count[cast.tensors++] = count;
}

// Casts to FP8, and keeps the scales of the results with that of the inputs.
void quantize(tea_fp8_joint_cast& cast, const Recipe& recipe, bool is_current,
              const Scales::Found& scales, char* base, const Head& head, const Place& place) {
  cast.power_of_two = recipe.power_of_two, cast.amax_floor = recipe.amax_floor;
  cast.scale = scales.inputs.scale, cast.amax = scales.inputs.amax;
  cast.scale_inv = number(base, head, kInputInverse);
  cast.maxima = reinterpret_cast<float*>(base + head.maxima);
  cast.copied[0] = scales.first.scale, cast.copied[1] = scales.second.scale;
  cast.copy[0] = number(base, head, kFirst), cast.copy[1] = number(base, head, kSecond);
  require((is_current ? tea_fp8_quantize_joint_current : tea_fp8_quantize_joint)(
      &cast, place.where.device, place.where.stream));
}

void dequantize(tea_fp8_joint_cast& cast, float* scale_inv, const Place& place) {
  cast.scale_inv = scale_inv;
  require(tea_fp8_dequantize_joint(&cast, place.where.device, place.where.stream));
}

struct Entry {
  tea_tensor index;
  Number number;
};
constexpr Entry kForward[] = {{TEA_Q_SCALE_INV, kInputInverse},
                              {TEA_K_SCALE_INV, kInputInverse},
                              {TEA_V_SCALE_INV, kInputInverse},
                              {TEA_S_SCALE, kFirst},
                              {TEA_S_SCALE_INV, kFirstInverse}};
constexpr Entry kBackward[] = {
    {TEA_DOUT_SCALE_INV, kInputInverse}, {TEA_DP_SCALE, kFirst}, {TEA_DP_SCALE_INV, kFirstInverse}};
constexpr Entry kGradients[] = {
    {TEA_DQ_SCALE, kSecond}, {TEA_DK_SCALE, kSecond}, {TEA_DV_SCALE, kSecond}};

template <size_t N>
void add_numbers(Call& call, const Entry (&entries)[N], char* base, const Head& head) {
  for (const Entry& entry : entries) call.add_memory(entry.index, number(base, head, entry.number));
}

void require_format(const Arguments& a) {
  if (a.format.starts_with("bhsd"))
    refuse("format", "\"" + a.format + "\"", "one in which the heads of a row are adjacent");
}

// O with heads merged: q's shape but for the last two dimensions.
Tensor new_merged(const Tensor& q, int32_t type, const frontend::Layout& o) {
  int64_t size[4];
  std::copy_n(o.size, o.rank - 1, size);
  size[o.rank - 2] *= o.size[o.rank - 1];
  return empty(q, torch_dtype(type), o.rank - 1, size);
}

char* bytes_of(const Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

void fp8_attention_forward(Stack& stack) {
  const Scales given(stack);
  const Recipe recipe(stack);
  const Arguments arguments = read_arguments(stack);
  require_format(arguments);
  const Place place("q", arguments.q);
  const Views qkv = {view_of("q", arguments.q), view_of("k", arguments.k),
                     view_of("v", arguments.v)};
  const char* const names[] = {"q", "k", "v"};
  const int32_t type = dtype_of(arguments.q);
  if (type == TEA_DTYPE_DEFAULT)
    refuse("q.dtype", dtype_text(arguments.q), "float16, bfloat16, float32 or float64");
  const bool casts_o = given.has_second();
  const auto [of_qkv, of_s, of_o] = given.at(place, "s", "o");

  const Saved saved(qkv, recipe.dtype, casts_o);
  const Tensor memory = empty(arguments.q, torch_byte(), {saved.places.bytes()});
  char* const base = bytes_of(memory);
  tea_fp8_joint_cast cast = cast_of(type, recipe.dtype);
  for (int i = 0; i < 3; ++i) {
    void* const data = frontend::require_memory(names[i], qkv[i], type, place.where.device);
    add(cast, data, base + saved.codes[i], saved.rows[i].count());
  }
  Call call(arguments, saved.qkv(base, place.where.device));
  quantize(cast, recipe, given.is_current(), {of_qkv, of_s, of_o}, base, saved.head, place);

  call.problem().o_dtype = casts_o ? recipe.dtype : type;
  const frontend::Layout layout = call.o_layout();
  const Tensor o = new_merged(arguments.q, type, layout);
  void* const rows = casts_o ? base + saved.o : bytes_of(o);
  call.problem().o =
      call.add_rows(TEA_O, "o", rows_of(layout, call.problem().o_dtype, place, rows));
  call.add_memory(TEA_LSE, base + saved.lse);
  add_numbers(call, kForward, base, saved.head);
  call.add_memory(TEA_S_AMAX, of_s.amax);
  if (casts_o) {
    call.add_memory(TEA_O_SCALE, number(base, saved.head, kSecond));
    call.add_memory(TEA_O_AMAX, of_o.amax);
  }
  call.forward();
  if (casts_o) {
    tea_fp8_joint_cast back = cast_of(recipe.dtype, type);
    add(back, rows, bytes_of(o), o.numel());
    dequantize(back, number(base, saved.head, kSecondInverse), place);
  }
  stack.give(o, memory);
}

namespace {

// The memory of backward: the codes of dO, and of the gradients if they are cast.
struct Scratch {
  Places places;
  Head head{places};
  int64_t dout, gradients[3];

  Scratch(int64_t of_dout, const Saved& saved, bool casts) : dout(places.add(of_dout)) {
    for (int i = 0; i < 3; ++i) gradients[i] = places.add(casts ? saved.rows[i].count() : 0);
  }
};

void require_saved(const Tensor& memory, const Saved& saved) {
  if (memory.numel() != saved.places.bytes())
    refuse("saved", "of " + std::to_string(memory.numel()) + " elements",
           std::to_string(saved.places.bytes()) + ": what forward returned for such q, k and v");
}

// Memory for the gradient of q, k or v (0, 1, 2), in the type of q.
Tensor gradient_of(const Tensor& q, const Saved& saved, int i) {
  const frontend::Tensor rows = saved.rows[i].at(nullptr);
  return empty(q, torch_dtype(dtype_of(q)), rows.rank, rows.size);
}

}  // namespace

void fp8_attention_backward(Stack& stack) {
  const Tensor dout_given = stack.tensor(), memory = stack.tensor();
  const std::optional<Tensor> o_given = stack.maybe_tensor();
  const Scales given(stack);
  const int32_t forward_dtype = frontend::dtype_named("forward_dtype", stack.text());
  const Recipe recipe(stack);
  const Arguments arguments = read_arguments(stack);  // of q, k and v only shape and type
  require_format(arguments);
  const Place place("dout", dout_given);
  const Tensor dout =
      dout_given.is_contiguous() ? dout_given : torch::stable::contiguous(dout_given);
  const int device = place.where.device;
  const int32_t type = dtype_of(arguments.q);
  const bool casts = given.has_second();
  const auto [of_dout, of_dp, of_gradients] = given.at(place, "dp", "gradient");

  const Saved saved({View(arguments.q), View(arguments.k), View(arguments.v)}, forward_dtype,
                    !o_given);
  require_saved(memory, saved);
  char* const kept = static_cast<char*>(place.memory("saved", memory, torch_byte()));
  const Scratch scratch(dout.numel(), saved, casts);
  const Tensor workspace = empty(arguments.q, torch_byte(), {scratch.places.bytes()});
  char* const base = bytes_of(workspace);

  tea_fp8_joint_cast cast = cast_of(dtype_of(dout), recipe.dtype);
  add(cast, dout.data_ptr(), base + scratch.dout, dout.numel());
  Call call(arguments, saved.qkv(kept, device));
  const frontend::Layout layout = call.o_layout();
  if (dout.numel() != rows_of(layout, type, place, nullptr).elements())
    refuse("dout", "of shape " + shape_text(View(dout)), "the elements of O");
  quantize(cast, recipe, given.is_current(), {of_dout, of_dp, of_gradients}, base, scratch.head,
           place);

  tea_problem& problem = call.problem();
  problem.training = 1;
  problem.outputs = TEA_OUTPUT_LSE;
  problem.o_dtype = o_given ? type : forward_dtype;
  problem.dout_dtype = recipe.dtype;
  problem.dqkv_dtype = casts ? recipe.dtype : type;
  void* const o = o_given ? place.memory("o", *o_given, torch_dtype(type)) : kept + saved.o;
  problem.o = call.add_rows(TEA_O, "o", rows_of(layout, problem.o_dtype, place, o));
  problem.dout =
      call.add_rows(TEA_DOUT, "dout", rows_of(layout, recipe.dtype, place, base + scratch.dout));
  call.add_memory(TEA_LSE, kept + saved.lse);
  add_numbers(call, kForward, kept, saved.head);
  if (!o_given) call.add_memory(TEA_O_SCALE_INV, number(kept, saved.head, kSecondInverse));
  add_numbers(call, kBackward, base, scratch.head);
  call.add_memory(TEA_DP_AMAX, of_dp.amax);
  if (casts) {
    add_numbers(call, kGradients, base, scratch.head);
    call.add_memory(TEA_DQ_AMAX, of_gradients.amax);
  }

  const Tensor out[] = {gradient_of(arguments.q, saved, 0), gradient_of(arguments.q, saved, 1),
                        gradient_of(arguments.q, saved, 2)};
  constexpr tea_tensor kIndices[] = {TEA_DQ, TEA_DK, TEA_DV};
  const char* const names[] = {"dq", "dk", "dv"};
  tea_strides* const strides[] = {&problem.dq, &problem.dk, &problem.dv};
  tea_fp8_joint_cast back = cast_of(recipe.dtype, type);
  for (int i = 0; i < 3; ++i) {
    void* const data = casts ? base + scratch.gradients[i] : bytes_of(out[i]);
    frontend::Tensor rows = saved.rows[i].at(data);
    rows.type = problem.dqkv_dtype, rows.device = device;
    *strides[i] = call.add_rows(kIndices[i], names[i], rows);
    add(back, data, bytes_of(out[i]), out[i].numel());
  }
  call.backward();
  if (casts) dequantize(back, number(base, scratch.head, kSecondInverse), place);
  stack.give(out[0], out[1], out[2]);
}

}  // namespace tea::torch_ops
