// The oracle's rules: number types, masks, dropout, and what counts as a right answer.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kit/oracle.h"

namespace tea::oracle {

Rounding rounding(Type type) {
  switch (type) {
    case Type::kFp16:
      return {0x1p-11, 0x1p-25, 65504, false};
    case Type::kBf16:
      return {0x1p-8, 0x1p-134, 0x1.FEp127, false};
    case Type::kFp32:
      return {0x1p-24, 0x1p-150, FLT_MAX, false};
    case Type::kFp64:
      return {0x1p-53, 0x1p-1074, DBL_MAX, false};
    case Type::kE4m3:
      return {0x1p-4, 0x1p-10, 448, true};
    case Type::kE5m2:
      return {0x1p-3, 0x1p-17, 57344, true};
    case Type::kExact:
      break;
  }
  return {};
}

Precision precision(Type type) {
  const bool fp8 = type == Type::kE4m3 || type == Type::kE5m2;
  const Rounding r = rounding(type), exact = rounding(Type::kExact);
  return {type == Type::kFp64 ? 0x1p-53 : 0x1p-24, fp8 ? exact : r, r, r,
          fp8 ? rounding(Type::kFp32) : r};
}

double Tensor::error(size_t i, double actual) const {
  constexpr double kWrong = std::numeric_limits<double>::infinity(), kUnknown = 1e100;
  const double want = value[i], allowed = bound[i];
  if (std::isnan(want)) return std::isfinite(actual) ? kWrong : 0;
  if (allowed >= std::min(type.largest, kUnknown) || actual == want) return 0;
  if (std::isinf(actual) && std::isfinite(want) && !type.saturates) {
    const double toward = std::copysign(1.0, actual) * want;
    return toward + 2 * allowed >= type.largest ? 0 : kWrong;
  }
  const double off = std::abs(actual - want);
  return allowed > 0 && std::isfinite(off) ? off / allowed : kWrong;
}

Tensor reduce(const Case& c, const Tensor& dbias, const bool (&lacks)[4],
              const Precision& precision) {
  const int64_t full[4] = {c.batch, c.heads_q, c.max_q, c.max_kv};
  int64_t stride[4], size = 1, terms = 1;
  for (int n = 3; n >= 0; --n) {
    stride[n] = lacks[n] ? 0 : size;
    (lacks[n] ? terms : size) *= full[n];
  }
  const double adding = precision.unit_acc * (static_cast<double>(terms) / 2 + 4);
  Tensor sum{std::vector<double>(size), std::vector<double>(size), precision.dbias};
  for (size_t i = 0; i < dbias.value.size(); ++i) {
    int64_t rest = static_cast<int64_t>(i), at = 0;
    for (int n = 3; n >= 0; rest /= full[n--]) at += rest % full[n] * stride[n];
    sum.value[at] += dbias.value[i];
    sum.bound[at] += dbias.bound[i] + adding * std::abs(dbias.value[i]);
  }
  for (size_t i = 0; i < sum.value.size(); ++i)
    if (sum.value[i] != 0 || sum.bound[i] != 0)
      sum.bound[i] += sum.type.unit * std::abs(sum.value[i]) + std::max(sum.type.floor, 0x1p-126);
  return sum;
}

bool visible(const Case& c, int64_t b, int64_t i, int64_t j) {
  if (i >= c.length_q[b] || j >= c.length_kv[b]) return false;
  const int64_t delta = c.bottom_right ? c.length_kv[b] - c.length_q[b] : 0;
  const int64_t ahead = (j + c.origin[3]) - (i + c.origin[2]) - delta;
  if (c.causal && ahead > 0) return false;
  if (c.window_left >= 0 && ahead < -c.window_left) return false;
  return c.window_right < 0 || ahead <= c.window_right;
}

void philox(uint32_t (&counter)[4], uint64_t key) {
  uint32_t weyl[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  for (int round = 0; round < 10; ++round, weyl[0] += 0x9E3779B9, weyl[1] += 0xBB67AE85) {
    const uint64_t even = uint64_t{counter[0]} * 0xD2511F53,
                   odd = uint64_t{counter[2]} * 0xCD9E8D57;
    counter[0] = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ weyl[0];
    counter[1] = static_cast<uint32_t>(odd);
    counter[2] = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ weyl[1];
    counter[3] = static_cast<uint32_t>(even);
  }
}

bool keeps(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  const uint64_t row = i + c.origin[2], col = j + c.origin[3];
  const uint64_t stream = (b + c.origin[0]) * 4096 + h + c.origin[1];
  uint32_t words[4] = {static_cast<uint32_t>(row / 16 * 8 + row % 8),
                       static_cast<uint32_t>(col / 16 * 4 + col % 8 / 2),
                       static_cast<uint32_t>(stream), static_cast<uint32_t>(c.offset)};
  philox(words, c.seed ^ (c.offset >> 32) << 32);
  const uint64_t index = row % 16 / 8 * 4 + col % 16 / 8 * 2 + col % 2;
  const uint32_t uniform = words[index / 2] >> (index % 2 * 16) & 0xFFFF;
  return uniform >= std::round(static_cast<double>(static_cast<float>(c.dropout)) * 65536);
}

}  // namespace tea::oracle
