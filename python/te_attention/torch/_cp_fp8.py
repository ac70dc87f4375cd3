"""FP8 of context_parallel_attention(fp8="current"): each tensor has one scale on all ranks.

The ranks agree on the largest magnitudes, so that the values are those of one device. Tensors are
cast before they travel, and travel as bytes, which every transport and copy knows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch._cp_exchange import Program, of_all_ranks
from te_attention.torch._cp_parts import Problem
from te_attention.torch._fp8 import largest_norm, name_of, scales_of_dp, scales_of_s
from te_attention.torch._library import OPS
from te_attention.torch.fp8.cast import dense, largest_into
from te_attention.torch.fp8.formats import E4M3, E5M2

_cast, _scale = OPS.fp8_quantize.default, OPS.fp8_scale.default


class Scales(NamedTuple):
    """Scales of the tensors of a call, and the type of its results. None: not known yet."""

    dtype: torch.dtype
    q: Tensor
    k: Tensor
    v: Tensor
    s: tuple[Tensor, Tensor]  # the scale and its inverse, as for dP
    dout: Tensor | None = None
    dp: tuple[Tensor | None, Tensor | None] = (None, None)

    def of_forward(self) -> tuple:
        """As the operators take them."""
        return (self.q, self.k, self.v, *self.s, None)

    def of_backward(self) -> tuple:
        """As the operators take them."""
        return (self.q, self.k, self.v, *self.s, None, self.dout, *self.dp, None, None, None)


def _largest_of_all(p: Problem, values: Tensor) -> Program:
    """The maxima over ranks."""
    return torch.stack((yield from of_all_ranks(p, values))).amax(0)


def _largest(tensors: list[Tensor], *more: Tensor) -> Tensor:
    """The largest magnitude of each tensor, and other values: float32."""
    found = torch.zeros(len(tensors), dtype=torch.float32, device=tensors[0].device)
    for i, tensor in enumerate(tensors):
        largest_into(tensor, found[i : i + 1])
    return torch.cat([found, *(t.float().view(1) for t in more)])


def _bytes(tensor: Tensor, largest: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """A tensor in FP8, and the inverse of its scale."""
    scale, _ = _scale(largest, dtype)
    values, scale_inv = _cast(dense(tensor), scale, None, dtype)
    return values.view(torch.uint8), scale_inv


def cast_inputs(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Program:
    """q, k and v in E4M3, and the scales of forward."""
    largest = yield from _largest_of_all(p, _largest([q, k, v]))
    cast = [_bytes(t, largest[i : i + 1], E4M3.name) for i, t in enumerate((q, k, v))]
    scales = Scales(q.dtype, *(c[1] for c in cast), scales_of_s(p.dropout, q.device))
    return [c[0] for c in cast], scales


def cast_gradient(
    p: Problem, scales: Scales, q: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
) -> Program:
    """dO in E5M2, and the scales of backward. v: as the caller gave it.

    The bound of dP has room for the rounding of dO and V.
    """
    of_lse = dout.new_zeros(()) if dlse is None or not dlse.numel() else dlse.abs().amax()
    mine = _largest([dout], largest_norm(dout), largest_norm(v), of_lse)
    largest = yield from _largest_of_all(p, mine)
    of_dout, norm_dout, norm_v, of_lse = largest.split(1)
    scale = q.shape[-1] ** -0.5 if p.options["scale"] is None else p.options["scale"]
    dp = scales_of_dp(norm_v, norm_dout, of_lse, p.dropout, scale, E5M2.name)
    cast, scale_inv = _bytes(dout, of_dout, E5M2.name)
    return cast, scales._replace(dout=scale_inv, dp=tuple(dp))


def gradient_in_fp32(dout: Tensor, scales: Scales) -> Tensor:
    """dO as the parts read it."""
    values = dout.contiguous().view(E5M2.torch)
    return OPS.fp8_dequantize.default(values, scales.dout, name_of(torch.float32))
