"""Rows over an axis of devices: both strategies and every layout give the results of one device."""

import collections
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_mesh_cases import EVERY, LAYOUTS, STRATEGIES, compare, mesh_of, program, shared
from te_attention.jax import attention, context_parallel, reorder

BATCH, ROWS, HEADS, DIM = 2, 32, 4, 16
KEY = jax.random.key(3)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv_of(heads_kv: int = 2, rows_kv: int = ROWS) -> list[np.ndarray]:
    shapes = ((ROWS, HEADS, DIM), (rows_kv, heads_kv, DIM), (rows_kv, heads_kv, DIM + 8))
    return [normal(i, BATCH, *shape) for i, shape in enumerate(shapes)]


LENGTHS = {
    "query_seq_lengths": np.array([27, 9], np.int32),
    "key_value_seq_lengths": np.array([19, 32], np.int32),
}
# Options, arrays with a gradient, and rows of key.
CASES = {
    "full": ({}, {}, ROWS),
    "causal": ({"is_causal": True}, {}, ROWS),
    "window": ({"local_window_size": (5, None), "is_causal": True}, {}, ROWS),
    "narrow window": ({"local_window_size": (1, 0)}, {}, ROWS),
    "both sides": ({"local_window_size": (3, 9)}, {}, ROWS),
    "future": ({"local_window_size": (None, 2)}, {}, ROWS),
    "cross": ({}, {}, 2 * ROWS),
    "cross causal": ({"is_causal": True}, {}, 2 * ROWS),
    "bottom right": ({"is_causal": True, "bottom_right": True}, {}, 2 * ROWS),
    "bottom right, fewer keys": ({"is_causal": True, "bottom_right": True}, {}, ROWS // 2),
    "window, bottom right": (
        {"local_window_size": (9, 3), "bottom_right": True},
        {},
        2 * ROWS,
    ),
    "lengths": (LENGTHS | {"is_causal": True}, {}, ROWS),
    "lengths, sink": (LENGTHS, {"sink": normal(5, HEADS)}, ROWS),
    "softcap": ({"softcap": 2.0, "scale": 0.5}, {}, ROWS),
    "alibi": ({"alibi": True, "is_causal": True}, {}, ROWS),
    "slopes": ({"alibi": normal(6, HEADS) ** 2}, {}, ROWS),
    "dropout": ({"dropout": 0.3, "dropout_key": KEY, "is_causal": True}, {}, ROWS),
    "dropout, alibi, window, sink, bias": (
        {"dropout": 0.3, "dropout_key": KEY, "alibi": True, "local_window_size": (9, 4)},
        {"sink": normal(5, HEADS), "bias": normal(7, BATCH, HEADS, ROWS, ROWS)},
        ROWS,
    ),
    "dropout, off by one, bottom right": (
        {
            "dropout": 0.3,
            "dropout_key": KEY,
            "sink": "off_by_one",
            "is_causal": True,
            "bottom_right": True,
        },
        {},
        2 * ROWS,
    ),
    "off by one": ({"sink": "off_by_one", "is_causal": True}, {}, ROWS),
    "sink": (
        {"is_causal": True, "local_window_size": (4, 0)},
        {"sink": normal(5, HEADS)},
        ROWS,
    ),
    "bias": ({"is_causal": True}, {"bias": normal(7, BATCH, HEADS, ROWS, ROWS)}, ROWS),
    "bias of columns": ({}, {"bias": normal(7, 1, HEADS, 1, ROWS)}, ROWS),
    "bias of rows": ({}, {"bias": normal(7, 1, 1, ROWS, 1)}, ROWS),
    "bias before the scale": (
        {"bias_type": "pre_scale", "scale": 0.5},
        {"bias": normal(7, 1, HEADS, ROWS, ROWS)},
        ROWS,
    ),
    "mask of columns": ({"mask": normal(8, BATCH, 1, 1, ROWS) > -1}, {}, ROWS),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_options_on_four_devices(case: str, layout: str, strategy: str) -> None:
    static, small, rows_kv = CASES[case]
    qkv = qkv_of(2, rows_kv)
    compare(shared(4, strategy, layout, small), static, small, qkv, qkv)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_sizes_and_heads(size: int, strategy: str, layout: str) -> None:
    for heads_kv in (4, 1):
        qkv = qkv_of(heads_kv)
        compare(shared(size, strategy, layout, {}), {"is_causal": True}, {}, qkv, qkv)


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_values_that_vary_are_checked(strategy: str, layout: str) -> None:
    static, small, *_ = CASES["dropout, alibi, window, sink, bias"]
    attend = shared(4, strategy, layout, small, check_vma=True)
    compare(attend, static, small, qkv_of(), qkv_of())


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_batch_and_heads_over_further_axes(strategy: str, layout: str) -> None:
    o = over_three_axes(strategy, layout, lambda: {"is_causal": True})
    expected = attention(*qkv_of(), is_causal=True)
    np.testing.assert_allclose(o, expected, atol=3e-5)


def over_three_axes(strategy: str, layout: str, options_of: Callable[[], dict]) -> jax.Array:
    """O, with batch, rows and heads over two devices each; `options_of` runs on each device."""
    names, kinds = ("dp", "cp", "tp"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=kinds)
    how = {"axis_name": "cp", "strategy": strategy, "layout": layout}
    split = jax.shard_map(
        lambda *x: context_parallel(*x, **options_of(), **how),
        **{"mesh": mesh, "in_specs": P(*names), "out_specs": P(*names), "check_vma": False},
    )
    o = jax.jit(split)(*(reorder(x, 2, layout) for x in qkv_of()))
    return reorder(o, 2, layout, inverse=True)


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_slopes_and_dropout_with_heads_over_a_further_axis(strategy: str, layout: str) -> None:
    slopes = jnp.asarray(normal(6, HEADS) ** 2)
    both = {"is_causal": True, "dropout": 0.3, "dropout_key": KEY}

    def of_device() -> dict:
        batch, head = jax.lax.axis_index("dp"), jax.lax.axis_index("tp") * (HEADS // 2)
        origin = jnp.stack([batch, head, 0, 0])
        own = jax.lax.dynamic_slice_in_dim(slopes, head, HEADS // 2)
        return {"alibi": own, "origin": origin, **both}

    expected = attention(*qkv_of(), alibi=slopes, **both)
    np.testing.assert_allclose(over_three_axes(strategy, layout, of_device), expected, atol=3e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_half_precision(strategy: str, layout: str, dtype: str) -> None:
    qkv = [jnp.asarray(x, dtype) for x in qkv_of()]
    out, expected = (
        program(attend, {"is_causal": True})(qkv, {})
        for attend in (shared(4, strategy, layout, {}), attention)
    )
    # Results, and those of the parts that they are sums of, are rounded to the dtype.
    limit = 2 * float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        x, y = (np.asarray(a, np.float32) for a in (ours, theirs))
        np.testing.assert_allclose(x, y, rtol=limit, atol=limit * np.abs(y).max())


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_vmap_and_checkpoint(strategy: str, layout: str) -> None:
    qkv = [np.stack([x, x[::-1]]) for x in qkv_of()]
    static = {"is_causal": True, "alibi": True}

    def gradients(attend: Callable) -> Callable:
        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(attend(*x, **static, return_residual=True)[0]))

        return jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))))

    def ours(*x: jax.Array, **options: object) -> tuple:
        return shared(4, strategy, layout, {})(*x, **options)

    for x, y in zip(gradients(ours)(*qkv), gradients(attention)(*qkv), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


def test_eager_shard_map() -> None:
    """Without jit, where JAX evaluates no custom_vjp that has symbolic zeros."""

    def results(attend: Callable) -> tuple:
        def loss(*x: jax.Array) -> jax.Array:
            o, *_ = attend(*x, is_causal=True, return_residual=True)
            return jnp.sum(jnp.sin(o))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*qkv_of())

    ours = results(shared(2, "all_gather", "contiguous", {}))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(results(attention)), strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_batch_invariant_bits_of_gathered_keys_are_those_of_one_device(layout: str) -> None:
    static = {"is_causal": True, "batch_invariant": True}
    wants = {"return_residual": True, "return_max_logit": True}
    attend = shared(4, "all_gather", layout, {})
    out = attend(*qkv_of(), **static, **wants)
    for x, y in zip(out, attention(*qkv_of(), **static, **wants), strict=True):
        np.testing.assert_array_equal(x, y)


