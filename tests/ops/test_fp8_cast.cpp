// Casts to and from fp8: nearest values, bounds of the round trip, amax, both kinds of scaling.
#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "ops/fp8_cast.h"

namespace tea {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kFp8[] = {TEA_E4M3, TEA_E5M2};

double largest(int32_t dtype) { return dtype == TEA_E4M3 ? 448 : 57344; }
double smallest_normal(int32_t dtype) { return dtype == TEA_E4M3 ? 0x1p-6 : 0x1p-14; }

tea_fp8_cast arguments(Buffer& input, Buffer& output) {
  tea_fp8_cast a{};
  a.struct_size = sizeof a;
  a.input_dtype = input.dtype(), a.output_dtype = output.dtype();
  a.input = input.data(), a.output = output.data();
  a.count = input.count();
  return a;
}

TEST(Fp8Cast, DelayedPicksTheNearestOfAllCodes) {
  std::mt19937_64 random(1);
  for (int32_t from : kEveryReal)
    for (int32_t to : kFp8) {
      Buffer input = random_buffer(from, 300, random), output(to, 300);
      float scale = 100, scale_inv = 0, amax = 0;
      tea_fp8_cast a = arguments(input, output);
      a.scale = &scale, a.scale_inv = &scale_inv, a.amax = &amax;
      fp8_quantize(a, {});
      Buffer codes(to, 256);
      for (int64_t i = 0; i < 256; ++i) static_cast<uint8_t*>(codes.data())[i] = uint8_t(i);
      float most = 0;
      for (int64_t i = 0; i < 300; ++i) {
        const float x = static_cast<float>(input[i]) * scale;
        most = std::max(most, std::abs(static_cast<float>(input[i])));
        double best = kInfinity;
        for (int64_t c = 0; c < 256; ++c)
          if (std::isfinite(codes[c])) best = std::min(best, std::abs(codes[c] - double{x}));
        ASSERT_EQ(std::abs(output[i] - double{x}), best) << dtype_name(from) << " " << x;
      }
      EXPECT_EQ(amax, most);
      EXPECT_EQ(scale, 100);
      EXPECT_EQ(scale_inv, 1.0f / 100);
    }
}

TEST(Fp8Cast, AmaxIsAMaximumIntoTheValueThere) {
  Buffer input(TEA_FP32, {1, -3, 2}), output(TEA_E4M3, 3);
  tea_fp8_cast a = arguments(input, output);
  float amax = 2;
  a.amax = &amax;
  fp8_quantize(a, {});
  EXPECT_EQ(amax, 3);
  amax = 50;
  fp8_quantize(a, {});
  EXPECT_EQ(amax, 50);
}

TEST(Fp8Cast, SpecialValues) {
  for (int32_t to : kFp8) {
    Buffer input(TEA_FP32, {NAN, kInfinity, -kInfinity, 1e30, -0.0, 1}), output(to, 6);
    float amax = 0;
    tea_fp8_cast a = arguments(input, output);
    a.amax = &amax, a.count = 5;
    fp8_quantize(a, {});
    EXPECT_TRUE(std::isnan(output[0]));
    EXPECT_EQ(output[1], largest(to));
    EXPECT_EQ(output[2], -largest(to));
    EXPECT_EQ(output[3], largest(to));
    EXPECT_TRUE(output[4] == 0 && std::signbit(output[4]));
    EXPECT_TRUE(output.untouched(5));
    EXPECT_EQ(amax, kInfinity);
  }
}

TEST(Fp8Cast, CurrentUsesTheWholeRange) {
  std::mt19937_64 random(2);
  for (int32_t from : kEveryReal)
    for (int32_t to : kFp8)
      for (int32_t power : {0, 1}) {
        Buffer input = random_buffer(from, 500, random), output(to, 500), back(from, 500);
        float scale = -1, scale_inv = -1, amax = 1e9f;
        tea_fp8_cast a = arguments(input, output);
        a.scale = &scale, a.scale_inv = &scale_inv, a.amax = &amax, a.power_of_two = power;
        fp8_quantize_current(a, {});
        float most = 0;
        for (double x : input.values()) most = std::max(most, std::abs(static_cast<float>(x)));
        const float exact = static_cast<float>(largest(to)) / most;
        EXPECT_EQ(amax, most);
        EXPECT_EQ(scale, power ? std::exp2(std::floor(std::log2(exact))) : exact);
        EXPECT_EQ(scale_inv, 1 / scale);

        tea_fp8_cast d = arguments(output, back);
        d.scale_inv = &scale_inv;
        fp8_dequantize(d, {});
        const double unit = rounding_unit(to) + rounding_unit(from) + 3e-7;
        for (int64_t i = 0; i < 500; ++i)
          ASSERT_NEAR(
              back[i], input[i],
              unit * std::abs(input[i]) + rounding_unit(to) * smallest_normal(to) / double{scale});
      }
}

TEST(Fp8Cast, CurrentScaleAtTheEnds) {
  struct End {
    double value;
    float floor, scale;
  };
  const float most = std::numeric_limits<float>::max();
  const End ends[] = {{0, 0, 1},        {kInfinity, 0, 1}, {NAN, 0, 1},
                      {1e-44, 0, most}, {0, 448, 1},       {1, 2, 224}};
  for (const End& end : ends) {
    Buffer input(TEA_FP32, std::vector{end.value}), output(TEA_E4M3, 1);
    float scale = -1;
    tea_fp8_cast a = arguments(input, output);
    a.scale = &scale, a.amax_floor = end.floor;
    fp8_quantize_current(a, {});
    EXPECT_EQ(scale, end.scale) << end.value;
  }
}

TEST(Fp8Cast, UpdateAmaxOfEveryDtype) {
  for (int32_t dtype : kEveryDtype) {
    Buffer data(dtype, {1, -5, NAN, 2});
    float amax = 0.5f;
    update_amax({data.data(), dtype, 4}, &amax, {});
    EXPECT_EQ(amax, 5) << dtype_name(dtype);
    update_amax({data.data(), dtype, 0}, &amax, {});
    EXPECT_EQ(amax, 5);
  }
}

TEST(Fp8Cast, NamesWhatIsWrong) {
  Buffer real(TEA_FP16, 1), small(TEA_E4M3, 1);
  float x = 1;
  using Run = void(const tea_fp8_cast&, const Place&);
  const auto error = [&](Run* run, Buffer& input, Buffer& output, auto change) {
    tea_fp8_cast a = arguments(input, output);
    change(a);
    return error_of([&] { run(a, {}); });
  };
  const auto same = [](auto&) {};
  EXPECT_EQ(error(fp8_quantize, small, small, same),
            "input_dtype is e4m3; needs one of fp16, bf16, fp32, fp64");
  EXPECT_EQ(error(fp8_quantize, real, real, same), "output_dtype is fp16; needs one of e4m3, e5m2");
  EXPECT_EQ(error(fp8_dequantize, real, real, same),
            "input_dtype is fp16; needs one of e4m3, e5m2");
  EXPECT_EQ(error(fp8_quantize, real, small, [](auto& a) { a.power_of_two = 1; }),
            "power_of_two is 1; needs 0 except for current scaling");
  EXPECT_EQ(error(fp8_quantize_current, real, small, [](auto& a) { a.amax_floor = -1; }),
            "amax_floor is -1; needs finite, 0 or more");
  EXPECT_EQ(error(fp8_dequantize, small, real, [&](auto& a) { a.scale = &x; }),
            "scale is a pointer; needs NULL: dequantising reads scale_inv");
  EXPECT_EQ(error(fp8_dequantize, small, real, [&](auto& a) { a.amax = &x; }),
            "amax is a pointer; needs NULL: dequantising records none");
  EXPECT_EQ(error(fp8_quantize, real, small, [](auto& a) { a.count = -1; }),
            "count is -1; needs 0 or more");
  EXPECT_EQ(error(fp8_quantize, real, small, [](auto& a) { a.input = nullptr; }),
            "input is NULL; needs memory");
  EXPECT_EQ(error_of([] {
              update_amax({nullptr, TEA_FP32, 0}, nullptr, {});
            }),
            "amax is NULL; needs memory");
}

TEST(Fp8Cast, SeveralTensorsShareTheScaleOfOneAmax) {
  Buffer input(TEA_FP32, {1, -2}), output(TEA_E4M3, 2);
  float amax = 7, scale = 0;
  tea_fp8_cast a = arguments(input, output);
  a.amax = &amax, a.scale = &scale, a.amax_given = 1;
  fp8_quantize_current(a, {});
  EXPECT_EQ(amax, 7);
  EXPECT_EQ(scale, 64);
  EXPECT_EQ(output[1], -128);
  a.count = 0, a.input = nullptr, a.output = nullptr, amax = 14;
  fp8_quantize_current(a, {});
  EXPECT_EQ(scale, 32);
  a.amax = nullptr;
  EXPECT_EQ(error_of([&] { fp8_quantize_current(a, {}); }),
            "amax is NULL; needs memory with amax_given");
}

// Tensors of 40, 0 and 9 elements.
struct Joint {
  std::vector<Buffer> inputs, outputs;
  float scale = 3, scale_inv = -1, amax = 0, other = 8, copy[2] = {-1, -1};
  tea_fp8_joint_cast args{};

