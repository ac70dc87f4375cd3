// The target options of the AMX kernels: the instructions they may use, from here to the
// includer's `#pragma GCC pop_options`, and the macros of simd.h, tile.h. Only for x86-64.
#pragma once

// GCC 12 warns about the undefined operands of its own intrinsics: https://gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#pragma GCC target("amx-tile,amx-bf16,prefer-vector-width=512")
#include "cpu/avx512_primitives.h"
