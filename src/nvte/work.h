// What a call's tensors say about its sizes: the shapes that are read, and the checks that those
// shapes cover the memory that will be touched.
#pragma once
#include "nvte/call.h"

namespace tea::nvte {

// A 16-bit call's types are all Q's; an FP8 call's come from the labels. Throws if V's differs from
// K's, an output's is not one that the call can write, integers are not labelled as those that are
// read, or FP8 tensors are scaled in another way than by one number each.
Work work_of(const ForwardCall& call);
Work work_of(const BackwardCall& call);

// The same without reading sizes from shapes.
Work work_of(const ForwardCall& call, const Sizes& sizes);
Work work_of(const BackwardCall& call, const Sizes& sizes);

// Throws if the random state that dropout reads is not labelled int64.
void check_rng_state(const Tensor& rng_state, const Options& options);

// "Q and KV must have the same data type."
void check_same_type(NVTEDType q, NVTEDType kv);

// Which of (batch, head, row, column) a bias of this shape lacks: [1 or b, 1 or h, 1 or sq, skv].
// Throws if it is none of these.
int bias_broadcast(const char* name, const NVTEShape& shape, const Sizes& sizes);

}  // namespace tea::nvte
