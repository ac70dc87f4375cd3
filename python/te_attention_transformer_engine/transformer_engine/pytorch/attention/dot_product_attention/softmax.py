"""Softmax over scores in memory, as the unfused backend uses it."""

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention import environment
from te_attention.torch.operators import ops


def _function(kind: str, name: str, about: str) -> type[torch.autograd.Function]:
    """An autograd function for softmax(scale * scores) with a mask of the given kind."""
    masked = kind == "given"

    def forward(ctx, scores: Tensor, *rest: Tensor | float) -> Tensor:
        mask, scale = rest if masked else (None, rest[0])
        ctx.scale = float(1.0 if scale is None else scale)
        probabilities = ops.scaled_softmax_forward(scores.contiguous(), mask, ctx.scale, kind)
        ctx.save_for_backward(probabilities)
        return probabilities

    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        dx = ops.scaled_softmax_backward(gradient.contiguous(), probabilities, ctx.scale, kind)
        return (dx, None, None) if masked else (dx, None)

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__doc__": about,
        "__module__": __name__,
    }
    return type(name, (torch.autograd.Function,), members)


ScaledSoftmax = _function("none", "ScaledSoftmax", "apply(scores, scale).")
ScaledMaskedSoftmax = _function(
    "given", "ScaledMaskedSoftmax", "apply(scores, mask [1 or b, 1, rows, columns], scale)."
)
ScaledUpperTriangMaskedSoftmax = _function(
    "causal", "ScaledUpperTriangMaskedSoftmax", "apply(scores, scale); causal from the top left."
)
ScaledAlignedCausalMaskedSoftmax = _function(
    "causal_bottom_right",
    "ScaledAlignedCausalMaskedSoftmax",
    "apply(scores, scale); causal, the last row sees all.",
)


def _causal(scores: Tensor, attn_mask_type: str) -> Tensor:
    rows, cols = scores.shape[-2:]
    first = 1 + (cols - rows if "bottom_right" in attn_mask_type else 0)
    return scores.new_ones((rows, cols), dtype=torch.bool).triu_(first)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax: one kernel for scores of half precision, else PyTorch's functions.

    Rows without a visible key are zeros, with zero gradients, in both cases.
    """

    def __init__(
        self, mask_func: Callable[[Tensor, Tensor], Tensor], softmax_in_fp32: bool = True
    ) -> None:
        """mask_func(scores, mask) masks the scores where mask is True, for PyTorch's softmax."""
        super().__init__()
        self.scaled_masked_softmax_fusion = environment.switch("NVTE_MASKED_SOFTMAX_FUSION")
        self.mask_func, self.softmax_in_fp32 = mask_func, softmax_in_fp32

    def forward(
        self, inp: Tensor, mask: Tensor | None, attn_mask_type: str, scale: float | None = None
    ) -> Tensor:
        """Probabilities of scores [b, heads, rows, columns]. A mask is complete, if given."""
        if mask is None and "causal" in attn_mask_type:
            mask = _causal(inp, attn_mask_type)
        scale = 1.0 if scale is None else scale
        half = inp.dtype in (torch.float16, torch.bfloat16)
        small = mask is None or (mask.dim() == 4 and mask.shape[1] == 1)
        if self.scaled_masked_softmax_fusion and half and small:
            if mask is None:
                return ScaledSoftmax.apply(inp, scale)
            rows = mask.expand(-1, -1, *inp.shape[-2:]).contiguous()
            return ScaledMaskedSoftmax.apply(inp, rows, scale)
        return self._by_torch(inp, mask, scale)

    def _by_torch(self, inp: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = inp.float() if self.softmax_in_fp32 and inp.dtype != torch.float64 else inp
        scores = scores * scale
        if mask is not None:
            scores = self.mask_func(scores, mask)
        probabilities = torch.softmax(scores, dim=-1)
        if mask is not None:
            probabilities = probabilities.masked_fill(mask, 0.0)
        return probabilities.to(inp.dtype)
