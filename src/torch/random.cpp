// The random state, and the dropout mask that it determines.
#include "torch/ops.h"
#include "torch/tensor.h"

namespace tea::torch_ops {
namespace {

int64_t* state(const Place& place, const Tensor& rng_state) {
  if (rng_state.numel() != 2)
    refuse("rng_state", "of shape " + shape_text(View(rng_state)), "int64 [2]: seed, offset");
  return place.int64("rng_state", rng_state);
}

}  // namespace

void rng_fill(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor rng_state = in.tensor();
  const auto seed = static_cast<uint64_t>(in.integer()),
             offset = static_cast<uint64_t>(in.integer());
  const Place place("rng_state", rng_state);
  require(
      tea_rng_fill(state(place, rng_state), seed, offset, place.where.device, place.where.stream));
}

void rng_fill_captured(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor rng_state = in.tensor(), seed = in.tensor();
  const std::optional<Tensor> offset = in.maybe_tensor();
  const auto offset_in_graph = static_cast<uint64_t>(in.integer());
  const Place place("rng_state", rng_state);
  require(tea_rng_fill_captured(state(place, rng_state), place.int64("seed", seed),
                                offset ? place.int64("offset", *offset) : nullptr, offset_in_graph,
                                place.where.device, place.where.stream));
}

void rng_advance(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor rng_state = in.tensor();
  const auto increment = static_cast<uint64_t>(in.integer());
  const Place place("rng_state", rng_state);
  require(
      tea_rng_advance(state(place, rng_state), increment, place.where.device, place.where.stream));
}

void dropout_mask(StableIValue* stack, uint64_t inputs, uint64_t) {
  Stack in(stack, inputs);
  const Tensor rng_state = in.tensor();
  tea_dropout_mask args{};
  args.struct_size = sizeof args;
  args.dropout = static_cast<float>(in.number());
  args.batch = in.integer(), args.heads = in.integer();
  args.rows = in.integer(), args.cols = in.integer();
  const std::optional<Tensor> origin = in.maybe_tensor();
  const Place place("rng_state", rng_state);
  const Tensor keep =
      empty(rng_state, torch_bool(), {args.batch, args.heads, args.rows, args.cols});
  args.keep = static_cast<uint8_t*>(keep.data_ptr());
  args.rng_state = state(place, rng_state);
  if (origin) args.origin_device = place.int64("origin", *origin);
  require(tea_dropout_keep(&args, place.where.device, place.where.stream));
  give(stack, keep);
}

}  // namespace tea::torch_ops
