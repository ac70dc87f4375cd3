"""Rows over devices that are several sequences, or have diagonals of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mesh_cases import EVERY, STRATEGIES, compare, mesh_of, program, shared
from te_attention.jax import attention, context_parallel, reorder

BATCH, ROWS, HEADS, DIM = 2, 32, 4, 16
KEY = jax.random.key(3)
STRIPES = 4
# Of four devices: single stripes, and those of several rows.
WAYS = [(*way, 1) for way in EVERY]
WAYS += [(strategy, "striped", s) for s in (2, STRIPES) for strategy in STRATEGIES]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv_of(heads_kv: int = 2, rows_kv: int = ROWS) -> list[np.ndarray]:
    shapes = ((ROWS, HEADS, DIM), (rows_kv, heads_kv, DIM), (rows_kv, heads_kv, DIM + 8))
    return [normal(i, BATCH, *shape) for i, shape in enumerate(shapes)]


def ids_of(rows: int, *lengths: list[int]) -> np.ndarray:
    """Ids of runs; a negative length is padding."""
    out = np.zeros((len(lengths), rows), np.int32)
    for row, some in zip(out, lengths, strict=True):
        first = number = 0
        for length in some:
            number += length > 0
            row[first : first + abs(length)] = number * (length > 0)
            first += abs(length)
    return out


# Of both sides, one run crosses several devices, one is within a device, and one row has a gap.
IDS = ids_of(ROWS, [3, 17, -2, 7], [-1, 11, 2, 1, 14])
OTHER = ids_of(2 * ROWS, [20, 9, 30], [5, -6, 30, 3, 11])
SEGMENTS = {"q_segment_ids": IDS, "max_segments": 4}
CROSS = SEGMENTS | {"kv_segment_ids": OTHER}
LENGTHS = {
    "query_seq_lengths": np.array([27, 9], np.int32),
    "key_value_seq_lengths": np.array([19, 32], np.int32),
}
CORNER = {"is_causal": True, "bottom_right": True}
DROPPING = {"dropout": 0.3, "dropout_key": KEY}
# Options, arrays with a gradient, and rows of key.
CASES = {
    "segments": (SEGMENTS, {}, ROWS),
    "segments, causal": (SEGMENTS | {"is_causal": True}, {}, ROWS),
    "segments, window": (SEGMENTS | {"local_window_size": (5, 2)}, {}, ROWS),
    "segments, narrow window": (
        SEGMENTS | {"local_window_size": (2, 0), "is_causal": True},
        {},
        ROWS,
    ),
    "segments, bottom right": (SEGMENTS | CORNER, {}, ROWS),
    "segments, sink": (SEGMENTS | {"is_causal": True}, {"sink": normal(5, HEADS)}, ROWS),
    "segments, off by one": (SEGMENTS | {"sink": "off_by_one"}, {}, ROWS),
    "segments, softcap": (SEGMENTS | {"softcap": 2.0, "scale": 0.5}, {}, ROWS),
    "segments, alibi": (SEGMENTS | {"alibi": True, "is_causal": True}, {}, ROWS),
    "segments, slopes": (SEGMENTS | {"alibi": normal(6, BATCH, HEADS) ** 2}, {}, ROWS),
    "segments, dropout": (SEGMENTS | DROPPING | {"is_causal": True}, {}, ROWS),
    "cross segments": (CROSS, {}, 2 * ROWS),
    "cross segments, causal": (CROSS | {"is_causal": True}, {}, 2 * ROWS),
    "cross segments, bottom right": (CROSS | CORNER, {"sink": normal(5, HEADS)}, 2 * ROWS),
    "cross segments, window": (CROSS | CORNER | {"local_window_size": (9, 0)}, {}, 2 * ROWS),
    "cross segments, dropout": (CROSS | CORNER | DROPPING | {"alibi": True}, {}, 2 * ROWS),
    "lengths, bottom right": (LENGTHS | CORNER, {"sink": normal(5, HEADS)}, ROWS),
    "lengths, bottom right, window": (
        LENGTHS | {"bottom_right": True, "local_window_size": (6, 3)},
        {},
        ROWS,
    ),
    "length of query, bottom right": (
        CORNER | {"query_seq_lengths": LENGTHS["query_seq_lengths"]},
        {"bias": normal(7, 1, HEADS, ROWS, ROWS)},
        ROWS,
    ),
    "lengths, bottom right, dropout": (LENGTHS | CORNER | DROPPING, {}, ROWS),
    "bottom right, dropout": (CORNER | DROPPING, {}, 2 * ROWS),
    "bottom right, fewer keys, alibi": (CORNER | {"alibi": True} | DROPPING, {}, ROWS // 2),
    "alibi": ({"alibi": True}, {}, ROWS),
}


# Every third way of a case, another third of the next one: jax_mesh_draws.py draws all.
SOME = [
    (*way, case) for i, way in enumerate(WAYS) for j, case in enumerate(CASES) if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("strategy", "layout", "stripe", "case"), SOME)
def test_options_on_four_devices(strategy: str, layout: str, stripe: int, case: str) -> None:
    static, small, rows_kv = CASES[case]
    qkv = qkv_of(2, rows_kv)
    attend = shared(4, strategy, layout, small, stripe=stripe)
    compare(attend, static, small, qkv, qkv)


@pytest.mark.parametrize(("size", "heads_kv"), [(2, 4), (8, 1)])
@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_sizes_and_heads(strategy: str, layout: str, size: int, heads_kv: int) -> None:
    attend = shared(size, strategy, layout, {})
    compare(attend, SEGMENTS | {"is_causal": True}, {}, qkv_of(heads_kv), qkv_of(heads_kv))


@pytest.mark.parametrize(("strategy", "layout", "stripe"), WAYS)
def test_values_that_vary_are_checked(strategy: str, layout: str, stripe: int) -> None:
    small = {"sink": normal(5, HEADS)}
    attend = shared(4, strategy, layout, small, check_vma=True, stripe=stripe)
    compare(attend, SEGMENTS | {"is_causal": True}, small, qkv_of(), qkv_of())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vmap_of_segments(strategy: str) -> None:
    """A mapped axis joins the batch, with the origin of each sequence."""
    qkv, ids = [np.stack([x, x[::-1]]) for x in qkv_of()], np.stack([IDS, IDS[::-1]])
    static = {"is_causal": True, "max_segments": 4}

    def gradients(attend) -> tuple:
        def loss(q, k, v, ids):
            o, *_ = attend(q, k, v, q_segment_ids=ids, return_residual=True, **static)
            return jnp.sum(jnp.sin(o))

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(*qkv, ids)

    ours = gradients(shared(4, strategy, "zigzag", {}))
    for x, y in zip(ours, gradients(attention), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_merged_parts_of_float64(strategy: str, layout: str) -> None:
    """The gradient of a part takes dO . O from the O of all parts, not from its own keys."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        qkv = [x.astype(np.float64) for x in qkv_of()]
        attend = shared(4, strategy, layout, {})
        out, expected = (program(f, {"is_causal": True})(qkv, {}) for f in (attend, attention))
        for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    finally:
        jax.config.update("jax_enable_x64", before)


