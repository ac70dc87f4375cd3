// The table of tensors: lifetime, parts, packs, and every error with its text.
#include <cstring>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "nvte/tensor.h"

namespace {

constexpr size_t kCapacity = 68985;

using Handles = std::vector<NVTETensor>;

NVTETensor no_such_tensor() { return reinterpret_cast<NVTETensor>(size_t{1} << 40); }

// A part in which every field differs from an absent one.
NVTEBasicTensor sample(int n) {
  static float memory[16];
  const size_t dims[] = {2, 3, static_cast<size_t>(n + 1)};
  return {memory + n, static_cast<NVTEDType>(n), nvte_make_shape(dims, 3)};
}

void expect_equal(const NVTEBasicTensor& seen, const NVTEBasicTensor& needed) {
  EXPECT_EQ(seen.data_ptr, needed.data_ptr);
  EXPECT_EQ(seen.dtype, needed.dtype);
  ASSERT_EQ(seen.shape.ndim, needed.shape.ndim);
  for (size_t i = 0; i < needed.shape.ndim; ++i)
    EXPECT_EQ(seen.shape.data[i], needed.shape.data[i]);
}

NVTEBasicTensor read(NVTETensor tensor, NVTETensorParam param) {
  NVTEBasicTensor part = sample(9);
  nvte_get_tensor_param_v2(tensor, param, &part, sizeof(part), nullptr);
  return part;
}

struct Tensors : testing::Test {
  NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  ~Tensors() override { nvte_destroy_tensor(tensor); }
};

TEST_F(Tensors, ANewOneIsEmpty) {
  for (int param = kNVTERowwiseData; param <= kNVTEColumnwiseAmax; ++param)
    expect_equal(read(tensor, static_cast<NVTETensorParam>(param)), tea::nvte::kAbsent);
  uint8_t flag = 7;
  nvte_get_tensor_param_v2(tensor, kNVTEWithGEMMSwizzledScales, &flag, 1, nullptr);
  EXPECT_EQ(flag, 0);
  EXPECT_EQ(nvte_tensor_scaling_mode(tensor), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_FALSE(tea::nvte::tensor(tensor).has_data());
  EXPECT_FALSE(tea::nvte::tensor(tensor).has_columnwise_data());
}

TEST_F(Tensors, HandlesAreSmallNumbersAndTheSlotFreedLastIsTakenFirst) {
  NVTETensor a = nvte_create_tensor(NVTE_MXFP8_1D_SCALING);
  NVTETensor b = nvte_create_tensor(NVTE_BLOCK_SCALING_2D);
  EXPECT_LE(reinterpret_cast<uintptr_t>(b), kCapacity);
  EXPECT_EQ(nvte_tensor_scaling_mode(a), NVTE_MXFP8_1D_SCALING);
  EXPECT_EQ(nvte_tensor_scaling_mode(b), NVTE_BLOCK_SCALING_2D);
  nvte_destroy_tensor(a);
  nvte_destroy_tensor(b);
  EXPECT_EQ(nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING), b);
  EXPECT_EQ(nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING), a);
  EXPECT_EQ(nvte_tensor_scaling_mode(a), NVTE_DELAYED_TENSOR_SCALING);
  nvte_destroy_tensor(a);
  nvte_destroy_tensor(b);
}

TEST_F(Tensors, ADestroyedOneReadsAsEmpty) {
  NVTETensor gone = nvte_create_tensor(NVTE_MXFP8_1D_SCALING);
  const NVTEBasicTensor part = sample(1);
  nvte_set_tensor_param(&gone, kNVTERowwiseData, &part);
  nvte_destroy_tensor(gone);
  expect_equal(nvte_get_tensor_param(gone, kNVTERowwiseData), tea::nvte::kAbsent);
  EXPECT_EQ(nvte_tensor_numel(gone), 0u);
  EXPECT_EQ(nvte_tensor_scaling_mode(gone), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_NVTE_ERROR(nvte_destroy_tensor(gone), "Invalid tensor. Tensor ");
  EXPECT_NVTE_ERROR(nvte_destroy_tensor(gone), " was already destroyed.");
}

TEST_F(Tensors, DestroyTakesNullAndRefusesWhatNeverExisted) {
  nvte_destroy_tensor(nullptr);
  EXPECT_NVTE_ERROR(nvte_destroy_tensor(no_such_tensor()),
                    "Assertion failed: index <= slots_.size(). Invalid tensor. ");
  Handles some = {nullptr, nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING), nullptr};
  nvte_destroy_tensors(some.data(), some.size());
  EXPECT_NVTE_ERROR(nvte_destroy_tensor(some[1]), "already destroyed");
  nvte_destroy_tensors(nullptr, 0);
  EXPECT_NVTE_ERROR(nvte_destroy_tensors(nullptr, 3), "tensors is NULL; needs an array of 3");
  EXPECT_NVTE_ERROR(nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, nullptr, 3),
                    "tensors is NULL; needs an array of 3");
}

