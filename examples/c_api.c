/* Causal attention of 4 query heads over 2 key heads (GQA) on the host, through the C API. */
#include <stdio.h>
#include <stdlib.h>
#include <te_attention.h>

enum { kSeqlen = 8, kHeadsQ = 4, kHeadsKv = 2, kDim = 16 };
static _Alignas(16) float q[kSeqlen][kHeadsQ][kDim], o[kSeqlen][kHeadsQ][kDim];
static _Alignas(16) float k[kSeqlen][kHeadsKv][kDim], v[kSeqlen][kHeadsKv][kDim];
static _Alignas(16) float lse[kHeadsQ][kSeqlen];

int main(void) {
  for (int j = 0; j < kSeqlen; ++j) v[j][0][0] = (float)j;  // q and k are zero: equal scores

  // The operation. Zero means the default: contiguous [batch, seqlen, heads, dim], scale
  // 1 / sqrt(dim), no bias, no window, no dropout.
  const tea_problem problem = {.struct_size = sizeof problem,
                               .dtype = TEA_FP32,
                               .heads_q = kHeadsQ,
                               .heads_kv = kHeadsKv,
                               .dim_qk = kDim,
                               .batch = 1,
                               .seqlen_q = kSeqlen,
                               .seqlen_kv = kSeqlen,
                               .causal = 1,
                               .outputs = TEA_OUTPUT_LSE};
  void* tensors[TEA_TENSOR_COUNT] = {
      [TEA_Q] = q, [TEA_K] = k, [TEA_V] = v, [TEA_O] = o, [TEA_LSE] = lse};
  tea_run run = {.struct_size = sizeof run, .tensor_count = TEA_TENSOR_COUNT, .tensors = tensors};

  // Plan once (-1: the host; NULL: whichever engine accepts first), then run as often as you like.
  tea_plan* plan = NULL;
  uint64_t bytes = 0;
  tea_status status = tea_plan_create(&problem, -1, NULL, &plan);
  if (status == TEA_OK) status = tea_workspace_bound(&problem, NULL, &bytes, NULL);
  if (status == TEA_OK) {
    run.workspace_bytes = (bytes + 255) / 256 * 256;
    run.workspace = aligned_alloc(256, run.workspace_bytes);
    status = tea_forward(plan, &run);
  }
  if (status != TEA_OK) {
    fprintf(stderr, "%s\n", tea_error());
    return 1;
  }
  printf("engine %s: row 6 sees values 0..6, their mean is %g; LSE %g\n", tea_plan_engine(plan),
         o[6][0][0], lse[0][6]);
  free(run.workspace);
  tea_plan_release(plan);
  return 0;
}