  Joint(int32_t from, int32_t to, std::mt19937_64& random) {
    args.struct_size = sizeof args;
    args.input_dtype = from, args.output_dtype = to, args.tensors = 3;
    for (int64_t count : {40, 0, 9}) {
      inputs.push_back(random_buffer(from, count, random));
      outputs.emplace_back(to, count);
    }
    for (int i = 0; i < 3; ++i) {
      args.input[i] = inputs[i].data(), args.output[i] = outputs[i].data();
      args.count[i] = inputs[i].count();
    }
    args.scale = &scale, args.scale_inv = &scale_inv, args.amax = &amax;
    args.copied[1] = &other, args.copy[1] = copy;
  }
  // The same elements as one tensor.
  Buffer input() const {
    std::vector<double> all = inputs[0].values(), last = inputs[2].values();
    all.insert(all.end(), last.begin(), last.end());
    return {inputs[0].dtype(), all};
  }
  void expect_codes(Buffer& whole) const {
    for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(outputs[0][i], whole[i]);
    for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(outputs[2][i], whole[40 + i]);
  }
};

TEST(Fp8Cast, JointScalesAreThoseOfOneTensor) {
  std::mt19937_64 random(5);
  for (int32_t from : kEveryReal)
    for (int32_t to : kFp8)
      for (bool current : {false, true}) {
        Joint joint(from, to, random);
        Buffer input = joint.input(), output(to, 49);
        float scale = 3, scale_inv = 0, amax = 0;
        tea_fp8_cast a = arguments(input, output);
        a.scale = &scale, a.scale_inv = &scale_inv, a.amax = &amax;
        if (current) {
          a.amax_floor = joint.args.amax_floor = 0.5f;
          a.power_of_two = joint.args.power_of_two = 1;
        }
        (current ? fp8_quantize_current : fp8_quantize)(a, {});
        (current ? fp8_quantize_joint_current : fp8_quantize_joint)(joint.args, {});
        joint.expect_codes(output);
        EXPECT_EQ(joint.scale, scale);
        EXPECT_EQ(joint.scale_inv, scale_inv);
        EXPECT_EQ(joint.amax, amax);
        EXPECT_EQ(joint.copy[0], 8);
        EXPECT_EQ(joint.copy[1], 0.125f);

        tea_fp8_joint_cast back{};
        back.struct_size = sizeof back;
        back.input_dtype = to, back.output_dtype = from, back.tensors = 3;
        back.scale_inv = &scale_inv;
        std::copy_n(joint.args.output, 3, back.input);
        std::copy_n(joint.args.count, 3, back.count);
        for (int i = 0; i < 3; ++i) back.output[i] = joint.inputs[i].data();
        fp8_dequantize_joint(back, {});
        Buffer wanted(from, 49);
        tea_fp8_cast alone = arguments(output, wanted);
        alone.scale_inv = &scale_inv;
        fp8_dequantize(alone, {});
        for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(joint.inputs[0][i], wanted[i]);
        for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(joint.inputs[2][i], wanted[40 + i]);
      }
}

TEST(Fp8Cast, JointNamesWhatIsWrong) {
  const auto error = [](auto change, auto verb) {
    std::mt19937_64 random(6);
    Joint joint(TEA_BF16, TEA_E4M3, random);
    change(joint.args);
    return error_of([&] { verb(joint.args, Place{}); });
  };
  EXPECT_EQ(error([](auto& a) { a.tensors = 5; }, fp8_quantize_joint),
            "tensors is 5; needs 1 to 4");
  EXPECT_EQ(error([](auto& a) { a.tensors = 0; }, fp8_quantize_joint_current),
            "tensors is 0; needs 1 to 4");
  EXPECT_EQ(error([](auto& a) { a.output[2] = nullptr; }, fp8_quantize_joint),
            "output is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.copy[1] = nullptr; }, fp8_quantize_joint),
            "copy is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.power_of_two = 1; }, fp8_quantize_joint),
            "power_of_two is 1; needs 0 except for current scaling");
  EXPECT_EQ(error([](auto& a) { a.amax_floor = -1; }, fp8_quantize_joint_current),
            "amax_floor is -1; needs finite, 0 or more");
}

struct Scales {
  std::vector<float> history, scale;
  tea_fp8_scales args{};

