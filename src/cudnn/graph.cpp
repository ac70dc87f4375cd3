// Translates a problem for cuDNN's frontend, whose headers only this file reads: a function for
// each feature, used by both directions.
#include "cudnn/graph.h"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_DISABLE_LOGGING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cuda_runtime.h>
#include <cudnn_frontend.h>

#include <exception>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/driver.h"
#include "core/error.h"
#include "cudnn/library.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the library in which the frontend looks functions up
}

namespace tea::cudnn {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Dims = std::vector<int64_t>;

fe::DataType_t type_of(int32_t dtype) {
  switch (dtype) {
    case TEA_FP16:
      return fe::DataType_t::HALF;
    case TEA_BF16:
      return fe::DataType_t::BFLOAT16;
    case TEA_E4M3:
      return fe::DataType_t::FP8_E4M3;
    case TEA_E5M2:
      return fe::DataType_t::FP8_E5M2;
    default:
      return fe::DataType_t::FLOAT;
  }
}

// ------------------------------------------------------------------------------------------ run

// A handle works for one call at a time; each device has one.
struct Handle {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;  // of the last call; a new handle has the default one
};

Handle& handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::lock_guard lock(mutex);
  return handles[device];
}

void require(fe::error_t status, const char* what) {
  if (status.is_bad())
    throw Error(TEA_FAILED, std::string("cudnn: ") + what + ": " + status.get_message());
}
void require(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw Error(TEA_FAILED,
                std::string("cudnn: ") + what + ": " + fe::detail::get_error_string(status));
}

// The frontend's graph, and what its execute() does in every call, found once. There it looks up
// symbols of CUDA's runtime and asks for the stream, which costs a microsecond.
class Frontend final : public fe::graph::Graph {
 public:
  // Of a graph with plans. `slots`: the caller's tensors.
  fe::error_t settle(const std::vector<int>& slots) {
    std::unordered_map<uid_t, std::tuple<int64_t, int64_t, std::vector<float>>> changes;
    std::unordered_map<uid_t, std::pair<uid_t, int64_t>> replaced;
    int64_t offset = 0;
    fe::error_t status = collect_pass_by_value_tensors_subtree(numbers_);
    if (status.is_good()) status = collect_tensors_in_workspace_subtree(changes, offset);
    if (status.is_good()) status = collect_variant_pack_replacements_subtree(replaced);
    uids_.assign(slots.begin(), slots.end());
    for (auto& [uid, value] : numbers_)
      add(uid, std::visit([](auto& x) -> void* { return &x; }, value), -1);
    for (const auto& [uid, change] : changes) {
      const auto& [kind, place, values] = change;
      add(uid, nullptr, place);
      copies_ |= kind == kCopy;
      if (kind == kZeroes) zeroes_.push_back({place, static_cast<size_t>(values[0])});
    }
    copies_ |= !replaced.empty() || plans.candidate < 0;
    if (status.is_good()) status = plans.is_plan_index_executable(plans.candidate);
    behind_ = get_fe_workspace_size_subtree();
    return status;
  }

  // `pointers`: of `slots`, aligned: import_run() has checked the caller's against the alignment
  // that the engine asks for, and the workspace gives the others. While a CUDA graph is being
  // captured, the frontend gives that graph a reference to the plan.
  void run(cudnnHandle_t handle, std::vector<void*>& pointers, void* workspace, void* stream) {
    if (copies_ || driver::is_capturing(stream)) {
      const int count = static_cast<int>(pointers.size());
      return require(execute(handle, pointers.data(), count, workspace), "execution");
    }
    auto* const base = static_cast<char*>(workspace);
    for (const Zeroes& z : zeroes_) driver::fill(base + z.place, 0, z.bytes, stream);
    if (!pack_ || pointers != pointers_ || workspace != workspace_) pack(pointers, workspace);
    const auto& plan = plans.execution_plans[static_cast<size_t>(plans.candidate)];
    require(fe::detail::execute(handle, plan->get_raw_desc(), pack_->get_ptr()), "execution");
  }

