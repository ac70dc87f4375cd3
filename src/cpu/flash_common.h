// Included by the kernels of every instruction set before their target options, so that no inline
// function of these headers is compiled for instructions that the processor may lack.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "cpu/flash.h"
#include "cpu/subnormals.h"
#include "math/bias.h"
#include "math/dropout.h"
#include "math/load_store.h"
#include "math/softmax.h"
