// Answers for the tracing of a call: the problem's line, sizes and workspace of a call that is
// described by shapes alone. Pure functions; nothing here knows of XLA or of a device.
#include "frontend/describe.h"

#include <charconv>
#include <cstring>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace tea::jax {
namespace {

using frontend::Description;
using frontend::Options;
using frontend::refuse;
using frontend::Tensor;

template <class T>
T number(const std::string& name, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    refuse(name, "\"" + std::string(text) + "\"", "a number");
  return value;
}

// Words "name=value", separated by spaces. A tensor is its dtype and its shape: "bfloat16[2,8]".
// Tensors have memory at an address that is never read.
class Request {
 public:
  explicit Request(const char* text) {
    std::string_view rest(text);
    while (!rest.empty()) {
      const std::string_view word = rest.substr(0, rest.find(' '));
      rest.remove_prefix(std::min(rest.size(), word.size() + 1));
      const size_t equals = word.find('=');
      if (equals == std::string_view::npos)
        refuse("word", "\"" + std::string(word) + "\"", "name=value");
      words_.emplace(word.substr(0, equals), word.substr(equals + 1));
    }
  }

  // One reader for each kind of option (frontend/options.h).
  std::optional<Tensor> OptionalTensor_(const char* name, const char*) {
    const std::optional<std::string> text = take(name);
    return text ? std::optional(tensor(name, *text)) : std::nullopt;
  }
  Tensor Tensor_(const char* name, const char*) {
    const std::optional<std::string> text = take(name);
    if (!text) refuse(name, "not given", "an array");
    return tensor(name, *text);
  }
  std::string Text_(const char* name, const char* usual) {
    if (const std::optional<std::string> text = take(name)) return *text;
    return std::string(usual + 1, std::strlen(usual) - 2);  // without its quotes
  }
  bool Flag_(const char* name, const char*) { return take(name).value_or("0") == "1"; }
  int64_t Integer_(const char* name, const char* usual) {
    return number<int64_t>(name, take(name).value_or(usual));
  }
  double Number_(const char* name, const char* usual) {
    return number<double>(name, take(name).value_or(usual));
  }
  std::optional<double> OptionalNumber_(const char* name, const char*) {
    const std::optional<std::string> text = take(name);
    return text ? std::optional(number<double>(name, *text)) : std::nullopt;
  }

  // After all: what is left is no option.
  void require_empty() const {
    if (!words_.empty()) refuse("option", "\"" + words_.begin()->first + "\"", "one of the table");
  }

 private:
  std::optional<std::string> take(const std::string& name) {
    const auto it = words_.find(name);
    if (it == words_.end()) return std::nullopt;
    std::string value = std::move(it->second);
    words_.erase(it);
    return value;
  }

  Tensor tensor(const char* name, std::string_view text) {
    const size_t bracket = text.find('[');
    if (bracket == std::string_view::npos || text.back() != ']')
      refuse(name, "\"" + std::string(text) + "\"", "a dtype and a shape");
    std::vector<int64_t>& size = shapes_.emplace_back();
    std::string_view sizes = text.substr(bracket + 1, text.size() - bracket - 2);
    while (!sizes.empty()) {
      const std::string_view one = sizes.substr(0, sizes.find(','));
      size.push_back(number<int64_t>(name, one));
      sizes.remove_prefix(std::min(sizes.size(), one.size() + 1));
    }
    std::vector<int64_t>& stride = shapes_.emplace_back(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= size[i]) stride[i] = step;
    return {kMemory,     frontend::type_named(std::string(text.substr(0, bracket))),
            -1,          static_cast<int>(size.size()),
            size.data(), stride.data()};
  }

  static inline void* const kMemory = reinterpret_cast<void*>(uintptr_t{4096});
  std::map<std::string, std::string> words_;
  std::deque<std::vector<int64_t>> shapes_;
};

// A Description and what it points into.
struct Described {
  Request request;
  Options options;
  Description description;
  bool wants_lse, lse_gradient;

  explicit Described(const char* text)
      : request(text),
        options{
  // the initialisers of a braced list are evaluated in order
#define TEA_OPTION(kind, name, default_text) request.kind##_(#name, default_text),
#include "frontend/options.def"
        },
        description(options),
        wants_lse(request.Flag_("lse", "")),
        lse_gradient(request.Flag_("lse_gradient", "")) {
    request.require_empty();
    tea_problem& problem = description.problem;
    if (!wants_lse) problem.outputs &= ~TEA_OUTPUT_LSE;
    problem.lse_gradient = lse_gradient;
    // Arrays of XLA are contiguous, which zero strides mean; as numbers they would depend on sizes
    // that ragged problems leave to the run.
    problem.q = problem.k = problem.v = {};
    problem.bias_stride = {};
    description.finish();
    check(tea_problem_check(&problem, &problem));
  }

  static void check(tea_status status) {
    if (status) throw std::runtime_error(tea_error());
  }
};

int answer(char* text, size_t capacity, const std::string& what, int status) {
  const size_t n = std::min(what.size(), capacity - 1);
  std::memcpy(text, what.data(), n);
  text[n] = 0;
  return status;
}

}  // namespace
}  // namespace tea::jax

using tea::jax::Described;

#define TEA_JAX_API extern "C" __attribute__((visibility("default")))

// The options as a schema, as frontend/options.h writes it.
TEA_JAX_API const char* te_attention_jax_options() { return tea::frontend::schema().c_str(); }

// The sizes of a call, from shapes alone. Next to options, a request may have "lse" (forward writes
// it) and "lse_gradient".
// NOLINTNEXTLINE(readability-identifier-naming): a name of the C interface.
struct te_attention_jax_call {
  int64_t sizes[7];            // of the run: the attribute `sizes`
  uint64_t forward, backward;  // bytes of workspace
  char text[4096];             // the problem's line; if the result is not 0, what is wrong
};

TEA_JAX_API int te_attention_jax_describe(const char* request, te_attention_jax_call* out) {
  try {
    Described described(request);
    const tea_problem& problem = described.description.problem;
    const tea_run& run = described.description.run;
    const int64_t sizes[] = {run.batch,     run.max_q,   run.max_kv, run.tokens_q,
                             run.tokens_kv, run.pages_k, run.pages_v};
    std::memcpy(out->sizes, sizes, sizeof sizes);
    const bool open = described.description.has_run_sizes();
    Described::check(
        tea_workspace_bound(&problem, open ? &run : nullptr, &out->forward, &out->backward));
    Described::check(tea_problem_print(&problem, out->text, sizeof out->text, nullptr));
    return 0;
  } catch (const std::exception& e) {
    return tea::jax::answer(out->text, sizeof out->text, e.what(), 1);
  }
}

// Exact counts of one execution. Ragged and padded sides: their cu_seqlens, else NULL.
TEA_JAX_API int te_attention_jax_cost(const char* request, const int32_t* cu_seqlens_q,
                                      const int32_t* cu_seqlens_kv, tea_cost* cost, char* error,
                                      size_t capacity) {
  try {
    Described described(request);
    tea_run& run = described.description.run;
    const void* tensors[TEA_TENSOR_COUNT] = {};
    tensors[TEA_CU_SEQLENS_Q] = cu_seqlens_q, tensors[TEA_CU_SEQLENS_KV] = cu_seqlens_kv;
    run.tensors = const_cast<void* const*>(tensors);
    Described::check(tea_problem_cost(&described.description.problem, &run, cost));
    return 0;
  } catch (const std::exception& e) {
    return tea::jax::answer(error, capacity, e.what(), 1);
  }
}
