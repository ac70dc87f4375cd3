// Interleaved QKV to three dense tensors, and the gradients back.
#pragma once
#include "ops/moves.h"

namespace tea {

void flash_prepare_forward(const tea_flash_prepare& args, const Place& place);
void flash_prepare_backward(const tea_flash_prepare& args, const Place& place);

// One move per head, in the order of the output.
struct FlashPrepareMoves : Moves {
  tea_flash_prepare a;
  bool forward;

  TEA_HOST_DEVICE void check(int64_t) const {}
  TEA_HOST_DEVICE Move at(int64_t i) const { return forward ? to_dense(i) : to_interleaved(i); }

 private:
  // i counts [3, batch, seqlen, heads].
  TEA_HOST_DEVICE Move to_dense(int64_t i) const {
    const int64_t row = quotient(i, a.heads), h = i - row * a.heads;
    const int64_t line = quotient(row, a.seqlen), s = row - line * a.seqlen;
    const int64_t which = quotient(line, a.batch), b = line - which * a.batch;
    const int64_t from = ((s * a.batch + b) * a.heads + h) * 3 + which;
    return {static_cast<char*>(a.output) + i * bytes,
            static_cast<const char*>(a.input[0]) + from * bytes};
  }
  // i counts [seqlen, batch, heads, 3].
  TEA_HOST_DEVICE Move to_interleaved(int64_t i) const {
    const int64_t head = quotient(i, 3), which = i - head * 3;
    const int64_t row = quotient(head, a.heads), h = head - row * a.heads;
    const int64_t s = quotient(row, a.batch), b = row - s * a.batch;
    const void* input = which == 0 ? a.input[0] : which == 1 ? a.input[1] : a.input[2];
    return {static_cast<char*>(a.output) + i * bytes,
            static_cast<const char*>(input) + ((b * a.seqlen + s) * a.heads + h) * bytes};
  }
};

}  // namespace tea
