// The oracle for large shapes: the same numbers and bounds as oracle::solve, by a GPU in float64, a
// warp for a row of queries and a warp for a key, without tiles. It shares only the arithmetic of
// errors (approx.h) with that oracle and nothing with the library.
#pragma once
#include "kit/bounds.h"

namespace tea::oracle {

// On GPU 0. Knows neither FP8 nor a bias, which are large by themselves: throws there.
Result solve_on_gpu(const Case& c, const Precision& precision);

}  // namespace tea::oracle
