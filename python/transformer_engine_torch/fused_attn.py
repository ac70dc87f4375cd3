"""fused_attn_fwd, fused_attn_bwd and their selector: TransformerEngine's arguments become ours."""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention import _library as core
from te_attention.torch import new_rng_state
from te_attention.torch._arguments import NONE, Arguments, trimmed
from te_attention.torch._library import OPS
from transformer_engine_torch.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine_torch.layouts import Layout, layout_of

_forward, _backward_out = OPS.forward.default, OPS.backward_out.default

TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}

# Our mask, and whether lengths count. Indexed by NVTE_Mask_Type.
_MASKS = (
    ("none", False),
    ("none", True),
    ("causal", False),
    ("causal", True),
    ("causal_bottom_right", False),
    ("causal_bottom_right", True),
)


class ForwardCall(NamedTuple):
    """What fused_attn_fwd takes, in its order.

    Three have no effect: set_zero, since every row of O is written, with zeros where there is no
    token; rng_elts_per_thread, since all of dropout follows from one draw; and cuda_graph, since
    every call can be captured.
    """

    max_seqlen_q: int
    max_seqlen_kv: int
    is_training: bool
    attn_scale: float
    p_dropout: float
    set_zero: bool
    qkv_layout: NVTE_QKV_Layout
    bias_type: NVTE_Bias_Type
    attn_mask_type: NVTE_Mask_Type
    softmax_type: NVTE_Softmax_Type
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    Q: Tensor
    K: Tensor
    V: Tensor
    fake_dtype: torch.dtype
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    page_table_k: Tensor | None
    page_table_v: Tensor | None
    s_quantizer: object
    o_quantizer: object
    Bias: Tensor | None
    SoftmaxOffset: Tensor | None
    rng_gen: torch.Generator | None
    rng_elts_per_thread: int
    return_max_logit: bool
    cuda_graph: bool


class BackwardCall(NamedTuple):
    """What fused_attn_bwd takes, in its order. set_zero and cuda_graph are as in ForwardCall."""

    max_seqlen_q: int
    max_seqlen_kv: int
    attn_scale: float
    p_dropout: float
    set_zero: bool
    qkv_layout: NVTE_QKV_Layout
    bias_type: NVTE_Bias_Type
    attn_mask_type: NVTE_Mask_Type
    softmax_type: NVTE_Softmax_Type
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    deterministic: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741
    dO: Tensor  # noqa: N815
    fake_dtype: torch.dtype
    dqkv_type: DType
    Aux_CTX_Tensors: list[Tensor]
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    s_quantizer: object
    dp_quantizer: object
    dqkv_quantizer: object
    cuda_graph: bool


class ForwardResult(NamedTuple):
    """O, and what backward needs. `inputs`: those of bias and softmax offset that are in use."""

    o: Tensor
    lse: Tensor
    max_logit: Tensor
    rng_state: Tensor
    inputs: list[Tensor]


def _refuse(name: str, seen: object, needed: str) -> None:
    raise ValueError(f"{name} is {seen}; needs {needed}")


def _check_no_fp8(call: ForwardCall | BackwardCall) -> None:
    for name in call._fields:
        if name.endswith("_quantizer") and getattr(call, name) is not None:
            raise NotImplementedError(
                f"{name} is a {type(getattr(call, name)).__name__}; needs None: "
                "FP8 attention is not there yet"
            )
    if call.fake_dtype != call.Q.dtype:
        _refuse("fake_dtype", call.fake_dtype, f"the dtype of Q, {call.Q.dtype}")


def _check_rows(call: ForwardCall | BackwardCall, layout: Layout, padding: bool) -> None:
    """The lengths given as numbers against the shapes: a ragged or paged side has only numbers."""
    sides = [("max_seqlen_q", call.max_seqlen_q, "Q", call.Q, layout.q)]
    if not layout.paged:
        sides.append(("max_seqlen_kv", call.max_seqlen_kv, "K", call.K, layout.kv))
    for name, length, tensor_name, tensor, form in sides:
        if form == "thd":
            continue
        rows = tensor.shape[form.index("s")]
        if length > rows or (length < rows and not padding):
            _refuse(name, length, f"the {rows} rows of {tensor_name}")


