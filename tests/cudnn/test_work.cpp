// The layout of the workspace, and the parameters of the two kernels around cuDNN's graph.
#include <gtest/gtest.h>

#include "cudnn/work.h"

namespace tea::cudnn {
namespace {

Problem problem(const std::string& more) {
  return Problem::parse("dtype=bf16 heads_q=4 heads_kv=2 dim_qk=64 " + more).normalised();
}

// A run whose tensors lie at addresses that say which they are.
Run run_of(const Problem& p) {
  tea_run sizes{};
  sizes.struct_size = sizeof sizes;
  if (p.varies()) sizes.batch = 3;
  if (p.varies_q()) sizes.max_q = 70, sizes.tokens_q = 200;
  if (p.varies_kv()) sizes.max_kv = 90;
  if (p.kv_form == TEA_RAGGED) sizes.tokens_kv = 250;
  if (p.kv_form == TEA_PAGED) sizes.pages_k = sizes.pages_v = 20;
  Run run{};
  run.size = geometry(p, p.varies() ? &sizes : nullptr);
  for (int t = 0; t < TEA_TENSOR_COUNT; ++t)
    run.tensor[t] = reinterpret_cast<void*>(0x1000L * (t + 1));
  run.workspace = reinterpret_cast<void*>(0x1000000L);
  return run;
}

TEST(CudnnLayout, KeepsItsPiecesApartAndAligned) {
  const Problem p = problem("training=1 q_form=ragged kv_form=ragged softmax=off_by_one");
  const Geometry size = run_of(p).size;
  const Capacity n = capacity_of(p, size);
  const Layout at = layout(p, size, n, Direction::kBackward);
  for (int slot = kLengthsQ; slot < kSlots; ++slot) EXPECT_EQ(at.offset[slot] % 256, 0u);
  EXPECT_GE(at.offset[kLengthsKv], at.offset[kLengthsQ] + 4 * static_cast<uint64_t>(n.batch));
  EXPECT_GE(at.offset[kStartsK], at.offset[kStartsQ] + 8 * static_cast<uint64_t>(n.batch + 1));
  EXPECT_GE(at.offset[kLengthsQ],
            at.offset[kFiniteLse] +
                4 * static_cast<uint64_t>(tensor_info(TEA_LSE).shape(p, size).span()));
  EXPECT_GT(at.library, at.offset[kStartsDv]);
}

TEST(CudnnLayout, IsEmptyWhereEverythingIsDense) {
  const Problem p = problem("batch=2 seqlen_q=8 seqlen_kv=8");
  EXPECT_EQ(layout(p, default_geometry(p), capacity_of(p, default_geometry(p)), Direction::kForward)
                .library,
            0u);
  const auto run = run_of(p);
  const Pointers slots = pointers(run, Layout{});
  EXPECT_FALSE(preparation(p, run, capacity_of(p, run.size), slots, Direction::kForward));
  EXPECT_EQ(slots[TEA_K], run.tensor[TEA_K]);
}

TEST(CudnnPreparation, MakesStartsForRaggedSidesOnly) {
  const Problem p = problem("q_form=ragged kv_form=padded seqlen_kv=90 gaps=1");
  const auto run = run_of(p);
  const Capacity n = capacity_of(p, run.size);
  const auto made = preparation(
      p, run, n, pointers(run, layout(p, run.size, n, Direction::kForward)), Direction::kForward);
  ASSERT_TRUE(made);
  EXPECT_TRUE(made->q.starts[0].out);
  EXPECT_EQ(made->q.starts[0].stride, 4 * 64);
  EXPECT_TRUE(made->q.side.offsets);
  EXPECT_FALSE(made->kv.starts[0].out);
  EXPECT_FALSE(made->kv.side.offsets);
  EXPECT_TRUE(made->kv.lengths);
  EXPECT_EQ(made->batch, 3);
}

TEST(CudnnPreparation, ClampsTablesOfTheGraphsOwnWidth) {
  const Problem p = problem("q_form=padded kv_form=paged page_size=16 seqlen_q=4");
  auto run = run_of(p);
  run.tensor[TEA_TABLE_V] = nullptr;
  const Capacity n = capacity_of(p, run.size);
  const auto made = preparation(
      p, run, n, pointers(run, layout(p, run.size, n, Direction::kForward)), Direction::kForward);
  ASSERT_TRUE(made);
  EXPECT_EQ(made->given_columns, 6);  // of 90 keys
  EXPECT_EQ(made->columns, 8);        // of 128
  EXPECT_EQ(made->v_table.in, made->k_table.in);
  EXPECT_NE(made->v_table.out, made->k_table.out);
}

TEST(CudnnPreparation, CopiesLseForBackwardWhereRowsCanBeWithoutAResult) {
  const Problem p = problem("training=1 window_left=3 batch=2 seqlen_q=8 seqlen_kv=8");
  const auto run = run_of(p);
  const Capacity n = capacity_of(p, run.size);
  const Pointers slots = pointers(run, layout(p, run.size, n, Direction::kBackward));
  EXPECT_FALSE(preparation(p, run, n, slots, Direction::kForward));
  const auto made = preparation(p, run, n, slots, Direction::kBackward);
  ASSERT_TRUE(made);
  EXPECT_EQ(made->lse.in, run.tensor[TEA_LSE]);
  EXPECT_EQ(made->lse.out, slots[kFiniteLse]);
  EXPECT_EQ(made->lse.count, 2 * 4 * 8);
}

TEST(CudnnPointers, GiveTheWordsOfTheRngState) {
  const auto run = run_of(problem("training=1 dropout=0.5 batch=1 seqlen_q=8 seqlen_kv=8"));
  const Pointers slots = pointers(run, Layout{});
  EXPECT_EQ(slots[kSeed], run.tensor[TEA_RNG_STATE]);
  EXPECT_EQ(slots[kOffset], static_cast<char*>(run.tensor[TEA_RNG_STATE]) + 8);
}

TEST(CudnnPointers, StandInForScalesThatAreNotGiven) {
  auto run = run_of(problem("batch=1 seqlen_q=8 seqlen_kv=8"));
  for (const int t : {TEA_K_SCALE_INV, TEA_S_SCALE, TEA_DQ_SCALE, TEA_DK_SCALE})
    run.tensor[t] = nullptr;
  const Pointers slots = pointers(run, Layout{});
  EXPECT_EQ(slots[TEA_K_SCALE_INV], run.tensor[TEA_Q_SCALE_INV]);
  EXPECT_EQ(slots[TEA_V_SCALE_INV], run.tensor[TEA_V_SCALE_INV]);
  EXPECT_EQ(slots[TEA_S_SCALE], slots[kOne]);
  EXPECT_EQ(slots[TEA_DQ_SCALE], slots[kOne]);
  EXPECT_EQ(slots[TEA_DK_SCALE], slots[kOne]);
}

// cuDNN writes MAX and SUM_EXP, or LSE; those that the caller does not request are in the
// workspace.
TEST(CudnnFinishing, MakesLseOfMaxAndSumExp) {
  const auto made = [](const std::string& more) {
    const Problem p = problem("batch=2 seqlen_q=8 seqlen_kv=8 " + more);
    auto run = run_of(p);
    const Layout at = layout(p, run.size, capacity_of(p, run.size), Direction::kForward);
    const Pointers slots = pointers(run, at);
    EXPECT_EQ(at.library > 0, more.find("max+") == more.npos && by_parts(p)) << more;
    return std::pair(finishing(p, run, slots), run);
  };
  EXPECT_FALSE(made("outputs=lse").first);
  EXPECT_FALSE(made("training=1").first);
  const auto [both, run] = made("outputs=max+sum_exp");
  ASSERT_TRUE(both);
  EXPECT_EQ(both->max, run.tensor[TEA_MAX]);
  EXPECT_EQ(both->sum_exp, run.tensor[TEA_SUM_EXP]);
  EXPECT_FALSE(both->lse);
  EXPECT_EQ(both->batches * both->rows * both->heads, 2 * 8 * 4);
  const auto one = made("training=1 outputs=max").first;
  ASSERT_TRUE(one);
  EXPECT_EQ(one->lse, run.tensor[TEA_LSE]);
  EXPECT_GE(static_cast<const void*>(one->sum_exp), run.workspace);
}

TEST(CudnnRaising, CollectsInDqWhatHasNoAmaxOfItsOwn) {
  auto run = run_of(problem("batch=1 seqlen_q=8 seqlen_kv=8"));
  const Pointers slots = pointers(run, Layout{});
  run.tensor[TEA_DK_AMAX] = nullptr;
  const auto back = raising(run, slots, Direction::kBackward);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->from[2], slots[kDkAmax]);
  EXPECT_EQ(back->to[2], run.tensor[TEA_DQ_AMAX]);
  EXPECT_EQ(back->to[3], run.tensor[TEA_DV_AMAX]);
  run.tensor[TEA_S_AMAX] = run.tensor[TEA_O_AMAX] = nullptr;
  EXPECT_FALSE(raising(run, slots, Direction::kForward));
}

// cuDNN's own is that of P after the division, from which a later scale of S would be too large.
TEST(CudnnRaising, RecordsOneForSIfAsked) {
  const auto run = run_of(problem("batch=1 seqlen_q=8 seqlen_kv=8"));
  const Pointers slots = pointers(run, Layout{});
  EXPECT_EQ(raising(run, slots, Direction::kForward)->from[0], slots[kSAmax]);
  const auto exact = raising(run, slots, Direction::kForward, true);
  EXPECT_EQ(exact->from[0], slots[kOne]);
  EXPECT_EQ(exact->to[0], run.tensor[TEA_S_AMAX]);
  EXPECT_EQ(exact->from[1], slots[kOAmax]);
}

TEST(CudnnClearing, WritesWhatTheSinkAloneGives) {
  const Problem p = problem("q_form=ragged kv_form=ragged softmax=learnable outputs=lse");
  const auto run = run_of(p);
  const Pointers slots = pointers(run, Layout{});
  const Clear rows = clearing(p, run, slots, Direction::kForward);
  EXPECT_EQ(rows.tensor[1].data, run.tensor[TEA_LSE]);
  EXPECT_EQ(rows.tensor[1].sink, run.tensor[TEA_SINK]);
  EXPECT_FALSE(rows.tensor[2].data);
}

TEST(CudnnClearing, CoversEveryGradientOfKeys) {
  const Problem p =
      problem("training=1 q_form=padded kv_form=padded batch=2 seqlen_q=8 seqlen_kv=8");
  const auto run = run_of(p);
  const Clear keys = clearing_of_keys(p, run);
  EXPECT_TRUE(keys.keys);
  EXPECT_EQ(keys.tensor[0].data, run.tensor[TEA_DK]);
  EXPECT_EQ(keys.tensor[1].data, run.tensor[TEA_DV]);
  EXPECT_EQ(keys.tensor[1].heads, 2);
}

TEST(CudnnClearing, IsLeftOutWhereEveryRowHasAResult) {
  EXPECT_FALSE(leaves_rows(problem("batch=1 seqlen_q=8 seqlen_kv=8 causal=1")));
  EXPECT_TRUE(leaves_rows(problem("batch=1 seqlen_q=8 seqlen_kv=4 causal=1 bottom_right=1")));
  EXPECT_TRUE(leaves_rows(problem("batch=1 seqlen_q=8 seqlen_kv=4 window_left=2")));
  EXPECT_TRUE(
      is_empty(problem("batch=1 seqlen_q=8"), default_geometry(problem("batch=1 seqlen_q=8"))));
}

// The bound of the workspace if the problem specifies all sizes.
uint64_t most(const std::string& what, Direction d = Direction::kBackward,
              Passes passes = Passes::kBoth) {
  const Problem p = Problem::parse(what);
  const Geometry size = default_geometry(p);
  return library_bound(p, size, capacity_of(p, size), d, passes);
}

// The line on which cuDNN 9.19 asked for 2305280 bytes.
TEST(CudnnWorkspace, CountsTheHolesOfRaggedGradients) {
  const Problem p = Problem::parse(
      "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=24 heads_kv=3 dim_qk=72 dim_v=32 "
      "q=0,2040,72 k=0,2040,72 v=0,2040,32 dq=0,2040,72 dk=0,2040,72 dv=0,2040,32");
  tea_run sizes{};
  sizes.batch = 3, sizes.max_q = sizes.max_kv = 9, sizes.tokens_q = sizes.tokens_kv = 27;
  const Geometry size = geometry(p, &sizes);
  EXPECT_GE(library_bound(p, size, capacity_of(p, size), Direction::kBackward, Passes::kBoth),
            2305280u);
}

// The draw on which cuDNN 9.19 asked for 2656000 bytes.
TEST(CudnnWorkspace, HasRoomForTheLongestOfEverySequence) {
  const Problem p = Problem::parse(
      "dtype=fp16 training=1 q_form=ragged kv_form=ragged gaps=1 heads_q=32 heads_kv=4 dim_qk=40");
  tea_run sizes{};
  sizes.batch = 4, sizes.max_q = 9, sizes.max_kv = 16, sizes.tokens_q = sizes.tokens_kv = 36;
  const Geometry size = geometry(p, &sizes);
  EXPECT_GE(library_bound(p, size, capacity_of(p, size), Direction::kBackward, Passes::kBoth),
            2656000u);
}

// The layer of which cuDNN 9.19 asked for 807403776 bytes.
TEST(CudnnWorkspace, HasRoomForSumsOfSharedHeadsInFp32) {
  EXPECT_GE(most("dtype=e4m3 training=1 heads_q=64 heads_kv=8 dim_qk=128 batch=4 seqlen_q=2048 "
                 "seqlen_kv=2048"),
            807403776u);
}

// The workspace of cuDNN 9.19 on an A100, L40S or RTX 5090, and on a B200 with fp8, as it says
// where it plans for a GPU that is not there. Plans for sm_90 need one of the sums.
TEST(CudnnWorkspace, HasRoomForTwoSumsOfDq) {
  EXPECT_GE(most("dtype=bf16 training=1 heads_q=64 heads_kv=8 dim_qk=128 batch=1 seqlen_q=8192 "
                 "seqlen_kv=8192 causal=1"),
            807403648u);
  EXPECT_GE(most("dtype=bf16 training=1 heads_q=16 heads_kv=16 dim_qk=64 batch=32 seqlen_q=512 "
                 "seqlen_kv=512"),
            135266432u);
  EXPECT_GE(most("dtype=e4m3 training=1 heads_q=64 heads_kv=8 dim_qk=128 batch=1 seqlen_q=8192 "
                 "seqlen_kv=8192 causal=1"),
            1077936256u);
  const char* const layer =
      "dtype=bf16 training=1 heads_q=16 heads_kv=16 dim_qk=128 batch=1 seqlen_q=4096 "
      "seqlen_kv=4096";
  EXPECT_EQ(most(layer) - most(layer, Direction::kBackward, Passes::kBackward),
            4u * 16 * 4096 * 128);
}

// The workspace on an H200 and on a B200: 32 and 5 parts of the keys. The first was refused.
TEST(CudnnWorkspace, HasRoomForThePartsOfOneQuerysKeys) {
  const std::string decode = "dtype=bf16 heads_q=64 heads_kv=8 dim_qk=128 seqlen_kv=8192 ";
  EXPECT_GE(most(decode + "batch=1 seqlen_q=1", Direction::kForward), 1065088u);
  EXPECT_GE(most(decode + "batch=32 seqlen_q=1", Direction::kForward), 5324928u);
  EXPECT_EQ(most(decode + "batch=32 seqlen_q=2", Direction::kForward), 1u << 20);
}

// The line of docs/support.txt of which cuDNN 9.19 asked for 8421632 bytes.
TEST(CudnnWorkspace, HasRoomForMoreThanTheGradientOfABias) {
  const std::string line =
      "dtype=bf16 training=1 heads_q=8 heads_kv=8 dim_qk=128 batch=2 seqlen_q=512 seqlen_kv=512";
  EXPECT_GE(most(line + " bias=post_scale"), 8421632u);
  EXPECT_EQ(most(line + " bias=post_scale") - most(line), 2u * 2 * 8 * 512 * 512);
}

TEST(CudnnWorkspace, IsLinearInTheLengths) {
  const auto bytes = [](int64_t rows) {
    const std::string n = std::to_string(rows);
    return most("dtype=bf16 heads_q=4 heads_kv=2 dim_qk=64 training=1 batch=1 seqlen_q=" + n +
                " seqlen_kv=" + n);
  };
  EXPECT_LE(bytes(65536), 2 * bytes(32768));
}

}  // namespace
}  // namespace tea::cudnn
