"""FLOP formulas for torch.utils.flop_counter: 2 FLOP per multiply-add of a visible pair."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from te_attention.torch._arguments import FORMATS, Arguments, formats_of
from te_attention.torch._library import OPS

# The number of arguments before the common ones: of backward, of backward_minimal, and of the
# gradients' memory in the _out operators.
INCOMING, INCOMING_MINIMAL, OUTGOING = 6, 3, 3


def _lengths(cu_seqlens: Tensor | None, batch: int, most: int) -> list[int]:
    # The contents of a fake tensor are unknown: then every sequence counts as full.
    if cu_seqlens is None or isinstance(cu_seqlens, FakeTensor) or cu_seqlens.is_meta:
        return [most] * batch
    return cu_seqlens.diff().tolist()


def _visible(rows: int, cols: int, a: Arguments) -> int:
    shift = cols - rows if "bottom_right" in a.mask else 0
    right = 0 if "causal" in a.mask else a.window_right
    if right == -1 and a.window_left == -1:
        return rows * cols
    total = 0
    for row in range(rows):
        first = 0 if a.window_left == -1 else max(0, row + shift - a.window_left)
        last = cols - 1 if right == -1 else min(cols - 1, row + shift + right)
        total += max(0, last - first + 1)
    return total


def _pairs(a: Arguments) -> int:
    """Pairs of row and column that the mask allows, over batch and query heads."""
    form_q, form_kv = formats_of(a)
    batch_q, row_q, head_q = FORMATS[form_q]
    rows, heads = a.q.shape[row_q], a.q.shape[head_q]
    cols = a.k.shape[FORMATS[form_kv][1]]
    if a.page_table is not None:
        cols *= a.page_table.shape[1]
    batch = a.cu_seqlens_q.shape[0] - 1 if batch_q is None else a.q.shape[batch_q]
    lengths_q = _lengths(a.cu_seqlens_q, batch, a.max_seqlen_q if a.max_seqlen_q >= 0 else rows)
    lengths_kv = _lengths(a.cu_seqlens_kv, batch, a.max_seqlen_kv if a.max_seqlen_kv >= 0 else cols)
    return heads * sum(_visible(r, c, a) for r, c in zip(lengths_q, lengths_kv, strict=True))


@register_flop_formula(
    [OPS.attention, OPS.forward, OPS.forward_minimal, OPS.inference], get_raw=True
)
def forward_flops(*arguments, out_val=None, **_) -> int:  # noqa: ARG001
    """The two products of the forward pass."""
    a = Arguments(*arguments)
    return 2 * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])


@register_flop_formula(OPS.inference_plain, get_raw=True)
def inference_plain_flops(q, k, v, causal=False, out_val=None, **_) -> int:  # noqa: ARG001
    """The same, of the operator with the fewest arguments."""
    return forward_flops(q, k, v, "bhsd", "causal" if causal else "none")


def _backward_flops(arguments: tuple) -> int:
    a = Arguments(*arguments)
    return 2 * _pairs(a) * (3 * a.q.shape[-1] + 2 * a.v.shape[-1])


@register_flop_formula(OPS.backward, get_raw=True)
def backward_flops(*arguments, out_val=None, **_) -> int:  # noqa: ARG001
    """The five products of the backward pass: the scores are computed again."""
    return _backward_flops(arguments[INCOMING:])


@register_flop_formula(OPS.backward_minimal, get_raw=True)
def backward_minimal_flops(*arguments, out_val=None, **_) -> int:  # noqa: ARG001
    """The same as backward."""
    return _backward_flops(arguments[INCOMING_MINIMAL:])


@register_flop_formula(OPS.backward_out, get_raw=True)
def backward_out_flops(*arguments, out_val=None, **_) -> int:  # noqa: ARG001
    """The same as backward."""
    return _backward_flops(arguments[OUTGOING + INCOMING :])


@register_flop_formula(OPS.backward_minimal_out, get_raw=True)
def backward_minimal_out_flops(*arguments, out_val=None, **_) -> int:  # noqa: ARG001
    """The same as backward."""
    return _backward_flops(arguments[OUTGOING + INCOMING_MINIMAL :])
