// One graph of cuDNN: a problem, a direction and capacities, built once and run many times. All
// that knows cuDNN's own types is behind this header.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <variant>

#include "core/device.h"
#include "core/engine.h"
#include "core/tensors.h"
#include "cudnn/bucket.h"

namespace tea::cudnn {

// Every tensor of a graph has one number: that of tea_tensor, or one of these, which the engine
// makes from them in its workspace.
enum Slot : int {
  kLengthsQ = TEA_TENSOR_COUNT,  // int32 [batch]
  kLengthsKv,
  kStartsQ,  // int64 [batch + 1], in elements; only of ragged sides
  kStartsK,
  kStartsV,
  kStartsO,
  kStartsLse,
  kStartsDout,
  kStartsDq,
  kStartsDk,
  kStartsDv,
  kZeroSink,   // fp32 [heads_q], for off_by_one
  kFiniteLse,  // LSE without minus infinity, for backward
  kPagesK,     // int32 [batch, table_pages], clamped
  kPagesV,
  kSeed,  // the two words of rng_state, int64
  kOffset,
  kOne,    // fp32 1, for fp8 scales that are not given
  kSAmax,  // fp32, of this run alone; the caller's hold the largest of all runs
  kOAmax,
  kDpAmax,
  kDqAmax,
  kDkAmax,
  kDvAmax,
  kSlots
};
using Pointers = std::array<void*, kSlots>;

class Graph {
 public:
  virtual ~Graph() = default;
  virtual uint64_t workspace() const = 0;
  // The context of the device is current.
  virtual void run(const Pointers& pointers, void* workspace, void* stream) const = 0;
};

struct GraphKey {
  Capacity capacity;
  Direction direction;
  bool dbias, dsink;  // these gradients are wanted
  auto operator<=>(const GraphKey&) const = default;
};

// The graph, or what cuDNN said. Strides are those of `size`, whose other values are not read.
std::variant<Refusal, std::shared_ptr<const Graph>> build(const Problem& problem,
                                                          const Geometry& size, const GraphKey& key,
                                                          const Device& device);

}  // namespace tea::cudnn
