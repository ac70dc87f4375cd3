// The table of tensors: for each index of tea_tensor its name, and as functions of the Problem when
// it is used, its type and its shape. Checks, byte counts, test inputs and front ends read it.
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
  int64_t elements() const;              // INT64_MAX if there are more: strides of zero allow it
  int64_t span() const;  // elements from the first to the last one, both included; 0 if empty
  int64_t offset(int64_t flat) const;  // of the element with this index in row-major order
};

enum class Type : uint8_t { kQkv, kO, kDout, kDqkv, kBias, kStatistic, kFp32, kInt32, kInt64 };

struct TensorInfo {
  tea_tensor index;
  std::string_view name;  // as in messages: "Q", "cu_seqlens_q"
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

// What counts for K and V that have no scale_inv of their own is Q's, for dK and dV without a scale
// or an amax dQ's. Of all others, they themselves.
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

// One execution as the engines see it: sizes resolved, pointers complete.
struct Run {
  Geometry size;
  void* tensor[TEA_TENSOR_COUNT];
  void* workspace;
  void* stream;
  int64_t origin[4];
  const int64_t* origin_device;
  int32_t* status;
  tea_parallel_for parallel_for;  // NULL: the engine's own threads
  void* parallel_context;

  template <class T>
  T* as(tea_tensor t) const {
    return static_cast<T*>(tensor[t]);
  }
  // The scale or amax of FP8 that counts for `t`: its own, else the one that stands in for it.
  // NULL: there is neither.
  float* number(tea_tensor t) const { return as<float>(tensor[t] ? t : stand_in(t)); }
};

bool is_aligned(const void* address, uint64_t bytes);

// Refuses origins that are negative or so large that sums of them could overflow, and numbers on
// the host beside numbers in memory. `of`: what their names start with.
void require_origin(const char* of, const int64_t (&origin)[4], const int64_t* origin_device);

// The caller's struct under the growth rules of te_attention.h.
tea_run as_known(const tea_run* caller);

// What the checks of a run need to know of its problem, found once for all runs.
class Checks {
 public:
  explicit Checks(const Problem& problem);
  // The sizes, if no run gives any.
  const std::optional<Geometry>& size() const { return size_; }
  // Whether all pointers are there and aligned as they must be, and no others. Where it says no,
  // the table has the last word: an empty tensor needs no memory.
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
