// Merging partial attention results by their log-sum-exp.
#pragma once
#include "ops/args.h"

namespace tea {
void merge_parts(const tea_merge& args, const Place& place);

// log(exp(a) + exp(b)) without overflow; two -inf give -inf.
double log_add_exp(double a, double b);
}  // namespace tea
