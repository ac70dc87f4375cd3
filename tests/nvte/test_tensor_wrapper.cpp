// The C++ wrapper: what its constructors set, whose handle it holds, and every accessor.
#include <type_traits>
#include <vector>

#include "expect_error.h"
#include "transformer_engine/transformer_engine.h"

namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Dims = std::vector<size_t>;

Dims dims(const NVTEShape& shape) { return Dims(shape.data, shape.data + shape.ndim); }

static_assert(!std::is_copy_constructible_v<TensorWrapper>);
static_assert(!std::is_copy_assignable_v<TensorWrapper>);
static_assert(!std::is_convertible_v<NVTEScalingMode, TensorWrapper>);
static_assert(std::is_nothrow_move_constructible_v<TensorWrapper>);
static_assert(static_cast<int>(DType::kFloat4E2M1) == 10 && static_cast<int>(DType::kByte) == 0);
static_assert(static_cast<int>(DType::kFloat32) == 4 && static_cast<int>(DType::kNumTypes) == 11);

struct Wrapper : testing::Test {
  float data[24] = {}, amax = 0, scale = 0, scale_inv = 0;
};

TEST_F(Wrapper, ByDefaultIsAValidEmptyTensor) {
  const TensorWrapper none;
  EXPECT_NE(none.data(), nullptr);
  EXPECT_EQ(dims(none.shape()), Dims{0});
  EXPECT_EQ(none.dptr(), nullptr);
  EXPECT_EQ(none.numel(), 0u);
  EXPECT_EQ(none.dtype(), DType::kFloat32);
  EXPECT_EQ(none.scaling_mode(), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_EQ(TensorWrapper(NVTE_MXFP8_1D_SCALING).scaling_mode(), NVTE_MXFP8_1D_SCALING);
}

TEST_F(Wrapper, SetsEverythingInTheOrderOfItsArguments) {
  const TensorWrapper t(data, Dims{2, 3, 4}, DType::kFloat8E4M3, &amax, &scale, &scale_inv, {5, 6},
                        NVTE_BLOCK_SCALING_1D);
  EXPECT_EQ(t.dptr(), data);
  EXPECT_EQ(dims(t.shape()), (Dims{2, 3, 4}));
  EXPECT_EQ(t.dtype(), DType::kFloat8E4M3);
  EXPECT_EQ(t.amax(), &amax);
  EXPECT_EQ(t.scale(), &scale);
  EXPECT_EQ(t.scale_inv(), &scale_inv);
  EXPECT_EQ(dims(t.scale_inv_shape()), (Dims{5, 6}));
  EXPECT_EQ(t.scaling_mode(), NVTE_BLOCK_SCALING_1D);
  EXPECT_EQ(dims(t.get_amax().shape), Dims{1});
  EXPECT_EQ(dims(t.get_scale().shape), Dims{1});
  EXPECT_EQ(t.get_amax().dtype, kNVTEFloat32);

  const TensorWrapper same(data, t.shape(), DType::kByte, nullptr, nullptr, &scale_inv);
  EXPECT_EQ(dims(same.shape()), (Dims{2, 3, 4}));
  EXPECT_EQ(dims(same.scale_inv_shape()), Dims{1});
}

TEST_F(Wrapper, ScalesThatAreNullAreAbsent) {
  const TensorWrapper t(data, Dims{2}, DType::kBFloat16);
  EXPECT_EQ(dims(t.get_amax().shape), Dims{0});
  EXPECT_EQ(dims(t.get_scale().shape), Dims{0});
  EXPECT_EQ(dims(t.scale_inv_shape()), Dims{0});
  const TensorWrapper shaped(data, Dims{2}, DType::kFloat8E4M3, nullptr, nullptr, nullptr, {4, 1});
  EXPECT_EQ(dims(shaped.scale_inv_shape()), (Dims{4, 1}));
}

TEST_F(Wrapper, EachSetterHasItsGetter) {
  TensorWrapper t;
  EXPECT_EQ(&t.set_rowwise_data(data, DType::kInt32, Dims{2}), &t);
  t.set_columnwise_data(data + 1, DType::kByte, Dims{3})
      .set_scale(&scale, DType::kFloat32, Dims{1});
  t.set_amax(&amax, DType::kFloat32, TensorWrapper::defaultShape);
  t.set_rowwise_scale_inv(&scale_inv, DType::kFloat8E8M0, Dims{4});
  t.set_columnwise_scale_inv(data + 2, DType::kFloat8E8M0, Dims{5});
  t.set_columnwise_amax(data + 3, DType::kFloat32, Dims{6});
  t.set_with_gemm_swizzled_scales(true);
  EXPECT_EQ(t.get_rowwise_data().data_ptr, data);
  EXPECT_EQ(t.get_columnwise_data().data_ptr, data + 1);
  EXPECT_EQ(t.columnwise_dptr(), data + 1);
  EXPECT_EQ(dims(t.columnwise_shape()), Dims{3});
  EXPECT_EQ(t.get_scale().data_ptr, &scale);
  EXPECT_EQ(t.get_amax().data_ptr, &amax);
  EXPECT_EQ(t.get_rowwise_scale_inv().data_ptr, &scale_inv);
  EXPECT_EQ(t.get_columnwise_scale_inv().data_ptr, data + 2);
  EXPECT_EQ(dims(t.get_columnwise_amax().shape), Dims{6});
  EXPECT_TRUE(t.get_with_gemm_swizzled_scales());
}

TEST_F(Wrapper, CountsElementsAndTheBytesThatAreThere) {
  const TensorWrapper t(data, Dims{3, 4}, DType::kFloat16);
  EXPECT_EQ(t.ndim(), 2u);
  EXPECT_EQ(t.size(1), 4u);
  EXPECT_EQ(t.numel(), 12u);
  EXPECT_EQ(t.element_size(), 2u);
  EXPECT_EQ(t.element_size_bits(), 16u);
  EXPECT_EQ(t.bytes(), 24u);
  EXPECT_EQ(TensorWrapper(nullptr, Dims{3, 4}, DType::kFloat16).bytes(), 0u);
  EXPECT_NVTE_ERROR(t.size(2), "Dimension 2 of a tensor with 2 dimensions.");
}

TEST_F(Wrapper, MovesItsHandle) {
  TensorWrapper from(data, Dims{2}, DType::kByte);
  NVTETensor handle = from.data();
  TensorWrapper to(std::move(from));
  EXPECT_EQ(to.data(), handle);
  TensorWrapper assigned;
  NVTETensor replaced = assigned.data();
  assigned = std::move(to);
  EXPECT_EQ(assigned.data(), handle);
  EXPECT_EQ(assigned.dptr(), data);
  EXPECT_NVTE_ERROR(nvte_destroy_tensor(replaced), "already destroyed");
  TensorWrapper& itself = assigned;
  assigned = std::move(itself);
  EXPECT_EQ(assigned.data(), handle);
}

TEST_F(Wrapper, MovedFromHoldsNothing) {
  TensorWrapper t(data, Dims{2}, DType::kByte);
  const TensorWrapper taken(std::move(t));
  EXPECT_EQ(t.data(), nullptr);
  EXPECT_EQ(t.dptr(), nullptr);
  EXPECT_EQ(t.shape().ndim, 0u);
  EXPECT_EQ(t.columnwise_shape().ndim, 0u);
  EXPECT_EQ(t.scale_inv_shape().ndim, 0u);
  EXPECT_EQ(t.ndim() + t.size(0) + t.numel() + t.bytes(), 0u);
  EXPECT_EQ(t.element_size() + t.element_size_bits(), 0u);
  EXPECT_EQ(t.dtype(), DType::kNumTypes);
  EXPECT_EQ(t.scaling_mode(), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_EQ(t.amax(), nullptr);
  EXPECT_FALSE(t.get_with_gemm_swizzled_scales());
  t.zero_(nullptr);
  EXPECT_NVTE_ERROR(t.set_scale(&scale, DType::kFloat32, Dims{1}), "Invalid tensor.");
}

TEST_F(Wrapper, AFailedConstructorGivesItsHandleBack) {
  NVTETensor next = TensorWrapper().data();
  NVTEShape shape = nvte_make_shape(nullptr, 1);
  shape.ndim = 16;
  EXPECT_NVTE_ERROR(TensorWrapper(data, shape, DType::kByte), "has 16 dimensions");
  EXPECT_EQ(TensorWrapper().data(), next);
}

}  // namespace
