// Another library with the same names is in the process first and globally, as NVIDIA's may be.
// Calls inside this library must not bind to the decoy.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "te_attention.h"
#include "transformer_engine/cudnn.h"

namespace {

void* open(const char* path, int scope) {
  void* library = dlopen(path, RTLD_NOW | scope);
  EXPECT_NE(library, nullptr) << dlerror();
  return library;
}

struct Decoy : testing::Test {
  void* decoy = open(DECOY_LIBRARY, RTLD_GLOBAL);
  void* ours = open(TE_ATTENTION_LIBRARY, RTLD_LOCAL);
  int* calls = static_cast<int*>(dlsym(decoy, "decoy_calls"));

  template <class Function>
  Function* find(const char* name) {
    void* found = dlsym(ours, name);
    EXPECT_NE(found, nullptr) << dlerror();
    EXPECT_NE(found, dlsym(decoy, name));
    return reinterpret_cast<Function*>(found);
  }
};

#define OURS(name) find<decltype(name)>(#name)

TEST_F(Decoy, IsWhatAnyOtherCodeFinds) {
  for (const char* name : {"nvte_create_tensor", "nvte_tensor_shape", "tea_version"}) {
    ASSERT_NE(dlsym(decoy, name), nullptr);
    EXPECT_EQ(dlsym(RTLD_DEFAULT, name), dlsym(decoy, name));
  }
  const int before = *calls;
  reinterpret_cast<decltype(nvte_is_non_tn_fp8_gemm_supported)*>(
      dlsym(RTLD_DEFAULT, "nvte_is_non_tn_fp8_gemm_supported"))();
  EXPECT_EQ(*calls, before + 1) << "it counts";
}

TEST_F(Decoy, GetsNoCallOfTensors) {
  const int before = *calls;
  NVTETensorPack pack;
  OURS(nvte_tensor_pack_create)(&pack);
  float data[6] = {1, 2, 3, 4, 5, 6};
  const size_t dims[] = {2, 3};
  const NVTEBasicTensor part = {data, kNVTEFloat32, OURS(nvte_make_shape)(dims, 2)};
  OURS(nvte_set_tensor_param)(&pack.tensors[4], kNVTERowwiseData, &part);
  EXPECT_EQ(OURS(nvte_get_tensor_param)(pack.tensors[4], kNVTERowwiseData).data_ptr, data);
  EXPECT_EQ(OURS(nvte_tensor_numel)(pack.tensors[4]), 6u);
  EXPECT_EQ(OURS(nvte_tensor_ndims)(pack.tensors[4]), 2u);
  EXPECT_EQ(OURS(nvte_tensor_size)(pack.tensors[4], 1), 3u);
  EXPECT_EQ(OURS(nvte_tensor_size_bytes)(pack.tensors[4]), 24u);
  OURS(nvte_zero_tensor)(pack.tensors[4], nullptr);
  EXPECT_EQ(std::vector(data, data + 6), std::vector(6, 0.f));
  OURS(nvte_tensor_pack_destroy)(&pack);
  NVTETensor one = OURS(nvte_create_tensor)(NVTE_MXFP8_1D_SCALING);
  OURS(nvte_destroy_tensors)(&one, 1);
  EXPECT_THROW(OURS(nvte_tensor_shape)(nullptr), std::runtime_error);
  EXPECT_EQ(*calls, before);
}

TEST_F(Decoy, GetsNoCallOfTheOwnApi) {
  const int before = *calls;
  EXPECT_STREQ(OURS(tea_version)(), "0.1.0");
  tea_problem problem = {};
  EXPECT_EQ(OURS(tea_problem_parse)("dtype=bf16 batch=1", &problem), TEA_OK) << OURS(tea_error)();
  EXPECT_EQ(OURS(tea_problem_check)(&problem, nullptr), TEA_INVALID);
  EXPECT_NE(std::string(OURS(tea_error)()), "");
  size_t needed = 0;
  EXPECT_EQ(OURS(tea_explain)(&problem, -1, nullptr, 0, &needed), TEA_INVALID);
  EXPECT_EQ(*calls, before);
}

}  // namespace
