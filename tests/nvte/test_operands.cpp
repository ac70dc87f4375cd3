// Checks of tensor arguments: each names the tensor, what it is and what it should be.
#include "expect_error.h"
#include "nvte/boundary.h"
#include "nvte/operands.h"
#include "ops/buffer.h"
#include "tensor_of.h"

namespace tea::nvte {
namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

TEST(Operands, SizesCountFromBothEnds) {
  Buffer buffer(TEA_FP16, 24);
  const TensorWrapper handle = test::handle_of(buffer, {2, 3, 4});
  const Operand x("x", handle.data());
  EXPECT_EQ(x.rank(), 3);
  EXPECT_EQ(x.elements(), 24);
  EXPECT_EQ(x.size(0), 2);
  EXPECT_EQ(x.size(-1), 4);
  EXPECT_EQ(x.data(), buffer.data());
  EXPECT_EQ(error_of([&] { (void)x.size(3); }), "x.ndim is 3; needs a dimension 3");
  EXPECT_EQ(error_of([&] { (void)x.size(-4); }), "x.ndim is 3; needs a dimension -4");
  EXPECT_EQ(error_of([&] { require_rank(x, 4, 4); }), "x.ndim is 3; needs 4");
  EXPECT_EQ(error_of([&] { require_rank(x, 1, 2); }), "x.ndim is 3; needs 1 to 2");
  EXPECT_EQ(error_of([&] { require_elements(x, 25); }), "x.numel is 24; needs 25 or more");
}

TEST(Operands, Types) {
  Buffer half(TEA_FP16, 4), single(TEA_FP32, 4);
  std::vector<int32_t> numbers = {0, 1, 2};
  const TensorWrapper h = test::handle_of(half, {4}), s = test::handle_of(single, {4});
  const TensorWrapper n = test::ints(numbers);
  const Operand x("x", h.data()), y("y", s.data()), cu("cu", n.data());
  EXPECT_EQ(required_dtype(x, kRealDtypes), TEA_FP16);
  EXPECT_EQ(float_data(y, 4), single.data());
  EXPECT_EQ(int32_data(cu, 3), numbers.data());
  EXPECT_EQ(batch_of(cu), 2);
  EXPECT_EQ(error_of([&] { required_dtype(x, kFp8Dtypes); }),
            "x.dtype is fp16; needs one of e4m3, e5m2");
  EXPECT_EQ(error_of([&] { required_dtype(cu, kAnyDtype); }),
            "cu.dtype is 2; needs a floating-point NVTEDType of 8, 16 or 32 bits");
  EXPECT_EQ(error_of([&] { require_same_type(x, y); }), "x.dtype is 5; needs that of y, 4");
  EXPECT_EQ(error_of([&] { int32_data(x, 0); }), "x.dtype is 5; needs kNVTEInt32, 2");
  EXPECT_EQ(error_of([&] { float_data(x, 0); }), "x.dtype is 5; needs kNVTEFloat32, 4");
  EXPECT_EQ(error_of([&] { float_data(y, 5); }), "y.numel is 4; needs 5 or more");
  std::vector<int32_t> one = {0};
  const TensorWrapper short_array = test::ints(one);
  EXPECT_EQ(error_of([&] { batch_of(Operand("cu", short_array.data())); }),
            "cu.numel is 1; needs 2 or more");
}

TEST(Operands, HandlesAndPlaces) {
  EXPECT_THROW(Operand("x", nullptr), std::runtime_error);
  const TensorWrapper empty;
  const Operand x("x", empty.data());
  int token = 0;
  const auto stream = reinterpret_cast<cudaStream_t>(&token);
  const Place place = place_of({x}, stream);
  EXPECT_EQ(place.device, kHost);
  EXPECT_EQ(place.stream, stream);
}

TEST(Operands, InvalidArraysThrow) {
  require_valid(0, "cu_seqlens");
  EXPECT_EQ(error_of([] { require_valid(TEA_STATUS_BAD_LENGTHS, "cu_seqlens"); }),
            "cu_seqlens is out of range in part; needs positions inside the tensors");
}

}  // namespace
}  // namespace tea::nvte