def over_three_axes(of_device: dict, how: dict) -> jax.Array:
    """O, with rows over two devices and batch and heads over further axes."""
    names, spec = ("dp", "cp", "tp"), jax.sharding.PartitionSpec("dp", "cp", "tp")
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=kinds)
    axes = {"batch_axes": "dp", "head_axes": "tp", "axis_name": "cp", "layout": "zigzag"} | how
    split = jax.shard_map(
        lambda *x: context_parallel(*x, **of_device, **axes),
        **{"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False},
    )
    o = jax.jit(split)(*(reorder(x, 2, axes["layout"]) for x in qkv_of()))
    return reorder(o, 2, axes["layout"], inverse=True)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_published_slopes_and_dropout_with_heads_over_a_further_axis(
    strategy: str, layout: str
) -> None:
    """The slopes are those of the heads of a device, not those of as many heads."""
    options = {"alibi": True, "is_causal": True, **DROPPING}
    o = over_three_axes(options, {"strategy": strategy, "layout": layout})
    np.testing.assert_allclose(o, attention(*qkv_of(), **options), atol=3e-5)


def test_published_slopes_without_the_axes_of_heads_are_refused() -> None:
    text = r"head_axes is None within axes dp, tp; needs its axes, or \(\): alibi is True"
    with pytest.raises(ValueError, match=text):
        over_three_axes({"alibi": True}, {"head_axes": None})


REFUSED = {
    "lengths": (SEGMENTS | LENGTHS, {}, "query_seq_lengths is given; needs None: q_segment_ids"),
    "bias": (SEGMENTS, {"bias": normal(7, 1, 1, 1, ROWS)}, "bias is given; needs None: q_segment"),
    "no bound": ({"q_segment_ids": IDS}, {}, "max_segments is None; needs an integer from 1"),
    "no ids of key": (SEGMENTS, {}, "kv_segment_ids is None; needs integers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_segments_do_not_go_with(case: str) -> None:
    static, small, text = REFUSED[case]
    qkv = qkv_of(2, 2 * ROWS if case == "no ids of key" else ROWS)
    with pytest.raises(ValueError, match=text):
        compare(shared(4, "ring", "zigzag", small), static, small, qkv, qkv)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"stripe_size": 0}, "stripe_size is 0; needs an integer from 1"),
        ({"stripe_size": 2}, "stripe_size is 2; needs 1 with layout zigzag"),
    ],
)
def test_stripes_that_do_not_exist(how: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        over_three_axes({}, {"strategy": "ring", **how})


def test_stripes_that_do_not_divide_the_rows_are_refused() -> None:
    qkv = [x[:, :24] for x in qkv_of()]
    with pytest.raises(ValueError, match="rows of query on a device is 6; needs a multiple of 4"):
        over_stripes(qkv)


def over_stripes(qkv: list) -> None:
    """Traces a call of rows that are as they are."""
    spec = jax.sharding.PartitionSpec(None, "cp")
    how = {"axis_name": "cp", "layout": "striped", "stripe_size": STRIPES}
    split = jax.shard_map(
        lambda *x: context_parallel(*x, **how), mesh=mesh_of(4), in_specs=spec, out_specs=spec
    )
    jax.eval_shape(split, *qkv)
