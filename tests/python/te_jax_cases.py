"""The cases of TransformerEngine's tests of JAX attention, through transformer_engine.jax.

Masks, softmax types, shapes, dropout, windows, descriptors and biases in every combination, against
attention in float32 by operations of JAX.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from transformer_engine.jax.cpp_extensions import FusedAttnHelper
from transformer_engine_jax import NVTE_Fused_Attn_Backend

MASKS = ("NO_MASK", "PADDING_MASK", "CAUSAL_MASK", "PADDING_CAUSAL_MASK")
MASKS += ("PADDING_CAUSAL_BOTTOM_RIGHT_MASK",)
SHAPES = (  # batch, rows, keys, heads, groups, dims, dtype, arrays that are packed
    (2, 2048, 2048, 12, 12, 64, 64, jnp.bfloat16, 3),
    (2, 512, 1024, 12, 12, 64, 64, jnp.bfloat16, 2),
    (2, 2048, 1024, 12, 12, 64, 32, jnp.bfloat16, 1),
    (2, 2048, 2048, 12, 6, 64, 64, jnp.bfloat16, 2),
    (4, 128, 128, 16, 16, 64, 32, jnp.float16, 3),
    (4, 128, 128, 16, 16, 64, 64, jnp.float16, 2),
    (2, 1024, 2048, 12, 6, 128, 64, jnp.float16, 1),
)
DETERMINISTIC = (2, 1024, 2048, 12, 6, 128, 64, jnp.bfloat16, 1)
DESCRIPTORS = ("mask", "seqlens", "segment_ids")
LAYOUTS = {
    False: {1: QKVLayout.BSHD_BSHD_BSHD, 2: QKVLayout.BSHD_BS2HD, 3: QKVLayout.BS3HD},
    True: {1: QKVLayout.THD_THD_THD, 2: QKVLayout.THD_T2HD, 3: QKVLayout.T3HD},
}
PADDING = 0.3


@dataclass(frozen=True)
class Grid:
    """One combination."""

    mask: AttnMaskType
    softmax: AttnSoftmaxType
    shape: tuple
    is_thd: bool
    dropout: float
    has_window: bool
    descriptor: str
    has_bias: bool
    left: int | None = None  # of the window; None: a tenth of the keys
    segments: int = 2  # of a row of THD

    def __str__(self) -> str:
        """As a test is named."""
        b, rows, keys, heads, groups, dim, dim_v, dtype, _ = self.shape
        parts = (self.layout.name, jnp.dtype(dtype).name, f"{b}-{rows}-{keys}-{heads}-{groups}")
        flags = (f"dropout {self.dropout}",) * (self.dropout > 0)
        flags += ("window",) * self.has_window + ("bias",) * self.has_bias
        names = (self.mask.name, self.softmax.name, self.descriptor)
        return " ".join((*parts, f"{dim}-{dim_v}", *names, *flags))

    @property
    def layout(self) -> QKVLayout:
        return LAYOUTS[self.is_thd][self.shape[-1]]

    @property
    def window(self) -> tuple[int, int] | None:
        left = self.shape[2] // 10 if self.left is None else self.left
        return (left, 0) if self.has_window else None

    @property
    def bias(self) -> AttnBiasType:
        return AttnBiasType.POST_SCALE_BIAS if self.has_bias else AttnBiasType.NO_BIAS


def grid(divisor: int = 1, shapes: tuple = SHAPES) -> list[Grid]:
    """Every combination; rows and keys divided, dims not."""
    small = [(s[0], s[1] // divisor, s[2] // divisor, *s[3:]) for s in shapes]
    axes = (MASKS, AttnSoftmaxType, small, (False, True), (0.0, 0.1), (False, True))
    return [
        Grid(AttnMaskType[mask], *rest)
        for mask, *rest in itertools.product(*axes, DESCRIPTORS, (False, True))
    ]


def skipped(case: Grid) -> str:
    """Why TransformerEngine's test skips a case before it asks for a backend, or nothing."""
    _, rows, keys, _, _, dim, dim_v, _, packed = case.shape
    if case.is_thd and not case.mask.is_padding():
        return "THD without padding"
    if case.is_thd and case.descriptor == "mask":
        return "THD with a mask as descriptor"
    if case.mask.is_bottom_right() and (rows > keys or case.has_bias or case.dropout):
        return "bottom-right with more rows than keys, bias or dropout"
    if case.has_window and rows > keys:
        return "a window with more rows than keys"
    if packed > 1 and dim != dim_v:
        return "a packed layout with two head dims"
    if case.is_thd and case.has_bias:
        return "THD with a bias: a bias has no rows of its own for each sequence"
    return ""


