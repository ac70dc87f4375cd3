// Repeats what a rank that shares sequences does in a call: memory, attention, copies and NCCL's
// transfers, as python/te_attention/torch/_cp_record.py has recorded them. The host's time is
// that of the launches: neither Python nor torch.distributed has a part in it.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "torch/call.h"
#include "torch/ops.h"

// torch declares them in builds with CUDA only, and defines them with CUDA only.
extern "C" {
struct CUDAStreamGuardOpaque;
__attribute__((weak)) AOTITorchError aoti_torch_create_cuda_stream_guard(
    void* stream, int32_t device_index, CUDAStreamGuardOpaque** ret_guard);
__attribute__((weak)) AOTITorchError aoti_torch_delete_cuda_stream_guard(
    CUDAStreamGuardOpaque* guard);
}

namespace tea::torch_ops {
namespace {

// PyTorch's current stream while it lives.
class CurrentStream {
 public:
  CurrentStream(void* stream, int device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_stream_guard(stream, device, &guard_));
  }
  ~CurrentStream() { aoti_torch_delete_cuda_stream_guard(guard_); }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  CUDAStreamGuardOpaque* guard_ = nullptr;
};

// The instructions, each followed by its operands, in the order of _cp_recording.py.
enum Instruction : int64_t {
  kAllocate,  // slot, view: as a tensor of its own
  kFree,      // slot
  kLaunch,    // its number, count, and for each tensor: tea_tensor, memory
  kCopy,      // memory, view, memory, view: to, from
  kFill,      // memory, view, the bits of a double
  kAdd,       // memory, view of the sum, and of what is added
  kMerge,     // memory, view of O, of LSE, and of those of the part
  kMark,      // the place before which a transfer may begin
  kTransfer,  // whether from the mark on, number of the event after it, count, and for each
              // message: sends, rank, memory, bytes
  kWait,      // for the transfer with the event of this number
  kResult,    // slot
  kView,      // slot, offset in elements, view: a result that is a part of its memory
  kAfter,     // what follows runs after transfers, in their stream
  kJoin,      // the end of that; then as kWait
  kArena,     // bytes: memory for several slots, until the end
  kPlace,     // slot, offset in that memory
  kRound,     // memory, view of O, of O in the type of sums and of LSE
};

constexpr int kEvents = 4;                         // transfers that are under way at a time
constexpr uint64_t kKeptWorkspaceBytes = 1 << 20;  // of a workspace that later launches use again

// Functions of NCCL and CUDA by address, and objects of theirs.
struct Transport {
  int (*group_start)();
  int (*send)(const void*, size_t, int type, int rank, void* communicator, void* stream);
  int (*receive)(void*, size_t, int type, int rank, void* communicator, void* stream);
  int (*group_end)();
  int (*record)(void* event, void* stream);  // NULL: memory of the host, which needs no streams
  int (*wait)(void* stream, void* event, unsigned flags);
  void* communicator;
  void* stream;  // of the transfers
  void* detour;  // a stream without work
  void* marked;  // events
  void* passed;
  void* done[kEvents];
};

constexpr int kBytes = 0;  // ncclInt8

// The types of tensors, in the order of _cp_recording.py.
constexpr int32_t kTypes[] = {TEA_FP16, TEA_BF16, TEA_FP32, TEA_FP64, TEA_E4M3, TEA_E5M2};
int32_t dtype_at(int64_t index) { return torch_dtype(kTypes[index]); }

// Reads the head of the code, behind which `code` moves. Whether inputs have the types, shapes,
// strides and alignments of those that were recorded, on the same device, and share memory as they
// did.
bool fits(const int64_t*& code, const std::vector<Tensor>& inputs) {
  const int64_t* at = code;
  const int64_t* const end = at + 1 + *at;
  ++at;
  code = end;
  if (*at++ != static_cast<int64_t>(inputs.size())) return false;
  for (const Tensor& input : inputs) {
    const frontend::Tensor x = view_of("an input", input);
    const int64_t type = *at++, device = *at++, alignment = *at++, place = *at++, rank = *at++;
    if (x.type != kTypes[type] || x.device != device || x.rank != rank ||
        reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(alignment) !=
            static_cast<uintptr_t>(place) ||
        !std::equal(x.size, x.size + rank, at) || !std::equal(x.stride, x.stride + rank, at + rank))
      return false;
    at += 2 * rank;
  }
  while (at < end) {
    const auto address = [&](int64_t i) {
      return static_cast<const char*>(inputs[static_cast<size_t>(i)].data_ptr());
    };
    const int64_t one = *at++, other = *at++, distance = *at++;
    if (address(other) - address(one) != distance) return false;
  }
  return true;
}

class Replay {
 public:
  // code: behind its head.
  Replay(const int64_t* code, const int64_t* end, const Tensor& launches, const Tensor& transport,
         const std::vector<Tensor>& inputs)
      : code_(code),
        end_(end),
        launches_(static_cast<const Launch*>(launches.data_ptr())),
        like_(inputs.at(0)),
        where_(where_is("q", like_)),
        main_stream_(where_.stream) {
    if (static_cast<size_t>(transport.numel()) * sizeof(int64_t) != sizeof transport_)
      refuse("transport", std::to_string(transport.numel()) + " numbers",
             std::to_string(sizeof transport_ / sizeof(int64_t)));
    std::memcpy(&transport_, transport.data_ptr(), sizeof transport_);
    slots_.resize(static_cast<size_t>(next()));
    for (size_t i = 0; i < inputs.size(); ++i)
      slots_[i] = {static_cast<char*>(inputs[i].data_ptr()), {}};
  }

