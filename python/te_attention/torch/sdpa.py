"""scaled_dot_product_attention by TE Attention, with no change of code.

    import te_attention.torch.sdpa
    torch.nn.attention.activate_flash_attention_impl("TE_ATTENTION")

This replaces the kernels of PyTorch's FlashAttention backend on CUDA, wherever PyTorch selects that
backend. On the CPU, and for arguments that the backend does not take (masks as tensors, more head
dims), `enabled()` replaces the function itself inside a `with` block.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.attention import register_flash_attention_impl
from torch.nn.attention.bias import CausalBias, CausalVariant

from te_attention.torch._arguments import Arguments, trimmed
from te_attention.torch._library import OPS
from te_attention.torch._options import MINIMAL
from te_attention.torch.functional import attention, new_rng_state

NAME = "TE_ATTENTION"
_original = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The function of torch.nn.functional with the same arguments, computed by attention().

    A boolean mask becomes a bias of 0 and -inf, and has no gradient; the causal biases of
    torch.nn.attention.bias become names of masks. O has the order of dimensions of q, as in
    PyTorch. PyTorch's own function runs the calls that attention() does not take: nested tensors,
    tensors without four dimensions, a head dim that is not a multiple of 8 or above 1024 (with
    gradients or dropout: 512), a last stride other than 1, and a dropout probability of 1.
    """
    mask, bias = "causal" if is_causal else None, attn_mask
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise ValueError("attn_mask is a CausalBias; needs None with is_causal=True")
        mask, bias = _as_mask_name(attn_mask, query, key)
    if not (dropout_p < 1 and _fits(query, key, value, bias, enable_gqa, dropout_p > 0)):
        if mask == "causal_bottom_right":
            bias = _lower_right(attn_mask, query)
        causal = mask == "causal"
        return _original(
            query, key, value, bias, dropout_p, causal, scale=scale, enable_gqa=enable_gqa
        )
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
    o = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        dropout=dropout_p,
        scale=scale,
    )
    return _with_strides_of(q=query, o=o)


def _lower_right(mask: CausalBias, q: Tensor) -> Tensor:
    rows, cols = mask.seq_len_q, mask.seq_len_kv
    return torch.ones(rows, cols, dtype=torch.bool, device=q.device).tril(cols - rows)


def _as_mask_name(mask: CausalBias, q: Tensor, k: Tensor) -> tuple[str | None, Tensor | None]:
    """The mask's name in attention(), or a boolean tensor if the name has another meaning there."""
    rows, cols = mask.seq_len_q, mask.seq_len_kv
    if mask.variant == CausalVariant.UPPER_LEFT or rows == cols:  # PyTorch's rule, for any q
        return "causal", None
    if rows < cols and (q.shape[-2], k.shape[-2]) == (rows, cols):
        return "causal_bottom_right", None
    return None, _lower_right(mask, q)


def _with_strides_of(q: Tensor, o: Tensor) -> Tensor:
    """O, dense, with the dimensions in the same order in memory as q, which callers rely on."""
    outer = sorted(range(3), key=lambda dim: -q.stride(dim))
    back = [outer.index(dim) for dim in range(3)]
    return o.permute(*outer, 3).contiguous().permute(*back, 3)


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool, drops: bool) -> bool:
    trains = torch.is_grad_enabled() and (
        (q.requires_grad or k.requires_grad or v.requires_grad)
        or (mask is not None and mask.requires_grad)
    )
    most = 512 if trains or drops else 1024  # as attention() refuses larger head dims
    return (
        not any(t.is_nested for t in (q, k, v))
        and q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and (q.shape[1] == k.shape[1] or gqa)
        and k.shape[1] == v.shape[1]
        and all(t.shape[-1] % 8 == 0 and 0 < t.shape[-1] <= most for t in (q, v))
        and all(t.stride(-1) == 1 and t.device.type in ("cpu", "cuda") for t in (q, k, v))
        # the values of a subclass may differ from those in its memory
        and (mask is None or type(mask) in (Tensor, torch.nn.Parameter, FakeTensor))
        and (mask is None or mask.dtype in (torch.bool, q.dtype, torch.float32))
    )


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """A context in which torch.nn.functional.scaled_dot_product_attention is this module's."""
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


# ---- PyTorch's interface for replacing the kernels of its FlashAttention backend -----------------


def _arguments(q, k, v, dropout, causal, scale, rng_state) -> tuple:
    """The arguments of the operators: the minimal ones if there is no dropout."""
    random = {"dropout": dropout, "rng_state": rng_state} if dropout else {}
    mask = "causal" if causal else "none"
    return trimmed(Arguments(q, k, v, mask=mask, training=True, scale=scale, **random))


def _flash_forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention."""
    if return_debug_mask:
        raise RuntimeError("return_debug_mask is True; needs False: there is no S by S tensor")
    empty = torch.empty(0, dtype=torch.int64, device=q.device)
    rng_state = new_rng_state(q.device) if dropout_p else empty
    arguments = _arguments(q, k, v, dropout_p, is_causal, scale, rng_state)
    forward = OPS.forward_minimal if len(arguments) <= MINIMAL else OPS.forward
    o, lse, *_ = forward.default(*arguments)
    if o.stride() != q.stride() and o.shape == q.shape:
        o = torch.empty_like(q).copy_(o)  # compiled code relies on the strides of q
    # cu_seqlens, maxima, rng_state, an offset that rng_state already holds, and the debug mask
    return o, lse, None, None, q.shape[2], k.shape[2], rng_state, empty, q.new_empty(0)


def _flash_backward(
    dout,
    q,
    k,
    v,
    o,
    lse,
    _cum_q,
    _cum_k,
    _max_q,
    _max_k,
    dropout_p,
    is_causal,
    rng_state,
    _offset,
    *,
    scale=None,
):
    """aten::_scaled_dot_product_flash_attention_backward."""
    arguments = _arguments(q, k, v, dropout_p, is_causal, scale, rng_state)
    if len(arguments) <= MINIMAL:
        return OPS.backward_minimal.default(dout, o, lse, *arguments)
    return OPS.backward.default(dout, None, o, lse, False, False, *arguments)[:3]


@dataclass
class _Handle:
    library: torch.library.Library | None

    def remove(self) -> None:
        """Restores PyTorch's own kernels."""
        self.library = None


def register() -> _Handle:
    """Replaces the kernels of PyTorch's FlashAttention backend on CUDA. PyTorch calls this."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_scaled_dot_product_flash_attention", _flash_forward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CUDA")
    return _Handle(library)


register_flash_attention_impl(NAME, register_fn=register)
