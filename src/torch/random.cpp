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

void rng_fill(Stack& stack) {
  const Tensor rng_state = stack.tensor();
  const auto seed = static_cast<uint64_t>(stack.integer()),
             offset = static_cast<uint64_t>(stack.integer());
  const Place place("rng_state", rng_state);
  require(
      tea_rng_fill(state(place, rng_state), seed, offset, place.where.device, place.where.stream));
}

void rng_fill_captured(Stack& stack) {
  const Tensor rng_state = stack.tensor(), seed = stack.tensor();
  const std::optional<Tensor> offset = stack.maybe_tensor();
  const auto offset_in_graph = static_cast<uint64_t>(stack.integer());
  const Place place("rng_state", rng_state);
  require(tea_rng_fill_captured(state(place, rng_state), place.int64("seed", seed),
                                offset ? place.int64("offset", *offset) : nullptr, offset_in_graph,
                                place.where.device, place.where.stream));
}

void rng_advance(Stack& stack) {
  const Tensor rng_state = stack.tensor();
  const auto increment = static_cast<uint64_t>(stack.integer());
  const Place place("rng_state", rng_state);
  require(
      tea_rng_advance(state(place, rng_state), increment, place.where.device, place.where.stream));
}

void dropout_mask(Stack& stack) {
  const Tensor rng_state = stack.tensor();
  auto args = sized<tea_dropout_mask>();
  args.dropout = static_cast<float>(stack.number());
  args.batch = stack.integer(), args.heads = stack.integer();
  args.rows = stack.integer(), args.cols = stack.integer();
  const std::optional<Tensor> origin = stack.maybe_tensor();
  const Place place("rng_state", rng_state);
  const Tensor keep =
      empty(rng_state, torch_bool(), {args.batch, args.heads, args.rows, args.cols});
  args.keep = static_cast<uint8_t*>(keep.data_ptr());
  args.rng_state = state(place, rng_state);
  if (origin) args.origin_device = place.int64("origin", *origin);
  require(tea_dropout_keep(&args, place.where.device, place.where.stream));
  stack.give(keep);
}

}  // namespace tea::torch_ops
