// Codes of FP8 as fp16, exactly.
#pragma once
#include "hopper/device/ptx.cuh"
#include "te_attention.h"

namespace tea::hopper::decode {

TEA_DEVICE uint32_t e4m3_to_halves(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(codes));
  return halves;
}
// Four codes, the first in the low byte, as two pairs. dtype: TEA_E4M3 or TEA_E5M2.
TEA_DEVICE void widen_fp8(uint32_t& low, uint32_t& high, uint32_t codes, int32_t dtype) {
  if (dtype == TEA_E4M3) {
    low = e4m3_to_halves(static_cast<uint16_t>(codes));
    high = e4m3_to_halves(static_cast<uint16_t>(codes >> 16));
  } else {  // a code of E5M2 is the upper byte of a half
    low = __byte_perm(codes, 0, 0x1404);
    high = __byte_perm(codes, 0, 0x3424);
  }
}

}  // namespace tea::hopper::decode
