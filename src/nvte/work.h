// Reads the sizes of a call from its tensors' shapes, and checks that the shapes cover all memory
// that will be accessed.
#pragma once
#include "nvte/call.h"

namespace tea::nvte {

// The types of a 16-bit call are all those of Q; those of an FP8 call are the tensors' own. Throws
// if V's type differs from K's, if the call cannot write an output's type, if an integer tensor has
// another type than the one that is read, or if an FP8 tensor has more than one scale.
Work work_of(const ForwardCall& call);
Work work_of(const BackwardCall& call);

// As above, with given sizes.
Work work_of(const ForwardCall& call, const Sizes& sizes);
Work work_of(const BackwardCall& call, const Sizes& sizes);

// Throws if the type of dropout's random state is not int64.
void check_rng_state(const Tensor& rng_state, const Options& options);

// Throws "Q and KV must have the same data type.".
void check_same_type(NVTEDType q, NVTEDType kv);

// The bits of the dimensions (batch, head, row, column) in which a bias [1 or b, 1 or h, 1 or sq,
// skv] has size 1. Throws for other shapes.
int bias_broadcast(const char* name, const NVTEShape& shape, const Sizes& sizes);

}  // namespace tea::nvte
