// Random fields of a case that several kinds of random cases share.
#pragma once
#include "kit/case.h"
#include "kit/random.h"

namespace tea::kit {

template <class T, size_t N>
T pick(Random& r, const T (&values)[N]) {
  return values[r.below(N)];
}

// Lengths around the edges of the tiles that kernels use, and the degenerate ones.
int64_t length(Random& r, int64_t most);

// Keys and values alone in FP8.
void draw_cache(Random& r, Problem& p);
void draw_mask(Random& r, Problem& p);
void draw_scores(Random& r, Problem& p);

// Of the thread blocks of a kernel. Last, so that the other fields of a seed do not depend on it.
void draw_limit(Random& r, Problem& p);

// The sizes of the sides that are dense.
void set_sizes(Problem& p, int64_t batch, int64_t q, int64_t kv);

// After the lengths: the fields of the run, and values and a layout that fit them.
void draw_words(Random& r, Case& c);

}  // namespace tea::kit
