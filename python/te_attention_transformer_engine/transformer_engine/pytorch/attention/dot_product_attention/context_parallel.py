"""Context parallelism by TransformerEngine's names."""

from ._cp_batches import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)

__all__ = [
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
]
