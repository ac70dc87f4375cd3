"""attention() of nested tensors of layout torch.jagged: their values as a ragged batch."""

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = {"bhsd": 2, "bshd": 1}  # the ragged dimension of [b, heads, s, d] and [b, s, heads, d]
# Arguments with lengths or sizes that a jagged tensor contains, or that would need a jagged tensor.
TAKEN = (
    *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    *("offsets_q", "offsets_kv", "page_table", "page_table_v"),
)


def _check(name: str, tensor: Tensor, form: str) -> None:
    if not tensor.is_nested or tensor.layout != torch.jagged:
        what = f"of layout {tensor.layout}" if tensor.is_nested else "a dense tensor"
        raise TypeError(
            f"{name} is {what}; needs a nested tensor of layout torch.jagged, as q, k and v alike"
        )
    if tensor.dim() != 4 or tensor._ragged_idx != ROWS[form]:
        shape = "[b, heads, s, d]" if form == "bhsd" else "[b, s, heads, d]"
        raise ValueError(
            f"{name} is ragged in dimension {tensor._ragged_idx} of {tensor.dim()}; needs "
            f"{ROWS[form]} of 4 for format {form}: {shape} with a length s of each sequence"
        )
    if tensor.lengths() is not None:
        raise ValueError(f"{name} has gaps between its sequences; needs none (.contiguous())")


def attend_jagged(attention: Callable[..., Tensor], options: dict[str, object]) -> object:
    """attention() with these options, which include q, k, v and the format."""
    form = options["format"]
    if form not in ROWS:
        raise ValueError(f"format is {form!r}; needs bhsd or bshd with nested tensors")
    for name in TAKEN:
        if options.get(name) is not None:
            raise ValueError(f"{name} is given; needs None: nested tensors have their own lengths")
    for name in ("return_lse", "return_max_logit", "return_amax"):
        if options.get(name):
            raise ValueError(f"{name} is True; needs False with nested tensors (use format 'thd')")
    tensors = [options[name] for name in "qkv"]
    for name, tensor in zip("qkv", tensors, strict=True):
        _check(name, tensor, form)
    q, k, v = tensors
    if k.offsets() is not v.offsets() and (k.is_cuda or not k.offsets().equal(v.offsets())):
        raise ValueError("v has other offsets than k; needs the same tensor of offsets")
    values = [t.values().transpose(0, 1) if form == "bhsd" else t.values() for t in tensors]
    own = (*"qkv", *TAKEN, "format")
    kept = {name: value for name, value in options.items() if name not in own}
    o = attention(
        *values,
        **kept,
        format="thd",
        cu_seqlens_q=q.offsets(),
        cu_seqlens_kv=k.offsets(),
        max_seqlen_q=q._maybe_max_seqlen,  # None where finding it would wait for the device
        max_seqlen_kv=k._maybe_max_seqlen,
    )
    out = torch.nested.nested_tensor_from_jagged(
        o, q.offsets(), min_seqlen=q._maybe_min_seqlen, max_seqlen=q._maybe_max_seqlen
    )
    return out.transpose(1, 2) if form == "bhsd" else out
