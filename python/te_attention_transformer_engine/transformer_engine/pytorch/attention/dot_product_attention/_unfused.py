"""Attention in plain PyTorch with the scores in memory: the reference of the other backends."""

from contextlib import nullcontext

import torch
from torch import Tensor

from te_attention import environment
from te_attention.torch import dropout_mask, new_rng_state
from transformer_engine.pytorch._refusal import require
from transformer_engine.pytorch.utils import attention_mask_func
from transformer_engine_torch.fused_attn import largest_of_heads

from ._emulation import Rounding
from ._engine import Backend, check_bias_and_offset
from ._fp8 import emulates
from ._layouts import formats_of
from ._lengths import ConvertBSHDtoTHD, ConvertTHDtoBSHD, get_padding_mask
from ._masks import get_alibi, get_full_mask, is_bottom_right
from .softmax import FusedScaleMaskSoftmax

_TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def _heads_first(
    tensor: Tensor, form: str, cu_seqlens: Tensor, rows: int, offsets: Tensor | None
) -> Tensor:
    """The tensor of any format as [b, heads, rows, dim]."""
    if form == "thd":
        tensor, form = ConvertTHDtoBSHD.apply(tensor, cu_seqlens, rows, offsets), "bshd"
    return tensor.permute(_TO_BHSD[form])


def _zeroed(
    masks: Tensor | tuple[Tensor, Tensor] | None, q: Tensor, *of_keys: Tensor
) -> tuple[Tensor, ...]:
    """The tensor with zeros in the padding, because 0 * NaN is NaN."""
    if masks is None:
        return q, *of_keys
    of_q, of_kv = (
        mask.transpose(-1, -2) for mask in (masks if isinstance(masks, tuple) else (masks, masks))
    )
    return q.masked_fill(of_q, 0), *(t.masked_fill(of_kv, 0) for t in of_keys)


def _heads_last(
    out: Tensor, form: str, cu_seqlens: Tensor, tokens: int, offsets: Tensor | None
) -> Tensor:
    """The inverse of _heads_first(), with heads merged."""
    if form == "thd":
        bshd = out.transpose(1, 2).contiguous()
        return ConvertBSHDtoTHD.apply(bshd, cu_seqlens, tokens, offsets).flatten(-2)
    return out.permute((0, 2, 1, 3) if form == "bshd" else (2, 0, 1, 3)).flatten(-2).contiguous()


