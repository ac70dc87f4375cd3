// Batch-invariant problems on the GPU: kit/invariance.h, with enough heads and rows that some of
// the batches split their keys among CTAs and others compute the splits one after the other.
#include "kit/invariance.h"

#include <gtest/gtest.h>

#include "gpu/parallel.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;
constexpr int64_t kLength = 4500;  // three splits of 2048 keys

std::vector<std::vector<Chunk>> batches() {
  return {{{1, 0, kLength}},
          {{2, 5, 3}, {1, 0, kLength}, {3, 0, 700}},
          {{1, 0, 2048}},
          {{1, 2048, 1}, {4, 6000, 40}},
          {{5, 0, 40}, {1, 2048, kLength - 2048}},
          {{1, 2000, 130}},
          {{1, kLength - 1, 1}},
          {{6, 9000, 2}, {1, kLength - 1, 1}, {1, kLength - 3, 2}},
          std::vector<Chunk>(40, {1, kLength - 1, 1})};
}

TEST(Invariance, BitsDependOnTheSequenceAlone) {
  const std::string ragged = "q_form=ragged kv_form=ragged ",
                    paged = "q_form=ragged kv_form=paged ";
  const std::string lines[] = {
      "dtype=bf16 " + ragged + "heads_q=8 heads_kv=2 dim_qk=128",
      "dtype=fp16 " + paged + "page_size=16 heads_q=4 heads_kv=1 dim_qk=64 softcap=20",
      "dtype=fp32 " + ragged + "heads_q=2 heads_kv=1 dim_qk=64 softmax=learnable",
      "dtype=bf16 " + ragged + "heads_q=4 heads_kv=4 dim_qk=256 window_left=700 alibi=standard",
      "dtype=bf16 " + paged + "page_size=64 heads_q=16 heads_kv=1 dim_qk=576 dim_v=512",
      "dtype=e4m3 o_dtype=bf16 " + ragged + "heads_q=2 heads_kv=2 dim_qk=64",
  };
  parallel_for(std::size(lines), [&](size_t i) {
    for (const std::string& line :
         invariance_violations(lines[i] + " batch_invariant=1", "", kGpu, batches()))
      ADD_FAILURE() << line;
  });
}

}  // namespace
}  // namespace tea::kit