 private:
  static constexpr int64_t kCopy = 0, kZeroes = 1;  // what the frontend does in its workspace
  struct Own {
    void* number;
    int64_t place;  // in the workspace; -1: none
  };
  struct Zeroes {
    int64_t place;
    size_t bytes;
  };

  void add(int64_t uid, void* number, int64_t place) {
    uids_.push_back(uid);
    own_.push_back({number, place});
  }

  // The descriptor of these pointers; kept, since many runs have those of the one before.
  void pack(const std::vector<void*>& pointers, void* workspace) {
    pack_.reset();
    std::vector<void*> all = pointers;
    auto* const base = static_cast<char*>(workspace);
    for (const Own& own : own_) all.push_back(own.place < 0 ? own.number : base + own.place);
    auto made =
        std::make_unique<fe::detail::backend_descriptor>(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    require(made->get_status(), "variant pack");
    require(fe::detail::create_variant_pack(*made, all.data(), uids_, base + behind_),
            "variant pack");
    pack_ = std::move(made), pointers_ = pointers, workspace_ = workspace;
  }

  std::unordered_map<uid_t, fe::graph::Tensor_attributes::pass_by_values_t> numbers_;
  std::vector<int64_t> uids_;  // of the slots, then of `own_`
  std::vector<Own> own_;
  std::vector<Zeroes> zeroes_;
  bool copies_ = false;  // from the host, or otherwise what only execute() does
  int64_t behind_ = 0;   // where cuDNN's own workspace begins
  std::unique_ptr<fe::detail::backend_descriptor> pack_;
  std::vector<void*> pointers_;  // of `pack_`
  void* workspace_ = nullptr;
};

class Built final : public Graph {
 public:
  Built(std::shared_ptr<Frontend> graph, std::vector<int> slots, int device)
      : graph_(std::move(graph)), slots_(std::move(slots)), device_(device) {
    int64_t bytes = 0;
    require(graph_->get_workspace_size(bytes), "workspace");
    workspace_ = static_cast<uint64_t>(bytes);
    require(graph_->settle(slots_), "tensors");
    Handle& here = handle_of(device);  // now: a first run may be captured
    const std::lock_guard lock(here.mutex);
    if (!here.handle) require(fe::detail::create_handle(&here.handle), "cudnnCreate");
  }

  // Frees memory and unloads kernels, whatever is being captured. Where the process ends, there may
  // be no driver any more.
  ~Built() override {
    try {
      const driver::OnDevice here(device_);
      const driver::OutsideCapture frees;
      graph_.reset();
    } catch (const Error&) {
    }
  }

  uint64_t workspace() const override { return workspace_; }

  void run(const Pointers& pointers, void* workspace, void* stream) const override {
    Handle& here = handle_of(device_);
    const std::lock_guard lock(here.mutex);
    sorted_.clear();
    for (const int slot : slots_) sorted_.push_back(pointers[static_cast<size_t>(slot)]);
    if (here.stream != stream) {
      const auto next = static_cast<cudaStream_t>(stream);
      require(fe::detail::set_stream(here.handle, next), "cudnnSetStream");
      here.stream = next;
    }
    graph_->run(here.handle, sorted_, workspace, stream);
  }

