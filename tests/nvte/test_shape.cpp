// Shapes, types and sizes that the C API reports, for every scaling mode and every absence.
#include <tuple>
#include <vector>

#include "expect_error.h"
#include "nvte/tensor.h"

namespace {

using transformer_engine::DType;
using Dims = std::vector<size_t>;

Dims dims(const NVTEShape& shape) { return Dims(shape.data, shape.data + shape.ndim); }

NVTETensor no_such_tensor() { return reinterpret_cast<NVTETensor>(size_t{1} << 40); }

struct Shapes : testing::Test {
  float memory[4] = {};
  std::vector<NVTETensor> made;

  NVTETensor make(NVTEScalingMode mode = NVTE_DELAYED_TENSOR_SCALING) {
    made.push_back(nvte_create_tensor(mode));
    return made.back();
  }
  void set(NVTETensor tensor, NVTETensorParam param, NVTEDType type, const Dims& shape,
           void* pointer = nullptr) {
    const NVTEBasicTensor part = {pointer, type, nvte_make_shape(shape.data(), shape.size())};
    nvte_set_tensor_param(&tensor, param, &part);
  }
  ~Shapes() override { nvte_destroy_tensors(made.data(), made.size()); }
};

TEST(MakeShape, CopiesClearsAndRefuses) {
  const size_t data[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  EXPECT_EQ(dims(nvte_make_shape(data, 3)), (Dims{1, 2, 3}));
  EXPECT_EQ(nvte_make_shape(data, 3).data[3], 0u);
  EXPECT_EQ(dims(nvte_make_shape(data, 15)), Dims(data, data + 15));
  EXPECT_EQ(dims(nvte_make_shape(nullptr, 4)), (Dims{0, 0, 0, 0}));
  EXPECT_EQ(nvte_make_shape(nullptr, 0).ndim, 0u);
  EXPECT_NVTE_ERROR(nvte_make_shape(nullptr, 16), "A shape of 16 dimensions; needs at most 15.");
}

TEST_F(Shapes, RowwiseDataDecides) {
  NVTETensor tensor = make();
  set(tensor, kNVTERowwiseData, kNVTEBFloat16, {2, 3, 4});
  set(tensor, kNVTEColumnwiseData, kNVTEFloat8E4M3, {7, 8});
  EXPECT_EQ(dims(nvte_tensor_shape(tensor)), (Dims{2, 3, 4}));
  EXPECT_EQ(dims(nvte_tensor_columnwise_shape(tensor)), (Dims{7, 8}));
  EXPECT_EQ(nvte_tensor_ndims(tensor), 3u);
  EXPECT_EQ(nvte_tensor_size(tensor, 2), 4u);
  EXPECT_EQ(nvte_tensor_numel(tensor), 24u);
  EXPECT_EQ(nvte_tensor_type(tensor), kNVTEBFloat16);
  EXPECT_EQ(nvte_tensor_element_size(tensor), 2u);
  EXPECT_EQ(nvte_tensor_size_bytes(tensor), 48u);
}

TEST_F(Shapes, ColumnwiseDataAloneIsTransposedExceptForMxfp8) {
  const std::pair<NVTEScalingMode, Dims> cases[] = {
      {NVTE_DELAYED_TENSOR_SCALING, {3, 4, 2}}, {NVTE_MXFP8_1D_SCALING, {2, 3, 4}},
      {NVTE_BLOCK_SCALING_1D, {3, 4, 2}},       {NVTE_BLOCK_SCALING_2D, {3, 4, 2}},
      {NVTE_NVFP4_1D_SCALING, {3, 4, 2}},
  };
  for (const auto& [mode, shape] : cases) {
    SCOPED_TRACE(mode);
    NVTETensor tensor = make(mode);
    set(tensor, kNVTEColumnwiseData, kNVTEFloat8E5M2, {2, 3, 4}, memory);
    EXPECT_EQ(dims(nvte_tensor_shape(tensor)), shape);
    EXPECT_EQ(dims(nvte_tensor_columnwise_shape(tensor)), (Dims{2, 3, 4}));
    EXPECT_EQ(nvte_tensor_type(tensor), kNVTEFloat8E5M2);
    EXPECT_EQ(nvte_tensor_size_bytes(tensor), 24u);
    EXPECT_EQ(nvte_tensor_data(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_columnwise_data(tensor), memory);
  }
}

TEST_F(Shapes, OnlyNullWithZeroElementsInOneDimensionIsAbsent) {
  const std::tuple<Dims, void*, bool> cases[] = {
      {{0}, nullptr, false}, {{0}, memory, true}, {{0, 0}, nullptr, true},
      {{5}, nullptr, true},  {{}, nullptr, true},
  };
  for (const auto& [shape, pointer, present] : cases) {
    NVTETensor tensor = make();
    set(tensor, kNVTERowwiseData, kNVTEInt32, shape, pointer);
    set(tensor, kNVTEColumnwiseData, kNVTEByte, {9});
    EXPECT_EQ(tea::nvte::tensor(tensor).has_data(), present);
    EXPECT_EQ(nvte_tensor_type(tensor), present ? kNVTEInt32 : kNVTEByte);
    EXPECT_EQ(dims(nvte_tensor_shape(tensor)), present ? shape : Dims{9});
  }
}

TEST_F(Shapes, NoDimensionsIsOneElementAndAnEmptyTensorNone) {
  NVTETensor scalar = make();
  set(scalar, kNVTERowwiseData, kNVTEInt64, {});
  EXPECT_EQ(nvte_tensor_ndims(scalar), 0u);
  EXPECT_EQ(nvte_tensor_numel(scalar), 1u);
  EXPECT_EQ(nvte_tensor_size_bytes(scalar), 8u);
  NVTETensor empty = make();
  EXPECT_EQ(dims(nvte_tensor_shape(empty)), Dims{0});
  EXPECT_EQ(dims(nvte_tensor_columnwise_shape(empty)), Dims{0});
  EXPECT_EQ(dims(nvte_tensor_scale_inv_shape(empty)), Dims{0});
  EXPECT_EQ(nvte_tensor_numel(empty), 0u);
  EXPECT_EQ(nvte_tensor_size_bytes(empty), 0u);
}

TEST_F(Shapes, InvalidHandlesThrowOrReadAsEmpty) {
  for (NVTETensor invalid : {NVTETensor{}, no_such_tensor()}) {
    EXPECT_NVTE_ERROR(nvte_tensor_shape(invalid), "Invalid tensor.");
    EXPECT_NVTE_ERROR(nvte_tensor_columnwise_shape(invalid), "Invalid tensor.");
    EXPECT_NVTE_ERROR(nvte_tensor_ndims(invalid), "Invalid tensor.");
    EXPECT_NVTE_ERROR(nvte_tensor_size(invalid, 0), "Invalid tensor.");
    EXPECT_NVTE_ERROR(nvte_tensor_numel(invalid), "Invalid tensor.");
    EXPECT_EQ(nvte_tensor_element_size(invalid), 4u);
    EXPECT_EQ(nvte_tensor_element_size_bits(invalid), 32u);
    EXPECT_EQ(nvte_tensor_size_bytes(invalid), 0u);
    EXPECT_EQ(nvte_tensor_type(invalid), kNVTEFloat32);
    EXPECT_EQ(nvte_tensor_data(invalid), nullptr);
    EXPECT_EQ(nvte_tensor_columnwise_data(invalid), nullptr);
    EXPECT_EQ(nvte_tensor_amax(invalid), nullptr);
    EXPECT_EQ(nvte_tensor_scale(invalid), nullptr);
    EXPECT_EQ(nvte_tensor_scale_inv(invalid), nullptr);
    EXPECT_EQ(nvte_tensor_columnwise_scale_inv(invalid), nullptr);
    EXPECT_EQ(dims(nvte_tensor_scale_inv_shape(invalid)), Dims{0});
  }
  EXPECT_EQ(nvte_tensor_scaling_mode(nullptr), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_NVTE_ERROR(nvte_tensor_scaling_mode(no_such_tensor()), "Invalid tensor.");
}

TEST_F(Shapes, ADimensionOutsideAndAModeWithoutShapeThrow) {
  NVTETensor tensor = make();
  set(tensor, kNVTERowwiseData, kNVTEByte, {2, 3});
  EXPECT_NVTE_ERROR(nvte_tensor_size(tensor, 2), "Dimension 2 of a tensor with 2 dimensions.");
  NVTETensor invalid = make(NVTE_INVALID_SCALING);
  set(invalid, kNVTERowwiseData, kNVTEByte, {2, 3});
  EXPECT_NVTE_ERROR(nvte_tensor_shape(invalid), "A tensor of scaling mode 100 has no shape");
  EXPECT_EQ(nvte_tensor_scaling_mode(invalid), NVTE_INVALID_SCALING);
}

TEST_F(Shapes, ScalesAreReadAndCheckedForTheirType) {
  NVTETensor tensor = make();
  set(tensor, kNVTEAmax, kNVTEFloat32, {1}, memory);
  set(tensor, kNVTEScale, kNVTEFloat32, {1}, memory + 1);
  set(tensor, kNVTERowwiseScaleInv, kNVTEFloat8E8M0, {8, 4}, memory + 2);
  set(tensor, kNVTEColumnwiseScaleInv, kNVTEFloat8E8M0, {4, 8}, memory + 3);
  EXPECT_EQ(nvte_tensor_amax(tensor), memory);
  EXPECT_EQ(nvte_tensor_scale(tensor), memory + 1);
  EXPECT_EQ(nvte_tensor_scale_inv(tensor), memory + 2);
  EXPECT_EQ(nvte_tensor_columnwise_scale_inv(tensor), memory + 3);
  EXPECT_EQ(dims(nvte_tensor_scale_inv_shape(tensor)), (Dims{8, 4}));
  set(tensor, kNVTEAmax, kNVTEFloat16, {1}, memory);
  set(tensor, kNVTEScale, kNVTEByte, {1}, memory);
  EXPECT_NVTE_ERROR(nvte_tensor_amax(tensor), "amax has type 5; needs kNVTEFloat32 (4).");
  EXPECT_NVTE_ERROR(nvte_tensor_scale(tensor), "scale has type 0; needs kNVTEFloat32 (4).");
}

TEST_F(Shapes, EveryTypeHasItsSize) {
  const size_t bits[kNVTENumTypes] = {8, 16, 32, 64, 32, 16, 16, 8, 8, 8, 4};
  for (int type = 0; type < kNVTENumTypes; ++type) {
    SCOPED_TRACE(type);
    NVTETensor tensor = make();
    set(tensor, kNVTERowwiseData, static_cast<NVTEDType>(type), {6});
    EXPECT_EQ(nvte_tensor_element_size_bits(tensor), bits[type]);
    EXPECT_EQ(nvte_tensor_size_bytes(tensor), 6 * bits[type] / 8);
    const DType same = static_cast<DType>(type);
    EXPECT_EQ(is_fp8_dtype(same), same == DType::kFloat8E4M3 || same == DType::kFloat8E5M2);
    if (type == kNVTEFloat4E2M1) {
      EXPECT_NVTE_ERROR(nvte_tensor_element_size(tensor), "type 10 has 4 bits");
      EXPECT_NVTE_ERROR(typeToSize(same), "type 10 has 4 bits");
    } else {
      EXPECT_EQ(nvte_tensor_element_size(tensor), bits[type] / 8);
      EXPECT_EQ(typeToSize(same), bits[type] / 8);
    }
  }
  EXPECT_NVTE_ERROR(typeToSize(DType::kNumTypes), "Invalid type 11; needs 0 to 10.");
}

}  // namespace
