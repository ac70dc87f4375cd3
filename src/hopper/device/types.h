// Element types of wgmma operands and tensor maps.
#pragma once
#include "math/host_device.h"

namespace tea::hopper {

enum class Type { kBf16, kFp16, kE4M3, kE5M2, kFp32 };

TEA_HOST_DEVICE constexpr int bytes(Type t) {
  return t == Type::kFp32 ? 4 : t == Type::kBf16 || t == Type::kFp16 ? 2 : 1;
}

}  // namespace tea::hopper
