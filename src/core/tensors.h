// The table of tensors: for each index of tea_tensor its name and, as functions of the Problem, its
// use, dtype and shape. Checks, byte counts, test inputs and front ends read it.
#pragma once
#include <optional>
#include <span>
#include <string_view>

#include "core/geometry.h"

namespace tea {

enum class Direction { kForward, kBackward };
enum class Use { kUnused, kOptional, kRequired };

struct Shape {
  int rank = 0;
  int64_t size[4] = {}, stride[4] = {};  // strides in elements
  int64_t elements() const;              // saturates at INT64_MAX, which strides of zero can exceed
  int64_t span() const;  // elements from the first to the last one, both included; 0 if empty
  int64_t offset(int64_t flat) const;  // offset of the element with this row-major index
};

enum class Type : uint8_t { kQ, kKv, kO, kDout, kDqkv, kBias, kStatistic, kFp32, kInt32, kInt64 };

struct TensorInfo {
  tea_tensor index;
  std::string_view name;  // the name in messages: "Q", "cu_seqlens_q"
  Type type;
  Use (*forward)(const Problem&);
  Use (*backward)(const Problem&);
  bool written_forward, written_backward;
  Shape (*shape)(const Problem&, const Geometry&);

  Use use(const Problem& p, Direction d) const {
    return d == Direction::kForward ? forward(p) : backward(p);
  }
  bool written(Direction d) const {
    return d == Direction::kForward ? written_forward : written_backward;
  }
  int32_t dtype(const Problem& p) const;  // a tea_dtype; TEA_DTYPE_DEFAULT for integers
  int element_bytes(const Problem& p) const;
};

const TensorInfo& tensor_info(tea_tensor index);
std::span<const TensorInfo> tensor_table();

// The tensor that replaces a missing FP8 scalar: K and V without a scale_inv use that of Q, dK and
// dV without a scale or an amax use those of dQ. Other tensors are not replaced.
constexpr tea_tensor stand_in(tea_tensor t) {
  switch (t) {
    case TEA_K_SCALE_INV:
    case TEA_V_SCALE_INV:
      return TEA_Q_SCALE_INV;
    case TEA_DK_SCALE:
    case TEA_DV_SCALE:
      return TEA_DQ_SCALE;
    case TEA_DK_AMAX:
    case TEA_DV_AMAX:
      return TEA_DQ_AMAX;
    default:
      return t;
  }
}

// One execution in the form for engines: sizes resolved, pointers complete.
struct Run {
  Geometry size;
  void* tensor[TEA_TENSOR_COUNT];
  void* workspace;
  void* stream;
  int64_t origin[4];
  const int64_t* origin_device;
  int64_t origin_stride, shift;
  int32_t partial, accumulate;
  int32_t* status;
  tea_parallel_for parallel_for;  // NULL: the engine's own threads
  void* parallel_context;
  int64_t threads;  // at most so many of the engine's own; 0: the default

  template <class T>
  T* as(tea_tensor t) const {
    return static_cast<T*>(tensor[t]);
  }
  // The FP8 scale or amax of `t`: its own, else that of stand_in(t). NULL: neither is given.
  float* number(tea_tensor t) const { return as<float>(tensor[t] ? t : stand_in(t)); }
};

bool is_aligned(const void* address, uint64_t bytes);

// Refuses origins that are negative or so large that sums of them could overflow, and an origin on
// the host together with one on the device. `of`: the prefix of their names in messages.
void require_origin(const char* of, const int64_t (&origin)[4], const int64_t* origin_device);

// Converts the caller's struct under the growth rules of te_attention.h.
tea_run as_known(const tea_run* caller);

// The properties of a problem that the checks of its runs need, computed once.
class Checks {
 public:
  explicit Checks(const Problem& problem);
  // The sizes, if the problem specifies all of them.
  const std::optional<Geometry>& size() const { return size_; }
  // Fast path: whether all required pointers are given and aligned, and no others. If it returns
  // false, the table decides, because an empty tensor needs no memory.
  bool pass(void* const (&tensor)[TEA_TENSOR_COUNT], Direction d) const;

 private:
  struct Rules {
    uint64_t required = 0, refused = 0;      // by index
    uint64_t unaligned[TEA_TENSOR_COUNT]{};  // bits that are 0 in an address
  };
  std::optional<Geometry> size_;
  Rules rules_[2];
};

// Checks sizes, pointers, alignment and workspace before anything is written. `workspace`: the
// engine's need, or NULL for none.
Run import_run(const Problem& problem, const Checks& checks, const tea_run* caller,
               Direction direction,
               uint64_t (*workspace)(const Problem&, const Geometry&, Direction));

}  // namespace tea
