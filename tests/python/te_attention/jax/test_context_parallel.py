"""On one device: the order of rows, and refusals. More is in ../jax_devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_attention.jax import attention, context_parallel, reorder

ORDERS = {
    "contiguous": list(range(16)),
    "zigzag": [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9],
    "striped": [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15],
}


@pytest.mark.parametrize("layout", ORDERS)
def test_reorder_gives_each_device_its_rows_and_back(layout: str) -> None:
    rows = np.arange(32).reshape(2, 16)
    there = reorder(rows, 4, layout)
    assert there[0].tolist() == ORDERS[layout]
    np.testing.assert_array_equal(reorder(there, 4, layout, inverse=True), rows)
    np.testing.assert_array_equal(reorder(rows.T, 4, layout, axis=0), there.T)


def test_reorder_refuses_rows_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"dimension 1 of x is 12; needs a multiple of 8"):
        reorder(np.zeros((1, 12)), 4, "zigzag")


Q = np.random.default_rng(0).normal(size=(1, 8, 2, 8)).astype(np.float32)


def on_one_device(
    q: np.ndarray = Q, k: np.ndarray = Q, v: np.ndarray = Q, **options: object
) -> jax.Array:
    mesh = jax.make_mesh((1,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    kinds = {"mesh": mesh, "in_specs": P(None, "cp"), "out_specs": P(None, "cp")}
    call = jax.shard_map(
        lambda *x: context_parallel(*x, axis_name="cp", **options), **kinds, check_vma=False
    )
    return jax.jit(call)(q, k, v)


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
@pytest.mark.parametrize("layout", ORDERS)
def test_an_axis_of_one_device(strategy: str, layout: str) -> None:
    o = on_one_device(is_causal=True, strategy=strategy, layout=layout)
    np.testing.assert_allclose(o, attention(Q, Q, Q, is_causal=True), atol=1e-6)


REFUSED = {
    "strategy is 'a2a'; needs one of all_gather, ring": {"strategy": "a2a"},
    "layout is 'odd'; needs one of contiguous, zigzag, striped": {"layout": "odd"},
    "stripe_size is 2; needs 1 with layout zigzag": {"layout": "zigzag", "stripe_size": 2},
    "bias is of shape .*; needs 1 or all 8 columns": {"bias": np.zeros((8, 4), np.float32)},
    "bias is of shape .*; needs .1, 2, 8, 8.": {"bias": np.zeros((4, 8), np.float32)},
    "rows of query on a device is 7; needs a multiple of 2": {"q": Q[:, :7], "layout": "zigzag"},
    # K and V are sent as one array, in which a dtype or a shape of its own would be lost.
    "key.dtype is bfloat16; needs float32 as q": {"k": jnp.asarray(Q, jnp.bfloat16)},
    "value is of shape .1, 4, 2, 8.; needs the heads and rows of k": {"v": Q[:, :4]},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        on_one_device(**REFUSED[text])


@pytest.mark.parametrize("name", ["implementation", "sof_cap"])
def test_options_that_do_not_exist(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} is no option of context_parallel\(\)"):
        on_one_device(**{name: None})


def test_return_residual_is_a_flag() -> None:
    with pytest.raises(TypeError, match="return_residual is 2; needs True or False"):
        on_one_device(return_residual=2)