def dropped(attend) -> np.ndarray:
    """The pattern of dropout: scores of 0 and a value of one for each column."""
    zero = jnp.zeros((1, ROWS, 2, DIM))
    eye = jnp.broadcast_to(jnp.eye(ROWS)[None, :, None], (1, ROWS, 2, ROWS))
    options = {"dropout": 0.5, "dropout_key": KEY}
    wants = {"return_residual": True, "return_max_logit": True}
    return np.asarray(jax.jit(lambda: attend(zero, zero, eye, **options, **wants)[0])()) > 0


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_dropout_draws_the_bits_of_one_device(strategy: str, layout: str) -> None:
    ours, one = dropped(shared(4, strategy, layout, {})), dropped(attention)
    assert 0.4 < one.mean() < 0.6
    np.testing.assert_array_equal(ours, one)


ORIGINS = {
    "causal": {"origin": (0, 0, 8, 0), "is_causal": True},
    "of the device": {"origin": jnp.array([0, 0, 3, 0]), "is_causal": True},
    "window": {"origin": (0, 0, 0, 7), "local_window_size": (9, 3)},
    "the same for rows and columns": {"origin": (1, 2, 5, 5), "local_window_size": (9, 0)},
    "dropout": {"origin": (3, 1, 2, 8), "dropout": 0.3, "dropout_key": KEY, "is_causal": True},
}


