// The table of tensors of this process, and the functions that create, destroy, set and read them.
#include "nvte/tensor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/error.h"

namespace tea::nvte {
namespace {

// The capacity of TransformerEngine's table: 20 MiB, with 304 bytes per tensor.
constexpr size_t kMaxTensors = (size_t{20} << 20) / 304;

uintptr_t index_of(NVTETensor handle) { return reinterpret_cast<uintptr_t>(handle); }
NVTETensor handle_of(size_t index) { return reinterpret_cast<NVTETensor>(index); }

// Slots never move and are never freed, so that a look-up needs no lock: it reads only the
// high-water mark. Unused pages of the reserved memory are not backed by physical memory.
class Table {
 public:
  Table() {
    slots_.reserve(kMaxTensors);
    free_.reserve(kMaxTensors);
    live_.reserve(kMaxTensors);
  }

  Tensor* find(NVTETensor handle) {
    const size_t index = index_of(handle);
    return index >= 1 && index <= high_water_.load(std::memory_order_acquire)
               ? slots_.data() + (index - 1)
               : nullptr;
  }

  void create(NVTEScalingMode mode, std::span<NVTETensor> handles) {
    const std::lock_guard lock(mutex_);
    const size_t live = slots_.size() - free_.size();
    TEA_NVTE_CHECK(handles.size() <= kMaxTensors - live, "No room for ", handles.size(),
                   " more tensors: ", live, " are live and the table holds ", kMaxTensors,
                   ". Are tensors created and never destroyed?");
    for (NVTETensor& handle : handles) {
      const size_t index = take();
      slots_[index - 1].scaling_mode = mode;
      live_[index - 1] = true;
      handle = handle_of(index);
    }
  }

  void destroy(std::span<const NVTETensor> handles) {
    const std::lock_guard lock(mutex_);
    for (NVTETensor handle : handles) {
      if (handle == nullptr) continue;
      const size_t index = index_of(handle);
      TEA_NVTE_CHECK(index <= slots_.size(), "Invalid tensor. No tensor was ever created as ",
                     index, "; the last one is ", slots_.size(), ".");
      // A second entry in the free list would assign one slot to two owners.
      TEA_NVTE_CHECK(live_[index - 1], "Invalid tensor. Tensor ", index, " was already destroyed.");
      slots_[index - 1] = Tensor{};
      live_[index - 1] = false;
      free_.push_back(index);
    }
  }

 private:
  // The slot freed last, or a new slot.
  size_t take() {
    if (!free_.empty()) {
      const size_t index = free_.back();
      free_.pop_back();
      return index;
    }
    slots_.emplace_back();
    live_.push_back(false);
    high_water_.store(slots_.size(), std::memory_order_release);
    return slots_.size();
  }

  std::mutex mutex_;
  std::vector<Tensor> slots_;
  std::vector<bool> live_;
  std::vector<size_t> free_;
  std::atomic<size_t> high_water_ = 0;
};

// Never destroyed: static objects of the caller may destroy their tensors at exit, after ours.
Table& table() {
  static Table& only = *new Table;
  return only;
}

constexpr NVTEBasicTensor Tensor::*kParts[] = {
    &Tensor::data,      &Tensor::columnwise_data,      &Tensor::scale,           &Tensor::amax,
    &Tensor::scale_inv, &Tensor::columnwise_scale_inv, &Tensor::columnwise_amax,
};
static_assert(std::size(kParts) == kNVTEWithGEMMSwizzledScales);

NVTEBasicTensor Tensor::*part_of(NVTETensorParam param) {
  TEA_NVTE_CHECK(param >= 0 && static_cast<size_t>(param) < std::size(kParts),
                 "Unknown tensor parameter ", param, "; needs 0 to ", std::size(kParts) - 1, ".");
  return kParts[param];
}

void set_part(Tensor& tensor, NVTETensorParam param, const NVTEBasicTensor& value) {
  NVTEBasicTensor& part = tensor.*part_of(param);
  TEA_NVTE_CHECK(value.shape.ndim <= kMaxDims, "The shape of tensor parameter ", param, " has ",
                 value.shape.ndim, " dimensions; needs at most ", kMaxDims, ".");
  part = value;
}

size_t param_bytes(NVTETensorParam param) {
  if (param == kNVTEWithGEMMSwizzledScales) return sizeof(Tensor::with_gemm_swizzled_scales);
  part_of(param);
  return sizeof(NVTEBasicTensor);
}

void check_room(NVTETensorParam param, size_t seen) {
  TEA_NVTE_CHECK(seen >= param_bytes(param), "The buffer of tensor parameter ", param, " has ",
                 seen, " bytes; needs ", param_bytes(param), ".");
}

}  // namespace

Tensor* find(NVTETensor handle) { return table().find(handle); }

Tensor& tensor(NVTETensor handle) {
  Tensor* found = find(handle);
  TEA_NVTE_CHECK(found != nullptr, "Invalid tensor. ", index_of(handle),
                 " is not the handle of a tensor.");
  return *found;
}

Tensor& tensor(const char* name, NVTETensor handle) {
  Tensor* found = find(handle);
  if (found == nullptr) {
    const std::string seen = handle ? shown(index_of(handle)) : "NULL";
    throw Error(TEA_INVALID,
                "Invalid tensor. " + std::string(name) + " is " + seen +
                    "; needs the handle of a tensor (an empty one where there is none)");
  }
  return *found;
}

std::string text(const NVTEShape& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.ndim; ++i) out += (i ? ", " : "") + shown(shape.data[i]);
  return out + "]";
}

