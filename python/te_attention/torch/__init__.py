"""Attention for PyTorch: attention(), a module, and the operators of the namespace te_attention.

torch.ops.te_attention holds all operators, with schemas, fake implementations and FLOP formulas.
"""

from te_attention.torch import _batching, _fakes, _flops  # noqa: F401  (imports register functions)
from te_attention.torch.functional import (
    Fp8,
    attention,
    dropout_mask,
    explain,
    new_rng_state,
)
from te_attention.torch.kv_cache import KVCache
from te_attention.torch.module import Attention
from te_attention.torch.packed import attention_packed
from te_attention.torch.prepared import PreparedAttention

__all__ = [
    "Attention",
    "Fp8",
    "KVCache",
    "PreparedAttention",
    "attention",
    "attention_packed",
    "context_parallel_attention",
    "dropout_mask",
    "explain",
    "new_rng_state",
]


def __getattr__(name: str) -> object:
    """context_parallel_attention, whose module needs torch.distributed."""
    if name == "context_parallel_attention":
        from te_attention.torch.context_parallel import (
            context_parallel_attention,
        )

        return context_parallel_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
