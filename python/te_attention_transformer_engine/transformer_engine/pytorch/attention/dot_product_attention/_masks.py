"""Masks, windows and ALiBi: normalised names, and dense tensors for Unfused."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from operator import index

import torch
from torch import Tensor

from transformer_engine.pytorch._refusal import refuse
from transformer_engine.pytorch.constants import AttnMaskTypes

Window = tuple[int, int]
# te_attention's names of the masks, by (causal, bottom right).
NAMES = {
    (False, False): None,
    (False, True): "bottom_right",
    (True, False): "causal",
    (True, True): "causal_bottom_right",
}


def normalised_mask(attn_mask_type: str) -> str:
    """The canonical name of a mask."""
    name = attn_mask_type.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    if name not in AttnMaskTypes:
        refuse("attn_mask_type", repr(attn_mask_type), "one of " + ", ".join(AttnMaskTypes))
    return name


@lru_cache(maxsize=1024)
def normalised_options(
    mask: str, window: Window, bottom_right: bool | None
) -> tuple[str, Window, bool]:
    """The mask, window and diagonal of a call in their canonical forms."""
    mask = normalised_mask(mask)
    if bottom_right not in (None, False, True):
        refuse("bottom_right_diagonal", repr(bottom_right), "None, False or True")
    window = tuple(check_set_window_size(mask, window))
    return mask, window, is_bottom_right(mask, bottom_right)


def is_bottom_right(attn_mask_type: str, asked: bool | None) -> bool:
    """Whether the diagonal is bottom right. Causal masks define it; others use the flag."""
    if attn_mask_type in ("causal", "padding_causal"):
        return False
    return True if "bottom_right" in attn_mask_type or asked is None else asked


def two_integers(window_size: Sequence[int]) -> Window:
    """The bounds of a window as integers."""
    try:
        left, right = window_size
        return index(left), index(right)
    except (TypeError, ValueError):
        return refuse("window_size", repr(window_size), "(left, right), two integers")


def check_set_window_size(
    attn_mask_type: str, window_size: Sequence[int] | None = None
) -> Sequence[int]:
    """The window that applies with a mask. (-1, -1) and (-1, 0) mean no window.

    A causal mask ignores the right side. Other masks need both sides or neither.
    """
    causal = "causal" in attn_mask_type
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    left, right = two_integers(window_size)
    if right > 0 and causal:
        warnings.warn(f"window_size {window_size}: a causal mask has no right side", stacklevel=2)
    if causal and ((left, right) in ((-1, -1), (-1, 0)) or (left >= 0 and right >= -1)):
        return (left, 0)
    if not causal and (left, right) in ((-1, -1), (-1, 0)):
        return (-1, -1)
    if not causal and left >= 0 and right >= 0:
        return window_size
    needed = "(-1, 0) or (left >= 0, 0)" if causal else "(-1, -1) or (left >= 0, right >= 0)"
    return refuse("window_size", f"{window_size} with mask {attn_mask_type}", needed)


def is_window(window_size: Window) -> bool:
    """Whether the window masks anything that the mask does not."""
    return window_size[0] != -1 or window_size[1] not in (-1, 0)


def bounds(attn_mask_type: str, window_size: Window) -> Window:
    """The window, with the right side replaced by the causal mask's."""
    return window_size[0], 0 if "causal" in attn_mask_type else window_size[1]


def _diagonal(rows: int, cols: int, like: Tensor, shift: Tensor | int) -> Tensor:
    """The column relative to the row's diagonal, [1 or b, 1, rows, cols]."""
    row = torch.arange(rows, dtype=torch.int32, device=like.device).view(1, 1, rows, 1)
    col = torch.arange(cols, dtype=torch.int32, device=like.device).view(1, 1, 1, cols)
    return col - row - shift


def get_full_mask(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str = "no_mask",
    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    window_size: Window | None = None,
    attention_type: str = "self",
    bottom_right_alignment: bool = True,
    like: Tensor | None = None,
) -> tuple[str, Tensor | None, Tensor | None, Tensor | None]:
    """Mask, padding and window as one tensor: True where a score is masked.

    Returns (mask type: "arbitrary" if a window has changed it; bool [1 or b, 1, rows, columns], or
    None if no score is masked; actual lengths of q and of k, or None). `like` determines the device
    if attention_mask is None.
    """
    window_size = check_set_window_size(attn_mask_type, window_size)
    hidden, actual_q, actual_kv = attention_mask, None, None
    shift: Tensor | int = max_seqlen_kv - max_seqlen_q
    if "padding" in attn_mask_type:
        pair = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,) * 2
        if attention_type == "cross" and not isinstance(attention_mask, tuple):
            refuse("attention_mask", "one tensor", "one for q and one for k, as this is cross")
        actual_q, actual_kv = ((~m).sum(-1, keepdim=True, dtype=torch.int32) for m in pair)
        hidden = pair[0].transpose(-1, -2) | pair[1]
        shift = actual_kv - actual_q
    elif attn_mask_type != "arbitrary":
        hidden = None
    left, right = bounds(attn_mask_type, window_size)
    if left >= 0 or right >= 0:
        like = like if like is not None else hidden
        if like is None:
            like = torch.empty(0)
        bottom_right = is_bottom_right(attn_mask_type, bottom_right_alignment)
        at = _diagonal(max_seqlen_q, max_seqlen_kv, like, shift if bottom_right else 0)
        band = at < -left if left >= 0 else at > right
        if left >= 0 and right >= 0:
            band = band | (at > right)
        hidden = band if hidden is None else hidden | band
    kind = "arbitrary" if is_window(window_size) else attn_mask_type
    return kind, hidden, actual_q, actual_kv


@lru_cache
def _standard_slopes(heads: int, device: torch.device) -> Tensor:
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def get_alibi(
    _alibi_cache: dict | None,
    num_heads: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    actual_seqlens_q: Tensor | None = None,
    actual_seqlens_kv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    bottom_right_alignment: bool = True,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor]:
    """The slopes, and -slope * |row - column + shift| as a bias [1 or b, heads, rows, columns].

    `_alibi_cache` stores the last bias if it depends on nothing outside its key.
    """
    device = torch.device(device) if alibi_slopes is None else alibi_slopes.device
    fixed = alibi_slopes is None and actual_seqlens_q is None
    key = (num_heads, max_seqlen_q, max_seqlen_kv, bias_dtype, bottom_right_alignment, device)
    if fixed and _alibi_cache is not None and key in _alibi_cache:
        return _alibi_cache[key]
    slopes = _standard_slopes(num_heads, device) if alibi_slopes is None else alibi_slopes
    shift: Tensor | int = max_seqlen_kv - max_seqlen_q if bottom_right_alignment else 0
    if bottom_right_alignment and actual_seqlens_q is not None:
        shift = (actual_seqlens_kv - actual_seqlens_q).view(-1, 1, 1, 1)
    distance = _diagonal(max_seqlen_q, max_seqlen_kv, slopes, shift).abs()
    bias = -slopes.view(-1, num_heads, 1, 1) * distance
    found = (slopes, bias.to(bias_dtype or torch.float32))
    if fixed and _alibi_cache is not None:
        _alibi_cache.clear()
        _alibi_cache[key] = found
    return found
