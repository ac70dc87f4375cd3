"""fused_attn_fwd and fused_attn_bwd, translated into the operators of te_attention.torch."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch import new_rng_state
from te_attention.torch.fp8.formats import is_fp8_tensor
from te_attention.torch.operators import Arguments
from te_attention.torch.operators import backward_out as backward_operator
from te_attention.torch.operators import forward as forward_operator
from transformer_engine_torch import fp8
from transformer_engine_torch.calls import BackwardCall, ForwardCall
from transformer_engine_torch.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine_torch.fp8 import REAL
from transformer_engine_torch.layouts import Layout, layout_of, starts_of

Call = ForwardCall | BackwardCall

TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}

# (te_attention's mask, whether lengths apply), indexed by NVTE_Mask_Type.
_MASKS = (
    ("none", False),
    ("none", True),
    ("causal", False),
    ("causal", True),
    ("causal_bottom_right", False),
    ("causal_bottom_right", True),
)
_QUANTIZERS = {
    kind: tuple(name for name in kind._fields if name.endswith("_quantizer"))
    for kind in (ForwardCall, BackwardCall)
}


def _refuse(name: str, seen: object, needed: str) -> None:
    raise ValueError(f"{name} is {seen}; needs {needed}")


class Options(NamedTuple):
    """The options that the enums of a call determine. `aux`: the names of its auxiliary tensors.

    `lengths`: the max_seqlen arguments that a shape also determines, as (argument, tensor,
    dimension).
    """

    layout: Layout
    mask: str
    padding: bool
    pre_scale_bias: bool
    alibi: bool
    has_bias: bool
    has_sink: bool
    aux: tuple[str, ...]
    lengths: tuple[tuple[str, str, int], ...]


@functools.cache
def _options_of(
    layout: NVTE_QKV_Layout,
    bias: NVTE_Bias_Type,
    mask: NVTE_Mask_Type,
    softmax: NVTE_Softmax_Type,
    bottom_right: bool,
) -> Options:
    shape, (name, padding) = layout_of(layout), _MASKS[NVTE_Mask_Type(mask)]
    pre_scale = NVTE_Bias_Type(bias) == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS
    has_bias = pre_scale or bias == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
    has_sink = NVTE_Softmax_Type(softmax) != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    sides = (("max_seqlen_q", "Q", shape.q), ("max_seqlen_kv", "K", shape.kv))[: 2 - shape.paged]
    return Options(
        shape,
        "bottom_right" if name == "none" and bottom_right else name,
        padding,
        pre_scale,
        bias == NVTE_Bias_Type.NVTE_ALIBI,
        has_bias,
        has_sink,
        ("stats", "rng_state", *["Bias"] * has_bias, *["SoftmaxOffset"] * has_sink),
        tuple((length, name, form.index("s")) for length, name, form in sides if form != "thd"),
    )


def _options(call: Call) -> Options:
    """The options of a call. Checks its numbers and types."""
    if call.Q.dtype.itemsize == 1:
        if call.fake_dtype not in REAL.values():
            _refuse("fake_dtype", call.fake_dtype, "float16, bfloat16 or float32")
    else:
        _check_without_fp8(call)
    options = _options_of(
        call.qkv_layout,
        call.bias_type,
        call.attn_mask_type,
        call.softmax_type,
        bool(call.bottom_right_diagonal),
    )
    for name, tensor, axis in options.lengths:
        length, rows = getattr(call, name), getattr(call, tensor).shape[axis]
        if length != rows and (length > rows or not options.padding):
            _refuse(name, length, f"the {rows} rows of {tensor}")
    return options


def _check_without_fp8(call: Call) -> None:
    for name in _QUANTIZERS[type(call)]:
        if getattr(call, name) is not None:
            _refuse(name, f"a {type(getattr(call, name)).__name__}", "None without FP8 tensors")
    if call.fake_dtype != call.Q.dtype:
        _refuse("fake_dtype", call.fake_dtype, f"the dtype of Q, {call.Q.dtype}")


def _starts(call: Call, layout: Layout) -> tuple[Tensor | None, ...]:
    """The offsets of the sequences in ragged Q and K, or None without gaps."""
    padded = (call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded)
    q, kv = starts_of((call.cu_seqlens_q, call.cu_seqlens_kv), padded)
    if layout.shared == 3:  # one buffer has one set of offsets
        kv = q
    return q if layout.q == "thd" else None, kv if layout.kv == "thd" else None


def _pages(call: Call, layout: Layout) -> tuple[Tensor | None, ...]:
    k, v = call.page_table_k, call.page_table_v
    if not layout.paged:
        if k is not None or v is not None:
            _refuse("page_table_k or page_table_v", "a tensor", "None, or a paged layout")
        return None, None
    if isinstance(call, BackwardCall):
        _refuse("qkv_layout", call.qkv_layout.name, "one without pages: they serve inference only")
    if k is None or v is None:
        _refuse("page_table_k or page_table_v", "None", "int32 [batch, pages] with a paged layout")
    batch = call.cu_seqlens_q.shape[0] - 1  # a table may have rows for more sequences
    return k[:batch], None if v is k else v[:batch]


def _arguments(
    call: Call, options: Options, rng_state: Tensor, bias: Tensor | None, sink: Tensor | None
) -> Arguments:
    """The arguments of the operators. Both softmax types with an offset use a sink."""
    layout, padding = options.layout, options.padding
    offsets_q, offsets_kv = _starts(call, layout)
    table_k, table_v = _pages(call, layout)
    drops = call.is_training and call.p_dropout != 0
    left, right = call.window_size
    if right == 0 and options.mask.startswith("causal"):
        right = -1  # the causal mask implies it, and a default is not passed
    return Arguments(
        call.Q,
        call.K,
        call.V,
        layout.format,
        options.mask,
        call.is_training,
        call.attn_scale,
        left,
        right,
        call.p_dropout if drops else 0.0,
        rng_state if drops else None,
        bias,
        None if sink is None else sink.flatten(),
        call.cu_seqlens_q if padding or layout.q == "thd" else None,
        call.cu_seqlens_kv if padding or layout.kv == "thd" or layout.paged else None,
        call.max_seqlen_q if layout.q == "thd" else -1,
        call.max_seqlen_kv if layout.kv == "thd" or layout.paged else -1,
        table_k,
        alibi=options.alibi,
        offsets_q=offsets_q,
        offsets_kv=offsets_kv,
        page_table_v=table_v,
        pre_scale_bias=options.pre_scale_bias,
        max_logit=call.return_max_logit,
        deterministic=call.deterministic,
    )


class ForwardResult(NamedTuple):
    """O, and the tensors for backward. `inputs`: bias and softmax offset, if used."""

    o: Tensor
    lse: Tensor
    max_logit: Tensor | None
    rng_state: Tensor
    inputs: list[Tensor]


def _check_given(name: str, tensor: Tensor | None, used: bool, kind: object) -> None:
    if (tensor is not None) != used:
        words = ("None", "a tensor")
        _refuse(name, words[tensor is not None], f"{words[used]} with {kind.name}")


def forward(call: ForwardCall) -> ForwardResult:
    """Runs forward. It returns LSE in inference, too."""
    run = forward_operator
    if is_fp8_tensor(call.Q):
        call, run = fp8.forward(call)
    options = _options(call)
    bias, sink = call.Bias, call.SoftmaxOffset
    _check_given("Bias", bias, options.has_bias, call.bias_type)
    _check_given("SoftmaxOffset", sink, options.has_sink, call.softmax_type)
    if call.is_training and call.p_dropout != 0:
        rng_state = new_rng_state(call.Q.device, call.rng_gen)
    else:  # nothing reads it
        rng_state = torch.empty(2, dtype=torch.int64, device=call.Q.device)
    output = run(_arguments(call, options, rng_state, bias, sink))
    inputs = [tensor for tensor in (bias, sink) if tensor is not None]
    return ForwardResult(*output, rng_state, inputs)


def largest_of_heads(max_logit: Tensor, dtype: torch.dtype) -> Tensor:
    """[heads] of the largest scores of all rows, [batch, heads, rows] or [tokens, heads].

    -inf where there are no rows.
    """
    if not max_logit.numel():
        return max_logit.new_full((max_logit.shape[1],), -torch.inf, dtype=dtype)
    return max_logit.amax([i for i in range(max_logit.dim()) if i != 1]).to(dtype)


def fused_attn_fwd(*arguments: object) -> list[Tensor]:
    """Takes the fields of ForwardCall; returns O, then the auxiliary tensors for backward.

    The auxiliary tensors are the LSE ([b, h, sq, 1], or ragged [t, h, 1]), the random state, and
    the bias and softmax offset if given. With return_max_logit, Max and Sum_Exp replace the LSE:
    the largest score of a row, and the sum of exponentials relative to it. With FP8 tensors the
    LSE comes twice: M and ZInv, of which backward reads the first.
    """
    call = ForwardCall(*arguments)
    is_fp8 = is_fp8_tensor(call.Q)
    o, lse, largest, rng_state, inputs = forward(call)
    stats = [lse, lse] if is_fp8 else [lse]
    if call.return_max_logit:
        sums = torch.where(largest == -torch.inf, 0, (lse - largest).exp())
        stats = [largest, sums]
    return [o, *(stat.unsqueeze(-1) for stat in stats), rng_state, *inputs]


def _aux_tensors(call: BackwardCall, options: Options, is_fp8: bool) -> list[Tensor]:
    """LSE, random state and the rest. A backward in 16 bits takes the list of FP8 too."""
    given, names = call.Aux_CTX_Tensors, options.aux
    if is_fp8:
        names = ("M", "ZInv", *names[1:])
    if len(given) == len(options.aux) + 1:
        return [given[0], *given[2:]]
    if len(given) != len(names):
        _refuse("Aux_CTX_Tensors", f"{len(given)} tensors", ", ".join(names))
    return given


def _backward_plain(gradients: list[Tensor], *arguments: object) -> tuple:
    return gradients, *backward_operator(gradients, *arguments)


def fused_attn_bwd(*arguments: object) -> list[Tensor | None]:
    """Takes the fields of BackwardCall; returns dQ, dK, dV, dBias or None, dSoftmaxOffset or None.

    dQ, dK and dV have the layout of Q, K and V. dBias has the shape of the bias.
    """
    call = BackwardCall(*arguments)
    is_fp8 = is_fp8_tensor(call.Q)
    dtype = fp8.gradient_dtype(call) if is_fp8 else None
    call, run = fp8.backward(call) if is_fp8 else (call, _backward_plain)
    options = _options(call)
    if not is_fp8 and TORCH_DTYPES.get(call.dqkv_type) != call.Q.dtype:
        _refuse("dqkv_type", DType(call.dqkv_type).name, f"that of Q, {call.Q.dtype}")
    stats, rng_state, *inputs = _aux_tensors(call, options, is_fp8)
    bias = inputs[0] if options.has_bias else None
    sink = inputs[-1] if options.has_sink else None
    ours = _arguments(call, options, rng_state, bias, sink)
    gradients = options.layout.new_gradients(call.Q, call.K, call.V, dtype)
    lse, wanted = stats.squeeze(-1), (options.has_bias, options.has_sink)
    gradients, dbias, dsink = run(gradients, call.dO, None, call.O, lse, ours, *wanted)
    return [*gradients, dbias, None if dsink is None else dsink.view_as(sink)]
