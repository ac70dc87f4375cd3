"""Attention as a module, which holds the options and registers its parameters."""

import torch
from torch import Tensor, nn

from te_attention.torch.functional import Mask, Window, attention


class Attention(nn.Module):
    """The core of an attention layer, from q, k and v to O, without the projections.

    Args:
        mask, window, softcap, scale, format, deterministic: as in
            :func:`te_attention.torch.attention`.
        dropout: dropout probability, applied in training mode only.
        sink_heads: the number of learnable sinks, one for each query head. 0: no sink.
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
        """Stores the options and creates the sinks."""
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
        """attention(q, k, v) with the module's options, extended or overridden by `options`."""
        own = {"dropout": self.dropout if self.training else 0.0, "sink": self.sink}
        return attention(q, k, v, **{**self.options, **own, **options})

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        sinks = 0 if self.sink is None else self.sink.numel()
        every = {**self.options, "dropout": self.dropout, "sink_heads": sinks}
        given = {k: v for k, v in every.items() if v not in (None, 0)}
        return ", ".join(f"{k}={v!r}" for k, v in given.items())
