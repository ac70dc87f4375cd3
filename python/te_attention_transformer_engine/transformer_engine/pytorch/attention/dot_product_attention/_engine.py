"""Translation of a call with TransformerEngine's options into a call of attention()."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from te_attention.torch import Fp8, PreparedAttention, attention
from te_attention.torch.functional import Mask, Window
from transformer_engine.pytorch._refusal import refuse, require
from transformer_engine.pytorch.constants import QKVLayouts
from transformer_engine_torch.fused_attn import largest_of_heads
from transformer_engine_torch.layouts import starts_of

from ._cp_ranks import Ranks
from ._layouts import formats_of
from ._masks import NAMES, bounds, is_bottom_right, normalised_mask

_BIASES = ("pre_scale_bias", "post_scale_bias")  # the types that need a tensor


def check_bias_and_offset(
    bias_type: str, bias: Tensor | None, softmax_type: str, softmax_offset: Tensor | None
) -> None:
    """Refuses a missing bias or softmax offset, and one that the options do not use."""
    if (bias is None) is (bias_type in _BIASES):
        _refuse_tensor("core_attention_bias", bias, bias_type)
    if (softmax_offset is None) is not (softmax_type == "vanilla"):
        _refuse_tensor("softmax_offset", softmax_offset, softmax_type)


def _refuse_tensor(name: str, tensor: Tensor | None, kind: str) -> None:
    seen, needed = ("None", "one") if tensor is None else ("a tensor", "None")
    refuse(name, seen, f"{needed} with {kind}")


@dataclass(frozen=True, slots=True)
class Form:
    """The options of attention() that a call's layout, mask and window determine."""

    format: str
    mask: Mask | None
    window: Window | None
    causal: bool
    bottom_right: bool
    bounds: tuple[int, int]  # the window as TransformerEngine writes it
    padded: bool  # the lengths apply
    ragged_q: bool
    ragged_kv: bool
    name: str = "no_mask"  # of the mask, as given


@lru_cache(maxsize=4096)
def form_of(qkv_layout: str, mask: str, window: tuple[int, int], bottom_right: bool | None) -> Form:
    """The Form of these options, cached."""
    require(qkv_layout in QKVLayouts, "qkv_layout", qkv_layout, "one of QKVLayouts")
    mask = normalised_mask(mask)
    require(mask != "arbitrary", "attn_mask_type", mask, "a mask that has a name")
    q_format, kv_format = formats_of(qkv_layout)
    causal, diagonal = "causal" in mask, is_bottom_right(mask, bottom_right)
    left, right = bounds(mask, window)
    right_bound = right if not causal else -1  # a causal mask already bounds the right side
    return Form(
        q_format if q_format == kv_format else f"{q_format}_{kv_format}",
        NAMES[causal, diagonal],
        None
        if left < 0 and right_bound < 0
        else tuple(n if n >= 0 else None for n in (left, right_bound)),
        causal,
        diagonal,
        (left, right),
        "padding" in mask,
        q_format == "thd",
        kv_format == "thd",
        mask,
    )


@dataclass(slots=True)
class EngineCall:
    """The options and optional tensors of a call."""

    form: Form
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    max_seqlens: tuple[int | None, int | None]
    scale: float | None
    dropout: float = 0.0
    deterministic: bool = False
    alibi: bool | Tensor = False
    bias: Tensor | None = None
    pre_scale: bool = False
    sink: Tensor | None = None
    offsets: tuple[Tensor | None, Tensor | None] = (None, None)
    page_table: Tensor | None = None
    return_max_logit: bool = False
    ranks: Ranks | None = None  # that share the sequences of this call

    def tensors(self) -> dict[str, Tensor]:
        """The optional tensors of attention(), by name."""
        form, (cu_q, cu_kv), (starts_q, starts_kv) = self.form, self.cu_seqlens, self.offsets
        if starts_q is not None or starts_kv is not None:
            starts_q, starts_kv = starts_of(self.cu_seqlens, self.offsets)
        found = {
            "bias": self.bias,
            "sink": None if self.sink is None else self.sink.flatten(),
            "cu_seqlens_q": cu_q if form.padded else None,
            "cu_seqlens_kv": cu_kv if form.padded else None,
            "offsets_q": starts_q if form.ragged_q else None,
            "offsets_kv": starts_kv if form.ragged_kv else None,
            "page_table": self.page_table,
            "alibi": self.alibi if isinstance(self.alibi, Tensor) else None,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def options(self) -> dict[str, object]:
        """The other options of attention(), by name."""
        form, (most_q, most_kv) = self.form, self.max_seqlens
        return {
            "mask": form.mask,
            "window": form.window,
            "bias_type": "pre_scale" if self.pre_scale else "post_scale",
            "alibi": self.alibi is True,
            "dropout": self.dropout,
            "scale": self.scale,
            "format": form.format,
            "max_seqlen_q": most_q if form.ragged_q else None,
            "max_seqlen_kv": most_kv if form.ragged_kv or self.page_table is not None else None,
            "return_max_logit": self.return_max_logit,
            "deterministic": self.deterministic,
        }

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[PreparedAttention, list[str]]:
        """A PreparedAttention for calls with the same options, and the names of its tensors.

        With dropout, the last tensor is the random state.
        """
        tensors = self.tensors()
        if self.dropout:
            tensors["rng_state"] = torch.empty(2, dtype=torch.int64, device=q.device)
        return PreparedAttention(q, k, v, tensors, **self.options()), list(tensors)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, fp8: Fp8 | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """O with heads merged, and with return_max_logit the largest score of each head."""
        words = self.options() | self.tensors()
        if self.ranks is None:
            out = attention(q, k, v, **words, fp8=fp8)
        else:
            out = self.ranks.attend(q, k, v, words)
        if not self.return_max_logit:
            return out.flatten(-2)
        o, of_rows = out
        largest = largest_of_heads(of_rows, of_rows.dtype)
        if self.ranks is not None:
            largest = self.ranks.largest(largest)
        return o.flatten(-2), largest.to(o.dtype)


class Backend(torch.nn.Module):
    """Base class of the three backends."""

    def __init__(
        self,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        attention_dropout_ctx: object = nullcontext,
        attention_type: str = "self",
        layer_number: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """softmax_scale: default 1 / sqrt(d); attention_dropout_ctx: context of dropout's draws."""
        super().__init__()
        self.softmax_scale, self.attention_type = softmax_scale, attention_type
        self.attention_dropout = attention_dropout
        self.attention_dropout_ctx = attention_dropout_ctx
        self.layer_number = 1 if layer_number is None else layer_number
        self.deterministic = deterministic
