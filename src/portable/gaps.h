// Tokens of ragged buffers that belong to no sequence.
#pragma once
#include <initializer_list>

#include "gpu/arguments.h"

namespace tea::portable {

struct Cleared {
  StridedTensor rows;
  int32_t heads, dim;
};

// On a ragged side, writes zeros to the rows of the tensors that belong to no sequence; with
// per_row also -infinity to LSE and MAX, and zero to SUM_EXP. On other sides does nothing.
void clear_gaps(const AttentionArguments& work, const SequenceLayout& side,
                std::initializer_list<Cleared> tensors, bool per_row, void* stream);

}  // namespace tea::portable
