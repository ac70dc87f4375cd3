/* The binary interface of te_attention_ops.h, checked by the compiler in C and in C++:
   enum values, and the size field first in every struct. */
#ifndef TESTS_INCLUDE_LAYOUT_TE_ATTENTION_OPS_H_
#define TESTS_INCLUDE_LAYOUT_TE_ATTENTION_OPS_H_
#include <assert.h>

#include "te_attention_ops.h"

#define EXPECT_VALUE(name, value) static_assert((name) == (value), #name)
#define EXPECT_OFFSET(type, field, value) static_assert(offsetof(type, field) == (value), #field)

EXPECT_VALUE(TEA_CP_NONE, 0);
EXPECT_VALUE(TEA_CP_ADD, 1);
EXPECT_VALUE(TEA_CP_COPY, 2);

EXPECT_VALUE(TEA_SCORE_MASK_NONE, 0);
EXPECT_VALUE(TEA_SCORE_MASK_GIVEN, 1);
EXPECT_VALUE(TEA_SCORE_MASK_CAUSAL, 2);
EXPECT_VALUE(TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT, 3);

EXPECT_OFFSET(tea_kv_append, struct_size, 0);
EXPECT_OFFSET(tea_thd_convert, struct_size, 0);
EXPECT_OFFSET(tea_cu_seqlens, struct_size, 0);
EXPECT_OFFSET(tea_dropout_mask, struct_size, 0);
EXPECT_OFFSET(tea_merge, struct_size, 0);
EXPECT_OFFSET(tea_cp_half, struct_size, 0);
EXPECT_OFFSET(tea_cp_lse, struct_size, 0);
EXPECT_OFFSET(tea_cp_out, struct_size, 0);
EXPECT_OFFSET(tea_cp_grad, struct_size, 0);
EXPECT_OFFSET(tea_cp_partition, struct_size, 0);
EXPECT_OFFSET(tea_cp_order, struct_size, 0);
EXPECT_OFFSET(tea_cp_valid, struct_size, 0);
EXPECT_OFFSET(tea_flash_prepare, struct_size, 0);
EXPECT_OFFSET(tea_scaled_softmax, struct_size, 0);
EXPECT_OFFSET(tea_fp8_cast, struct_size, 0);
EXPECT_OFFSET(tea_fp8_joint_cast, struct_size, 0);
EXPECT_VALUE(TEA_FP8_TENSORS, 4);
EXPECT_VALUE(TEA_FP8_MAXIMA, 512);

#undef EXPECT_VALUE
#undef EXPECT_OFFSET
#endif