def _starts(call: ForwardCall | BackwardCall, layout: Layout) -> tuple[Tensor | None, ...]:
    """Where sequences begin in ragged Q and K, if not where their lengths say."""
    plain = (call.cu_seqlens_q, call.cu_seqlens_kv)
    starts = [call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded]
    if all(a is None or a is b for a, b in zip(starts, plain, strict=True)):
        return None, None
    starts = [b if a is None else a for a, b in zip(starts, plain, strict=True)]
    if layout.shared == 3:  # one buffer has one set of starts
        starts[1] = starts[0]
    return tuple(
        start if form == "thd" else None
        for start, form in zip(starts, (layout.q, layout.kv), strict=True)
    )


def _pages(call: ForwardCall | BackwardCall, layout: Layout) -> tuple[Tensor | None, ...]:
    tables = (getattr(call, "page_table_k", None), getattr(call, "page_table_v", None))
    if not layout.paged:
        if tables != (None, None):
            _refuse("page_table_k or page_table_v", "a tensor", "None, or a paged layout")
        return tables
    if isinstance(call, BackwardCall):
        _refuse("qkv_layout", call.qkv_layout.name, "one without pages: they serve inference only")
    if any(table is None for table in tables):
        _refuse("page_table_k or page_table_v", "None", "int32 [batch, pages] with a paged layout")
    batch = call.cu_seqlens_q.shape[0] - 1  # a table may have rows for more sequences
    k, v = (t if t.shape[0] == batch else t[:batch] for t in tables)
    return k, None if tables[0] is tables[1] else v


def _has_bias(call: ForwardCall | BackwardCall) -> bool:
    return NVTE_Bias_Type(call.bias_type).name in ("NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS")


def _has_sink(call: ForwardCall | BackwardCall) -> bool:
    return NVTE_Softmax_Type(call.softmax_type) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX


def _arguments(
    call: ForwardCall | BackwardCall,
    training: bool,
    rng_state: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
) -> Arguments:
    """The arguments of our operators. A softmax offset is a sink, whichever of the two types."""
    _check_no_fp8(call)
    layout = layout_of(call.qkv_layout)
    mask, padding = _MASKS[NVTE_Mask_Type(call.attn_mask_type)]
    ragged_q, ragged_kv = layout.q == "thd", layout.kv == "thd"
    if (ragged_q or ragged_kv or layout.paged) and not padding:
        _refuse("attn_mask_type", mask, f"a padding mask with layout {call.qkv_layout.name}")
    _check_rows(call, layout, padding)
    offsets_q, offsets_kv = _starts(call, layout)
    table_k, table_v = _pages(call, layout)
    drops = training and call.p_dropout > 0
    alibi = call.bias_type == NVTE_Bias_Type.NVTE_ALIBI
    return Arguments(
        call.Q,
        call.K,
        call.V,
        layout.format,
        "bottom_right" if mask == "none" and call.bottom_right_diagonal else mask,
        training,
        call.attn_scale,
        *call.window_size,
        call.p_dropout if drops else NONE,
        rng_state if drops else None,
        bias,
        None if sink is None else sink.flatten(),
        call.cu_seqlens_q if padding else None,
        call.cu_seqlens_kv if padding else None,
        call.max_seqlen_q if ragged_q else -1,
        call.max_seqlen_kv if ragged_kv or layout.paged else -1,
        table_k,
        alibi=alibi,
        offsets_q=offsets_q,
        offsets_kv=offsets_kv,
        page_table_v=table_v,
        pre_scale_bias=call.bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS,
        max_logit=getattr(call, "return_max_logit", False),
        deterministic=getattr(call, "deterministic", False),
    )


def forward(call: ForwardCall) -> ForwardResult:
    """Forward, with the LSE of training and of inference alike."""
    uses = {"Bias": _has_bias(call), "SoftmaxOffset": _has_sink(call)}
    for name, used in uses.items():
        given = getattr(call, name) is not None
        if given != used:
            kind = call.bias_type if name == "Bias" else call.softmax_type
            words = ("None", "a tensor")
            _refuse(name, words[given], f"{words[used]} with {kind.name}")
    if call.is_training and call.p_dropout > 0:
        rng_state = new_rng_state(call.Q.device, call.rng_gen)
    else:  # nothing reads it
        rng_state = call.Q.new_empty((2,), dtype=torch.int64)
    arguments = _arguments(call, call.is_training, rng_state, call.Bias, call.SoftmaxOffset)
    o, lse, max_logit = _forward(*trimmed(arguments))
    inputs = [getattr(call, name) for name, used in uses.items() if used]
    return ForwardResult(o, lse, max_logit, rng_state, inputs)


