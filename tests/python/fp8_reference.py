"""Attention in float64 by its definition, and how far FP8 may be from it.

The bounds are on the norm of the error over the norm of the result, of normal inputs.
"""

import torch
from torch import Tensor

BOUNDS = {"o": 0.06, "dq": 0.11, "dk": 0.11, "dv": 0.085}


def reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, *, causal: bool = False,
    lens: list[int] | None = None, bias: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """O and the gradients of [b, s, h, d] tensors. `lens`: tokens of each sequence."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.double()
    rows, cols = scores.shape[-2:]
    hidden = torch.zeros(q.shape[0], 1, rows, cols, dtype=torch.bool)
    if causal:
        hidden |= torch.ones(rows, cols, dtype=torch.bool).triu(1)
    for b, n in enumerate(lens or []):
        hidden[b, :, n:], hidden[b, :, :, n:] = True, True
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    out = {"o": torch.einsum("bhij,bjhd->bihd", p, values)}
    if dout is not None:
        gradients = torch.autograd.grad(out["o"], (q, k, v), dout.double())
        out |= zip(("dq", "dk", "dv"), gradients, strict=True)
    return {name: value.detach() for name, value in out.items()}


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each error over the norm of the result."""
    return {
        name: float((value.double() - wanted[name]).norm() / wanted[name].norm())
        for name, value in found.items()
    }


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], slack: float = 1.0) -> None:
    """That every error is within its bound, and is not that of 16 bits."""
    for name, error in errors(found, wanted).items():
        assert error <= slack * BOUNDS[name], (name, error)
        assert error > 0.005, (name, error)  # else it was not computed in FP8
