// XLA FFI handlers of attention: one generic body, four symbols (forward, backward; host, CUDA).
//
// The problem is one attribute, the line of text that tests and bug reports share; two more list
// which tensor (tea_tensor) each operand and each result is. The last result is the workspace. So a
// new option needs no change here. A handler must survive any program: every index and the size of
// every buffer is checked.
#include <iterator>
#include <optional>
#include <string>

#include "frontend/tensor.h"
#include "jax/extents.h"
#include "jax/ffi.h"
#include "jax/threads.h"

namespace tea::jax {
namespace {

using Verb = tea_status (*)(const tea_plan*, const tea_run*);
using Indices = ffi::Span<const int32_t>;
using Sizes = ffi::Span<const int64_t>;

constexpr uint64_t kAlignment = 256;  // of the workspace

struct Place {
  int device = -1;
  void* stream = nullptr;
  std::optional<ffi::ThreadPool> threads;
};

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error(what); }

class Call {
 public:
  Call(std::string_view line, Sizes sizes, Place& place) : place_(place) {
    int64_t* const fields[] = {&run.batch,     &run.max_q,   &run.max_kv, &run.tokens_q,
                               &run.tokens_kv, &run.pages_k, &run.pages_v};
    const size_t count = std::size(fields);
    if (sizes.size() != count && sizes.size() != count + 1)
      refuse("sizes has " + std::to_string(sizes.size()) +
             " numbers; needs the 7 of a run, and 1 more if O and LSE are of more keys");
    for (size_t i = 0; i < count; ++i) *fields[i] = sizes[i];
    if (sizes.size() > count) {
      if (sizes[count] != 0 && sizes[count] != 1)
        refuse("sizes[7] is " + std::to_string(sizes[count]) + "; needs 0 or 1");
      run.partial = static_cast<int32_t>(sizes[count]);
    }
    if (tea_problem_parse(std::string(line).c_str(), &problem)) refuse(tea_error());
    require_contiguous(problem);
    run.tensor_count = TEA_TENSOR_COUNT;
    run.tensors = tensors_;
    run.stream = place_.stream;
    if (place_.threads) run.parallel_for = parallel_for, run.parallel_context = &*place_.threads;
  }
  ~Call() { tea_plan_release(plan_); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // From the second call on the plan is found in the library's cache. Before everything else,
  // because it checks the problem.
  tea_status plan(std::string_view engine) {
    // It allocates at the first run of each size, which a captured graph must not do.
    if (engine == "cudnn")
      refuse("engine is \"cudnn\"; needs one that allocates nothing, or \"\" for any");
    return tea_plan_create(&problem, place_.device, std::string(engine).c_str(), &plan_);
  }

  void add(const char* what, size_t number, int32_t index, const ffi::AnyBuffer& buffer) {
    const auto name = [&] { return std::string(what) + "[" + std::to_string(number) + "]"; };
    if (index < 0 || index > kOrigin)
      refuse(name() + " is " + std::to_string(index) + "; needs the index of a tensor, from 0 to " +
             std::to_string(kOrigin));
    // An origin is that of all sequences, or one and a shift of the diagonal for each.
    const uint64_t size = buffer.size_bytes();
    const bool of_each = index == kOrigin && size == origin_bytes(problem, run);
    const uint64_t needed = of_each ? size : bytes_of(problem, run, index);
    if (of_each && size) run.origin_stride = kOriginNumbers;
    if (size != needed)
      refuse(name() + ", tensor " + std::to_string(index) + ", has " + std::to_string(size) +
             " bytes; needs " + std::to_string(needed));
    // XLA passes any pointer for a buffer of size zero.
    void* const data = needed ? buffer.untyped_data() : nullptr;
    if (reinterpret_cast<uintptr_t>(data) % 16)
      refuse(name() + " is not aligned; needs a multiple of 16 bytes");
    tensors_[index] = data;
  }

  void add_workspace(const ffi::AnyBuffer& buffer) {
    const auto start = reinterpret_cast<uintptr_t>(buffer.untyped_data());
    const uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
    const uint64_t lost = aligned - start, size = buffer.size_bytes();
    if (size <= lost) return;
    run.workspace = reinterpret_cast<void*>(aligned);
    run.workspace_bytes = size - lost;
  }

  tea_status execute(Verb verb) {
    run.origin_device = static_cast<const int64_t*>(tensors_[kOrigin]);
    int32_t status = 0;
    if (place_.device < 0) run.status = &status;
    if (const tea_status failure = verb(plan_, &run)) return failure;
    if (status & TEA_STATUS_BAD_LENGTHS)
      refuse(
          "cu_seqlens_q, cu_seqlens_kv or their offsets are out of range in part; needs lengths "
          "from 0 to the largest, of sequences inside the tensors");
    if (status & TEA_STATUS_BAD_ORIGIN)
      refuse("origin is out of range in part; needs numbers from 0 to 2^40");
    if (status) refuse("page_table is out of range in part; needs numbers of pages that there are");
    return TEA_OK;
  }

  tea_problem problem = frontend::sized<tea_problem>();
  tea_run run = frontend::sized<tea_run>();

 private:
  Place& place_;
  tea_plan* plan_ = nullptr;
  void* tensors_[kOrigin + 1] = {};
};

// NOLINTNEXTLINE(readability-function-size): a parameter for each attribute of the custom call.
ffi::Error run(Verb verb, Place place, std::string_view line, std::string_view engine,
               Indices operands, Indices results, Sizes sizes, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  return guarded([&] {
    if (args.size() != operands.size())
      refuse("operands lists " + std::to_string(operands.size()) +
             " tensors; needs one for each of " + std::to_string(args.size()) + " operands");
    if (rets.size() != results.size() + 1)
      refuse("results lists " + std::to_string(results.size()) +
             " tensors; needs one for each of " + std::to_string(rets.size()) +
             " results but the last, the workspace");
    Call call(line, sizes, place);
    if (const tea_status status = call.plan(engine)) return error_of(status);
    for (size_t i = 0; i < operands.size(); ++i)
      call.add("operands", i, operands[i], args.get<ffi::AnyBuffer>(i).value());
    for (size_t i = 0; i < results.size(); ++i)
      call.add("results", i, results[i], *rets.get<ffi::AnyBuffer>(i).value());
    call.add_workspace(*rets.get<ffi::AnyBuffer>(results.size()).value());
    const tea_status status = call.execute(verb);
    return status ? error_of(status) : ffi::Error::Success();
  });
}

template <Verb verb, class... Rest>
ffi::Error host(ffi::ThreadPool threads, Rest... rest) {
  return run(verb, {-1, nullptr, threads}, rest...);
}
template <Verb verb, class... Rest>
ffi::Error cuda(int32_t device, void* stream, Rest... rest) {
  return run(verb, {device, stream, std::nullopt}, rest...);
}

template <class Binding>
auto described(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("problem")
      .template Attr<std::string_view>("engine")
      .template Attr<Indices>("operands")
      .template Attr<Indices>("results")
      .template Attr<Sizes>("sizes")
      .RemainingArgs()
      .RemainingRets();
}
auto on_host() { return described(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()); }
auto on_cuda() { return described(bind_cuda()); }

}  // namespace
}  // namespace tea::jax

#define TEA_HANDLER(name, side, verb, ...)                        \
  TEA_JAX_HANDLER(                                                \
      name, [](auto... a) { return tea::jax::side<verb>(a...); }, \
      tea::jax::on_##side() __VA_OPT__(, ) __VA_ARGS__)
TEA_HANDLER(tea_attention_forward, host, tea_forward);
TEA_HANDLER(tea_attention_backward, host, tea_backward);
TEA_HANDLER(tea_attention_forward_cuda, cuda, tea_forward,
            {xla::ffi::Traits::kCmdBufferCompatible});
TEA_HANDLER(tea_attention_backward_cuda, cuda, tea_backward,
            {xla::ffi::Traits::kCmdBufferCompatible});

// The version of XLA's FFI for which the handlers are built: major, minor.
extern "C" __attribute__((visibility("default"))) void te_attention_jax_api(int32_t* out) {
  out[0] = XLA_FFI_API_MAJOR, out[1] = XLA_FFI_API_MINOR;
}
