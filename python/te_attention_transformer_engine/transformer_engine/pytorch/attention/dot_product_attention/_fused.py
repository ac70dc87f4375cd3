"""FusedAttention: our engines behind TransformerEngine's functions and autograd function."""

from contextlib import nullcontext

import torch
from torch import Tensor

from te_attention import environment
from transformer_engine.pytorch._refusal import refuse, require
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)
from transformer_engine.pytorch.cpu_offload import (
    is_cpu_offload_enabled,
    mark_activation_offload,
    start_offload,
)
from transformer_engine.pytorch.graph import is_graph_capturing

from . import _fused_fp8
from ._cp_ranks import ranks_of
from ._engine import Backend, EngineCall, Form, check_bias_and_offset, form_of
from ._layouts import pages_of

_FLASH_BACKWARD = "NVTE_FUSED_ATTN_USE_FAv2_BWD"
Q, BIAS, SINK, INPUTS = 9, 12, 29, 32  # the positions of q, bias and sink in the arguments


class FusedAttnFunc(torch.autograd.Function):
    """An autograd function with gradients for q, k, v, attn_bias and softmax_offset."""

    # fmt: off
    @staticmethod
    def forward(
        ctx, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v, q, k, v, attn_bias,
        attn_scale, dropout_p, fast_zero_fill, qkv_layout, attn_bias_type, attn_mask_type,
        softmax_type, window_size, bottom_right_diagonal, rng_gen, fused_attention_backend,
        use_FAv2_bwd, fp8, fp8_meta, quantizers, deterministic, softmax_offset,  # noqa: N803
        fp8_output, layer_number, return_max_logit,
    ) -> Tensor | tuple[Tensor, Tensor]:
        # fmt: on
        require(fp8 or not fp8_output, "fp8_output", True, "False without fp8")
        require(not use_FAv2_bwd, "use_FAv2_bwd", True, "False")
        del layer_number
        start_offload(q, k, v, offload_base_tensor=True)
        capturing = is_graph_capturing()
        # The arguments that both directions take, by name.
        ctx.options = {
            "attn_scale": attn_scale,
            "dropout": dropout_p,
            "fast_zero_fill": fast_zero_fill,
            "qkv_layout": qkv_layout,
            "attn_bias_type": attn_bias_type,
            "attn_mask_type": attn_mask_type,
            "softmax_type": softmax_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "cuda_graph": capturing,
        }
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        ctx.deterministic, ctx.fp8 = deterministic, fp8
        if fp8:
            require(not return_max_logit, "return_max_logit", True, "False with fp8")
            sizes = (is_training, max_seqlen_q, max_seqlen_kv)
            pages, small = (page_table_k, page_table_v), (attn_bias, softmax_offset, rng_gen)
            common = (lengths, sizes, pages, small, ctx.options, fp8_meta, quantizers, fp8_output)
            return _fused_fp8.forward(ctx, q, k, v, *common)
        # fmt: off
        out, aux, *max_logit = fused_attn_fwd(
            is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, q.dtype,
            fused_attention_backend, attn_bias, cu_seqlens_q_padded, cu_seqlens_kv_padded,
            page_table_k, page_table_v, rng_gen=rng_gen, softmax_offset=softmax_offset,
            return_max_logit=return_max_logit, **ctx.options,
        )
        # fmt: on
        if is_cpu_offload_enabled():
            mark_activation_offload(out)
        ctx.save_for_backward(q, k, v, out, *lengths, *aux)
        ctx.max_seqlens, ctx.backend = (max_seqlen_q, max_seqlen_kv), fused_attention_backend
        if not return_max_logit:
            return out
        ctx.mark_non_differentiable(*max_logit)
        return out, *max_logit

    @staticmethod
    def backward(ctx, d_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.fp8:
            dq, dk, dv, dbias, dsink = _fused_fp8.backward(ctx, d_out, ctx.deterministic)
        else:
            dq, dk, dv, dbias, dsink = _differentiate(ctx, d_out)
        gradients: list[Tensor | None] = [None] * (INPUTS + 1)
        gradients[Q : Q + 3] = dq, dk, dv
        needs = ctx.needs_input_grad
        gradients[BIAS] = dbias if needs[BIAS] else None
        gradients[SINK] = dsink if needs[SINK] else None
        return tuple(gradients)


def _differentiate(ctx, d_out: Tensor) -> list[Tensor | None]:
    q, k, v, out, cu_q, cu_kv, *padded_and_aux = ctx.saved_tensors
    # fmt: off
    return fused_attn_bwd(
        *ctx.max_seqlens, cu_q, cu_kv, q, k, v, out, d_out.contiguous(), q.dtype,
        TE_DType[d_out.dtype], padded_and_aux[2:], ctx.backend, *padded_and_aux[:2],
        deterministic=ctx.deterministic, **ctx.options,
    )
    # fmt: on


def qkv_dim(form: Form, side: int) -> int:
    """The dimension of the rows of q (side 0) or k, of the format of its side."""
    q, _, kv = form.format.partition("_")
    return ((kv or q) if side else q).find("s") % 3  # of thd: 2, which no caller uses


class FusedAttention(Backend):
    """Attention by our engines, with the options of fused_attn_fwd."""

    def __init__(
        self,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        attention_dropout_ctx: object = nullcontext,
        attention_type: str = "self",
        layer_number: int | None = None,
        deterministic: bool = False,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        """As FlashAttention; softmax_type and return_max_logit as in DotProductAttention."""
        common = (attention_dropout, attention_dropout_ctx, attention_type, layer_number)
        super().__init__(softmax_scale, *common, deterministic)
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        if environment.switch(_FLASH_BACKWARD):
            refuse(_FLASH_BACKWARD, "set", "0: flash-attn is no part of Fused")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_layout: str = "sbh3d",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        window_size: tuple[int, int] = (-1, -1),
        bottom_right_diagonal: bool | None = None,
        fused_attention_backend: object = FusedAttnBackend["F16_arbitrary_seqlen"],
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        fast_zero_fill: bool = True,
        cp_group: object = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        fp8: bool = False,
        fp8_meta: dict | None = None,
        quantizers: dict | None = None,
        pad_between_seqs: bool = False,
        inference_params: object = None,
        softmax_offset: Tensor | None = None,
        fp8_output: bool = False,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """O with heads merged, in the format of q; with return_max_logit also max_logit [heads].

        attention_mask and pad_between_seqs have no effect: cu_seqlens and the padded cu_seqlens
        define the padding. The last argument is an addition to TransformerEngine's: ALiBi slopes.
        """
        ranks = ranks_of(cp_group, cp_stream, cp_comm_type, fp8)
        require(fp8 or not fp8_output, "fp8_output", True, "False without fp8")
        form = form_of(qkv_layout, attn_mask_type, tuple(window_size), bottom_right_diagonal)
        if cu_seqlens_q is None or cu_seqlens_kv is None:
            missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_kv"
            refuse(missing, None, "int32 [batch + 1]")
        check_bias_and_offset(
            core_attention_bias_type, core_attention_bias, self.softmax_type, softmax_offset
        )
        del cp_global_ranks, attention_mask, pad_between_seqs
        del fused_attention_backend, fast_zero_fill  # without effect
        alibi = core_attention_bias_type == "alibi"
        if alibi_slopes is not None and not alibi:
            refuse("alibi_slopes", "a tensor", f"None with {core_attention_bias_type}")
        call = EngineCall(
            form,
            (cu_seqlens_q, cu_seqlens_kv),
            (max_seqlen_q, max_seqlen_kv),
            self.softmax_scale,
            self.attention_dropout if self.training else 0.0,
            self.deterministic,
            alibi if alibi_slopes is None else alibi_slopes,
            core_attention_bias,
            core_attention_bias_type == "pre_scale_bias",
            softmax_offset,
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            pages_of(inference_params, cu_seqlens_q),
            self.return_max_logit,
            ranks,
        )
        tensors = (query_layer, key_layer, value_layer)
        if fp8:
            with self.attention_dropout_ctx() if call.dropout else nullcontext():
                return self._in_fp8(call, tensors, qkv_layout, fp8_meta, quantizers, fp8_output)
        start_offload(*tensors, offload_base_tensor=True)
        with self.attention_dropout_ctx() if call.dropout else nullcontext():
            return call.run(*tensors)

    def _in_fp8(
        self,
        call: EngineCall,
        tensors: tuple[Tensor, Tensor, Tensor],
        qkv_layout: str,
        fp8_meta: dict | None,
        quantizers: dict | None,
        fp8_output: bool,
    ) -> Tensor:
        """O with heads merged, by FusedAttnFunc."""
        if fp8_meta is None or quantizers is None:
            missing = "fp8_meta" if fp8_meta is None else "quantizers"
            refuse(missing, None, "that of a module with fp8")
        form, rows = call.form, [t.shape[qkv_dim(call.form, i)] for i, t in enumerate(tensors[:2])]
        most_q, most_kv = call.max_seqlens
        ragged = (form.ragged_q, form.ragged_kv)
        most = [m if r else n for m, r, n in zip((most_q, most_kv), ragged, rows, strict=True)]
        if call.page_table is not None:
            most[1] = most_kv
        padded = call.offsets if any(ragged) else (None, None)
        bias_type = "no_bias" if call.bias is None else "post_scale_bias"
        if call.pre_scale:
            bias_type = "pre_scale_bias"
        elif call.alibi is True:
            bias_type = "alibi"
        require(not isinstance(call.alibi, Tensor), "alibi_slopes", "a tensor", "None with fp8")
        # fmt: off
        out = FusedAttnFunc.apply(
            self.training, *most, *call.cu_seqlens, *padded, call.page_table, call.page_table,
            *tensors, call.bias, call.scale, call.dropout, True, qkv_layout, bias_type,
            form.name, self.softmax_type, form.bounds, form.bottom_right, None,
            FusedAttnBackend["FP8"], False, True, fp8_meta, quantizers, call.deterministic,
            call.sink, fp8_output, self.layer_number, self.return_max_logit,
        )
        # fmt: on
        return out.view(*out.shape[:-2], -1)
