"""Rows over an axis of devices: both strategies and every layout give the results of one device."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_mesh_cases import EVERY, LAYOUTS, STRATEGIES, compare, mesh_of, shared
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
# Options, arrays with a gradient, rows of key, and layouts that refuse them.
CASES = {
    "full": ({}, {}, ROWS, ()),
    "causal": ({"is_causal": True}, {}, ROWS, ()),
    "window": ({"local_window_size": (5, None), "is_causal": True}, {}, ROWS, ()),
    "narrow window": ({"local_window_size": (1, 0)}, {}, ROWS, ()),
    "both sides": ({"local_window_size": (3, 9)}, {}, ROWS, ()),
    "future": ({"local_window_size": (None, 2)}, {}, ROWS, ()),
    "cross": ({}, {}, 2 * ROWS, ()),
    "cross causal": ({"is_causal": True}, {}, 2 * ROWS, ()),
    "bottom right": ({"is_causal": True, "bottom_right": True}, {}, 2 * ROWS, ()),
    "bottom right, fewer keys": ({"is_causal": True, "bottom_right": True}, {}, ROWS // 2, ()),
    "window, bottom right": (
        {"local_window_size": (9, 3), "bottom_right": True},
        {},
        2 * ROWS,
        (),
    ),
    "lengths": (LENGTHS | {"is_causal": True}, {}, ROWS, ()),
    "lengths, sink": (LENGTHS, {"sink": normal(5, HEADS)}, ROWS, ()),
    "softcap": ({"softcap": 2.0, "scale": 0.5}, {}, ROWS, ()),
    "alibi": ({"alibi": True, "is_causal": True}, {}, ROWS, ("striped",)),
    "slopes": ({"alibi": normal(6, HEADS) ** 2}, {}, ROWS, ("striped",)),
    "dropout": (
        {"dropout": 0.3, "dropout_key": KEY, "is_causal": True},
        {},
        ROWS,
        ("striped",),
    ),
    "off by one": ({"sink": "off_by_one", "is_causal": True}, {}, ROWS, ()),
    "sink": (
        {"is_causal": True, "local_window_size": (4, 0)},
        {"sink": normal(5, HEADS)},
        ROWS,
        (),
    ),
    "bias": ({"is_causal": True}, {"bias": normal(7, BATCH, HEADS, ROWS, ROWS)}, ROWS, ()),
    "bias of columns": ({}, {"bias": normal(7, 1, HEADS, 1, ROWS)}, ROWS, ()),
    "bias of rows": ({}, {"bias": normal(7, 1, 1, ROWS, 1)}, ROWS, ()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_options_on_four_devices(case: str, layout: str, strategy: str) -> None:
    static, small, rows_kv, refusing = CASES[case]
    qkv = qkv_of(2, rows_kv)
    if layout in refusing:
        with pytest.raises(ValueError, match="layout striped"):
            compare(shared(4, strategy, layout, small), static, small, qkv, qkv)
        return
    compare(shared(4, strategy, layout, small), static, small, qkv, qkv)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_sizes_and_heads(size: int, strategy: str, layout: str) -> None:
    for heads_kv in (4, 1):
        qkv = qkv_of(heads_kv)
        compare(shared(size, strategy, layout, {}), {"is_causal": True}, {}, qkv, qkv)


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_values_that_vary_are_checked(strategy: str, layout: str) -> None:
    static, small, *_ = CASES["sink"]
    attend = shared(4, strategy, layout, small, check_vma=True)
    compare(attend, static, small, qkv_of(), qkv_of())


@pytest.mark.parametrize(("strategy", "layout"), EVERY)
def test_batch_and_heads_over_further_axes(strategy: str, layout: str) -> None:
    names, kinds = ("dp", "cp", "tp"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=kinds)
    how = {"axis_name": "cp", "strategy": strategy, "layout": layout}
    split = jax.shard_map(
        lambda *x: context_parallel(*x, is_causal=True, **how),
        **{"mesh": mesh, "in_specs": P(*names), "out_specs": P(*names), "check_vma": False},
    )
    o = jax.jit(split)(*(reorder(x, 2, layout) for x in qkv_of()))
    expected = attention(*qkv_of(), is_causal=True)
    np.testing.assert_allclose(reorder(o, 2, layout, inverse=True), expected, atol=3e-5)


def dropped(attend) -> np.ndarray:
    """The pattern of dropout: scores of 0 and a value of one for each column."""
    zero = jnp.zeros((1, ROWS, 2, DIM))
    eye = jnp.broadcast_to(jnp.eye(ROWS)[None, :, None], (1, ROWS, 2, ROWS))
    options = {"dropout": 0.5, "dropout_key": KEY}
    wants = {"return_residual": True, "return_max_logit": True}
    return np.asarray(jax.jit(lambda: attend(zero, zero, eye, **options, **wants)[0])()) > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dropout_draws_the_bits_of_one_device(strategy: str, layout: str) -> None:
    ours, one = dropped(shared(4, strategy, layout, {})), dropped(attention)
    assert 0.4 < one.mean() < 0.6
    np.testing.assert_array_equal(ours, one)


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


def test_a_window_shortens_the_ring() -> None:
    window = {"is_causal": True, "local_window_size": (6, 0)}
    assert moves(4, "ring", "contiguous", **window) == {"collective-permute": 1}
