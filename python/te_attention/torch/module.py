"""Attention as a module: the options are set once, and the parameters it owns are registered."""

import torch
from torch import Tensor, nn

from te_attention.torch.functional import Mask, Window, attention


class Attention(nn.Module):
    """The core of an attention layer: q, k, v in, O out; projections are the caller's.

    Args:
        mask, window, softcap, scale, format, deterministic: as in
            :func:`te_attention.torch.attention`.
        dropout: probability of dropping; only in training mode.
        sink_heads: that many learnable sinks, one for each query head; 0: none.
    """

    def __init__(
        self,
        *,
        mask: Mask | None = None,
        window: Window | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
        dropout: float = 0.0,
        format: str = "bhsd",
        sink_heads: int = 0,
        deterministic: bool | None = None,
    ) -> None:
        """Keeps the options."""
        super().__init__()
        self.options = {
            "mask": mask,
            "window": window,
            "softcap": softcap,
            "scale": scale,
            "format": format,
            "deterministic": deterministic,
        }
        self.dropout = dropout
        self.sink = nn.Parameter(torch.zeros(sink_heads)) if sink_heads else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor | tuple[Tensor, ...]:
        """attention(q, k, v) with the module's options; `options` adds to them or replaces them."""
        own = {"dropout": self.dropout if self.training else 0.0, "sink": self.sink}
        return attention(q, k, v, **{**self.options, **own, **options})

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        sinks = 0 if self.sink is None else self.sink.numel()
        every = {**self.options, "dropout": self.dropout, "sink_heads": sinks}
        given = {k: v for k, v in every.items() if v not in (None, 0)}
        return ", ".join(f"{k}={v!r}" for k, v in given.items())
