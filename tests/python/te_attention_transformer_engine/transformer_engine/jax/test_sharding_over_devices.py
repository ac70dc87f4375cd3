"""Arrays that are split over four host devices, in a process of its own.

The bits of one device; the gradients of bias and offset, which are sums over devices, have the
bits of the sum of one device's gradients of each half of the batch.
"""

import os
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import transformer_engine.jax as te
from transformer_engine.jax.attention import *
from transformer_engine.jax.cpp_extensions import fused_attn_fwd
from transformer_engine.jax.flax import DotProductAttention

devices = np.array(jax.devices()).reshape(2, 2)
KINDS = (AttnBiasType.POST_SCALE_BIAS, AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD)
CALL = (AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.25, 0.0, True)
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 16, 4, 16), jnp.bfloat16)
bias = jax.random.normal(jax.random.key(1), (1, 4, 16, 16), jnp.bfloat16)
offset = jnp.ones((1, 4, 1, 1))

def attention(q, k, v, bias, offset):
    more = {"softmax_offset": offset}
    return fused_attn((q, k, v), bias, SequenceDescriptor(), None, *KINDS, *CALL, **more)

def gradients(*arrays):
    loss = lambda *x: (attention(*x).astype(jnp.float32) ** 2).sum()
    return jax.grad(loss, tuple(range(5)))(*arrays)

def below(q, k, v, bias, offset):
    return fused_attn_fwd((q, k, v), bias, offset, SequenceDescriptor(), None, *KINDS, *CALL, 1)[0]

def module(q, k, v, bias, offset):
    core = DotProductAttention(16, 4, attn_mask_type="causal", transpose_batch_sequence=False)
    return core.apply({}, q, k, v, bias=bias)

arrays = (q, k, v, bias, offset)
functions = (attention, gradients, below, module)
wanted = [jax.jit(f)(*arrays) for f in functions]
SUMMED = (3, 4)  # bias and offset, which the devices of dp share: each has a half of the batch
halves = [jax.jit(gradients)(*(x[part] for x in (q, k, v)), bias, offset)
          for part in (slice(2), slice(2, 4))]
mesh = Mesh(devices, ("dp", "tpsp"))
resource = te.MeshResource(dp_resource="dp", tpsp_resource="tpsp")
rows, heads = PartitionSpec("dp", None, "tpsp", None), PartitionSpec(None, "tpsp", None, None)
shardings = [NamedSharding(mesh, spec) for spec in (rows, rows, rows, heads, heads)]
split = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
with mesh, te.autocast(mesh_resource=resource):
    for f, want in zip(functions, wanted, strict=True):
        got = jax.jit(f, in_shardings=shardings)(*split)
        for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
            if f is gradients and i in SUMMED:
                rounding = float(jnp.finfo(b.dtype).eps)
                close = {"rtol": rounding, "atol": rounding * float(abs(b).max())}
                assert np.allclose(*(np.asarray(x, np.float32) for x in (a, b)), **close), i
                b = sum(x[i].astype(jnp.float32) for x in halves).astype(b.dtype)
            assert (np.asarray(a) == np.asarray(b)).all(), (f.__name__, i)
resource = te.MeshResource(dp_resource="dp", cp_resource="cp")
with Mesh(devices, ("dp", "cp")), te.autocast(mesh_resource=resource):
    for f in (attention, below):
        try:
            f(*arrays)
        except ValueError as error:
            assert "bias is given; needs None: devices share the rows" in str(error)
        else:
            raise AssertionError("a bias of shared rows was not refused")
"""


def test_values_over_devices_are_those_of_one() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=variables, check=True)
