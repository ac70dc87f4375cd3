"""FlashAttention: the installed flash-attn if it supports a call, otherwise our engines."""

import torch
from packaging.version import Version
from torch import Tensor

import transformer_engine_torch as tex
from te_attention.torch import Fp8
from te_attention.torch.fp8.formats import codes_of, is_fp8_tensor
from transformer_engine.pytorch._refusal import require
from transformer_engine.pytorch.cpu_offload import start_offload

from ._cp_ranks import ranks_of
from ._emulation import combine_and_quantize, get_attention_quantizers
from ._engine import Backend, EngineCall, form_of
from ._flash_package import is_v3, module_of
from ._layouts import pages_of
from ._masks import check_set_window_size

_V2 = Version("0")  # any installed version 2


class _PrepareQKVForFA(torch.autograd.Function):
    """Converts q, k, v, views of one sbh3d buffer, to three bshd tensors by one kernel."""

    @staticmethod
    def forward(_ctx, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> tuple:
        del key_layer, value_layer  # q's buffer contains them
        return tex.fa_prepare_fwd(query_layer).unbind(0)

    @staticmethod
    def backward(_ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
        packed = tex.fa_prepare_bwd(dq.contiguous(), dk.contiguous(), dv.contiguous())
        return packed.split(dq.shape[-1], dim=-1)


def _served(call: EngineCall, version: Version, q: Tensor) -> bool:
    """Whether an installed flash-attn computes the result that TransformerEngine specifies.

    Its masks are bottom-right aligned with the actual lengths, it supports padding only as thd, and
    it has no published slopes for ALiBi.
    """
    form = call.form
    unequal = form.ragged_q and call.cu_seqlens[0] is not call.cu_seqlens[1]
    return (
        q.is_cuda
        and module_of(version) is not None
        and "_" not in form.format
        and (form.ragged_q or not form.padded)
        and (form.bottom_right or not unequal)
        and call.alibi is not True
    )


def _by_package(
    call: EngineCall, version: Version, tensors: tuple[Tensor, Tensor, Tensor], num_splits: int
) -> Tensor:
    """O, computed by the installed package of this version."""
    module, options = module_of(version), {"softmax_scale": call.scale}
    options |= {"causal": call.form.causal, "deterministic": call.deterministic}
    options |= {"window_size": call.form.bounds}
    if is_v3(version):
        options["num_splits"] = num_splits
    else:
        options |= {"dropout_p": call.dropout}
        options |= {"alibi_slopes": call.alibi if isinstance(call.alibi, Tensor) else None}
    if call.form.ragged_q:
        lengths = (*call.cu_seqlens, *call.max_seqlens)
        out = module.flash_attn_varlen_func(*tensors, *lengths, **options)
    elif call.form.format == "sbhd":
        moved = (t.transpose(0, 1) for t in tensors)
        return _first(module.flash_attn_func(*moved, **options)).transpose(0, 1).contiguous()
    else:
        out = module.flash_attn_func(*tensors, **options)
    return _first(out)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _in_fp8(
    call: EngineCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    qkv_layout: str,
    quantizers: dict | None,
    fp8_output: bool,
) -> Tensor:
    """O of inference in FP8, by our engines: flash-attn's FP8 has no scale of P."""
    require(quantizers is not None, "quantizers", None, "those of a module with fp8")
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    require(not gradient, "fp8", True, "False with gradients: Flash runs inference in FP8")
    require(not call.dropout, "attention_dropout", call.dropout, "0 with fp8")
    of_qkv, of_o, of_s, *_ = get_attention_quantizers(True, quantizers)
    dtype = tensors[0].dtype
    if not is_fp8_tensor(tensors[0]):
        tensors = combine_and_quantize(qkv_layout, *tensors, of_qkv)
    scales = (t._scale_inv for t in tensors)
    fp8 = Fp8(*scales, of_s.scale, torch.reciprocal(of_s.scale), None, dtype)
    out = call.run(*map(codes_of, tensors), fp8=fp8)
    return of_o(out) if fp8_output else out


class FlashAttention(Backend):
    """Attention without scores in memory, with the options of flash-attn."""

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_layout: str = "sbh3d",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        alibi_slopes: Tensor | None = None,
        cp_group: object = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        fp8: bool = False,
        fp8_meta: dict | None = None,
        quantizers: dict | None = None,
        inference_params: object = None,
        flash_attention_backend: Version | None = _V2,
        fp8_output: bool = False,
        num_splits: int = 1,
        alibi: bool = False,
        bottom_right_diagonal: bool | None = None,
    ) -> Tensor:
        """O with heads merged, in the format of q.

        attention_mask has no effect: cu_seqlens define the padding. The last two arguments are
        additions to TransformerEngine's: ALiBi with the published slopes, and windows' diagonal.
        """
        ranks = ranks_of(cp_group, cp_stream, cp_comm_type, fp8)
        require(fp8 or not fp8_output, "fp8_output", True, "False without fp8")
        del fp8_meta, cp_global_ranks
        window = tuple(check_set_window_size(attn_mask_type, window_size))
        form = form_of(qkv_layout, attn_mask_type, window, bottom_right_diagonal)
        require(
            not form.padded or (cu_seqlens_q is not None and cu_seqlens_kv is not None),
            "cu_seqlens_q or cu_seqlens_kv",
            "None",
            f"int32 [batch + 1] with mask {attn_mask_type}"
            + (" (attention_mask alone is not enough)" if attention_mask is not None else ""),
        )
        call = EngineCall(
            form,
            (cu_seqlens_q, cu_seqlens_kv),
            (max_seqlen_q, max_seqlen_kv),
            self.softmax_scale,
            self.attention_dropout if self.training else 0.0,
            self.deterministic,
            alibi if alibi_slopes is None else alibi_slopes,
            page_table=pages_of(inference_params, cu_seqlens_q),
            ranks=ranks,
        )
        tensors = (query_layer, key_layer, value_layer)
        start_offload(*tensors, offload_base_tensor=True)
        if fp8:
            require(num_splits == 1, "num_splits", num_splits, "1 with fp8")
            return _in_fp8(call, tensors, qkv_layout, quantizers, fp8_output)
        with self.attention_dropout_ctx():
            version = flash_attention_backend or _V2
            if ranks is None and inference_params is None and _served(call, version, query_layer):
                return _by_package(call, version, tensors, num_splits).flatten(-2)
            require(num_splits == 1, "num_splits", num_splits, "1 without flash-attn-3")
            return call.run(*tensors)
