// The functions that report properties of the GPU and of cuDNN.
#include "nvte/gpu.h"

#include "core/driver.h"
#include "nvte/error.h"
#include "transformer_engine/cudnn.h"
#include "transformer_engine/util/cuda_runtime.h"

namespace {

// The GPU with this index, or the current GPU for -1.
const tea::Device& gpu(const char* question, int device_id) {
  const tea::driver::Gpus& gpus = tea::driver::gpus();
  const int index = device_id == -1 ? tea::driver::current_device() : device_id;
  if (index < 0 || index >= static_cast<int>(gpus.list.size()))
    TEA_NVTE_ERROR(question, " of device ", device_id, ": no GPU; there are ", gpus.list.size(),
                   ". ", gpus.why_none);
  return gpus.list[static_cast<size_t>(index)];
}

}  // namespace

int nvte_is_non_tn_fp8_gemm_supported() {
  const tea::driver::Gpus& gpus = tea::driver::gpus();
  constexpr int kNoGpu = 0;
  return tea::nvte::has_non_tn_fp8_gemm(gpus.list.empty() ? kNoGpu : gpu("kind", -1).sm);
}

namespace transformer_engine {

void nvte_cudnn_handle_init() {}

namespace cuda {

int current_device() { return gpu("index", -1).index; }
int sm_arch(int device_id) { return gpu("compute capability", device_id).sm; }
int sm_count(int device_id) { return gpu("number of SMs", device_id).num_sms; }

}  // namespace cuda
}  // namespace transformer_engine
