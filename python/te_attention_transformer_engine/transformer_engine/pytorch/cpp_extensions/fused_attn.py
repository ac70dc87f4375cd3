"""Fused attention with options as strings and defaults, over transformer_engine_torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

import transformer_engine_torch as tex
from te_attention.torch.fp8.formats import is_fp8_tensor
from transformer_engine_torch.calls import ForwardCall
from transformer_engine_torch.fused_attn import TORCH_DTYPES, forward, largest_of_heads

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]


class UnknownNameError(KeyError, ValueError):
    """A name that a table lacks. KeyError is what TransformerEngine's tables raise."""

    __str__ = Exception.__str__  # KeyError shows the text in quotes


class _Table(dict):
    """Values by name; the error of a missing name has that of the argument."""

    def __init__(self, argument: str, values: dict) -> None:
        super().__init__(values)
        self._argument = argument

    def __missing__(self, name: object) -> None:
        needed = f"one of {', '.join(self)}"
        raise UnknownNameError(f"{self._argument} is {name!r}; needs {needed}")


def _by_name(argument: str, enum: type, suffix: str = "") -> _Table:
    names = (member.name.removeprefix("NVTE_").removesuffix(suffix).lower() for member in enum)
    return _Table(argument, dict(zip(names, enum, strict=True)))


QKVFormat = _by_name("qkv_format", tex.NVTE_QKV_Format)
QKVLayout = _by_name("qkv_layout", tex.NVTE_QKV_Layout)
AttnBiasType = _by_name("attn_bias_type", tex.NVTE_Bias_Type)
AttnMaskType = _by_name("attn_mask_type", tex.NVTE_Mask_Type, suffix="_MASK")
AttnMaskType["no_mask"] = AttnMaskType.pop("no")
_SOFTMAX_TYPES = {
    "vanilla": tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    "off-by-one": tex.NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX,
    "learnable": tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX,
}
SoftmaxType = _Table("softmax_type", _SOFTMAX_TYPES)
FusedAttnBackend = {
    backend.name.removeprefix("NVTE_"): backend for backend in tex.NVTE_Fused_Attn_Backend
}
TORCH_DType = {
    **TORCH_DTYPES,
    tex.DType.kFloat8E4M3: torch.uint8,
    tex.DType.kFloat8E5M2: torch.uint8,
}

META_QKV = tex.FP8FwdTensors.GEMM1_OUTPUT
META_O = tex.FP8FwdTensors.GEMM2_INPUT
META_S = tex.FP8FwdTensors.GEMM3_OUTPUT
META_DQKV = tex.FP8BwdTensors.GRAD_OUTPUT1
META_DO = tex.FP8BwdTensors.GRAD_INPUT2
META_DP = tex.FP8BwdTensors.GRAD_INPUT3

_PHILOX_ELEMENTS = 16  # has no effect here
_SIDES = 2  # of a window


def _check_backend(backend: tex.NVTE_Fused_Attn_Backend) -> None:
    if backend not in FusedAttnBackend.values() or backend == FusedAttnBackend["No_Backend"]:
        raise ValueError(
            f"fused_attention_backend is {backend!r}; needs F16_max512_seqlen, "
            "F16_arbitrary_seqlen or FP8 of FusedAttnBackend"
        )


def _check_fp8(q: object, backend: tex.NVTE_Fused_Attn_Backend, **needed: object) -> None:
    """That FP8 tensors come with the backend FP8 and its quantizers, and no others do."""
    is_fp8 = is_fp8_tensor(q)
    if is_fp8 is not (backend == FusedAttnBackend["FP8"]):
        wanted = "FP8 with" if is_fp8 else "one of F16 without"
        raise ValueError(f"fused_attention_backend is {backend!r}; needs {wanted} FP8 tensors")
    for name, value in needed.items():
        if is_fp8 and value is None:
            raise ValueError(f"{name} is None; needs a quantizer with the backend FP8")


