// One graph of cuDNN: a problem, a direction and capacities, built once and run many times. This
// header hides cuDNN's types.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

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
  kOwnMax,     // MAX and SUM_EXP that the caller does not want, as LSE lies
  kOwnSumExp,
  kPagesK,  // int32 [batch, table_pages], clamped
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

// cuDNN writes LSE, or MAX and SUM_EXP, never all of them: where any of the two is wanted it writes
// both, and LSE is made of them.
inline bool by_parts(const Problem& p) { return p.outputs & (TEA_OUTPUT_MAX | TEA_OUTPUT_SUM_EXP); }
inline int max_slot(const Problem& p) { return p.outputs & TEA_OUTPUT_MAX ? +TEA_MAX : +kOwnMax; }
inline int sum_exp_slot(const Problem& p) {
  return p.outputs & TEA_OUTPUT_SUM_EXP ? +TEA_SUM_EXP : +kOwnSumExp;
}

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

enum class Passes { kBoth, kBackward };

// The graphs of a capacity: forward, and backward for every choice of the gradients that a run may
// ask for.
inline std::vector<GraphKey> graphs_of(const Problem& p, const Capacity& n, Passes passes) {
  std::vector<GraphKey> keys;
  if (passes == Passes::kBoth) keys.push_back({n, Direction::kForward, false, false});
  for (const bool dbias : {true, false})
    for (const bool dsink : {true, false})
      if (p.training && (p.bias || !dbias) && (p.softmax || !dsink))
        keys.push_back({n, Direction::kBackward, dbias, dsink});
  return keys;
}

// The frontend's own reason against the graph on a GPU of this sm; empty: none. Nothing
// is built, so no GPU is needed: the library gives its version only.
std::string objection(const Problem& problem, const Geometry& size, const GraphKey& key, int sm);

// The graph, or cuDNN's error. Strides are those of `size`, whose other values are not read.
std::variant<Refusal, std::shared_ptr<const Graph>> build(const Problem& problem,
                                                          const Geometry& size, const GraphKey& key,
                                                          const Device& device);

}  // namespace tea::cudnn
