"""The operators without autograd, for layers that translate the interface of another library.

Models call attention(). A compatibility layer whose interface has separate forward and backward
passes, and whose caller keeps O and LSE in between, calls forward() and backward_out(). `ops` is
torch.ops.te_attention, with every operator: importing this module registers them.
"""

from collections.abc import Callable

from torch import Tensor

from te_attention.torch._arguments import Arguments, trimmed
from te_attention.torch._library import OPS
from te_attention.torch._options import MINIMAL

__all__ = [
    "Arguments",
    "backward_out",
    "forward",
    "fp8_attention_backward",
    "fp8_attention_forward",
    "ops",
]

ops = OPS
_forward, _forward_minimal = OPS.forward.default, OPS.forward_minimal.default
_backward_out = OPS.backward_out.default
_fp8_forward = OPS.fp8_attention_forward.default, OPS.fp8_attention_forward_minimal.default
_fp8_backward = OPS.fp8_attention_backward.default, OPS.fp8_attention_backward_minimal.default


def forward(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """O, LSE and, with arguments.max_logit, the row maxima of the scores.

    O and LSE have the layout of the operator `forward`; LSE is valid also without `training`.
    It calls the operator with the fewest arguments, because each argument takes time in PyTorch's
    dispatcher.
    """
    passed = trimmed(arguments)
    if len(passed) <= MINIMAL:
        return *_forward_minimal(*passed), None
    o, lse, max_logit = _forward(*passed)
    return o, lse, max_logit if arguments.max_logit else None


def backward_out(
    gradients: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    arguments: Arguments,
    wants_dbias: bool = False,
    wants_dsink: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes dQ, dK and dV into `gradients`; returns dBias and dSink, each None unless wanted.

    `o` and `lse` are the results of forward() for the same `arguments`.
    """
    incoming = (dout, dlse, o, lse, wants_dbias, wants_dsink)
    dbias, dsink = _backward_out(*gradients, *incoming, *trimmed(arguments))
    return dbias if wants_dbias else None, dsink if wants_dsink else None


def fp8_attention_forward(arguments: tuple) -> Callable:
    """The operator of that name with the fewest arguments, for the arguments of attention alone."""
    return _fp8_forward[len(arguments) <= MINIMAL]._op


def fp8_attention_backward(arguments: tuple) -> Callable:
    """The same for backward."""
    return _fp8_backward[len(arguments) <= MINIMAL]._op
