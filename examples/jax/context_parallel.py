"""Sequences whose rows eight devices share: a ring over a causal sequence, with its gradients.

Runs on eight devices of the host, and compares with one device.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_attention.jax import attention, context_parallel, reorder

N = 8
mesh = jax.make_mesh((N,), ("cp",), axis_types=(AxisType.Auto,))
rows = P(None, "cp")


def ring(q, k, v):
    """attention() of whole sequences; inside, a device has its rows."""

    def local(q, k, v):
        how = {"axis_name": "cp", "strategy": "ring", "layout": "zigzag"}
        return context_parallel(q, k, v, is_causal=True, local_window_size=(255, 0), **how)

    # Chunks r and 15 - r of 16 on device r: the mask then costs all devices the same.
    q, k, v = (reorder(x, N, "zigzag") for x in (q, k, v))
    o = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(q, k, v)
    return reorder(o, N, "zigzag", inverse=True)


def single(q, k, v):
    """The same on one device."""
    return attention(q, k, v, is_causal=True, local_window_size=(255, 0))


def results(attend, *qkv):
    """O and the gradients of a loss."""
    loss = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), argnums=(0, 1, 2))
    return attend(*qkv), *loss(*qkv)[1]


qkv = jax.random.normal(jax.random.key(0), (3, 1, 1024, 4, 64))
ours = jax.jit(lambda *x: results(ring, *x))(*qkv)
theirs = jax.jit(lambda *x: results(single, *x))(*qkv)
worst = max(float(jnp.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
print(f"{jax.device_count()} devices: O and gradients differ from one device's by {worst:.1e}")
assert worst < 1e-4
