// The value: text that round-trips exactly, equality, hash, the field table.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <unordered_set>

#include "core/error.h"
#include "core/problem.h"

namespace tea {
namespace {

// Every byte of the struct drawn at random, so that no field can be forgotten.
Problem noise(std::mt19937_64& random) {
  Problem p{};
  for (const Field& f : problem_fields()) {
    char* at = reinterpret_cast<char*>(&p) + f.offset;
    for (int i = 0; i < f.count; ++i) {
      const uint64_t bits = random() >> (random() % 64);
      if (f.kind == Kind::kReal) {
        const double x = std::ldexp(static_cast<double>(bits), -static_cast<int>(random() % 80));
        std::memcpy(at + 8 * i, &x, 8);
      } else if (f.kind == Kind::kInt64) {
        const int64_t x = static_cast<int64_t>(bits) * (random() % 2 ? 1 : -1);
        std::memcpy(at + 8 * i, &x, 8);
      } else {
        const auto x = static_cast<int32_t>(bits);
        std::memcpy(at + 4 * i, &x, 4);
      }
    }
  }
  p.struct_size = sizeof(tea_problem);
  return p;
}

TEST(Problem, AnyBytesRoundTripThroughText) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const Problem p = noise(random);
    ASSERT_EQ(Problem::parse(p.text()), p) << p.text();
  }
}

TEST(Problem, ExtremeNumbersRoundTrip) {
  Problem p{};
  p.struct_size = sizeof p;
  p.batch = std::numeric_limits<int64_t>::max();
  p.q = {std::numeric_limits<int64_t>::min(), (int64_t{1} << 53) + 1, -1};
  p.scale = std::numeric_limits<double>::denorm_min();
  p.softcap = std::nextafter(0.1, 1.0);
  p.dropout = -0.0;
  EXPECT_EQ(Problem::parse(p.text()), p) << p.text();
}

TEST(Problem, TextReadsLikeTheProblem) {
  const std::string line =
      "dtype=bf16 training=1 outputs=lse+max q_form=ragged kv_form=ragged heads_q=8 heads_kv=2 "
      "dim_qk=64 causal=1 bias=post_scale bias_broadcast=batch+row softmax=learnable scale=0.125 "
      "has_scale=1 k=0,1024,64";
  EXPECT_EQ(Problem::parse(line).text(), line);
  EXPECT_EQ(Problem::parse(" \t" + line + "\n").text(), line);
  EXPECT_EQ(Problem::parse("").text(), "");
}

std::string parse_error(std::string_view text) {
  try {
    Problem::parse(text);
  } catch (const Error& e) {
    EXPECT_EQ(e.status, TEA_INVALID);
    return e.what();
  }
  return "no error";
}

TEST(Problem, MalformedTextIsRefusedWithTheWord) {
  const struct {
    const char *text, *error;
  } rows[] = {
      {"dytpe=bf16", "\"dytpe=bf16\": needs field=value with a field of tea_problem"},
      {"batch", "\"batch\": needs field=value"},
      {"struct_size=1", "\"struct_size=1\": needs field=value with a field"},
      {"batch=2 batch=0", "\"batch=0\": needs each field once"},
      {"batch=two", "\"batch=two\": needs an integer that fits the field"},
      {"batch=2x", "\"batch=2x\": needs an integer"},
      {"batch=", "\"batch=\": needs an integer"},
      {"heads_q=4294967296", "needs an integer that fits the field"},
      {"batch=9223372036854775808", "needs an integer that fits the field"},
      {"dtype=bf17", "\"dtype=bf17\": needs one of default, fp16, bf16, fp32, fp64, e4m3, e5m2"},
      {"outputs=lse+mx", "\"outputs=lse+mx\": needs one of lse, max, sum_exp, joined by +"},
      {"q=1,2", "\"q=1,2\": needs 3 values separated by commas"},
      {"q=1,2,3,4", "needs 3 values separated by commas"},
      {"scale=0.1f", "needs a number"},
  };
  for (const auto& row : rows)
    EXPECT_NE(parse_error(row.text).find(row.error), std::string::npos)
        << row.text << " gave: " << parse_error(row.text);
}

TEST(Problem, EveryByteCountsInEqualityAndHash) {
  Problem zero{};
  std::unordered_set<size_t> hashes{zero.hash()};
  for (size_t i = 0; i < sizeof zero; ++i) {
    Problem p = zero;
    reinterpret_cast<char*>(&p)[i] = 1;
    EXPECT_FALSE(p == zero);
    EXPECT_TRUE(hashes.insert(p.hash()).second) << "byte " << i;
  }
}

TEST(Problem, DefaultsStandForWhatTheHeaderSays) {
  Problem p{};
  p.dtype = TEA_BF16, p.dim_qk = 64;
  EXPECT_EQ(p.o_type(), TEA_BF16);
  EXPECT_EQ(p.dout_type(), TEA_BF16);
  EXPECT_EQ(p.dqkv_type(), TEA_BF16);
  EXPECT_EQ(p.bias_type(), TEA_BF16);
  EXPECT_EQ(p.v_dim(), 64);
  EXPECT_EQ(p.scale_value(), 0.125);
  p.has_scale = 1;
  EXPECT_EQ(p.scale_value(), 0);
  p.dtype = TEA_E4M3, p.o_dtype = TEA_FP16;
  EXPECT_EQ(p.bias_type(), TEA_FP32);
  EXPECT_EQ(p.dout_type(), TEA_FP16);
  EXPECT_EQ(p.dqkv_type(), TEA_E4M3);
}

TEST(Problem, TypesHaveNamesAndSizes) {
  const struct {
    int32_t dtype;
    const char* name;
    int bytes;
  } rows[] = {{TEA_FP16, "fp16", 2}, {TEA_BF16, "bf16", 2}, {TEA_FP32, "fp32", 4},
              {TEA_FP64, "fp64", 8}, {TEA_E4M3, "e4m3", 1}, {TEA_E5M2, "e5m2", 1}};
  for (const auto& row : rows) {
    EXPECT_STREQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_bytes(row.dtype), row.bytes);
  }
  EXPECT_STREQ(dtype_name(7), "unknown");
  EXPECT_EQ(dtype_bytes(-1), 0);
}

}  // namespace
}  // namespace tea