TEST_F(Tensors, AFullTableIsAnErrorAndStaysUsable) {
  Handles all(kCapacity - 1);  // one is the fixture's
  nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, all.data(), all.size());
  EXPECT_NVTE_ERROR(nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING),
                    "No room for 1 more tensors: 68985 are live and the table holds 68985.");
  nvte_destroy_tensors(all.data() + 5, 2);
  Handles three(3, tensor);
  EXPECT_NVTE_ERROR(nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, three.data(), 3),
                    "No room for 3 more tensors: 68983 are live");
  EXPECT_EQ(three, Handles(3, tensor)) << "nothing is written on failure";
  nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, all.data() + 5, 2);
  EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size());
  nvte_destroy_tensors(all.data(), all.size());
}

TEST_F(Tensors, EveryPartIsReadAsItWasSet) {
  for (int n = 0; n < kNVTEWithGEMMSwizzledScales; ++n) {
    const NVTEBasicTensor part = sample(n);
    if (n % 2 == 0)
      nvte_set_tensor_param(&tensor, static_cast<NVTETensorParam>(n), &part);
    else
      nvte_set_tensor_param_v2(tensor, static_cast<NVTETensorParam>(n), &part, sizeof(part));
  }
  const uint8_t on = 1;
  nvte_set_tensor_param_v2(tensor, kNVTEWithGEMMSwizzledScales, &on, sizeof(on));
  for (int n = 0; n < kNVTEWithGEMMSwizzledScales; ++n) {
    expect_equal(read(tensor, static_cast<NVTETensorParam>(n)), sample(n));
    expect_equal(nvte_get_tensor_param(tensor, static_cast<NVTETensorParam>(n)), sample(n));
  }
  const tea::nvte::Tensor& inside = tea::nvte::tensor(tensor);
  expect_equal(inside.data, sample(kNVTERowwiseData));
  expect_equal(inside.columnwise_data, sample(kNVTEColumnwiseData));
  expect_equal(inside.scale, sample(kNVTEScale));
  expect_equal(inside.amax, sample(kNVTEAmax));
  expect_equal(inside.scale_inv, sample(kNVTERowwiseScaleInv));
  expect_equal(inside.columnwise_scale_inv, sample(kNVTEColumnwiseScaleInv));
  expect_equal(inside.columnwise_amax, sample(kNVTEColumnwiseAmax));
  EXPECT_EQ(inside.with_gemm_swizzled_scales, 1);
}

TEST_F(Tensors, SetterRefuses) {
  NVTEBasicTensor part = sample(0);
  NVTETensor none = nullptr, wrong = no_such_tensor();
  const auto flag = kNVTEWithGEMMSwizzledScales;
  const auto unknown = static_cast<NVTETensorParam>(12);
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(nullptr, kNVTEScale, &part), "tensor is NULL");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&none, kNVTEScale, &part), "Invalid tensor. 0 is not");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&wrong, kNVTEScale, &part), "Invalid tensor. 1099511");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&tensor, kNVTEScale, nullptr), "param is NULL");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&tensor, flag, &part),
                    "Unknown tensor parameter 7; needs 0 to 6.");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&tensor, unknown, &part), "Unknown tensor parameter 12");
  part.shape.ndim = 16;
  EXPECT_NVTE_ERROR(nvte_set_tensor_param(&tensor, kNVTEScale, &part),
                    "The shape of tensor parameter 2 has 16 dimensions; needs at most 15.");
  expect_equal(read(tensor, kNVTEScale), tea::nvte::kAbsent);
}

TEST_F(Tensors, NewSetterRefuses) {
  const NVTEBasicTensor part = sample(0);
  const auto flag = kNVTEWithGEMMSwizzledScales;
  const auto unknown = static_cast<NVTETensorParam>(12);
  EXPECT_NVTE_ERROR(nvte_set_tensor_param_v2(nullptr, kNVTEAmax, &part, 144), "Invalid tensor.");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param_v2(tensor, kNVTEAmax, nullptr, 144),
                    "The buffer of tensor parameter 3 is NULL.");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param_v2(tensor, kNVTEAmax, &part, 143),
                    "The buffer of tensor parameter 3 has 143 bytes; needs 144.");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param_v2(tensor, flag, &part, 0),
                    "The buffer of tensor parameter 7 has 0 bytes; needs 1.");
  EXPECT_NVTE_ERROR(nvte_set_tensor_param_v2(tensor, unknown, &part, 144),
                    "Unknown tensor parameter 12");
}

