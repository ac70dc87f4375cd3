// Every operation of te_attention_ops.h as cases that run on both sides.
#pragma once
#include <vector>

#include "kit/both.h"

namespace tea::kit {
extern const std::vector<OpCase> kOpCases;
}