  Scales(std::vector<float> h, int64_t length, int64_t count)
      : history(std::move(h)), scale(static_cast<size_t>(count), 3) {
    args.struct_size = sizeof args;
    args.dtype = TEA_E4M3, args.length = length, args.count = count;
    args.amax_history = history.data(), args.scale = scale.data();
  }
};

TEST(Fp8Scales, TheLargestOfTheHistoryOrTheLatest) {
  for (int32_t algorithm : {TEA_AMAX_MAX, TEA_AMAX_MOST_RECENT}) {
    Scales s({2, 7, 14, 1, 4, 28}, 3, 2);
    s.args.algorithm = algorithm, s.args.margin = 1;
    fp8_update_scales(s.args, {});
    const bool max = algorithm == TEA_AMAX_MAX;
    EXPECT_EQ(s.scale, (std::vector<float>{max ? 16.0f : 112.0f, max ? 8.0f : 32.0f}));
    EXPECT_EQ(s.history, (std::vector<float>{0, 0, 4, 28, 2, 7}));
  }
}

TEST(Fp8Scales, AReducedAmaxReplacesTheLatest) {
  Scales s({2}, 1, 1);
  const float reduced = 8;
  s.args.amax = &reduced, s.args.dtype = TEA_E5M2;
  fp8_update_scales(s.args, {});
  EXPECT_EQ(s.scale[0], 7168);
  EXPECT_EQ(s.history[0], 0);
}

TEST(Fp8Scales, AnAmaxOfNoUseKeepsTheScale) {
  for (float amax : {0.0f, kInfinity, NAN}) {
    Scales s({amax}, 1, 1);
    fp8_update_scales(s.args, {});
    EXPECT_EQ(s.scale[0], 3) << amax;
  }
  Scales tiny({1e-44f}, 1, 1);
  fp8_update_scales(tiny.args, {});
  EXPECT_EQ(tiny.scale[0], std::numeric_limits<float>::max());
}

TEST(Fp8Scales, NamesWhatIsWrong) {
  const auto error = [](auto change) {
    Scales s({1}, 1, 1);
    change(s.args);
    return error_of([&] { fp8_update_scales(s.args, {}); });
  };
  EXPECT_EQ(error([](auto& a) { a.dtype = TEA_FP16; }), "dtype is fp16; needs one of e4m3, e5m2");
  EXPECT_EQ(error([](auto& a) { a.algorithm = 2; }),
            "algorithm is 2; needs TEA_AMAX_MAX or TEA_AMAX_MOST_RECENT");
  EXPECT_EQ(error([](auto& a) { a.length = 0; }), "length is 0; needs 1 or more");
  EXPECT_EQ(error([](auto& a) { a.scale = nullptr; }), "scale is NULL; needs memory");
}

}  // namespace
}  // namespace tea
