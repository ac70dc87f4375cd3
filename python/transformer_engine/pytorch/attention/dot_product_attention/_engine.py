"""A call in the words of TransformerEngine: how Flash and Fused reach our engines."""

from typing import NamedTuple

from torch import Tensor

from te_attention.torch import attention
from transformer_engine.pytorch._refusal import refuse
from transformer_engine.pytorch.attention.dot_product_attention._masks import NAMES
from transformer_engine_torch.fused_attn import largest_of_heads
from transformer_engine_torch.layouts import starts_of


def check_small(
    bias_type: str, bias: Tensor | None, softmax_type: str, softmax_offset: Tensor | None
) -> None:
    """That a bias and an offset are there where they are used, and nowhere else."""
    if bias_type.endswith("_scale_bias") != (bias is not None):
        _refuse_small("core_attention_bias", bias, bias_type)
    if (softmax_type != "vanilla") != (softmax_offset is not None):
        _refuse_small("softmax_offset", softmax_offset, softmax_type)


def _refuse_small(name: str, tensor: Tensor | None, kind: str) -> None:
    seen, needed = ("None", "one") if tensor is None else ("a tensor", "None")
    refuse(name, seen, f"{needed} with {kind}")


class EngineCall(NamedTuple):
    """What a call asks for, beside its three tensors."""

    q_format: str
    kv_format: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    max_seqlens: tuple[int | None, int | None]
    scale: float | None
    dropout: float
    deterministic: bool
    alibi: bool | Tensor = False
    bias: Tensor | None = None
    pre_scale: bool = False
    sink: Tensor | None = None
    offsets: tuple[Tensor | None, Tensor | None] = (None, None)
    page_table: Tensor | None = None
    return_max_logit: bool = False

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """O, and the largest score of each head if it is asked for; with gradients."""
        causal, (left, right) = "causal" in self.mask, self.window
        same = self.q_format == self.kv_format
        options = {
            "format": self.q_format if same else f"{self.q_format}_{self.kv_format}",
            "mask": NAMES[causal, self.bottom_right],
            "scale": self.scale,
            "alibi": self.alibi,
            "dropout": self.dropout,
            "page_table": self.page_table,
            "deterministic": self.deterministic,
        }
        if left >= 0 or (right >= 0 and not causal):  # the mask itself says 0
            bounds = (left if left >= 0 else None, right if right >= 0 and not causal else None)
            options["window"] = bounds
        if self.bias is not None:
            options["bias"] = self.bias
            options["bias_type"] = "pre_scale" if self.pre_scale else "post_scale"
        if self.sink is not None:
            options["sink"] = self.sink.flatten()
        if "padding" in self.mask:
            options["cu_seqlens_q"], options["cu_seqlens_kv"] = self.cu_seqlens
        if self.q_format == "thd":
            starts = starts_of(self.cu_seqlens, self.offsets)
            options["max_seqlen_q"], options["offsets_q"] = self.max_seqlens[0], starts[0]
            if self.kv_format == "thd":
                options["max_seqlen_kv"], options["offsets_kv"] = self.max_seqlens[1], starts[1]
        if self.page_table is not None:
            options["max_seqlen_kv"] = self.max_seqlens[1]
        if not self.return_max_logit:
            return attention(q, k, v, **options)
        o, largest = attention(q, k, v, return_max_logit=True, **options)
        return o, largest_of_heads(largest, o.dtype)


def merged(out: Tensor) -> Tensor:
    """O with the last two dimensions, heads and elements, as one. Cheaper than flatten()."""
    *rows, heads, dim = out.shape
    return out.view(*rows, heads * dim)


def pages_of(inference_params: object, cu_seqlens: Tensor) -> Tensor | None:
    """The page table of a paged KV cache, for the sequences that there are."""
    if inference_params is None or not inference_params.is_paged:
        return None
    return inference_params.cache_manager.page_table[: cu_seqlens.shape[0] - 1]
