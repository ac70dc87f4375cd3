"""Attention as a module: it stores the options and registers the parameters that it owns."""

import inspect

import torch
from torch import Tensor, nn

from te_attention.torch._errors import refuse_unknown
from te_attention.torch._types import check_number
from te_attention.torch.functional import Mask, Sink, Window, attention, explain

# The shape of q, k and v with which options are checked at construction, by format.
_SHAPES = {"thd": (1, 1, 8)}
_OWN = ("bias", "rng_state", "cu_seqlens_q", "cu_seqlens_kv", "offsets_q", "offsets_kv")
# Arguments of one call: tensors of its batch. forward() takes them.
PER_CALL = frozenset(
    (*_OWN, "page_table", "page_table_v", "origin", "fp8", "k_descale", "v_descale")
)


class Attention(nn.Module):
    """The core of an attention layer: q, k, v in, O out. Projections belong to the caller.

    Args:
        mask, window, softcap, scale, format, deterministic: as in
            :func:`te_attention.torch.attention`.
        dropout: probability of dropping; only in training mode.
        sink_heads: number of learnable sinks, one for each query head; 0: none.
        sink: "off_by_one", or initial values of learnable sinks; None: as `sink_heads` says.
        alibi: True, or slopes, which become a buffer.
        options: any other option of attention(), but tensors that belong to one call; those are
            given to forward().

    Raises:
        TypeError, ValueError, RuntimeError: an option is invalid, as attention() would raise. Names
            and values are checked here, shapes and dtypes with the first tensors.
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
        sink: Sink | None = None,
        alibi: bool | Tensor | None = False,
        deterministic: bool | None = None,
        **options: object,
    ) -> None:
        """Checks and stores the options."""
        super().__init__()
        if unknown := {n: v for n, v in options.items() if n not in _NAMES}:
            refuse_unknown(unknown, attention)
        per_call = PER_CALL if options.get("fp8") != "current" else PER_CALL - {"fp8"}
        for name in per_call.intersection(options):
            raise TypeError(f"{name} is given at construction; needs forward(): it is of one call")
        if sink_heads and sink is not None:
            raise ValueError(f"sink is given with sink_heads={sink_heads}; needs one of the two")
        if isinstance(sink_heads, bool) or not isinstance(sink_heads, int) or sink_heads < 0:
            raise ValueError(f"sink_heads is {sink_heads!r}; needs a number of heads, or 0")
        self.options = {
            "mask": mask,
            "window": window,
            "softcap": softcap,
            "scale": scale,
            "format": format,
            "deterministic": deterministic,
            **options,
        }
        if isinstance(sink, Tensor) and not sink.numel():
            raise ValueError(f"sink is of shape {list(sink.shape)}; needs [heads]")
        self.dropout = dropout
        values = sink if isinstance(sink, Tensor) else torch.zeros(sink_heads)
        self.sink = nn.Parameter(values.detach().clone()) if values.numel() else None
        self._off_by_one = None if isinstance(sink, Tensor) else sink
        slopes = alibi.detach().clone() if isinstance(alibi, Tensor) else None
        self.register_buffer("alibi", slopes)
        self._standard_alibi = alibi if slopes is None else False
        self._check()

    def _check(self) -> None:
        """Asks the engines of the CPU about the options, with the smallest tensors."""
        for name in ("softcap", "dropout", "scale"):
            check_number(name, self.dropout if name == "dropout" else self.options[name])
        form = self.options["format"]
        q_format = form.split("_")[0] if isinstance(form, str) else form
        q = torch.zeros(_SHAPES.get(q_format, (1, 1, 1, 8)))
        kv_format = form.split("_")[-1] if isinstance(form, str) else form
        k = torch.zeros(_SHAPES.get(kv_format, (1, 1, 1, 8)))
        cu_seqlens = torch.zeros(2, dtype=torch.int32)
        lengths = {}
        if q_format == "thd":
            lengths["cu_seqlens_q"] = cu_seqlens
        if kv_format == "thd":
            lengths["cu_seqlens_kv"] = cu_seqlens
        if "bias_type" in self.options:
            lengths["bias"] = torch.zeros(1, 1, 1, 1)
        checked = {n: v for n, v in self.options.items() if n not in _ELSEWHERE}
        explain(
            *(q, k, k),
            **checked,
            **lengths,
            dropout=self.dropout,
            sink=self._off_by_one,
            alibi=self._standard_alibi,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor | tuple[Tensor, ...]:
        """attention(q, k, v) with the module's options; `options` adds to them or replaces them."""
        own = {
            "dropout": self.dropout if self.training else 0.0,
            "sink": self._off_by_one if self.sink is None else self.sink,
            "alibi": self._standard_alibi if self.alibi is None else self.alibi,
        }
        return attention(q, k, v, **{**self.options, **own, **options})

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        sinks = 0 if self.sink is None else self.sink.numel()
        alibi = "slopes" if self.alibi is not None else self._standard_alibi
        every = {**self.options, "dropout": self.dropout, "sink_heads": sinks, "alibi": alibi}
        every["sink"] = self._off_by_one
        given = {k: v for k, v in every.items() if v not in (None, 0)}
        return ", ".join(f"{k}={v!r}" for k, v in given.items())


_NAMES = frozenset(inspect.signature(attention).parameters) - {"q", "k", "v"}
# Checked with the first call: a generator is of a device, and bounds are of real lengths.
_ELSEWHERE = ("generator", "max_seqlen_q", "max_seqlen_kv")
