// Context parallelism on ragged batches: halves of sequences, corrections of partial results,
// and the order of tokens over the ranks.
#pragma once
#include "ops/args.h"

namespace tea {
void cp_read_half(const tea_cp_half& args, const Place& place);
void cp_lse_correct(const tea_cp_lse& args, const Place& place);
void cp_lse_read(const tea_cp_lse& args, const Place& place);
void cp_out_correct(const tea_cp_out& args, const Place& place);
void cp_grad_correct(const tea_cp_grad& args, const Place& place);
void cp_partition_indices(const tea_cp_partition& args, const Place& place);
void cp_to_rank_order(const tea_cp_order& args, const Place& place);
void cp_to_sequence_order(const tea_cp_order& args, const Place& place);
void cp_copy_valid(const tea_cp_valid& args, const Place& place);
}  // namespace tea
