"""Paged and contiguous KV caches for inference, and the lengths for the attention of each step.

pre_step assigns rows or pages to the sequences on the host, and writes the assignment into buffers
whose addresses never change. step only launches kernels that read these buffers, so that a CUDA
graph of it can be replayed.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from numbers import Integral

import torch
from torch import Tensor

import transformer_engine_torch as tex
from transformer_engine.pytorch.attention.dot_product_attention._layouts import first
from transformer_engine.pytorch.cpp_extensions.fused_attn import QKVFormat

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]

_SIZES = ("max_batch_size", "max_sequence_length", "num_heads_kv", "head_dim_k", "head_dim_v")


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _write(buffer: Tensor, values: Iterable[int]) -> None:
    """Writes values into a buffer of integers, in place, without waiting for the device."""
    options = {"dtype": buffer.dtype, "device": "cpu", "pin_memory": buffer.is_cuda}
    buffer.copy_(torch.tensor(list(values), **options).view_as(buffer), non_blocking=True)


def _new_tokens(new_k: Tensor, qkv_format: str, max_batch_size: int) -> tuple[int, int]:
    """(sequences, tokens of each). For ragged tokens the lengths are on the device."""
    if qkv_format == "thd":
        return max_batch_size, 1
    batch, length, *_ = new_k.shape
    return (length, batch) if qkv_format == "sbhd" else (batch, length)


class KVCacheManager:
    """Interface of a cache manager: memory for each layer, and the sequences' lengths."""

    def __init__(self) -> None:
        """Creates a manager without memory for any layer."""
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[int, int] = OrderedDict()

    def reset(self) -> None:
        """Removes all sequences. The memory stays allocated."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Makes the caches of a layer."""
        raise NotImplementedError

    def pre_step(self, step_dict: OrderedDict[int, int]) -> OrderedDict[int, int]:
        """Reserves memory for the new tokens of each sequence; returns the new lengths."""
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Appends new tokens to the caches of a layer; returns the caches."""
        raise NotImplementedError


class _Manager(KVCacheManager):
    """Base class of the two managers: shapes, limits, and the order of sequences."""

    def __init__(
        self,
        rows: tuple[int, int],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        limits: tuple[int, int],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim_k, self.head_dim_v = heads
        self.max_batch_size, self.max_seqlen = limits
        self.dtype = dtype
        self.device = device or _default_device()
        self._rows = rows

    def allocate_memory(self, layer_number: int) -> None:
        """Allocates zeros for K and V of a layer."""
        options = {"dtype": self.dtype, "device": self.device}
        self.cache[layer_number] = tuple(
            torch.zeros(*self._rows, self.num_heads, dim, **options)
            for dim in (self.head_dim_k, self.head_dim_v)
        )

    def _append(
        self, layer_number: int, new: tuple, places: Tensor, pages: int, moves: bool
    ) -> tuple[Tensor, Tensor, int]:
        """Appends new tokens; returns the caches of a layer and the number of sequences."""
        new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format = new
        if layer_number not in self.cache:
            raise ValueError(
                f"layer_number is {layer_number}; needs one that has memory: "
                f"allocate_memory({layer_number}) before"
            )
        k_cache, v_cache = self.cache[layer_number]
        batch, length = _new_tokens(new_k, qkv_format, self.max_batch_size)
        if batch < len(self.sequences):
            raise ValueError(
                f"new_k has a batch of {batch}; needs {len(self.sequences)}, as many as pre_step "
                "received"
            )
        tex.copy_to_kv_cache(
            *(new_k, new_v, k_cache, v_cache, places, cu_new_seqlens, cu_cached_seqlens),
            *(QKVFormat[qkv_format], batch, length, self.max_seqlen, pages, moves),
        )
        return k_cache, v_cache, batch

    def _lengths_after(self, step_dict: OrderedDict[int, int]) -> OrderedDict[int, int]:
        """Checks that the new tokens fit, and returns the lengths with them."""
        if not isinstance(step_dict, Mapping):
            raise TypeError(
                f"step_dict is of type {type(step_dict).__name__}; needs a dictionary: the number "
                "of new tokens by sequence"
            )
        going_on = [name for name in self.sequences if name in step_dict]
        if list(step_dict)[: len(going_on)] != going_on:
            raise ValueError(
                f"step_dict lists sequences {list(step_dict)}; needs those that go on first, in "
                f"their order: {going_on}"
            )
        if len(step_dict) > self.max_batch_size:
            raise ValueError(
                f"step_dict has {len(step_dict)} sequences; needs at most {self.max_batch_size}, "
                "the max_batch_size"
            )
        for name, new in step_dict.items():
            if new < 0:
                raise ValueError(f"step_dict[{name}] is {new}; needs 0 or more new tokens")
        after = OrderedDict((n, self.sequences.get(n, 0) + new) for n, new in step_dict.items())
        for name, length in after.items():
            if length > self.max_seqlen:
                raise ValueError(
                    f"sequence {name} has {length} tokens with this step; needs at most "
                    f"{self.max_seqlen}, the length of the cache"
                )
        return after


class NonPagedKVCacheManager(_Manager):
    """One row of the cache per sequence. Rows move forward when earlier sequences finish."""

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Caches are [max_batch_size, max_seqlen, num_heads, head_dim]."""
        dims = (num_heads, head_dim_k, head_dim_v or head_dim_k)
        limits = (max_batch_size, max_seqlen)
        super().__init__(limits, dims, dtype, limits, device)
        # The previous indices of rows 0, 1, ..., and their indices after the step.
        self.batch_indices_post_step = torch.arange(
            max_batch_size, dtype=torch.int32, device=self.device
        )
        self.batch_indices = self.batch_indices_post_step.clone()
        self.need_reindex = True

    def reset(self) -> None:
        """Removes all sequences."""
        super().reset()
        self.batch_indices.copy_(self.batch_indices_post_step)
        self.need_reindex = True

    def pre_step(self, step_dict: OrderedDict[int, int]) -> OrderedDict[int, int]:
        """Moves the rows of continuing sequences to the front; new sequences follow."""
        after = self._lengths_after(step_dict)
        rows = list(enumerate(self.sequences))
        going_on = [row for row, name in rows if name in step_dict]
        finished = [row for row, name in rows if name not in step_dict]
        _write(self.batch_indices, [*going_on, *finished, *range(len(rows), self.max_batch_size)])
        self.need_reindex = self.sequences.keys() != after.keys()
        self.sequences = after
        return after

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Moves rows if necessary, appends, and returns the rows in use."""
        # A replay of a graph may have to move other rows than its capture.
        captured = new_k.is_cuda and torch.cuda.is_current_stream_capturing()
        new = (new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format)
        moves = self.need_reindex or captured
        *caches, batch = self._append(layer_number, new, self.batch_indices, 1, moves)
        return tuple(first(cache, batch) for cache in caches)


@dataclass
class Page:
    """A page of the cache, and whether it is allocated to a sequence."""

    page_id: int
    allocated: bool = False


class PagedKVCacheManager(_Manager):
    """A table with the pages of each sequence."""

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Caches are [total_num_pages, page_size, num_heads, head_dim]."""
        dims = (num_heads, head_dim_k, head_dim_v or head_dim_k)
        limits = (max_batch_size, max_seqlen)
        super().__init__((total_num_pages, page_size), dims, dtype, limits, device)
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_pages_per_seq = max_seqlen // page_size
        self.free_pages = deque(Page(i) for i in range(total_num_pages))
        self.allocated_pages: dict[int, list[Page]] = {}
        self.page_table = torch.zeros(
            max_batch_size, self.max_pages_per_seq, dtype=torch.int32, device=self.device
        )

    def reset(self) -> None:
        """Removes all sequences and frees every page."""
        for name in list(self.allocated_pages):
            self.deallocate_sequence(name)
        super().reset()
        self.page_table.zero_()

    def print_cache(self) -> None:
        """Prints the pages of each sequence."""
        print(f"{self.get_sequence_count()} sequences, {len(self.free_pages)} free pages")
        for name, length in self.sequences.items():
            print(f"sequence {name}: {length} tokens in pages {self.get_page_list(name)}")

    def get_sequence_count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """The lengths of all sequences, in order."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Whether a page is free."""
        return bool(self.free_pages)

    def get_page_count(self, seq: int) -> int:
        """The number of pages of a sequence."""
        return len(self.allocated_pages[seq])

    def get_page_list(self, seq: int) -> list[int]:
        """The numbers of a sequence's pages."""
        return [page.page_id for page in self.allocated_pages[seq]]

    def get_page_table(self, sequences: Iterable[int]) -> Tensor:
        """Fills the table for these sequences, padded with zeros, and returns it."""
        rows = [self.get_page_list(name) for name in sequences]
        rows += [[]] * (self.max_batch_size - len(rows))
        padded = (row + [0] * (self.max_pages_per_seq - len(row)) for row in rows)
        _write(self.page_table, chain.from_iterable(padded))
        return self.page_table

    def _require_free(self, needed: int, free: int) -> None:
        if needed > free:
            raise RuntimeError(
                f"free pages are {free} of {self.total_num_pages}; needs {needed}: more of them, "
                "or fewer sequences at a time"
            )

    def allocate_page(self, seq: int) -> None:
        """Allocates one more page to a sequence."""
        self._require_free(1, len(self.free_pages))
        page = self.free_pages.popleft()
        page.allocated = True
        self.allocated_pages.setdefault(seq, []).append(page)

    def allocate_sequence(self, seq: int, length: int) -> None:
        """Allocates the pages that a sequence of `length` tokens lacks."""
        self.allocated_pages.setdefault(seq, [])
        while self.get_page_count(seq) * self.page_size < length:
            self.allocate_page(seq)

    def deallocate_sequence(self, seq: int) -> None:
        """Frees the pages of a sequence."""
        for page in self.allocated_pages.pop(seq):
            page.allocated = False
            self.free_pages.append(page)

    def pre_step(self, step_dict: OrderedDict[int, int]) -> OrderedDict[int, int]:
        """Frees the pages of finished sequences and allocates those that the others need."""
        after = self._lengths_after(step_dict)
        finished = [name for name in self.sequences if name not in step_dict]
        pages = {name: len(held) for name, held in self.allocated_pages.items()}
        needed = sum(-(-length // self.page_size) - pages.get(n, 0) for n, length in after.items())
        # Checked before any change, so that a caller can try again with fewer sequences.
        self._require_free(needed, len(self.free_pages) + sum(pages[name] for name in finished))
        for name in finished:
            self.deallocate_sequence(name)
        for name, length in after.items():
            self.allocate_sequence(name, length)
        if needed or self.sequences.keys() != after.keys():  # most steps of decoding: neither
            self.get_page_table(after)
        self.sequences = after
        return after

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Appends; returns all pages."""
        new = (new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format)
        pages = self.max_pages_per_seq
        return self._append(layer_number, new, self.page_table, pages, False)[:2]


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, Integral) or value <= 0:
        raise ValueError(f"{name} is {value!r}; needs a positive integer")


class InferenceParams:
    """The caches of all layers and the lengths of a step.

    In each iteration, call pre_step with the number of new tokens of each sequence, continuing
    sequences first; then run the model, whose layers call step.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: type[KVCacheManager] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """allocate_memory allocates the memory of a layer. `device`: default the current GPU."""
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.dtype = num_heads_kv, dtype
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.is_paged, self.page_size, self.max_ctx_len = is_paged, page_size, max_ctx_len
        self._check(qkv_format)
        place = {} if device is None else {"device": torch.device(device)}
        kind = NonPagedKVCacheManager
        options = {"max_batch_size": max_batch_size, "max_seqlen": max_sequence_length}
        options |= {"num_heads": num_heads_kv, "head_dim_k": head_dim_k, "dtype": dtype}
        options |= {"head_dim_v": self.head_dim_v, **place}
        if is_paged:
            kind = PagedKVCacheManager
            if total_num_pages is None:
                total_num_pages = max_batch_size * self._pages_per_sequence
            _check_size("total_num_pages", total_num_pages)
            self.total_num_pages = total_num_pages
            options |= {"total_num_pages": self.total_num_pages, "page_size": page_size}
        self.cache_manager = (custom_cache_manager or kind)(**options)
        self.cache_qkv_format = "bshd"
        self._set_format(qkv_format)
        lengths = (max_batch_size + 1, max_batch_size + 1, max_batch_size)
        integers = {"dtype": torch.int32, "device": place.get("device", _default_device())}
        self._lengths = torch.zeros(
            sum(lengths), **integers
        )  # one buffer, so that a step needs one copy
        self.cu_seqlens_q, self.cu_seqlens_kv, self.pre_step_seqlens = self._lengths.split(lengths)
        self._forget()

    @property
    def _pages_per_sequence(self) -> int:
        return self.max_sequence_length // self.page_size

    def _check(self, qkv_format: str) -> None:
        for name in ("num_heads_kv", "head_dim_k", "dtype"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is None; needs that of the keys")
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}; needs a floating-point type")
        if self.is_paged and (not self.page_size or self.max_sequence_length % self.page_size):
            raise ValueError(
                f"page_size is {self.page_size}; needs a divisor of max_sequence_length, "
                f"{self.max_sequence_length}"
            )
        if qkv_format == "thd" and self.max_ctx_len is None:
            raise ValueError("max_ctx_len is None; needs the most new tokens with format thd")

    def _set_format(self, qkv_format: str) -> None:
        if qkv_format not in ("bshd", "sbhd", "thd"):
            raise ValueError(f"qkv_format is {qkv_format!r}; needs bshd, sbhd or thd")
        self.input_qkv_format = qkv_format
        same = qkv_format == self.cache_qkv_format
        self.output_qkv_format = qkv_format if same else f"{qkv_format}_2{self.cache_qkv_format}"

    def _forget(self) -> None:
        self.batch_size, self._has_begun = 0, False
        self.sequences: OrderedDict[int, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[int, int] = OrderedDict()

    def reset(self) -> None:
        """Removes all sequences. The memory of the caches stays allocated."""
        self._forget()
        self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Makes the caches of a layer."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: OrderedDict[int, int]) -> None:
        """Begins a step with these sequences, in order, and their numbers of new tokens."""
        self.sequences = self.cache_manager.pre_step(step_dict)
        self.batch_size, self._has_begun = len(step_dict), True
        self.sequences_pre_step = OrderedDict(
            (name, length - step_dict[name]) for name, length in self.sequences.items()
        )
        idle = [0] * (self.max_batch_size - self.batch_size)
        cu_seqlens_q = accumulate([0, *step_dict.values(), *idle])
        cu_seqlens_kv = accumulate([0, *self.sequences.values(), *idle])
        before = [*self.sequences_pre_step.values(), *idle]
        _write(self._lengths, [*cu_seqlens_q, *cu_seqlens_kv, *before])

    def get_seqlens_pre_step(self) -> Tensor:
        """The lengths before this step, which are the positions of its first tokens."""
        return self.pre_step_seqlens

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Appends the new tokens of a layer; returns caches, lengths and format."""
        if not self._has_begun:
            raise ValueError("pre_step() has not been called; needs a call before each step")
        if qkv_format != self.input_qkv_format:
            self._set_format(qkv_format)
        k_cache, v_cache = self.cache_manager.step(
            layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format
        )
        lengths = (self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length)
        return k_cache, v_cache, *lengths, self.output_qkv_format

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Copies of the caches of this step's sequences, [batch, max_sequence_length, h, d]."""
        k_cache, v_cache = self.cache_manager.cache[layer_number]
        if not self.is_paged:
            return k_cache[: self.batch_size], v_cache[: self.batch_size]
        pages = self.cache_manager.page_table[: self.batch_size].long()
        return tuple(cache[pages].flatten(1, 2) for cache in (k_cache, v_cache))