def fused_attn_fwd(*arguments: object) -> list[Tensor]:
    """Takes the fields of ForwardCall; returns O, then the auxiliary tensors for backward.

    Those are the LSE ([b, h, sq, 1], or ragged [t, h, 1]), the random state, the bias and the
    softmax offset, where there are such. With return_max_logit Max and Sum_Exp take the LSE's
    place: the largest score of a row, and the sum of exponentials relative to it.
    """
    call = ForwardCall(*arguments)
    o, lse, largest, rng_state, inputs = forward(call)
    stats = [lse]
    if call.return_max_logit:
        sums = torch.where(largest == -torch.inf, 0, (lse - largest).exp())
        stats = [largest, sums]
    return [o, *(stat.unsqueeze(-1) for stat in stats), rng_state, *inputs]


def fused_attn_bwd(*arguments: object) -> list[Tensor | None]:
    """Takes the fields of BackwardCall; returns dQ, dK, dV, dBias or None, dSoftmaxOffset or None.

    dQ, dK and dV share memory as the layout says. dBias has the shape of the bias.
    """
    call = BackwardCall(*arguments)
    if TORCH_DTYPES.get(call.dqkv_type) != call.Q.dtype:
        _refuse("dqkv_type", DType(call.dqkv_type).name, f"that of Q, {call.Q.dtype}")
    has_bias, has_sink = _has_bias(call), _has_sink(call)
    names = ["stats", "rng_state"] + ["Bias"] * has_bias + ["SoftmaxOffset"] * has_sink
    if len(call.Aux_CTX_Tensors) != len(names):
        _refuse("Aux_CTX_Tensors", f"{len(call.Aux_CTX_Tensors)} tensors", ", ".join(names))
    stats, rng_state, *inputs = call.Aux_CTX_Tensors
    bias = inputs[0] if has_bias else None
    sink = inputs[-1] if has_sink else None
    ours = trimmed(_arguments(call, True, rng_state, bias, sink))
    gradients = layout_of(call.qkv_layout).new_gradients(call.Q, call.K, call.V)
    dbias, dsink = _backward_out(
        *gradients, call.dO, None, call.O, stats.squeeze(-1), has_bias, has_sink, *ours
    )
    return [*gradients, dbias if has_bias else None, dsink.view_as(sink) if has_sink else None]


@functools.cache
def _selector() -> Callable[..., int]:
    out = core.library().nvte_get_fused_attn_backend
    sizes, windows, flags = [ctypes.c_size_t] * 6, [ctypes.c_int64] * 2, [ctypes.c_bool] * 3
    enums = [ctypes.c_int] * 6
    out.argtypes = [ctypes.c_bool, *enums, ctypes.c_float, *sizes, *windows, *flags]
    out.restype = ctypes.c_int
    return out


_SELECTED = (
    DType,
    DType,
    NVTE_QKV_Layout,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
)


def get_fused_attn_backend(is_training: bool, *arguments: object) -> NVTE_Fused_Attn_Backend:
    """The backend that a call with these options counts as, by the core's own checks.

    Takes is_training, q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type, softmax_type,
    p_dropout, num_attn_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim_qk,
    head_dim_v, window_size_left, window_size_right, return_max_logit, cuda_graph, deterministic.
    """
    # What the core would throw at a C++ caller has to be found here.
    enums = [kind(value) for kind, value in zip(_SELECTED, arguments, strict=False)]
    sizes = arguments[7:13]
    if enums[0] != enums[1]:
        _refuse("kv_dtype", enums[1].name, f"q_dtype, {enums[0].name}")
    if not all(0 <= size < 2**63 for size in sizes):
        _refuse("a head count, length or head dim", min(sizes), "0 to 2^63 - 1")
    if enums[0] in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend  # fused_attn_fwd refuses FP8
    return NVTE_Fused_Attn_Backend(_selector()(is_training, *enums, *arguments[6:]))


def get_cudnn_version() -> int:
    """A version that passes every rule that callers have for cuDNN, which is not used here."""
    return 92100
