// The properties of the GPU that the TransformerEngine C API reports.
#pragma once

namespace tea::nvte {

// The rule of nvte_is_non_tn_fp8_gemm_supported; `sm` is 10 * major + minor, 0 without a GPU.
constexpr bool has_non_tn_fp8_gemm(int sm) { return (sm >= 100 && sm < 120) || sm >= 130; }

}  // namespace tea::nvte