def _largest(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The largest visible score of each head."""
    seen = scores if mask is None else scores.masked_fill(mask, -torch.inf)
    return largest_of_heads(seen.detach().flatten(2), scores.dtype)


class UnfusedDotProductAttention(Backend):
    """Two products with a softmax between them. Scores and probabilities have the dtype of q.

    Scores with ALiBi are float32, because bfloat16 rounds large distances (43 to multiples of 1/4).
    """

    def __init__(
        self,
        softmax_scale: float,
        attention_type: str = "self",
        attention_dropout: float = 0.0,
        attention_dropout_ctx: object = nullcontext,
        layer_number: int | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        """As FlashAttention; softmax_type and return_max_logit as in DotProductAttention."""
        super().__init__(softmax_scale, attention_dropout, attention_dropout_ctx, attention_type)
        self.layer_number, self.softmax_type = layer_number, softmax_type
        self.return_max_logit = return_max_logit
        self.scale_mask_softmax = FusedScaleMaskSoftmax(attention_mask_func)
        self.apply_qk_layer_scaling = layer_number is not None and environment.switch(
            "NVTE_APPLY_QK_LAYER_SCALING"
        )

    def forward(
        self,
        _alibi_cache: dict | None,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_layout: str = "sbh3d",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        inference_params: object = None,
        softmax_offset: Tensor | None = None,
        fp8: bool = False,
        fp8_meta: dict | None = None,
        quantizers: dict | None = None,
        fp8_output: bool = False,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """O with heads merged, in the format of q; with return_max_logit also max_logit [heads].

        The last two arguments are additions: where sequences begin in thd tensors with gaps.
        """
        require(fp8 or not fp8_output, "fp8_output", True, "False without fp8")
        require(
            not fp8 or emulates(), "fp8", True, "NVTE_UnfusedDPA_Emulate_FP8=1: it emulates FP8"
        )
        rounded = Rounding(fp8, fp8_meta, quantizers, qkv_layout)
        query_layer, key_layer, value_layer = rounded.qkv(query_layer, key_layer, value_layer)
        if core_attention_bias_type != "alibi":
            check_bias_and_offset(
                core_attention_bias_type, core_attention_bias, self.softmax_type, softmax_offset
            )
        q_format, kv_format = formats_of(qkv_layout)
        if inference_params is not None and inference_params.is_paged:
            key_layer, value_layer = inference_params.convert_paged_to_nonpaged(self.layer_number)
            entries = key_layer.shape[0] + 1  # the buffer of lengths may have more sequences
            cu_seqlens_q, cu_seqlens_kv = cu_seqlens_q[:entries], cu_seqlens_kv[:entries]
        if q_format != "thd":
            max_seqlen_q = query_layer.shape[q_format.index("s")]
        if kv_format != "thd":
            max_seqlen_kv = key_layer.shape[kv_format.index("s")]
        q = _heads_first(query_layer, q_format, cu_seqlens_q, max_seqlen_q, cu_seqlens_q_padded)
        k, v = (
            _heads_first(t, kv_format, cu_seqlens_kv, max_seqlen_kv, cu_seqlens_kv_padded)
            for t in (key_layer, value_layer)
        )
        kind = "cross" if isinstance(attention_mask, tuple) else self.attention_type
        if "padding" in attn_mask_type and attention_mask is None:
            kind, sizes = "cross", (max_seqlen_q, max_seqlen_kv)
            attention_mask = get_padding_mask(len(q), cu_seqlens_q, cu_seqlens_kv, *sizes, kind)
        bottom_right = is_bottom_right(attn_mask_type, bottom_right_diagonal)
        padding = attention_mask if "padding" in attn_mask_type else None
        q, k, v = _zeroed(padding, q, k, v)
        sizes = (max_seqlen_q, max_seqlen_kv)
        rule = (attn_mask_type, attention_mask, window_size, kind, bottom_right)
        mask_type, mask, *actual = get_full_mask(*sizes, *rule, like=q)
        if core_attention_bias_type == "alibi":
            options = {"bottom_right_alignment": bottom_right, "device": q.device}
            options["alibi_slopes"] = alibi_slopes
            _, core_attention_bias = get_alibi(_alibi_cache, q.shape[1], *sizes, *actual, **options)
        scores, factor = self._scores(q, k, core_attention_bias_type, core_attention_bias)
        max_logit = _largest(scores, mask).to(q.dtype) * factor if self.return_max_logit else None
        scores = rounded.scores(scores)
        out = self._weighted(scores, v, mask, mask_type, factor, softmax_offset, rounded)
        (out,) = _zeroed(padding, out)
        tokens = query_layer.shape[0]
        out = _heads_last(out, q_format, cu_seqlens_q, tokens, cu_seqlens_q_padded)
        out = rounded.out(out, fp8_output)
        return (out, max_logit) if self.return_max_logit else out

    def _scores(
        self, q: Tensor, k: Tensor, bias_type: str, bias: Tensor | None
    ) -> tuple[Tensor, float]:
        """The scores [b, heads, rows, columns], and the scale that the softmax has to apply.

        Query heads of one group are adjacent, so they are rows of one product; K is not copied.
        """
        batch, heads, rows, dim = q.shape
        groups, cols = k.shape[1:3]
        scaled = self.apply_qk_layer_scaling and q.dtype == torch.float16
        factor = float(self.layer_number) if scaled else 1.0
        alpha = self.softmax_scale / factor
        left = q.reshape(batch * groups, heads // groups * rows, dim)
        right = k.reshape(batch * groups, cols, dim).transpose(1, 2)
        before = bias_type == "pre_scale_bias"
        out = left.new_empty((batch * groups, left.shape[1], cols))
        separate = before or alpha == 0  # with alpha=0 PyTorch may not write the output
        scores = torch.baddbmm(out, left, right, beta=0.0, alpha=1.0 if separate else alpha)
        scores = scores.view(batch, heads, rows, cols)
        if before:
            scores = scores + bias
        if separate:
            scores = scores * alpha
        if not before and bias_type != "no_bias":
            scores = scores + bias / factor
        return scores if bias_type == "alibi" else scores.to(q.dtype), factor

    def _weighted(
        self,
        scores: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mask_type: str,
        factor: float,
        softmax_offset: Tensor | None,
        rounded: Rounding,
    ) -> Tensor:
        """O [b, heads, rows, dim]. A sink is an additional column, dropped after the softmax."""
        batch, heads, rows, cols = scores.shape
        if softmax_offset is not None:
            sink = softmax_offset.to(scores.dtype).view(1, -1, 1, 1) / factor
            scores = torch.cat([scores, sink.expand(batch, -1, rows, 1)], dim=-1)
            if mask is not None:
                mask = torch.cat([mask, mask.new_zeros((*mask.shape[:-1], 1))], dim=-1)
            mask_type = "arbitrary"
        probabilities = self.scale_mask_softmax(scores, mask, mask_type, factor)[..., :cols]
        if self.attention_dropout and self.training:
            with self.attention_dropout_ctx():
                state = new_rng_state(scores.device)
            keep = dropout_mask(state, self.attention_dropout, (batch, heads, rows, cols))
            probabilities = probabilities * keep / (1.0 - self.attention_dropout)
        probabilities = rounded.probabilities(probabilities)
        groups, dim = v.shape[1], v.shape[-1]
        left = probabilities.to(v.dtype).reshape(batch * groups, heads // groups * rows, cols)
        right = v.reshape(batch * groups, cols, dim)
        return torch.bmm(left, right).view(batch, heads, rows, dim)