void create(NVTEScalingMode mode, std::span<NVTETensor> handles) { table().create(mode, handles); }

void destroy(std::span<const NVTETensor> handles) { table().destroy(handles); }

}  // namespace tea::nvte

using tea::nvte::check_room;
using tea::nvte::create;
using tea::nvte::destroy;
using tea::nvte::find;
using tea::nvte::kAbsent;
using tea::nvte::param_bytes;
using tea::nvte::part_of;
using tea::nvte::set_part;
using tea::nvte::Tensor;

NVTETensor nvte_create_tensor(NVTEScalingMode scaling_mode) {
  NVTETensor handle;
  create(scaling_mode, {&handle, 1});
  return handle;
}

void nvte_destroy_tensor(NVTETensor tensor) { destroy({&tensor, 1}); }

void nvte_create_tensors(NVTEScalingMode scaling_mode, NVTETensor* tensors, size_t count) {
  TEA_NVTE_CHECK(tensors != nullptr || count == 0, "tensors is NULL; needs an array of ", count,
                 " handles.");
  create(scaling_mode, {tensors, count});
}

void nvte_destroy_tensors(NVTETensor* tensors, size_t count) {
  TEA_NVTE_CHECK(tensors != nullptr || count == 0, "tensors is NULL; needs an array of ", count,
                 " handles.");
  destroy({tensors, count});
}

void nvte_tensor_pack_create(NVTETensorPack* pack) {
  TEA_NVTE_CHECK(pack != nullptr, "pack is NULL; needs a tensor pack.");
  create(NVTE_DELAYED_TENSOR_SCALING, pack->tensors);
}

void nvte_tensor_pack_destroy(NVTETensorPack* pack) {
  TEA_NVTE_CHECK(pack != nullptr, "pack is NULL; needs a tensor pack.");
  destroy(pack->tensors);
  std::fill(std::begin(pack->tensors), std::end(pack->tensors), nullptr);
}

void nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param, const void* buf,
                              size_t size_in_bytes) {
  Tensor& target = tea::nvte::tensor(tensor);
  TEA_NVTE_CHECK(buf != nullptr, "The buffer of tensor parameter ", param, " is NULL.");
  check_room(param, size_in_bytes);
  if (param == kNVTEWithGEMMSwizzledScales) {
    target.with_gemm_swizzled_scales = *static_cast<const uint8_t*>(buf) != 0;
    return;
  }
  NVTEBasicTensor value;
  std::memcpy(&value, buf, sizeof(value));
  set_part(target, param, value);
}

void nvte_get_tensor_param_v2(const NVTETensor tensor, NVTETensorParam param, void* buf,
                              size_t size_in_bytes, size_t* size_written) {
  const size_t needed = param_bytes(param);
  if (size_written != nullptr) *size_written = needed;
  if (buf == nullptr) return;
  check_room(param, size_in_bytes);
  const Tensor* found = find(tensor);
  const Tensor source = found != nullptr ? *found : Tensor{};
  if (param == kNVTEWithGEMMSwizzledScales)
    std::memcpy(buf, &source.with_gemm_swizzled_scales, needed);
  else
    std::memcpy(buf, &(source.*part_of(param)), needed);
}

void nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param_name,
                           const NVTEBasicTensor* param) {
  TEA_NVTE_CHECK(tensor != nullptr, "tensor is NULL; needs a pointer to a handle.");
  TEA_NVTE_CHECK(param != nullptr, "param is NULL; needs a basic tensor.");
  set_part(tea::nvte::tensor(*tensor), param_name, *param);
}

NVTEBasicTensor nvte_get_tensor_param(const NVTETensor tensor, NVTETensorParam param_name) {
  if (tensor == nullptr) return kAbsent;
  return tea::nvte::tensor(tensor).*part_of(param_name);
}
