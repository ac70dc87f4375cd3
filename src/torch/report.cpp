// The status word: on the stack for the host; on a GPU it is allocated only if it will be read.
#include "torch/report.h"

#include <string_view>

namespace tea::torch_ops {
namespace {

bool waits_for_devices() {
  static const std::string_view value = tea_setting("TE_ATTENTION_CHECK");
  return !value.empty() && value != "0";
}

}  // namespace

Report::Report(const Tensor& like, const Where& where) {
  if (where.device < 0) return;
  word_ = nullptr;
  if (!waits_for_devices()) return;
  device_ = empty(like, torch_int32(), {1});
  word_ = static_cast<int32_t*>(device_->data_ptr());
  require(tea_fill_bytes(word_, 0, sizeof *word_, where.device, where.stream));
}

void Report::refuse_invalid(const char* lengths) {
  if (device_) TORCH_ERROR_CODE_CHECK(aoti_torch_item_int32(device_->get(), &host_));
  if (!host_) return;
  const std::string seen = "out of range in part";
  if (host_ & TEA_STATUS_BAD_LENGTHS)
    refuse(lengths, seen, "lengths from 0 to the largest, of sequences inside the tensors");
  if (host_ & TEA_STATUS_BAD_PAGE) refuse("page_table", seen, "numbers of pages that there are");
  if (host_ & TEA_STATUS_BAD_ORIGIN) refuse("origin", seen, "numbers from 0 to 2^40");
  refuse("s_scale", "so large that probabilities saturate",
         "at most 448 * (1 - dropout) for float8_e4m3fn, 57344 * (1 - dropout) for float8_e5m2");
}

}  // namespace tea::torch_ops
