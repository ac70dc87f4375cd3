// Merging partial attention results by their log-sum-exp.
#pragma once
#include <cmath>

#include "math/softmax.h"
#include "ops/args.h"

namespace tea {

void merge_parts(const tea_merge& args, const Place& place);

// The strides of a merge, with the defaults resolved.
struct MergeStrides {
  tea_strides part_o, o, part_lse, lse;
};

struct MergeRow {
  int64_t batch, row, head;
  TEA_HOST_DEVICE int64_t in(const tea_strides& s) const {
    return batch * s.batch + row * s.seq + head * s.head;
  }
};

// The LSE over all parts, whose LSEs are lse_of(i).
template <class Real, class Parts>
TEA_HOST_DEVICE Real merged_lse(int32_t parts, const Parts& lse_of) {
  Real high = -INFINITY, sum = 0;
  for (int32_t i = 0; i < parts; ++i) high = fmax(high, Real{lse_of(i)});
  if (high == -INFINITY) high = 0;  // all parts are empty, or one is NaN
  for (int32_t i = 0; i < parts; ++i) sum += exp(Real{lse_of(i)} - high);
  return high + log(sum);
}

// The factor of a part; 0 if its O must not be read.
template <class Real>
TEA_HOST_DEVICE Real merge_weight(Real part_lse, Real lse) {
  return part_lse == -INFINITY ? 0 : static_cast<Real>(exp(part_lse - lse));
}

// Of every LSE.
inline int32_t lse_dtype(const tea_merge& a) {
  return a.part_dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32;
}

void merge_on_gpu(const tea_merge& args, const MergeStrides& at, const Place& place);

}  // namespace tea
