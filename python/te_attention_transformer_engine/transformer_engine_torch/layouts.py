"""The 25 memory layouts, parsed from their names: formats, and tensors in one buffer."""

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine_torch.enums import NVTE_QKV_Layout


class Layout(NamedTuple):
    """The properties of a layout.

    The last `shared` tensors of Q, K and V are stored in one buffer, along its dimension `axis`.
    """

    q: str
    kv: str
    shared: int
    axis: int
    paged: bool

    @property
    def format(self) -> str:
        """The format's name in te_attention.torch."""
        return f"{self.q}_{self.kv}"

    def new_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Memory for dQ, dK and dV in the layout of Q, K and V, by default in their dtype."""
        alone = (q, k, v)[: 3 - self.shared] if self.shared > 1 else (q, k, v)
        options = {"dtype": dtype, "memory_format": torch.contiguous_format}
        out = [torch.empty_like(t, **options) for t in alone]
        if self.shared > 1:
            shape = list(k.shape)
            shape.insert(len(shape) + 1 + self.axis, self.shared)
            out += k.new_empty(shape, dtype=dtype).unbind(self.axis)
        return out


def _read(name: str) -> Layout:
    text = name.removeprefix("NVTE_").lower()
    paged = text.startswith("paged_kv_")
    buffers = text.removeprefix("paged_kv_").split("_")
    last = buffers[-1]
    axis = next((i - len(last) for i, letter in enumerate(last) if letter.isdigit()), 0)
    q, kv = ("".join(c for c in buffer if c.isalpha()) for buffer in (buffers[0], last))
    return Layout(q, kv, int(last[axis]) if axis else 1, axis, paged)


_LAYOUTS = tuple(_read(layout.name) for layout in NVTE_QKV_Layout)


def layout_of(layout: NVTE_QKV_Layout) -> Layout:
    """The Layout. Raises ValueError if `layout` is not one of the 25."""
    return _LAYOUTS[NVTE_QKV_Layout(layout)]


Pair = tuple[Tensor | None, Tensor | None]


def starts_of(cu_seqlens: Pair, padded: Pair) -> Pair:
    """The offsets of thd sequences; None if the sequences have no gaps."""
    (q, kv), (plain_q, plain_kv) = padded, cu_seqlens
    if (q is None or q is plain_q) and (kv is None or kv is plain_kv):
        return None, None
    return plain_q if q is None else q, plain_kv if kv is None else kv
