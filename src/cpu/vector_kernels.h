// The kernels in vectors of one instruction set. Included once per set, in its namespace; each
// header needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/row_sums.h"
#include "cpu/flash_tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/flash_kernel_backward.h"
#include "cpu/decode_elements.h"
#include "cpu/decode_rows.h"
#include "cpu/decode_kernel.h"
// clang-format on
