/* The layout that binaries depend on in te_attention_cp.h, checked by the compiler in C and in C++:
   enum values, sizes, and the size field first. */
#ifndef TESTS_INCLUDE_LAYOUT_TE_ATTENTION_CP_H_
#define TESTS_INCLUDE_LAYOUT_TE_ATTENTION_CP_H_
#include <assert.h>

#include "te_attention_cp.h"

static_assert(TEA_CP_RING == 0 && TEA_CP_ALL_GATHER == 1, "strategy");
static_assert(TEA_CP_HALO == 2 && TEA_CP_ALL_TO_ALL == 3, "strategy");
static_assert(TEA_CP_ZIGZAG == 0 && TEA_CP_CONTIGUOUS == 1, "sharding");
static_assert(offsetof(tea_cp_shape, struct_size) == 0, "struct_size");
static_assert(sizeof(tea_cp_shape) == 72, "tea_cp_shape");
static_assert(sizeof(tea_cp_part) == 80, "tea_cp_part");
static_assert(sizeof(tea_cp_move) == 32, "tea_cp_move");

#endif