 private:
  std::shared_ptr<Frontend> graph_;
  std::vector<int> slots_;             // in ascending order, as execute() wants the pointers
  mutable std::vector<void*> sorted_;  // of the run at hand, under the handle's lock
  int device_;
  uint64_t workspace_;
};

// ---------------------------------------------------------------------------------------- build

class Builder {
 public:
  Builder(const Problem& p, const Geometry& size, const GraphKey& key)
      : p_(p), size_(size), key_(key), n_(key.capacity), graph_(std::make_shared<Frontend>()) {
    graph_->set_io_data_type(type_of(p.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void describe() { key_.direction == Direction::kForward ? forward() : backward(); }

  std::shared_ptr<Frontend> graph() const { return graph_; }
  std::vector<int> slots() const {
    std::vector<int> out;
    for (int slot = 0; slot < kSlots; ++slot)
      if (tensors_[static_cast<size_t>(slot)]) out.push_back(slot);
    return out;
  }

 private:
  // The one tensor of a slot.
  Tensor tensor(int slot, const char* name, const Dims& dim, const Dims& stride,
                fe::DataType_t type) {
    Tensor& known = tensors_[static_cast<size_t>(slot)];
    if (known) return known;
    return known = graph_->tensor(fe::graph::Tensor_attributes()
                                      .set_uid(slot)
                                      .set_name(name)
                                      .set_dim(dim)
                                      .set_stride(stride)
                                      .set_data_type(type));
  }
  Tensor flat(int slot, const char* name, int64_t n, fe::DataType_t type) {
    return tensor(slot, name, {n, 1, 1, 1}, {1, 1, 1, 1}, type);
  }

  // A tensor that the graph writes, shaped as rows of heads.
  struct Rows {
    Dims dim, stride;
    Tensor starts;  // of ragged sides
  };
  Rows rows(bool query, int64_t heads, int64_t dim, const tea_strides& s, int starts) {
    const bool ragged = query ? p_.varies_q() : p_.kv_form == TEA_RAGGED;
    const int64_t count = query ? n_.max_q : n_.max_kv;
    Rows out{{n_.batch, heads, count, dim}, {s.batch, s.head, s.seq, 1}, nullptr};
    if (!ragged) return out;
    out.stride[0] = s.seq * count;  // not used: sequences lie where `starts` says
    // Nor is that of a single head; the frontend lays the gradients of those that share it by it.
    if (!query && heads == 1) out.stride[1] = dim;
    out.starts = flat(starts, "starts", n_.batch + 1, fe::DataType_t::INT64);
    return out;
  }
  Tensor input(int slot, const char* name, const Rows& r, fe::DataType_t type) {
    Tensor t = tensor(slot, name, r.dim, r.stride, type);
    if (r.starts) t->set_ragged_offset(r.starts);
    return t;
  }
  void output(const Tensor& t, int slot, const char* name, const Rows& r, fe::DataType_t type) {
    tensors_[static_cast<size_t>(slot)] = t;
    t->set_output(true)
        .set_uid(slot)
        .set_name(name)
        .set_dim(r.dim)
        .set_stride(r.stride)
        .set_data_type(type);
    if (r.starts) t->set_ragged_offset(r.starts);
  }

  fe::DataType_t io() const { return type_of(p_.dtype); }
  Tensor query() {
    return input(TEA_Q, "q", rows(true, p_.heads_q, p_.dim_qk, size_.q, kStartsQ), io());
  }
  Tensor keys(int slot, const char* name, int64_t dim, const tea_strides& s, int64_t pages,
              int starts) {
    if (p_.kv_form != TEA_PAGED)
      return input(slot, name, rows(false, p_.heads_kv, dim, s, starts), io());
    return tensor(slot, name, {pages, p_.heads_kv, p_.page_size, dim}, {s.batch, s.head, s.seq, 1},
                  io());
  }
  Tensor key() { return keys(TEA_K, "k", p_.dim_qk, size_.k, n_.pages_k, kStartsK); }
  Tensor value() { return keys(TEA_V, "v", p_.v_dim(), size_.v, n_.pages_v, kStartsV); }
  Rows lse_rows() { return rows(true, p_.heads_q, 1, size_.lse, kStartsLse); }

  // The functions below set one feature each of the attributes of either direction.

  template <class Attributes>
  void add_scale(Attributes& a) {
    a.set_attn_scale(static_cast<float>(p_.scale_value()));
  }

  // cuDNN's left bound counts the diagonal, its right bound does not; so do the fields of a
  // Problem, which hold the bound plus one.
  template <class Attributes>
  void add_mask(Attributes& a) {
    using Align = fe::DiagonalAlignment_t;
    a.set_diagonal_alignment(p_.bottom_right ? Align::BOTTOM_RIGHT : Align::TOP_LEFT);
    if (p_.causal)
      a.set_diagonal_band_right_bound(0);
    else if (p_.window_right)
      a.set_diagonal_band_right_bound(static_cast<int>(p_.window_right - 1));
    if (p_.window_left) a.set_diagonal_band_left_bound(static_cast<int>(p_.window_left));
  }

  template <class Attributes>
  void add_lengths(Attributes& a) {
    if (is_dense(p_)) return;
    a.set_padding_mask(true)
        .set_seq_len_q(flat(kLengthsQ, "lengths_q", n_.batch, fe::DataType_t::INT32))
        .set_seq_len_kv(flat(kLengthsKv, "lengths_kv", n_.batch, fe::DataType_t::INT32));
    if (key_.direction == Direction::kForward) return;
    if (n_.tokens_q) a.set_max_total_seq_len_q(n_.tokens_q);
    if (n_.tokens_kv) a.set_max_total_seq_len_kv(n_.tokens_kv);
  }

  Dims bias_dims() const {
    const auto size = [this](int bit, int64_t n) { return p_.bias_broadcast & bit ? 1 : n; };
    return {size(TEA_BROADCAST_BATCH, n_.batch), size(TEA_BROADCAST_HEAD, p_.heads_q),
            size(TEA_BROADCAST_ROW, n_.max_q), size(TEA_BROADCAST_COL, n_.max_kv)};
  }
  // A missing dimension also needs a valid stride.
  static Dims bias_strides(const tea_bias_strides& s, const Dims& dim) {
    Dims out{s.batch, s.head, s.row, s.col};
    for (size_t i = 4; i-- > 0;)
      if (!out[i]) out[i] = i == 3 ? 1 : dim[i + 1] * out[i + 1];
    return out;
  }
  template <class Attributes>
  void add_bias(Attributes& a) {
    if (!p_.bias) return;
    const Dims dim = bias_dims();
    a.set_bias(
        tensor(TEA_BIAS, "bias", dim, bias_strides(size_.bias, dim), type_of(p_.bias_type())));
  }
  void add_dbias(fe::graph::SDPA_backward_attributes& a) {
    if (!key_.dbias) return;
    const Dims dim = bias_dims();
    a.set_dbias(
        tensor(TEA_DBIAS, "dbias", dim, bias_strides(size_.dbias, dim), type_of(p_.bias_type())));
  }

  template <class Attributes>
  void add_alibi(Attributes& a) {
    if constexpr (requires { a.set_alibi_mask(true); })
      if (p_.alibi) a.set_alibi_mask(true);
  }

  // Which probabilities are dropped is cuDNN's own function of seed, offset and the graph's sizes.
  template <class Attributes>
  void add_dropout(Attributes& a) {
    if (!p_.drops()) return;
    const auto word = [this](int slot, const char* name) {
      return flat(slot, name, 1, fe::DataType_t::INT64);
    };
    a.set_dropout(static_cast<float>(p_.dropout), word(kSeed, "seed"), word(kOffset, "offset"));
  }

  Tensor per_head(int slot, const char* name) {
    return tensor(slot, name, {1, p_.heads_q, 1, 1}, {p_.heads_q, 1, 1, 1}, fe::DataType_t::FLOAT);
  }
  bool learns() const { return p_.softmax == TEA_SOFTMAX_LEARNABLE; }
  // Backward finds the sink in LSE and reads it for its gradient only.
  template <class Attributes>
  void add_sink(Attributes& a) {
    if (p_.softmax && (key_.direction == Direction::kForward || key_.dsink))
      a.set_sink_token(per_head(learns() ? +TEA_SINK : +kZeroSink, "sink"));
  }
  template <class Attributes>
  void add_sink_gradient(Attributes& a) {
    if (key_.dsink) a.set_dsink_token(per_head(TEA_DSINK, "dsink"));
  }

  void add_pages(fe::graph::SDPA_attributes& a) {
    if (p_.kv_form != TEA_PAGED) return;
    const auto table = [this](int slot, const char* name) {
      return tensor(slot, name, {n_.batch, 1, n_.table_pages, 1},
                    {n_.table_pages, n_.table_pages, 1, 1}, fe::DataType_t::INT32);
    };
    a.set_paged_attention_k_table(table(kPagesK, "pages_k"))
        .set_paged_attention_v_table(table(kPagesV, "pages_v"))
        .set_paged_attention_max_seq_len_kv(static_cast<int>(n_.max_kv));
  }

  // The row statistics that forward writes.
  void add_row_outputs(fe::graph::SDPA_attributes& a) {
    const auto written = [this](int slot, const char* name) {
      Tensor out = input(slot, name, lse_rows(), fe::DataType_t::FLOAT);
      out->set_output(true);
      return out;
    };
    a.set_generate_stats(p_.writes_lse() && !by_parts(p_));
    if (by_parts(p_))
      a.set_logit_max(written(max_slot(p_), "max"))
          .set_score_sum_exp(written(sum_exp_slot(p_), "sum_exp"));
  }

  template <class Attributes>
  void add_shared(Attributes& a) {
    add_scale(a), add_mask(a), add_lengths(a), add_bias(a), add_alibi(a), add_sink(a),
        add_dropout(a);
  }

  // Of fp8: one number, and one that the graph writes.
  Tensor scalar(tea_tensor t) {
    return flat(t, tensor_info(t).name.data(), 1, fe::DataType_t::FLOAT);
  }
  void amax(const Tensor& t, int slot, const char* name) {
    output(t, slot, name, {{1, 1, 1, 1}, {1, 1, 1, 1}, nullptr}, fe::DataType_t::FLOAT);
  }

  void forward() {
    auto a = fe::graph::SDPA_attributes().set_name("forward");
    add_shared(a), add_pages(a), add_row_outputs(a);
    const auto [o, stats] = p_.is_fp8() ? forward_fp8(a) : graph_->sdpa(query(), key(), value(), a);
    output(o, TEA_O, "o", rows(true, p_.heads_q, p_.v_dim(), size_.o, kStartsO),
           type_of(p_.o_type()));
    if (p_.writes_lse() && !by_parts(p_))
      output(stats, TEA_LSE, "lse", lse_rows(), fe::DataType_t::FLOAT);
  }
  std::array<Tensor, 2> forward_fp8(const fe::graph::SDPA_attributes& a) {
    const auto [o, stats, s_amax, o_amax] =
        graph_->sdpa_fp8(query(), key(), value(), scalar(TEA_Q_SCALE_INV), scalar(TEA_K_SCALE_INV),
                         scalar(TEA_V_SCALE_INV), scalar(TEA_S_SCALE_INV), scalar(TEA_S_SCALE),
                         scalar(TEA_O_SCALE), a);
    amax(s_amax, kSAmax, "s_amax"), amax(o_amax, kOAmax, "o_amax");
    return {o, stats};
  }

  void backward() {
    const auto [dq, dk, dvalue] = p_.is_fp8() ? backward_fp8() : backward_16();
    const int64_t hq = p_.heads_q, hkv = p_.heads_kv, d = p_.dim_qk, dv = p_.v_dim();
    const fe::DataType_t type = type_of(p_.dqkv_type());
    output(dq, TEA_DQ, "dq", rows(true, hq, d, size_.dq, kStartsDq), type);
    output(dk, TEA_DK, "dk", rows(false, hkv, d, size_.dk, kStartsDk), type);
    output(dvalue, TEA_DV, "dv", rows(false, hkv, dv, size_.dv, kStartsDv), type);
  }
  template <class Attributes>
  Attributes backward_attributes() {
    auto a = Attributes().set_name("backward");
    add_shared(a), add_sink_gradient(a);
    a.set_deterministic_algorithm(p_.deterministic != 0);
    return a;
  }
  Tensor o_stored() {
    return input(TEA_O, "o", rows(true, p_.heads_q, p_.v_dim(), size_.o, kStartsO),
                 type_of(p_.o_type()));
  }
  Tensor dout() {
    return input(TEA_DOUT, "dout", rows(true, p_.heads_q, p_.v_dim(), size_.dout, kStartsDout),
                 type_of(p_.dout_type()));
  }
  Tensor lse() {
    return input(leaves_rows(p_) ? +kFiniteLse : +TEA_LSE, "lse", lse_rows(),
                 fe::DataType_t::FLOAT);
  }
  std::array<Tensor, 3> backward_16() {
    auto a = backward_attributes<fe::graph::SDPA_backward_attributes>();
    add_dbias(a);
    return graph_->sdpa_backward(query(), key(), value(), o_stored(), dout(), lse(), a);
  }
  std::array<Tensor, 3> backward_fp8() {
    const auto a = backward_attributes<fe::graph::SDPA_fp8_backward_attributes>();
    const auto [dq, dk, dvalue, dq_amax, dk_amax, dv_amax, dp_amax] = graph_->sdpa_fp8_backward(
        query(), key(), value(), o_stored(), dout(), lse(), scalar(TEA_Q_SCALE_INV),
        scalar(TEA_K_SCALE_INV), scalar(TEA_V_SCALE_INV), scalar(TEA_O_SCALE_INV),
        scalar(TEA_DOUT_SCALE_INV), scalar(TEA_S_SCALE_INV), scalar(TEA_DP_SCALE_INV),
        scalar(TEA_S_SCALE), scalar(TEA_DQ_SCALE), scalar(TEA_DK_SCALE), scalar(TEA_DV_SCALE),
        scalar(TEA_DP_SCALE), a);
    amax(dq_amax, kDqAmax, "dq_amax"), amax(dk_amax, kDkAmax, "dk_amax");
    amax(dv_amax, kDvAmax, "dv_amax"), amax(dp_amax, kDpAmax, "dp_amax");
    return {dq, dk, dvalue};
  }

  const Problem& p_;
  const Geometry& size_;
  const GraphKey& key_;
  const Capacity& n_;
  std::shared_ptr<Frontend> graph_;
  std::array<Tensor, kSlots> tensors_;
};

// cuDNN's error in one line: the first reason of a candidate, if any.
std::string said(fe::error_t status) {
  const std::string text = status.get_message();
  const std::string mark = "Reason: ";
  const size_t reason = text.find(mark);
  const size_t begin = reason == text.npos ? 0 : reason + mark.size();
  return "cuDNN says: " + text.substr(begin, text.find('\n', begin) - begin);
}

// The steps of the frontend, up to the first that fails.
fe::error_t compile(fe::graph::Graph& graph) {
  fe::error_t status = graph.validate();
  if (status.is_good()) status = graph.build_operation_graph();
  if (status.is_good()) status = graph.create_execution_plans({fe::HeurMode_t::A});
  if (status.is_good()) status = graph.check_support();
  if (status.is_good()) status = graph.build_plans();
  return status;
}

// Loads cuDNN for the frontend. Returns the reason of a failure; empty: it is
// there.
std::string find_cudnn() {
  const Library cudnn = library();
  if (!cudnn.symbols) return "cuDNN was not found: " + cudnn.why_none;
  static const bool known = (fe::cudnn_dlhandle = cudnn.symbols, true);
  static_cast<void>(known);
  return "";
}

}  // namespace

std::string objection(const Problem& problem, const Geometry& size, const GraphKey& key, int sm) {
  if (const std::string why = find_cudnn(); !why.empty()) return why;
  Builder builder(problem, size, key);
  builder.graph()->set_sm_version(sm);
  builder.describe();
  const fe::error_t status = builder.graph()->validate();
  return status.is_bad() ? said(status) : "";
}

std::variant<Refusal, std::shared_ptr<const Graph>> build(const Problem& problem,
                                                          const Geometry& size, const GraphKey& key,
                                                          const Device& device) {
  if (const std::string why = find_cudnn(); !why.empty()) return Refusal{why};
  try {
    const auto properties = std::make_shared<fe::DeviceProperties>();
    fe::error_t status = properties->set_device_id(device.index).build();
    if (status.is_bad()) return Refusal{said(status)};
    Builder builder(problem, size, key);
    builder.graph()
        ->set_sm_version(device.sm)
        .set_device_properties(properties)
        .set_cuda_graph_retention(fe::CudaGraphRetention_t::PER_GRAPH);
    builder.describe();
    status = compile(*builder.graph());
    if (status.is_bad()) return Refusal{said(status)};
    return std::make_shared<Built>(builder.graph(), builder.slots(), device.index);
  } catch (const std::exception& e) {  // the frontend's own, where libcudart is missing
    return Refusal{std::string("cuDNN says: ") + e.what()};
  }
}

}  // namespace tea::cudnn
