// The parts of one execution around cuDNN's graph: the layout of the workspace, the parameters of
// the kernels before and after the graph, and the size of cuDNN's own workspace.
#pragma once
#include <optional>

#include "cudnn/graph.h"
#include "cudnn/prepare.h"

namespace tea::cudnn {

// The offsets of the engine's own slots in the workspace; cuDNN uses the rest.
struct Layout {
  uint64_t offset[kSlots] = {}, library = 0;
};
Layout layout(const Problem& problem, const Geometry& size, const Capacity& capacity,
              Direction direction);

// The most bytes that cuDNN may ask for: linear in the sequence lengths, or in a bias that trains.
// Of plans that only go back, which faster.h has rows for, on their GPUs; of others on any.
uint64_t library_bound(const Problem& problem, const Geometry& size, const Capacity& capacity,
                       Direction direction, Passes passes);

// Scales that are not given are those of q and of dq, or 1.
Pointers pointers(const Run& run, const Layout& layout);

// No query or no key: nothing for cuDNN to do, yet outputs to write.
bool is_empty(const Problem& problem, const Geometry& size);

// Before the graph, if anything must be made.
std::optional<Prepare> preparation(const Problem& problem, const Run& run, const Capacity& capacity,
                                   const Pointers& slots, Direction direction);

// After a forward graph that writes MAX and SUM_EXP.
std::optional<Finish> finishing(const Problem& problem, const Run& run, const Pointers& slots);

// Of fp8, after the graph; none where no amax is recorded.
// `exact`: the largest exp(x - MAX) of S, which is 1 where a row attends to a key, instead of
// cuDNN's, which is that of P after the division. Of problems in which every row does.
std::optional<Raise> raising(const Run& run, const Pointers& slots, Direction direction,
                             bool exact = false);

// After the graph: parameters of the kernel that clears rows without a result, on either side.
Clear clearing(const Problem& problem, const Run& run, const Pointers& slots, Direction direction);
Clear clearing_of_keys(const Problem& problem, const Run& run);  // backward

}  // namespace tea::cudnn
