"""SequenceDescriptor: its tree, its factories, and the sequences that a call gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine.jax._descriptor import descriptor_of_mask, sequences_of
from transformer_engine.jax.attention import (
    AttnMaskType,
    QKVLayout,
    SequenceDescriptor,
    run_length_fill,
)

BSHD, THD = QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD
PADDING, CAUSAL = AttnMaskType.PADDING_MASK, AttnMaskType.PADDING_CAUSAL_MASK
BOTTOM_RIGHT = AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK
OF_IDS = {"is_thd": True, "is_segment_ids_reordered": False}


def test_a_tree_of_eight_leaves_of_any_kind() -> None:
    descriptor = SequenceDescriptor.from_seqlens(jnp.array([3, 4]))
    leaves, tree = jax.tree.flatten(descriptor)
    assert [x.ndim for x in leaves] == [1] * 8
    assert [x.size for x in leaves] == [2, 2] + [0] * 6
    assert isinstance(jax.tree.unflatten(tree, list("abcdefgh")), SequenceDescriptor)
    mapped = jax.tree.map(lambda x: x.ndim, descriptor)
    assert (mapped.seqlens, mapped.segment_pos) == ((1, 1), (1, 1))


def test_arrays_are_made_anew() -> None:
    """Callers delete live arrays between their tests."""
    for x in jax.tree.leaves(SequenceDescriptor()):
        x.delete()
    assert all(x.size == 0 for x in jax.tree.leaves(SequenceDescriptor()))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.array([3, 4]), TypeError, "seqlens is of type ndarray; needs a jax.numpy array"),
        ([3, 4], TypeError, "seqlens is of type list"),
        ((jnp.ones(2),) * 3, ValueError, "seqlens has 3 arrays; needs one, or a tuple of two"),
    ],
)
def test_what_a_factory_refuses(value: object, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        SequenceDescriptor.from_seqlens(value)


def test_positions_that_are_not_given() -> None:
    ids = jnp.array([[1, 1, 0, 2, 2, 2, 0, 0]])
    (pos, _) = SequenceDescriptor.from_segment_ids_and_pos(ids, None, **OF_IDS).segment_pos
    assert pos.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    given = SequenceDescriptor.from_segment_ids_and_pos(ids, None, **OF_IDS | {"is_thd": False})
    assert given.segment_pos[0].tolist() == [list(range(8))]
    with pytest.raises(AssertionError, match="segment_pos is None; needs arrays: segment_ids are"):
        SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=True, is_segment_ids_reordered=True)
    with pytest.raises(ValueError, match="segment_pos is None; needs arrays, or is_thd"):
        SequenceDescriptor.from_segment_ids_and_pos(ids)


def test_ids_of_padded_rows_become_lengths() -> None:
    ids = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0]], jnp.float32)  # as TransformerEngine's tests do
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids, **OF_IDS | {"is_thd": False})
    lengths, starts = descriptor.get_seqlens_and_offsets(PADDING, BSHD, None, 1)
    assert lengths[0].tolist() == [3, 1]
    assert lengths[0].dtype == jnp.int32
    assert starts[0].size == 0
    (full, _), _ = descriptor.get_seqlens_and_offsets(AttnMaskType.CAUSAL_MASK, BSHD, None, 1)
    assert full.shape == ()


def counted(ids: list, pos: list, run: list, mask: AttnMaskType, n: int) -> tuple[list, list]:
    """By the meaning: tokens of a segment that attend, or are attended to, and the first one."""
    attends = np.array(ids[0])[:, None] == np.array(ids[1])[None, :]
    attends &= np.array(ids[0])[:, None] > 0
    q, kv = np.array(pos[0]), np.array(pos[1])
    if mask.is_bottom_right():
        q, kv = q - np.array(run[0]), kv - np.array(run[1])
    if mask.is_causal():
        attends &= q[:, None] >= kv[None, :]
    lengths, starts = [], []
    for side in (0, 1):
        used = attends.any(1 - side)
        hits = [np.nonzero(used & (np.array(ids[side]) == i + 1))[0] for i in range(n)]
        lengths.append([len(x) or -1 for x in hits])
        starts.append([x[0] if len(x) else -1 for x in hits] + [-1])
    return lengths, starts


@pytest.mark.parametrize("mask", [PADDING, CAUSAL, BOTTOM_RIGHT])
def test_ids_of_packed_rows_become_lengths_and_starts(mask: AttnMaskType) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = []
        for size in (16, 24):
            cuts = np.sort(rng.choice(np.arange(1, size), 3, replace=False))
            ids = np.searchsorted(cuts, np.arange(size), side="right")  # 0, 1, 2, 3
            ids[ids == rng.integers(0, 4)] = 0  # a sequence that is not there
            rows.append(jnp.array(ids)[None])
        descriptor = SequenceDescriptor.from_segment_ids_and_pos(tuple(rows), **OF_IDS)
        got = descriptor.get_seqlens_and_offsets(mask, THD, None, 3)
        plain = [x[0].tolist() for x in rows]
        pos = [x[0].tolist() for x in descriptor.segment_pos]
        run = [run_length_fill(x)[0].tolist() for x in rows]
        lengths, starts = counted(plain, pos, run, mask, 3)
        assert [x[0].tolist() for x in got[0]] == lengths
        assert [x[0].tolist() for x in got[1]] == starts


def test_interleaved_tokens_of_a_striped_step() -> None:
    """Query has positions 0, 4, 8 and key 1, 5, 9: the first row attends to nothing."""
    ids = jnp.ones((1, 3), jnp.int32)
    pos = tuple(jnp.array([x]) for x in ([0, 4, 8], [1, 5, 9]))
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids, pos)
    lengths, starts = descriptor.get_seqlens_and_offsets(CAUSAL, THD, None, 1)
    assert [x.tolist() for x in lengths] == [[[2]], [[2]]]
    assert [x.tolist() for x in starts] == [[[1, -1]], [[0, -1]]]


def sequences(lengths: list, starts: list, segments: int) -> list:
    arrays = (jnp.array(lengths), jnp.array(starts))
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(*arrays)
    return sequences_of(descriptor, PADDING, THD, (-1, -1), segments, (2, 8, 8))


def test_columns_beyond_the_sequences_of_a_row() -> None:
    """As many columns as tokens, with -1; the end after the last start is not a start."""
    lengths = [[3, 2, -1, -1, -1, -1, -1, -1], [4, -1, -1, -1, -1, -1, -1, -1]]
    starts = [[0, 4, 6, -1, -1, -1, -1, -1, -1], [1, 5, -1, -1, -1, -1, -1, -1, -1]]
    got = sequences(lengths, starts, 2)
    assert got.cu_seqlens_q.tolist() == [0, 3, 5, 9, 9]
    assert got.offsets_q.tolist()[:3] == [0, 4, 9]
    assert got.offsets_kv.tolist()[-1] == 16
    few = sequences([[3, 2], [4, -1]], [[0, 4, -1], [1, -1, -1]], 3)
    assert few.cu_seqlens_q.tolist() == [0, 3, 5, 9, 9, 9, 9]
    assert few.offsets_q.tolist() == [0, 4, 9, 16, 16, 16, 16]


def test_a_mask_becomes_lengths() -> None:
    masked = np.ones((2, 1, 4, 5), bool)
    masked[0, 0, :3, :2] = False
    masked[1] = False
    lengths = descriptor_of_mask(jnp.array(masked), PADDING, (2, 4, 5)).seqlens
    assert [x.tolist() for x in lengths] == [[3, 4], [2, 5]]
    triangle = masked | ~np.tri(4, 5, dtype=bool)
    lengths = descriptor_of_mask(jnp.array(triangle), CAUSAL, (2, 4, 5)).seqlens
    assert [x.tolist() for x in lengths] == [[3, 4], [2, 4]]
    full = descriptor_of_mask(None, AttnMaskType.CAUSAL_MASK, (2, 4, 5)).seqlens
    assert [x.tolist() for x in full] == [[4, 4], [5, 5]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: sequences([[1]], [[0, 1]], 1),
            r"sequence_descriptor is of lengths \[1, 1\]",
        ),
        (
            lambda: sequences_of(
                *(SequenceDescriptor.from_seqlens(jnp.array([1.5, 2.0])), PADDING, BSHD),
                *((-1, -1), 1, (2, 4, 4)),
            ),
            "seqlens.dtype is float32; needs integers",
        ),
        (lambda: descriptor_of_mask(None, PADDING, (2, 4, 5)), "mask is None; needs an array"),
        (
            lambda: descriptor_of_mask(jnp.zeros((2, 4, 5)), PADDING, (2, 4, 5)),
            r"mask is of shape \[2, 4, 5\]; needs \[2, 1, 4, 5\]",
        ),
    ],
)
def test_refusals(call: object, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        call()