TEST_F(Tensors, GetterRefusesAndAnswersNull) {
  expect_equal(nvte_get_tensor_param(nullptr, kNVTEAmax), tea::nvte::kAbsent);
  EXPECT_NVTE_ERROR(nvte_get_tensor_param(no_such_tensor(), kNVTEAmax), "Invalid tensor.");
  EXPECT_NVTE_ERROR(nvte_get_tensor_param(tensor, kNVTEWithGEMMSwizzledScales),
                    "Unknown tensor parameter 7; needs 0 to 6.");
}

TEST_F(Tensors, NewGetterTellsTheSizeAndReadsAnInvalidHandleAsEmpty) {
  size_t bytes = 0;
  nvte_get_tensor_param_v2(tensor, kNVTEAmax, nullptr, 0, &bytes);
  EXPECT_EQ(bytes, 144u);
  nvte_get_tensor_param_v2(nullptr, kNVTEWithGEMMSwizzledScales, nullptr, 0, &bytes);
  EXPECT_EQ(bytes, 1u);
  for (NVTETensor invalid : {NVTETensor{}, no_such_tensor()})
    expect_equal(read(invalid, kNVTERowwiseData), tea::nvte::kAbsent);

  NVTEBasicTensor part = sample(3);
  EXPECT_NVTE_ERROR(nvte_get_tensor_param_v2(tensor, kNVTEAmax, &part, 143, &bytes),
                    "The buffer of tensor parameter 3 has 143 bytes; needs 144.");
  expect_equal(part, sample(3));
  const auto unknown = static_cast<NVTETensorParam>(8);
  EXPECT_NVTE_ERROR(nvte_get_tensor_param_v2(tensor, unknown, &part, 144, &bytes),
                    "Unknown tensor parameter 8");
}

TEST(TensorPack, HasTenOfItsOwnAndLeavesTheSize) {
  NVTETensorPack pack;
  EXPECT_EQ(pack.size, 0u);
  EXPECT_EQ(NVTETensorPack::MAX_SIZE, 10);
  pack.size = 3;
  nvte_tensor_pack_create(&pack);
  EXPECT_EQ(pack.size, 3u);
  const Handles handles(std::begin(pack.tensors), std::end(pack.tensors));
  EXPECT_EQ(std::set(handles.begin(), handles.end()).size(), 10u);
  for (NVTETensor handle : handles)
    EXPECT_EQ(nvte_tensor_scaling_mode(handle), NVTE_DELAYED_TENSOR_SCALING);
  nvte_tensor_pack_destroy(&pack);
  EXPECT_EQ(pack.size, 3u);
  for (NVTETensor handle : handles)
    EXPECT_NVTE_ERROR(nvte_destroy_tensor(handle), "already destroyed");
  nvte_tensor_pack_destroy(&pack);  // its entries are NULL now
  EXPECT_NVTE_ERROR(nvte_tensor_pack_create(nullptr), "pack is NULL");
  EXPECT_NVTE_ERROR(nvte_tensor_pack_destroy(nullptr), "pack is NULL");
}

// Each thread marks its tensors and finds its own marks again: a slot with two owners shows.
TEST(Threads, NeverShareATensor) {
  constexpr int kThreads = 4, kRounds = 300;
  constexpr size_t kEach = 7;
  std::vector<int> wrong(kThreads, 0);
  const auto work = [&wrong](int id) {
    for (int round = 0; round < kRounds; ++round) {
      Handles mine(kEach);
      for (size_t i = 0; i < kEach; ++i) {
        mine[i] = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
        const size_t mark[] = {static_cast<size_t>(id), static_cast<size_t>(round), i};
        const NVTEBasicTensor part = {nullptr, kNVTEByte, nvte_make_shape(mark, 3)};
        nvte_set_tensor_param(&mine[i], kNVTERowwiseData, &part);
      }
      for (size_t i = 0; i < kEach; ++i) {
        const NVTEShape shape = nvte_tensor_shape(mine[i]);
        const size_t mark[] = {static_cast<size_t>(id), static_cast<size_t>(round), i};
        wrong[static_cast<size_t>(id)] += std::memcmp(shape.data, mark, sizeof(mark)) != 0;
        nvte_destroy_tensor(mine[i]);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) threads.emplace_back(work, id);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::accumulate(wrong.begin(), wrong.end(), 0), 0);
}

}  // namespace
