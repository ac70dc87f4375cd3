"""Cases of attention() over meshes that split batch and heads, compared with one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_attention.jax import attention

MESHES = {
    "1": {"dp": 1},
    "2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp8": {"dp": 8},
    "tp8": {"tp": 8},
    "2x4": {"dp": 2, "tp": 4},
    "4x2": {"dp": 4, "tp": 2},
}
BATCH, ROWS, HEADS, DIM = 8, 24, 8, 16
KEY = jax.random.key(7)


def mesh_of(shape: dict, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(shape.values())]
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(kind,) * len(shape), devices=devices
    )


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lengths(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ROWS + 1, BATCH).astype(np.int32)


IDS = np.repeat(np.array([[1, 1, 2, 0], [1, 2, 2, 3]] * 4, np.int32), ROWS // 4, axis=1)
# Options, and the arrays among them with a gradient.
OPTIONS = {
    "none": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"local_window_size": (7, 2), "bottom_right": True}, {}),
    "lengths": (
        {"query_seq_lengths": lengths(1), "key_value_seq_lengths": lengths(2), "is_causal": True},
        {},
    ),
    "alibi": ({"alibi": True, "softcap": 4.0}, {}),
    "slopes": ({"alibi": normal(3, HEADS) ** 2}, {}),
    "slopes of each": ({"alibi": normal(3, BATCH, HEADS) ** 2}, {}),
    "dropout": ({"dropout": 0.25, "dropout_key": KEY}, {}),
    "origin": ({"dropout": 0.25, "dropout_key": KEY, "origin": (3, 2**32 - 3, 0, 8)}, {}),
    "off by one": ({"sink": "off_by_one"}, {}),
    "sink": ({}, {"sink": normal(4, HEADS)}),
    "bias": ({}, {"bias": normal(5, BATCH, HEADS, ROWS, ROWS)}),
    "bias of heads": ({}, {"bias": normal(5, 1, HEADS, ROWS, ROWS)}),
    "bias of batches": ({}, {"bias": normal(5, BATCH, 1, 1, ROWS)}),
    "bias of all": ({}, {"bias": normal(5, ROWS, ROWS)}),
    "bias before the scale": (
        {"bias_type": "pre_scale", "scale": 0.5},
        {"bias": normal(5, 1, HEADS, ROWS, ROWS)},
    ),
    "mask": ({"mask": normal(8, BATCH, 1, 1, ROWS) > -1}, {}),
    "segments": ({"q_segment_ids": IDS, "max_segments": 3, "is_causal": True, "alibi": True}, {}),
}


def qkv_of(heads_kv: int, heads: int = HEADS) -> list[np.ndarray]:
    shapes = ((heads, DIM), (heads_kv, DIM), (heads_kv, DIM + 8))
    return [normal(i, BATCH, ROWS, *shape) for i, shape in enumerate(shapes)]


def program(options: dict):
    def loss(qkv: list, small: dict) -> tuple:
        o, lse = attention(*qkv, **small, **options, return_residual=True)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        weights = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
        return jnp.sum(o * weights) + jnp.sum(jnp.sin(finite)), (o, lse)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def placed(mesh: jax.sharding.Mesh, qkv: list) -> list:
    """On a mesh, split as far as the heads allow."""
    dp, tp = (name if name in mesh.shape else None for name in ("dp", "tp"))
    out = []
    for x in qkv:
        even = tp is None or x.shape[2] % mesh.shape[tp] == 0
        spec = P(dp, None, tp if even else None, None)
        out.append(jax.device_put(x, NamedSharding(mesh, spec)))
    return out


def check(out: tuple, expected: tuple, exact: tuple[str, ...]) -> None:
    """Bitwise equal where no sum is split; else to float32's rounding of a few hundred terms."""
    names = ("o", "lse", "dq", "dk", "dv", "bias", "sink")

    def named(result: tuple) -> dict:
        ((_, (o, lse)), (dqkv, small)) = result
        return dict(zip(names, (o, lse, *dqkv), strict=False)) | small

    ours, theirs = named(out), named(expected)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        if name in exact:
            np.testing.assert_array_equal(x, theirs[name], err_msg=name)
        else:
            np.testing.assert_allclose(x, theirs[name], rtol=2e-5, atol=2e-5, err_msg=name)
