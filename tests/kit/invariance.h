// Batch invariance: the bits that forward computes for the rows of a sequence, whatever else is in
// the batch and however the rows are divided among calls.
#pragma once
#include <string>
#include <vector>

#include "kit/case.h"

namespace tea::kit {

// Rows [first, first + rows) of a sequence that is the same wherever its number is the same, with
// the keys up to the last of these rows.
struct Chunk {
  int64_t number, first, rows;
};

// Runs the problem, causal with batch_invariant=1 or not, whose queries are ragged and whose keys
// are ragged or paged, on each batch, and compares O and LSE of rows that are in several of them. A
// line for each difference, at most one for each chunk.
std::vector<std::string> invariance_violations(const std::string& problem, std::string_view engine,
                                               int device,
                                               const std::vector<std::vector<Chunk>>& batches);

// The same on batches of a sequence of `length` rows: alone and whole, among others, in chunks of
// different sizes, and row by row at its end.
std::vector<std::string> invariance_violations(const std::string& problem, std::string_view engine,
                                               int device, int64_t length);

}  // namespace tea::kit
