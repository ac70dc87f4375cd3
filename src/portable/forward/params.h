// The parameters of a forward kernel: the arguments and what the host derives from them.
#pragma once
#include "gpu/arguments.h"
#include "portable/forward/tile_scheduler.h"

namespace tea::portable {

// The results of CTAs that compute a split of the keys, for combine.cu: by tile, split and row. O
// is not normalised.
struct SplitResults {
  float *o, *row_max, *row_sum;
};

struct KernelParams {
  AttentionArguments args;
  TileScheduler scheduler;
  SplitResults splits;
  // By tile and row: the results of the splits of earlier launches, where `splits` are further
  // ones; else null. `is_last`: there are no later ones.
  SplitResults earlier;
  bool has_earlier, is_last;
  int64_t first_cta;  // of this launch
  int heads_per_kv;   // query heads of a head of K and V
};

}  // namespace tea::portable
