// What the kernels of every instruction set include before their target options are switched on, so
// that no inline function of these headers is compiled for a machine that may not be there.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/flash.h"
#include "math/bias.h"
#include "math/dropout.h"
#include "math/load_store.h"
#include "math/softmax.h"
