"""SequenceDescriptor: where the sequences of a batch are, and its translation for a call."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine._refusal import require
from transformer_engine.jax._enums import AttnMaskType, QKVLayout
from transformer_engine.jax._masks import run_length_fill

Pair = tuple[Any, Any]
PARTS = ("seqlens", "seq_offsets", "segment_ids", "segment_pos")


def _none() -> Pair:
    """Arrays that mean: not given. Made anew each time, because callers may delete live arrays."""
    return jnp.zeros(0), jnp.zeros(0)


def _pair(name: str, value: Any) -> Pair:
    """The arrays for query and for key and value, of one for both or a tuple of two."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} has {len(pair)} arrays; needs one, or a tuple of two")
    for x in pair:
        if not isinstance(x, jnp.ndarray):
            raise TypeError(f"{name} is of type {type(x).__name__}; needs a jax.numpy array")
    return pair


def _positions(ids: jax.Array, is_thd: bool) -> jax.Array:
    """The position of each token: in its sequence for THD, in its row otherwise."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    if not is_thd or not ids.shape[-1]:
        return index
    begins = (ids[..., 1:] != ids[..., :-1]) & (ids[..., 1:] != 0)
    begins = jnp.concatenate([jnp.ones((*ids.shape[:-1], 1), bool), begins], axis=-1)
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=ids.ndim - 1)
    end = jnp.max(jnp.where(ids != 0, index, -1), axis=-1, keepdims=True)
    return jnp.where(index <= end, index - first, 0)


@jax.tree_util.register_pytree_node_class
@dataclass
class SequenceDescriptor:
    """The sequences of a batch, by lengths, lengths and starts, or ids. A pytree of 8 leaves.

    Each part is a pair: for query, and for key and value. Parts that are not given have no element.
    """

    seqlens: Pair = field(default_factory=_none)
    seq_offsets: Pair = field(default_factory=_none)
    segment_ids: Pair = field(default_factory=_none)
    segment_pos: Pair = field(default_factory=_none)

    def tree_flatten(self) -> tuple[tuple, None]:
        """The pairs; there is nothing static."""
        return tuple(getattr(self, name) for name in PARTS), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> "SequenceDescriptor":
        """Leaves may be any object: callers map them to shardings."""
        return cls(*children)

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> "SequenceDescriptor":
        """Of BSHD: lengths ``[batch]``, with padding at the end of each row."""
        return cls(seqlens=_pair("seqlens", seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Any, seq_offsets: Any) -> "SequenceDescriptor":
        """Of THD: lengths ``[batch, n]`` and starts ``[batch, n + 1]``, filled up with -1.

        Args:
            seqlens: the length of each sequence of a row.
            seq_offsets: the first token of each sequence, counted from the start of its row. An
                end after the last start is not read.
        """
        return cls(seqlens=_pair("seqlens", seqlens), seq_offsets=_pair("seq_offsets", seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(
        cls,
        segment_ids: Any,
        segment_pos: Any = None,
        *,
        is_thd: bool | None = None,
        is_segment_ids_reordered: bool = False,
    ) -> "SequenceDescriptor":
        """Of BSHD, with ids 0 and 1, or of THD, with ids from 1, each in one run; 0 is padding.

        Args:
            segment_ids: ``[batch, rows]``.
            segment_pos: the position of each token in its sequence. Default: by the ids.
            is_thd: whether a row has several sequences. Needed without segment_pos.
            is_segment_ids_reordered: whether tokens are in an order for context parallelism, of
                which positions cannot be found.
        """
        ids = _pair("segment_ids", segment_ids)
        if segment_pos is not None:
            return cls(segment_ids=ids, segment_pos=_pair("segment_pos", segment_pos))
        if is_thd is None:
            raise ValueError("segment_pos is None; needs arrays, or is_thd to find them")
        if is_segment_ids_reordered:
            raise AssertionError("segment_pos is None; needs arrays: segment_ids are reordered")
        return cls(segment_ids=ids, segment_pos=tuple(_positions(x, is_thd) for x in ids))

    def get_seqlens_and_offsets(
        self,
        attn_mask_type: AttnMaskType,
        qkv_layout: QKVLayout,
        window_size: tuple[int, int] | None,  # noqa: ARG002  # the kernels apply it
        max_segments_per_seq: int,
    ) -> tuple[Pair, Pair]:
        """Lengths and starts of the parts of sequences that attend or are attended to.

        For THD ``[batch, max_segments_per_seq]`` and one column more, filled up with -1. Of ids,
        tokens at the ends that a causal mask excludes are left out, so that query and key begin
        (bottom-right: end) on the diagonal.
        """
        ids = self.segment_ids
        if not ids[0].size:
            return self.seqlens, self.seq_offsets
        for name, x, pos in zip(("query", "key"), ids, self.segment_pos, strict=True):
            seen = f"of shape {list(pos.shape)} for {name}"
            require(pos.shape == x.shape, "segment_pos", seen, f"that of ids, {list(x.shape)}")
        if not qkv_layout.is_thd():
            if attn_mask_type.is_padding():
                return tuple(jnp.sum(x != 0, axis=-1, dtype=jnp.int32) for x in ids), _none()
            return tuple(jnp.full((), x.shape[-1], jnp.int32) for x in ids), _none()
        kept = _kept(ids, self.segment_pos, attn_mask_type, max_segments_per_seq)
        both = [_lengths_and_starts(x) for x in kept]
        return tuple(x[0] for x in both), tuple(x[1] for x in both)


def _kept(ids: Pair, pos: Pair, mask: AttnMaskType, segments: int) -> Pair:
    """Of query and key, bool ``[batch, rows, segments]``: a token of that segment that matters."""
    most = jnp.iinfo(jnp.int32).max
    hits = [x[..., None] == jnp.arange(1, segments + 1, dtype=x.dtype) for x in ids]
    keys = [x.astype(jnp.int32) for x in pos]
    if mask.is_bottom_right():  # distances from the end
        keys = [p - run_length_fill(x) for p, x in zip(keys, ids, strict=True)]
    keys = [key[..., None] for key in keys]
    if mask.is_causal():
        # A row attends to keys up to its position: rows before the first key, and keys after the
        # last row, do not count.
        first = jnp.min(jnp.where(hits[1], keys[1], most), axis=-2, keepdims=True)
        last = jnp.max(jnp.where(hits[0], keys[0], -most), axis=-2, keepdims=True)
        return hits[0] & (keys[0] >= first), hits[1] & (keys[1] <= last)
    there = [jnp.any(hit, axis=-2, keepdims=True) for hit in hits]
    return hits[0] & there[1], hits[1] & there[0]


def _lengths_and_starts(kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    lengths = jnp.sum(kept, axis=-2, dtype=jnp.int32)
    first = jnp.argmax(kept, axis=-2).astype(jnp.int32)
    edge = jnp.full((*lengths.shape[:-1], 1), -1, jnp.int32)
    empty = lengths == 0
    starts = jnp.concatenate([jnp.where(empty, -1, first), edge], axis=-1)
    return jnp.where(empty, -1, lengths), starts


class Sequences(NamedTuple):
    """The operands of a call: int32 arrays of sequences + 1 numbers, starts for THD only."""

    cu_seqlens_q: jax.Array
    cu_seqlens_kv: jax.Array
    offsets_q: jax.Array | None
    offsets_kv: jax.Array | None


def cumulative(lengths: jax.Array) -> jax.Array:
    """cu_seqlens of lengths; negative ones count as 0."""
    flat = jnp.maximum(lengths.astype(jnp.int32).ravel(), 0)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(flat, dtype=jnp.int32)])


def sequences_of(
    descriptor: SequenceDescriptor,
    mask: AttnMaskType,
    layout: QKVLayout,
    window: tuple[int, int],
    segments: int,
    shape: tuple[int, int, int],
) -> Sequences | None:
    """The operands for a batch, rows and keys of that `shape`; None where every row is full."""
    if not mask.is_padding():
        return None
    lengths, starts = descriptor.get_seqlens_and_offsets(mask, layout, window, segments)
    batch, *rows = shape
    for x in lengths:
        is_whole = not x.size or jnp.issubdtype(x.dtype, jnp.integer)
        require(is_whole, "seqlens.dtype", x.dtype.name, "integers")
    if not layout.is_thd():
        for x in lengths:
            seen = f"of shape {list(x.shape)}"
            require(x.size == batch, "seqlens", seen, f"[{batch}] with {mask.name}")
        return Sequences(*(cumulative(x) for x in lengths), None, None)
    for x, begin in zip(lengths, starts, strict=True):
        leading, columns = x.shape[:-1], x.shape[-1:]
        fits = math.prod(leading) == batch and begin.shape == (*leading, *(n + 1 for n in columns))
        seen = f"of lengths {list(x.shape)} and starts {list(begin.shape)}"
        needed = f"[{batch}, n] and [{batch}, n + 1] with {layout.name}"
        require(fits, "sequence_descriptor", seen, needed)
    return _compacted(lengths, starts, batch, rows, segments)


def _compacted(
    lengths: Pair, starts: Pair, batch: int, rows: list[int], segments: int
) -> Sequences:
    """batch * segments sequences, with the ends of the whole batch, of any number in each row.

    A sequence keeps its key and query together also where one of them has no token.
    """
    lengths = [x.reshape(batch, -1).astype(jnp.int32) for x in lengths]
    columns = max(x.shape[1] for x in lengths)
    starts = [
        x.reshape(batch, -1)[:, : n.shape[1]].astype(jnp.int32)
        for x, n in zip(starts, lengths, strict=True)
    ]

    def wide(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])), constant_values=-1)

    lengths = [wide(x).ravel() for x in lengths]
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), columns)
    begins = [
        jnp.where((x := wide(start).ravel()) < 0, batch * n, x + row * n)
        for start, n in zip(starts, rows, strict=True)
    ]
    count = batch * segments
    if columns != segments:  # those with tokens to the front, in their order
        is_empty = (lengths[0] <= 0) & (lengths[1] <= 0)
        order = jnp.argsort(is_empty, stable=True)[:count]
        lengths, begins = ([x[order] for x in both] for both in (lengths, begins))
        missing = count - order.shape[0]
        lengths = [jnp.pad(x, (0, missing)) for x in lengths]
        begins = [
            jnp.pad(x, (0, missing), constant_values=batch * n)
            for x, n in zip(begins, rows, strict=True)
        ]
    ends = [jnp.full(1, batch * n, jnp.int32) for n in rows]
    offsets = [jnp.concatenate([x, end]) for x, end in zip(begins, ends, strict=True)]
    return Sequences(*(cumulative(x) for x in lengths), *offsets)


def descriptor_of_mask(
    mask: Any, kind: AttnMaskType, shape: tuple[int, int, int]
) -> SequenceDescriptor:
    """The lengths that a mask ``[batch, 1, rows, keys]``, 1 where masked, stands for."""
    batch, rows, keys = shape
    if not kind.is_padding():
        full = (jnp.full(batch, n, jnp.int32) for n in (rows, keys))
        return SequenceDescriptor(seqlens=tuple(full))
    require(mask is not None, "mask", None, f"an array: attn_mask_type is {kind.name}")
    allowed = jnp.asarray(mask) == 0
    needed = f"[{batch}, 1, {rows}, {keys}]"
    fits = allowed.shape == (batch, 1, rows, keys)
    require(fits, "mask", f"of shape {list(allowed.shape)}", needed)
    allowed = allowed[:, 0]
    q = jnp.sum(allowed[:, :, 0], axis=-1, dtype=jnp.int32)
    per_row = jnp.sum(allowed, axis=-1, dtype=jnp.int32)
    kv = jnp.max(per_row, axis=-1) if kind.is_causal() else per_row[:, 0]
    return SequenceDescriptor(seqlens=(q, kv))