@pytest.mark.parametrize("case", ORIGINS)
@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_an_origin_of_the_caller_moves_the_mask(strategy: str, layout: str, case: str) -> None:
    """Which parts are visible does not follow from the positions of the rows alone."""
    qkv = qkv_of()
    compare(shared(4, strategy, layout, {}), ORIGINS[case], {}, qkv, qkv)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "rows"), [(4, 3 * 4), (8, 3 * 8), (8, 8), (4, 5 * 4)])
def test_exchanged_rows_that_no_message_divides(size: int, rows: int, strategy: str) -> None:
    """Messages have the same number of rows: some have one that the receiver does not use."""
    bias = {"bias": normal(7, BATCH, 1, rows, rows)}
    qkv = [x[:, :rows] for x in qkv_of()]
    for causal in (False, True):
        options = {"alibi": True, "is_causal": causal}
        compare(shared(size, strategy, "striped", bias), options, bias, qkv, qkv)


def moves(size: int, strategy: str, layout: str, **options: object) -> collections.Counter:
    mesh = mesh_of(size)
    how = {"axis_name": "cp", "strategy": strategy, "layout": layout}
    kinds = {"mesh": mesh, "in_specs": P(None, "cp"), "out_specs": P(None, "cp")}
    split = jax.shard_map(
        lambda *x: context_parallel(*x, **how, **options), **kinds, check_vma=False
    )
    text = jax.jit(split).lower(*qkv_of()).compile().as_text()
    names = r"= .*? (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)"
    return collections.Counter(re.findall(names + r"(?:-start)?\(", text))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_more_messages_than_needed(size: int, layout: str) -> None:
    assert moves(size, "all_gather", layout, is_causal=True) == {"all-gather": 1}
    assert moves(size, "ring", layout, is_causal=True) == {"collective-permute": size - 1}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_messages_of_exchanged_rows(size: int) -> None:
    """Q and O, in a ring K and V as one message: those of the parts are as many as without."""
    options = {"is_causal": True, "alibi": True}
    found = moves(size, "all_gather", "striped", **options)
    assert found == {"all-gather": 1, "all-to-all": 2}
    found = moves(size, "ring", "striped", **options)
    assert found == {"collective-permute": size - 1, "all-to-all": 3}


def test_a_window_shortens_the_ring() -> None:
    window = {"is_causal": True, "local_window_size": (6, 0)}
    assert moves(4, "ring", "contiguous", **window) == {"collective-permute": 1}
