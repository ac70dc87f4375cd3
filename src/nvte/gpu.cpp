// The questions about the GPU and cuDNN. This build has host engines only.
#include "nvte/gpu.h"

#include "nvte/error.h"
#include "transformer_engine/cudnn.h"
#include "transformer_engine/util/cuda_runtime.h"

namespace {

[[noreturn]] void fail_without_gpu(const char* question, int device_id) {
  TEA_NVTE_ERROR(question, " of device ", device_id, ": no GPU; this build runs on the host only.");
}

}  // namespace

int nvte_is_non_tn_fp8_gemm_supported() {
  constexpr int kNoGpu = 0;
  return tea::nvte::has_non_tn_fp8_gemm(kNoGpu);
}

namespace transformer_engine {

void nvte_cudnn_handle_init() {}

namespace cuda {

int current_device() { fail_without_gpu("index", -1); }
int sm_arch(int device_id) { fail_without_gpu("compute capability", device_id); }
int sm_count(int device_id) { fail_without_gpu("number of multiprocessors", device_id); }

}  // namespace cuda
}  // namespace transformer_engine
