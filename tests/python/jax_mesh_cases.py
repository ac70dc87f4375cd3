"""Cases over several devices, forward and gradients, against one device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_attention.jax import attention, context_parallel, reorder

LAYOUTS = ("contiguous", "zigzag", "striped")
STRATEGIES = ("all_gather", "ring")
EVERY = [(strategy, layout) for strategy in STRATEGIES for layout in LAYOUTS]
SEGMENT_IDS = ("q_segment_ids", "kv_segment_ids")
TOLERANCE = 3e-5  # of float32, for sums of some dozens of terms in another order


def mesh_of(size: int) -> jax.sharding.Mesh:
    devices = jax.devices()[:size]
    return jax.make_mesh((size,), ("cp",), axis_types=(AxisType.Auto,), devices=devices)


def program(attend, static: dict):
    def run(qkv: list, small: dict) -> tuple:
        def forward(qkv: list, small: dict) -> tuple:
            return attend(*qkv, **small, **static, return_residual=True, return_max_logit=True)

        (o, lse, largest), pull = jax.vjp(forward, qkv, small)
        slope = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
        dlse = jnp.where(jnp.isfinite(lse), jnp.sin(slope[..., 0]), 0).astype(lse.dtype)
        dqkv, dsmall = pull((slope, dlse, jnp.zeros_like(largest)))
        return {"o": o, "lse": lse, "max": largest}, dict(zip("qkv", dqkv, strict=True)), dsmall

    return jax.jit(run)


def shared(
    size: int, strategy: str, layout: str, small: dict, check_vma: bool = False, stripe: int = 1
):
    """attention() of whole arrays, the rows over so many devices."""
    mesh = mesh_of(size)
    order = {"stripe_size": stripe}

    def split(name: str, x: jax.Array) -> bool:
        return name != "sink" and x.shape[2 if name == "bias" else 1] > 1

    def attend(q, k, v, **given):
        arrays = {n: given.pop(n) for n in (*small, *SEGMENT_IDS) if n in given}
        placed = {
            n: reorder(x, size, layout, 2 if n == "bias" else 1, **order) if split(n, x) else x
            for n, x in {"q": q, "k": k, "v": v, **arrays}.items()
        }
        specs = {
            n: (P(None, None, "cp") if n == "bias" else P(None, "cp")) if split(n, x) else P()
            for n, x in placed.items()
        }

        def local(arrays: dict) -> tuple:
            arrays = dict(arrays)
            qkv = [arrays.pop(n) for n in "qkv"]
            how = {"axis_name": "cp", "strategy": strategy, "layout": layout, **order}
            return context_parallel(*qkv, **arrays, **how, **given)

        kinds = {"mesh": mesh, "in_specs": (specs,), "out_specs": P(None, "cp")}
        out = jax.shard_map(local, **kinds, check_vma=check_vma)(placed)
        return tuple(reorder(x, size, layout, inverse=True, **order) for x in out)

    return attend


def compare(attend: Callable, static: dict, small: dict, given: list, qkv: list) -> None:
    """Raises AssertionError unless `attend` of `given` is attention() of `qkv`."""
    expected = program(attention, static)(qkv, small)
    out = program(attend, static)(given, small)
    for ours, theirs in zip(out, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            largest = 1 + np.abs(np.nan_to_num(theirs[name], neginf=0)).max(initial=0)
            limit = {"rtol": TOLERANCE, "atol": TOLERANCE * largest}
            np.testing.assert_allclose(x, theirs[name], err_msg=name, **limit)
