// The numbers of a case: plain arrays, before they are rounded to the dtypes.
#pragma once
#include "kit/layout.h"
#include "kit/oracle.h"

namespace tea::kit {

// The oracle's case with every array that the problem uses, and every option.
oracle::Case make_logical(const Case& c, const Problem& p, const Extents& e);

// FP8 scalars as the run gives them; those that are NULL resolve to what the contract says.
struct Scalars {
  double q_scale_inv, k_scale_inv, v_scale_inv, s_scale, s_scale_inv, o_scale, o_scale_inv,
      dout_scale_inv, dp_scale, dp_scale_inv, dq_scale, dk_scale, dv_scale;
  double amax;  // what every amax holds before the run
};
Scalars scalars(const Case& c);

oracle::Type oracle_type(int32_t dtype);

}  // namespace tea::kit
