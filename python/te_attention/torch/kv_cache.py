"""A KV cache for inference, on the paged operators: append, prefill and decode."""

import math

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch.functional import attention

_append = OPS.kv_cache_append.default
_cumulative = OPS.cu_seqlens_from_lengths.default


def _refuse_gradients(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{name} requires a gradient; needs torch.no_grad(): a KV cache keeps none"
            )


class KVCache:
    """Keys and values of `batch` sequences in pages, and their lengths, all on the device.

    No method reads anything from the device, and the memory is allocated once, so that a captured
    CUDA graph of decode() serves every later length. Invalid lengths raise on the CPU.

    Args:
        batch: number of sequences.
        max_seqlen: capacity of each sequence in tokens; rounded up to whole pages.
        heads_kv, dim, dim_v: heads of keys and values, and their head dims (dim_v: as dim).
        page_size: tokens in a page.
        dtype, device: of the pools; as torch.empty(). float8_e4m3fn or float8_e5m2: append() casts,
            and q of 16 bits attends to the codes.
        k_descale, v_descale: of an FP8 cache: float32 ``[1]`` or ``[heads_kv]`` on the device. An
            element x is stored as ``x / descale``. Default: 1.
        page_table: int32 ``[batch, pages]``, the page of each part of each sequence, where pages
            are shared or placed by the caller. Default: pages of its own for every sequence.
        pages: number of pages in the pools, with page_table. Default: as many as it has entries.

    Attributes:
        k, v: the pools ``[pages, page_size, heads_kv, dim]``.
        page_table: int32 ``[batch, pages of a sequence]``.
        lengths: int32 ``[batch]``, tokens of each sequence in the cache.
    """

    def __init__(
        self,
        batch: int,
        max_seqlen: int,
        heads_kv: int,
        dim: int,
        *,
        dim_v: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_table: Tensor | None = None,
        pages: int | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> None:
        """Allocates the pools, whose contents are undefined until append()."""
        for name, value in (
            *(("batch", batch), ("max_seqlen", max_seqlen), ("heads_kv", heads_kv)),
            *(("dim", dim), ("page_size", page_size), ("dim_v", dim_v), ("pages", pages)),
        ):
            is_default = value is None and name in ("dim_v", "pages")
            if not is_default and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; needs 1 or more")
        if dim % 8 or (dim_v or dim) % 8:
            raise ValueError(f"dim is {dim} and dim_v {dim_v}; needs multiples of 8")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype is {dtype!r}; needs a floating-point type of torch, or None")
        count = math.ceil(max_seqlen / page_size)
        if page_table is None:
            own = torch.arange(batch * count, dtype=torch.int32, device=device)
            page_table = own.view(batch, count)
        elif page_table.dtype != torch.int32 or page_table.shape != (batch, count):
            raise ValueError(
                f"page_table is {page_table.dtype} {list(page_table.shape)}; needs int32 "
                f"{[batch, count]}: a page for each {page_size} of {max_seqlen} tokens"
            )
        self.page_table = page_table
        pool = (batch * count if pages is None else pages, page_size, heads_kv)
        self.k = torch.empty(*pool, dim, dtype=dtype, device=device)
        self.v = torch.empty(*pool, dim_v or dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.k.device)
        self.max_seqlen = count * page_size
        self.k_descale, self.v_descale = k_descale, v_descale

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    def reset(self, sequences: Tensor | None = None) -> None:
        """Forgets all sequences, or those whose numbers (int64 on the device) are given."""
        if sequences is None:
            self.lengths.zero_()
            return
        if getattr(sequences, "dtype", None) is not torch.int64:
            seen = getattr(sequences, "dtype", None) or f"of type {type(sequences).__name__}"
            raise TypeError(f"sequences is {seen}; needs an int64 tensor of their numbers, or None")
        self.lengths.index_fill_(0, sequences, 0)

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Adds tokens of every sequence behind those in the cache.

        Args:
            k, v: ``[batch, s, heads_kv, dim]``; with `lengths` also ``[tokens, heads_kv, dim]``,
                the new tokens of all sequences, concatenated.
            lengths: int32 ``[batch]``: how many of the s tokens are new; 0: none. Default: all.

        Returns:
            int32 ``[batch + 1]``: cumulative numbers of the new tokens.

        Raises:
            RuntimeError, ValueError: an argument is invalid, or requires a gradient, which the
                cache does not keep. The lengths have not changed then.
        """
        _refuse_gradients(k=k, v=v)
        if (lengths is None and k.dim() != 4) or (k.dim() == 4 and k.shape[0] != self.batch):
            needed = f"[{self.batch}, s, heads_kv, dim]"
            raise ValueError(f"k is of shape {list(k.shape)}; needs {needed}")
        if lengths is None:
            steps = torch.arange(self.batch + 1, dtype=torch.int32, device=k.device)
            cu_new = steps * k.shape[1]
        else:
            cu_new = _cumulative(lengths)
        added = k.shape[1] if lengths is None else lengths
        self.lengths += added
        try:
            cu_cached = _cumulative(self.lengths)
            scales = (self.k_descale, self.v_descale)
            _append(k, v, self.k, self.v, self.page_table, cu_new, cu_cached, False, *scales)
        except RuntimeError:
            wanted = self.lengths.tolist() if self.lengths.is_cpu else []
            self.lengths -= added  # the cache remains as it was
            for i, length in enumerate(wanted):
                if length > self.max_seqlen:
                    raise RuntimeError(
                        f"lengths[{i}] would be {length}; needs at most {self.max_seqlen}, the "
                        "capacity of a sequence"
                    ) from None
            raise
        return cu_new

    def attend(self, q: Tensor, lengths: Tensor | None = None, **options: object) -> Tensor:
        """attention() of q with the cache; the last query is at the last key of its sequence.

        Args:
            q: ``[batch, s, heads_q, dim]``, or ``[tokens, heads_q, dim]`` with `lengths`.
            lengths: int32 ``[batch]``: how many of the s queries are valid, or of the tokens
                belong to each sequence. Default: all.
            options: of attention(). mask: "causal_bottom_right" by default.
        """
        options.setdefault("mask", "causal_bottom_right")
        if q.dim() == 3 and lengths is None:
            raise ValueError("lengths is None; needs int32 [batch] with q of [tokens, heads, dim]")
        return attention(
            q,
            self.k,
            self.v,
            format="thd" if q.dim() == 3 else "bshd",
            cu_seqlens_q=None if lengths is None else _cumulative(lengths),
            cu_seqlens_kv=_cumulative(self.lengths),
            page_table=self.page_table,
            k_descale=self.k_descale,
            v_descale=self.v_descale,
            **options,
        )

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, **options: object
    ) -> Tensor:
        """append(k, v), then attend(q): a prompt, or a part of one. `lengths`: of both."""
        _refuse_gradients(q=q)
        self.append(k, v, lengths)
        return self.attend(q, lengths, **options)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """prefill() of one token of every sequence: q, k, v ``[batch, 1, heads, dim]``."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4 or tensor.shape[:2] != (self.batch, 1):
                raise ValueError(
                    f"{name} is of shape {list(tensor.shape)}; needs [{self.batch}, 1, heads, dim]"
                )
        return self.prefill(q, k, v, **options)