def _check_bias(attn_bias: Tensor | None, attn_bias_type: str, dtype: torch.dtype) -> None:
    if attn_bias_type not in ("pre_scale_bias", "post_scale_bias"):
        return
    if attn_bias is None or attn_bias.dtype != dtype:
        seen = None if attn_bias is None else attn_bias.dtype
        raise ValueError(f"attn_bias is {seen}; needs a tensor of {dtype} with {attn_bias_type}")


def _diagonal(bottom_right_diagonal: bool | None, attn_mask_type: str) -> bool:
    if bottom_right_diagonal is None:
        return attn_mask_type.endswith("bottom_right")
    if bottom_right_diagonal not in (False, True):
        raise ValueError(
            f"bottom_right_diagonal is {bottom_right_diagonal!r}; needs None, False or True"
        )
    return bottom_right_diagonal


def _check_window(window_size: tuple[int, int]) -> None:
    if not isinstance(window_size, Sequence) or len(window_size) != _SIDES:
        raise ValueError(f"window_size is {window_size!r}; needs (left, right), two integers")


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    fused_attention_backend: tex.NVTE_Fused_Attn_Backend,
    attn_bias: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    s_quantizer: object = None,
    o_quantizer: object = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    rng_gen: torch.Generator | None = None,
    softmax_offset: Tensor | None = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> tuple:
    """Returns O and the auxiliary tensors: LSE, random state, then bias and softmax offset.

    With return_max_logit also the largest score of each head, [heads].
    """
    _check_backend(fused_attention_backend)
    _check_window(window_size)
    _check_fp8(q, fused_attention_backend, s_quantizer=s_quantizer, o_quantizer=o_quantizer)
    _check_bias(attn_bias, attn_bias_type, fake_dtype if is_fp8_tensor(q) else q.dtype)
    # fmt: off
    result = forward(ForwardCall(
        max_seqlen_q, max_seqlen_kv, is_training,
        q.size(-1) ** -0.5 if attn_scale is None else attn_scale, dropout, fast_zero_fill,
        QKVLayout[qkv_layout], AttnBiasType[attn_bias_type], AttnMaskType[attn_mask_type],
        SoftmaxType[softmax_type], window_size, _diagonal(bottom_right_diagonal, attn_mask_type),
        cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, page_table_k, page_table_v, s_quantizer, o_quantizer, attn_bias,
        softmax_offset, rng_gen, _PHILOX_ELEMENTS, return_max_logit, cuda_graph,
    ))
    # fmt: on
    lse = result.lse.unsqueeze(-1)
    aux = [*[lse] * (1 + is_fp8_tensor(q)), result.rng_state, *result.inputs]
    if not return_max_logit:
        return result.o, aux
    return result.o, aux, largest_of_heads(result.max_logit, result.o.dtype)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: torch.dtype,
    dqkv_dtype: tex.DType,
    aux_ctx_tensors: list[Tensor],
    fused_attention_backend: tex.NVTE_Fused_Attn_Backend,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    s_quantizer: object = None,
    dp_quantizer: object = None,
    dqkv_quantizer: object = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    deterministic: bool = False,
    cuda_graph: bool = False,
) -> list[Tensor | None]:
    """Returns [dQ, dK, dV, dBias or None, dSoftmaxOffset or None]."""
    _check_backend(fused_attention_backend)
    _check_window(window_size)
    _check_fp8(q, fused_attention_backend, s_quantizer=s_quantizer, dp_quantizer=dp_quantizer)
    # fmt: off
    return tex.fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, q.size(-1) ** -0.5 if attn_scale is None else attn_scale,
        dropout, fast_zero_fill, QKVLayout[qkv_layout], AttnBiasType[attn_bias_type],
        AttnMaskType[attn_mask_type], SoftmaxType[softmax_type], window_size,
        _diagonal(bottom_right_diagonal, attn_mask_type), deterministic, cu_seqlens_q,
        cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer,
        cuda_graph,
    )
    # fmt: on
