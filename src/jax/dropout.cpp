// The dropout pattern as a custom call: which probabilities attention keeps.
#include <string>

#include "frontend/tensor.h"
#include "jax/ffi.h"
#include "te_attention_ops.h"

namespace tea::jax {
namespace {

using Words = ffi::Buffer<ffi::DataType::U32>;

ffi::Error dropout_mask(int device, void* stream, double dropout, const Words& rng_state,
                        const Words& origin, ffi::Result<ffi::Buffer<ffi::DataType::PRED>> keep) {
  return guarded([&] {
    const auto shape = keep->dimensions();
    if (rng_state.element_count() != 4 || (origin.element_count() && origin.element_count() != 8) ||
        shape.size() != 4)
      throw std::runtime_error(
          "the buffers are of other sizes; needs 4 words of rng_state, 8 or none of origin, and a "
          "result of 4 dimensions");
    auto args = frontend::sized<tea_dropout_mask>();
    args.dropout = static_cast<float>(dropout);
    args.batch = shape[0], args.heads = shape[1], args.rows = shape[2], args.cols = shape[3];
    args.rng_state = static_cast<const int64_t*>(rng_state.untyped_data());
    args.keep = static_cast<uint8_t*>(keep->untyped_data());
    if (origin.element_count())
      args.origin_device = static_cast<const int64_t*>(origin.untyped_data());
    const tea_status status = tea_dropout_keep(&args, device, stream);
    return status ? error_of(status) : ffi::Error::Success();
  });
}

template <class Binding>
auto described(Binding binding) {
  return std::move(binding)
      .template Attr<double>("dropout")
      .template Arg<Words>()
      .template Arg<Words>()
      .template Ret<ffi::Buffer<ffi::DataType::PRED>>();
}

}  // namespace
}  // namespace tea::jax

namespace ffi = xla::ffi;
TEA_JAX_HANDLER(
    tea_attention_dropout_mask, [](auto... a) { return tea::jax::dropout_mask(-1, nullptr, a...); },
    tea::jax::described(ffi::Ffi::Bind()));
TEA_JAX_HANDLER(tea_attention_dropout_mask_cuda,
                [](int32_t device, void* stream, auto... a) {
                  return tea::jax::dropout_mask(device, stream, a...);
                },
                tea::jax::described(tea::jax::bind_cuda()), {ffi::Traits::kCmdBufferCompatible});
