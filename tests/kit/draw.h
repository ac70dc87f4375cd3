// A random case from one integer: every option, in any combination, at sizes small enough that
// thousands run in a minute. The classes that broke other libraries are drawn often.
#pragma once
#include "kit/case.h"

namespace tea::kit {

// The same case for the same seed, always; its text is what a report quotes.
Case draw(uint64_t seed);

// A random case of decoding: forward without gradients in 16 bits, few queries of each sequence
// over up to 4096 keys, which are often in pages.
Case draw_decoding(uint64_t seed);

// A random case of prefill over pages: forward without gradients in 16 bits, more queries than the
// decoding kernels take, pages of a multiple of 8 keys but for a few cases.
Case draw_prefill(uint64_t seed);

// A random case of training in 16 bits that the backward kernels of hopper serve: without a change
// of the scores or dropout, head dimensions up to 128, a few tiles of rows and keys.
Case draw_training(uint64_t seed);

// A draw as one part of a larger problem: results of 16-bit inputs in fp32, and an origin and a
// shift for each sequence. For the engines of the host, which alone compute these.
Case draw_part(uint64_t seed);

}  // namespace tea::kit
