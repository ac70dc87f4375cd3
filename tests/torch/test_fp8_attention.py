"""Attention in FP8 with its casts: fakes, and errors of arguments.

test_fp8_attention_direct.py compares results with those of the separate operators.
"""

import pytest
import torch

from te_attention.torch._library import OPS


def _of_one() -> tuple:
    """A scale and an amax."""
    return torch.ones(1), torch.zeros(1)


def _given(casts: bool) -> tuple[tuple, tuple]:
    """The arguments of the operators with casts: those of forward and of backward."""
    q, k, v = (torch.randn(2, 9, n, 16).bfloat16() for n in (4, 2, 2))
    form, state = ("bshd", "causal", True), (torch.ones(3), torch.zeros(3))
    # Of delayed scaling, or of current scaling with S's.
    scales = (None, None, *state, 0, 1, 2) if casts else (*_of_one(), *state, -1, 1, -1)
    recipe = False, 0.0
    forward = (*scales, "float8_e4m3fn", *recipe, q, k, v, *form)
    o, saved = OPS.fp8_attention_forward_minimal(*forward)
    shapes = [t.new_empty(()).expand(t.shape) for t in (q, k, v)]
    dout, kept = torch.randn(o.shape).bfloat16(), None if casts else o
    types = "float8_e4m3fn", "float8_e5m2"
    return forward, (dout, saved, kept, *scales, *types, *recipe, *shapes, *form)


@pytest.mark.parametrize("casts", [True, False])
def test_fakes_of_attention_with_casts(casts: bool) -> None:
    """test_schema cannot compare memory that operators leave uninitialised between arrays."""
    for name, given in zip(("forward", "backward"), _given(casts), strict=True):
        for few in ("", "_minimal"):
            operator = getattr(OPS, f"fp8_attention_{name}{few}").default
            torch.library.opcheck(operator, given, test_utils=("test_faketensor",))


def test_attention_with_casts_names_what_is_wrong() -> None:
    forward, backward = (list(given) for given in _given(True))

    def fails(operator: object, given: list, place: int, value: object, text: str) -> None:
        changed = [*given[:place], value, *given[place + 1 :]]
        with pytest.raises(RuntimeError, match=text):
            operator(*changed)

    run, back = OPS.fp8_attention_forward_minimal, OPS.fp8_attention_backward_minimal
    q = forward[10]
    fails(run, forward, 10, q.transpose(0, 1).contiguous().transpose(0, 1), "q is not contiguous")
    fails(run, forward, 10, q.int(), r"q\.dtype is int32; needs float16, bfloat16, float32")
    fails(run, forward, 11, q.half(), r"k\.dtype is float16; needs bfloat16")
    fails(run, forward, 13, "bhsd", 'format is "bhsd"; needs one in which the heads of a row')
    fails(run, forward, 3, torch.zeros(2), r"amaxes is of shape \[2\]; needs that of scales, \[3\]")
    fails(run, forward, 2, torch.ones(3).half(), r"scales\.dtype is float16; needs float32")
    fails(run, forward, 6, 3, "o is 3; needs -1 to 2: a place in scales")
    fails(run, forward, 5, -1, "s is -1; needs 0 to 2: a place in scales")
    fails(run, forward, 7, "bfloat16", "output_dtype is bf16; needs one of e4m3, e5m2")
    fails(back, backward, 1, backward[1][1:], "saved is of .* elements; needs .* what forward")
    fails(back, backward, 0, backward[0][:1], "dout is of shape .*; needs the elements of O")
    current, _ = (list(given) for given in _given(False))
    fails(run, current, 0, torch.ones(2), r"input_scale is of shape \[2\]; needs float32 \[1\]")