def refused(case: Grid) -> str:
    """Why a case does not run, or nothing."""
    found = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    reason = skipped(case)
    return reason or (f"backend {backend(case).name}" if backend(case) != found else "")


def backend(case: Grid) -> NVTE_Fused_Attn_Backend:
    """By the query that TransformerEngine's tests make."""
    _, rows, keys, heads, groups, dim, dim_v, dtype, _ = case.shape
    kinds = (case.layout, case.bias, case.mask, case.softmax)
    sizes = (heads, groups, rows, keys, dim, dim_v)
    window = case.window or (-1, -1)
    return FusedAttnHelper(
        *(True, dtype, dtype), *kinds, case.dropout, *sizes, window
    ).get_fused_attn_backend()


def ids_of(case: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The segment ids of rows and of keys: 0 and 1 for BSHD, two sequences in a row of THD."""
    batch, rows, keys = case.shape[:3]
    if not case.is_thd:
        share = 1 - PADDING if case.mask.is_padding() else 1
        return tuple(
            np.broadcast_to(np.arange(n) < int(n * share), (batch, n)).astype(np.int32)
            for n in (rows, keys)
        )
    rng = np.random.default_rng(42)
    ids = [np.zeros((batch, n), np.int32) for n in (rows, keys)]
    for b in range(batch):
        for i in range(n := case.segments):
            length = int(rng.integers(rows // (2 * n), rows // n))
            ids[0][b, i * (rows // n) :][:length] = i + 1
            if rows == keys:
                ids[1][b] = ids[0][b]
                continue
            least = min(length, keys // n - 1) if rows < keys else keys // (2 * n)
            length = int(rng.integers(least, keys // n))
            ids[1][b, i * (keys // n) :][:length] = i + 1
    return tuple(ids)


def positions(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each token: its position in its run of equal ids, and the length of the run."""
    pos, length = np.zeros_like(ids), np.zeros_like(ids)
    for b, row in enumerate(ids):
        for n in set(row) - {0}:
            (where,) = np.nonzero(row == n)
            pos[b, where], length[b, where] = np.arange(where.size), where.size
    return pos, length


def attends_of(case: Grid) -> np.ndarray:
    """Which scores count: bool ``[batch, rows, keys]``."""
    ids = ids_of(case)
    (pos_q, len_q), (pos_kv, len_kv) = map(positions, ids)
    if not case.mask.is_padding():
        ids = [np.ones_like(x) for x in ids]
    out = (ids[0][:, :, None] == ids[1][:, None, :]) & (ids[0][:, :, None] != 0)
    if case.mask.is_bottom_right():
        pos_q, pos_kv = pos_q - len_q, pos_kv - len_kv
    distance = pos_q[:, :, None] - pos_kv[:, None, :]
    if case.mask.is_causal():
        out &= distance >= 0
    if case.window:
        out &= (distance <= case.window[0]) & (distance >= -case.window[1])
    return out


def descriptor_of(case: Grid) -> object:
    """The sequences of a case, as its descriptor says them."""
    ids = ids_of(case)
    if case.descriptor == "mask":  # without the window, which is an argument of its own
        masked = ~attends_of(replace(case, has_window=False))[:, None]
        return jnp.asarray(masked) if case.mask != AttnMaskType.NO_MASK else None
    if case.descriptor == "segment_ids":
        kinds = {"is_thd": case.is_thd, "is_segment_ids_reordered": False}
        arrays = tuple(jnp.asarray(x, jnp.int32 if case.is_thd else jnp.float32) for x in ids)
        return SequenceDescriptor.from_segment_ids_and_pos(arrays, None, **kinds)
    if not case.is_thd:
        return SequenceDescriptor.from_seqlens(tuple(jnp.asarray((x != 0).sum(1)) for x in ids))
    lengths = [np.full(x.shape, -1, np.int32) for x in ids]
    starts = [np.full((x.shape[0], x.shape[1] + 1), -1, np.int32) for x in ids]
    for x, length, start in zip(ids, lengths, starts, strict=True):
        for b, row in enumerate(x):
            for i in range(case.segments):
                (where,) = np.nonzero(row == i + 1)
                length[b, i], start[b, i] = where.size, where[0]
    pairs = (tuple(map(jnp.asarray, x)) for x in (lengths, starts))
    return SequenceDescriptor.from_seqlens_and_offsets(*pairs)


def reference(case: Grid, xp, attends, q, k, v, bias, offset, dout) -> tuple:
    """Attention and its gradients in float32, with NumPy or jax.numpy: O, dQ, dK, dV and the rest.

    NumPy compiles nothing, which takes most of the time of small cases.
    """
    scale, groups = np.float32(q.shape[-1] ** -0.5), k.shape[2]
    repeat = q.shape[2] // groups
    q, dout = (xp.swapaxes(x, 1, 2) for x in (q, dout))
    k, v = (xp.repeat(xp.swapaxes(x, 1, 2), repeat, axis=1) for x in (k, v))
    scores = q @ xp.swapaxes(k, 2, 3) * scale + (0 if bias is None else bias)
    scores = xp.where(attends[:, None], scores, xp.finfo(xp.float32).min)
    largest = xp.max(scores, axis=-1, keepdims=True)
    has_sink = case.softmax != AttnSoftmaxType.VANILLA_SOFTMAX
    sink = xp.zeros((1, q.shape[1], 1, 1), xp.float32) if offset is None else offset
    largest = xp.maximum(largest, sink) if has_sink else largest
    powers = xp.exp(scores - largest)
    extra = xp.exp(sink - largest) if has_sink else xp.zeros_like(largest)
    total = xp.sum(powers, axis=-1, keepdims=True) + extra
    p, p_sink = powers / total, extra / total
    dp = dout @ xp.swapaxes(v, 2, 3)
    row = xp.sum(dp * p, axis=-1, keepdims=True)
    ds = xp.where(attends[:, None], p * (dp - row), 0)

    def grouped(x):
        return xp.swapaxes(x.reshape(x.shape[0], groups, repeat, *x.shape[2:]).sum(2), 1, 2)

    out, dq = (xp.swapaxes(x, 1, 2) for x in (p @ v, ds @ k * scale))
    dk, dv = (grouped(xp.swapaxes(x, 2, 3) @ y) for x, y in ((ds, q * scale), (p, dout)))
    dbias = None if bias is None else xp.sum(ds, axis=0, keepdims=True)
    doffset = None if offset is None else -xp.sum(p_sink * row, axis=(0, 2), keepdims=True)
    return out, dq, dk, dv, dbias, doffset


def packed(case: Grid, q, k, v) -> tuple:
    """Q, K and V as the layout has them."""
    if case.shape[-1] == 3:
        return (jnp.stack([q, k, v], -3),)
    return (q, jnp.stack([k, v], -3)) if case.shape[-1] == 2 else (q, k, v)


def inputs(case: Grid) -> tuple[list, list]:
    """Q, K, V and bias in the dtype of the case, and the offset; None where there is none."""
    batch, rows, keys, heads, groups, dim, dim_v, dtype, _ = case.shape
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    qkv = [draw(batch, rows, heads, dim), draw(batch, keys, groups, dim)]
    qkv.append(draw(batch, keys, groups, dim_v))
    qkv = [x.astype(jnp.dtype(dtype)) for x in qkv]
    bias = draw(1, heads, rows, keys).astype(jnp.dtype(dtype)) if case.has_bias else None
    is_learnable = case.softmax == AttnSoftmaxType.LEARNABLE_SOFTMAX
    return qkv, [bias, draw(1, heads, 1, 1) if is_learnable else None]


def tolerance(dtype: object) -> float:
    """Relative and absolute: eps to the power of 2/3."""
    return float(jnp.finfo(dtype).eps) ** (2 / 3)


class Placed(NamedTuple):
    """How arrays lie on devices."""

    place: Callable  # inputs: a tree of arrays, to one on devices
    order: Callable  # rows, to those that devices hold one after the other
    back: Callable


HERE = Placed(lambda *x: x, lambda x: x, lambda x: x)


def ours(
    case: Grid, valid: np.ndarray, placed: Placed, more: dict, qkv: list, small: list, *rest
) -> tuple:
    """The loss of TransformerEngine's test, and O."""
    out = fused_attn(
        *(packed(case, *map(placed.order, qkv)), small[0], *rest),
        *(case.bias, case.mask, case.layout),
        *(case.softmax, case.shape[5] ** -0.5, case.dropout, True),
        max_segments_per_seq=case.segments + 1 if case.is_thd else 1,
        window_size=case.window,
        softmax_offset=small[1],
        **more,
    )
    out = placed.back(out)
    loss = jnp.mean(jnp.where(valid, out, 0), dtype=jnp.float32) * factor_of(case)
    return loss.astype(out.dtype), out


def factor_of(case: Grid) -> float:
    """Of the loss, so that gradients are of the size of 1 / (batch * dim)."""
    return case.shape[1] * case.shape[3] / (10 if case.mask.is_causal() else 1)


def run(case: Grid, xp=np, placed: Placed = HERE, **more: object) -> str:
    """The error of a case, or an empty text. `more`: of fused_attn()."""
    dtype = case.shape[7]
    qkv, small = inputs(case)
    attends = attends_of(case)
    valid = (ids_of(case)[0] != 0)[:, :, None, None]
    seed = jax.random.PRNGKey(5) if case.dropout else None
    both = jax.value_and_grad(partial(ours, case, valid, placed, more), (0, 1), has_aux=True)
    descriptor = descriptor_of(case)
    if case.is_thd and placed is not HERE:
        pairs = (descriptor.segment_ids, descriptor.segment_pos)
        ids, positions_ = (tuple(map(placed.order, pair)) for pair in pairs)
        descriptor = SequenceDescriptor(segment_ids=ids, segment_pos=positions_)
    (loss, out), gradients = jax.jit(both)(*placed.place(qkv, small, descriptor, seed))
    seen = [np.asarray(x, np.float32) for x in jax.tree.leaves((out, gradients))]
    results = (out, *gradients[0], *gradients[1])
    names = [n for n, x in zip(NAMES, results, strict=True) if x is not None]
    wrong = [
        f"{n} is not finite" for n, x in zip(names, seen, strict=True) if not np.isfinite(x).all()
    ]
    wrong += ["output in padding is not 0"] * bool(np.any(np.where(valid, 0, seen[0])))
    if case.dropout:
        return "; ".join(wrong)
    dout = np.broadcast_to(np.where(valid, factor_of(case) / out.size, 0), out.shape)
    arrays = [None if x is None else np.asarray(x, np.float32) for x in (*qkv, *small, dout)]
    compute = partial(reference, case, xp, attends)
    with jax.default_matmul_precision("highest"):
        wanted = (compute if xp is np else jax.jit(compute))(*arrays)
    wanted = [np.asarray(x) for x in wanted if x is not None]
    seen[0], wanted[0] = (np.where(valid, x, 0) for x in (seen[0], wanted[0]))
    for name, x, y in zip(names, seen, wanted, strict=True):
        wrong += different(name, x, y, dtype)
    total = np.mean(wanted[0], dtype=np.float64) * factor_of(case)
    wrong += different("loss", np.float32(loss), np.float32(total), dtype)
    if case.has_bias:
        masked = ~np.any(attends, axis=0)
        dbias = seen[names.index("dbias")]
        wrong += ["dbias of masked scores is not 0"] * bool(np.any(dbias[..., masked]))
    return "; ".join(wrong)


NAMES = ("output", "dq", "dk", "dv", "dbias", "doffset")


def different(name: str, seen: np.ndarray, wanted: np.ndarray, dtype: object) -> list:
    """Where two arrays differ most, if they do."""
    bound = tolerance(dtype)
    excess = np.abs(seen - wanted) - bound * (1 + np.abs(wanted))
    if not excess.size or excess.max() <= 0:
        return []
    at = np.unravel_index(np.argmax(excess), excess.shape)
    return [f"{name}{list(map(int, at))} is {seen[at]}; needs {wanted[at]} within {bound:.4f}"]


def deterministic_grid(divisor: int = 1) -> list[Grid]:
    """The cases that TransformerEngine repeats with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""
    return [
        case
        for case in grid(divisor, (DETERMINISTIC,))
        if case.softmax == AttnSoftmaxType.VANILLA_SOFTMAX
        and case.descriptor == "seqlens"
        and not case.dropout
        and not case.has_window
    ]


def of_one_rank(divisor: int = 1) -> list[Grid]:
    """The cases of context parallelism, which on one device are ordinary calls."""
    out = []
    for shape in ((2, 256, 8, 128), (4, 512, 16, 64)):
        batch, rows, heads, dim = shape
        for groups, arrays in itertools.product((1, 8), (1, 2)):
            for mask in ("NO_MASK", "CAUSAL_MASK", "PADDING_CAUSAL_MASK"):
                is_thd = mask == "PADDING_CAUSAL_MASK"
                if is_thd and arrays != 1:
                    continue
                rows_ = rows // divisor
                sizes = (batch, rows_, rows_, heads, heads // groups, dim, dim, jnp.bfloat16)
                rest = (0.0, False, "segment_ids" if is_thd else "seqlens", False)
                softmax = AttnSoftmaxType.VANILLA_SOFTMAX
                out.append(Grid(AttnMaskType[mask], softmax, (*sizes, arrays), is_thd, *rest))
    return out