  std::vector<Tensor> run() {
    try {
      while (code_ < end_) step(next());
    } catch (...) {
      // Memory of the call may be used again only after the transfers that were begun.
      try {
        for (int i = 0; i < kEvents; ++i)
          if (is_under_way_[i]) join(i);
      } catch (...) {  // the first error is the one that tells the cause
      }
      throw;
    }
    return results_;
  }

 private:
  struct Shape {
    int32_t dtype;
    int rank;
    const int64_t *size, *stride;
  };

  int64_t next() { return *code_++; }
  Shape shape() {
    Shape out{dtype_at(next()), static_cast<int>(next()), nullptr, nullptr};
    out.size = code_, out.stride = code_ + out.rank;
    code_ += 2 * out.rank;
    return out;
  }
  // A slot and an offset in bytes, or -1 and an address.
  void* memory() {
    const int64_t slot = next(), offset = next();
    return slot < 0 ? reinterpret_cast<void*>(offset) : slots_[slot].data + offset;
  }
  Tensor view() {
    void* const data = memory();
    const Shape s = shape();
    int32_t type, index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like_.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like_.get(), &index));
    AtenTensorHandle out;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(data, s.rank, s.size, s.stride, 0,
                                                              s.dtype, type, index, &out));
    return Tensor(out);
  }

  void step(int64_t instruction) {
    switch (instruction) {
      case kAllocate: {
        Slot& slot = slots_[next()];
        const Shape s = shape();
        slot.tensor = empty(like_, s.dtype, s.rank, s.size, s.stride);
        slot.data = static_cast<char*>(slot.tensor->data_ptr());
        return;
      }
      case kArena:
        arena_ = empty(like_, torch_byte(), {next()});
        return;
      case kPlace: {
        Slot& slot = slots_[next()];
        slot.data = static_cast<char*>(arena_->data_ptr()) + next();
        return;
      }
      case kFree:
        slots_[next()].tensor.reset();
        return;
      case kLaunch:
        return launch();
      case kCopy: {
        const Tensor to = view(), from = view();
        TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), 0));
        return;
      }
      case kAdd: {
        const Tensor to = view(), one = view(), other = view();
        const Tensor sum = torch::stable::subtract(one, other, -1);
        TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), sum.get(), 0));
        return;
      }
      case kFill: {
        Tensor to = view();
        double value;
        std::memcpy(&value, code_++, sizeof value);
        torch::stable::fill_(to, value);
        return;
      }
      case kMerge: {
        const Tensor o = view(), lse = view(), part_o = view(), part_lse = view();
        return merge_into(o, lse, part_o, part_lse);
      }
      case kRound: {
        const Tensor o = view(), sum = view(), lse = view();
        return round_o(o, sum, lse);
      }
      case kMark:
        return record(transport_.marked, where_.stream);
      case kTransfer:
        return transfer();
      case kAfter:
        if (where_.device < 0) return;
        current_.emplace(transport_.stream, where_.device);
        where_.stream = transport_.stream;
        workspace_.reset();  // that of another stream
        return;
      case kJoin:
        return join(next());
      case kWait:
        return finish(next());
      case kResult:
        results_.push_back(*slots_[next()].tensor);
        return;
      case kView: {
        const int64_t slot = next(), offset = next();
        const Shape s = shape();
        AtenTensorHandle out;
        TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(slots_[slot].tensor->get(), s.rank,
                                                              s.size, s.stride, offset, &out));
        results_.emplace_back(out);
        return;
      }
      default:
        refuse("code", "instruction " + std::to_string(instruction), "0 to 16");
    }
  }

  void launch() {
    const Launch& of = launches_[next()];
    tea_run run = of.run;
    void* tensors[TEA_TENSOR_COUNT] = {};
    for (int64_t count = next(); count > 0; --count) {
      const int64_t index = next();
      tensors[index] = memory();
    }
    run.tensors = tensors;
    if (!run_planned(of.problem, run, of.has_run_sizes, of.engine, like_, where_, of.is_forward,
                     &workspace_))
      refuse("code", "a part that no engine can merge", "one that was merged before");
  }

  void transfer() {
    const bool from_mark = next();
    const Transport& t = transport_;
    const int64_t event = next();
    if (!from_mark) record(t.marked, where_.stream);
    wait(t.stream, t.marked);
    require_success("ncclGroupStart", t.group_start());
    const char* function = "";
    int result = 0;  // of the first function that fails; the group is ended all the same
    for (int64_t count = next(); count > 0; --count) {
      const bool sends = next();
      const int rank = static_cast<int>(next());
      void* const data = memory();
      const auto bytes = static_cast<size_t>(next());
      if (result) continue;
      function = sends ? "ncclSend" : "ncclRecv";
      result = (sends ? t.send(data, bytes, kBytes, rank, t.communicator, t.stream)
                      : t.receive(data, bytes, kBytes, rank, t.communicator, t.stream));
    }
    const int ended = t.group_end();
    is_under_way_[event] = true;
    record(t.done[event], t.stream);
    require_success(function, result);
    require_success("ncclGroupEnd", ended);
    if (!from_mark) return;
    // A persistent kernel that follows would take all SMs as soon as the one before leaves them. By
    // way of another stream it comes microseconds later than NCCL's kernel.
    record(t.passed, where_.stream);
    wait(t.detour, t.passed);
    record(t.passed, t.detour);
    wait(where_.stream, t.passed);
  }

  void finish(int64_t event) {
    wait(where_.stream, transport_.done[event]);
    is_under_way_[event] = false;
  }

  // finish(), of what follows the transfer in its stream, too.
  void join(int64_t event) {
    current_.reset();
    where_.stream = main_stream_;
    workspace_.reset();
    record(transport_.done[event], transport_.stream);
    finish(event);
  }

  void record(void* event, void* stream) const {
    if (transport_.record) require_success("cudaEventRecord", transport_.record(event, stream));
  }
  void wait(void* stream, void* event) const {
    if (transport_.wait) require_success("cudaStreamWaitEvent", transport_.wait(stream, event, 0));
  }
  static void require_success(const char* function, int result) {
    if (result) refuse(function, "returning " + std::to_string(result), "0");
  }

  const int64_t* code_;
  const int64_t* const end_;
  const Launch* const launches_;
  const Tensor like_;
  Where where_;  // of the instructions now
  void* const main_stream_;
  std::optional<CurrentStream> current_;
  Transport transport_;
  bool is_under_way_[kEvents] = {};
  std::vector<Tensor> results_;
  struct Slot {
    char* data;
    std::optional<Tensor> tensor;  // where it has memory of its own
  };
  std::vector<Slot> slots_;
  std::optional<Tensor> arena_;
  Workspace workspace_{kKeptWorkspaceBytes};
};

}  // namespace

void replay(Stack& stack) {
  const Tensor code = stack.tensor(), launches = stack.tensor(), transport = stack.tensor();
  const std::vector<Tensor> inputs = stack.tensors();
  const auto* at = static_cast<const int64_t*>(code.data_ptr());
  const int64_t* const end = at + code.numel();
  if (!fits(at, inputs)) return stack.give(std::vector<Tensor>{});
  stack.give(Replay(at, end, launches, transport, inputs).run());
}

}  // namespace tea::torch_ops
