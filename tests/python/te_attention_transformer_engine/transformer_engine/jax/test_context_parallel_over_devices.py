"""Context parallelism over four host devices, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
import transformer_engine.jax as te
from transformer_engine.jax.attention import *
from transformer_engine.jax.cpp_extensions import fused_attn_bwd, fused_attn_fwd
from transformer_engine.jax.flax import DotProductAttention

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("cp", "tpsp"))
resource = te.MeshResource(cp_resource="cp", tpsp_resource="tpsp")
q, k, v, dout = (jax.random.normal(jax.random.key(i), (2, 32, h, 16), jnp.bfloat16)
                 for i, h in enumerate((4, 2, 2, 4)))
offset = jax.random.normal(jax.random.key(5), (1, 4, 1, 1))
ids = jnp.repeat(jnp.array([[1, 1, 2, 0], [1, 2, 2, 3]], jnp.int32), 8, axis=1)
THD = (AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD, ReorderStrategy.Striped)
BSHD = (AttnMaskType.CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD, ReorderStrategy.DualChunkSwap)
SOFT = AttnSoftmaxType.LEARNABLE_SOFTMAX
NONE = AttnBiasType.NO_BIAS
SEED = jax.random.PRNGKey(3)

def close(name, a, b, limit):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert x.shape == y.shape, name
        assert np.abs(x - y).max() <= limit * (1 + np.abs(y).max()), (name, np.abs(x - y).max())
"""
DOORS = """
for mask, layout, kind in (BSHD, THD):
    thd = layout.is_thd()
    for strategy in CPStrategy:
        def there(x): return reorder_causal_load_balancing(x, kind, 2, 1)
        def back(x): return inverse_reorder_causal_load_balancing(x, kind, 2, 1)
        whole = SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=True)
        pairs = (tuple(map(there, x)) for x in (whole.segment_ids, whole.segment_pos))
        split = SequenceDescriptor(**dict(zip(("segment_ids", "segment_pos"), pairs)))
        more = {"context_parallel_strategy": strategy,
                "context_parallel_causal_load_balanced": True}
        bound = 3 if thd else 1

        def attention(q, k, v, offset, descriptor, **more):
            return fused_attn((q, k, v), None, descriptor, SEED, NONE, mask, layout, SOFT, 0.25,
                              0.2, True, bound, softmax_offset=offset, **more)

        def gradients(q, k, v, offset, dout):
            o, pull = jax.vjp(lambda *x: attention(*x, whole), q, k, v, offset)
            return o, *pull(dout)

        def shared(q, k, v, offset, dout):
            def run(q, k, v, offset):
                return back(attention(*map(there, (q, k, v)), offset, split, **more))
            o, pull = jax.vjp(run, q, k, v, offset)
            return o, *pull(dout)

        def below(q, k, v, offset, dout):
            qkv = tuple(map(there, (q, k, v)))
            kinds = (NONE, mask, layout, SOFT, 0.25, 0.2, True, bound)
            o, lse, state = fused_attn_fwd(qkv, None, offset, split, SEED, *kinds, **more)
            assert lse.shape == ((2, 32, 4, 1) if thd else (2, 4, 32, 1))
            dqkv, _, doffset = fused_attn_bwd(qkv, None, offset, lse, state, o, there(dout), split,
                                              NONE, mask, layout, SOFT, *kinds[4:], **more)
            return back(o), *map(back, dqkv), doffset

        arrays = (q, k, v, offset, dout)
        wanted = jax.jit(gradients)(*arrays)
        with mesh, te.autocast(mesh_resource=resource):
            ours, doors = jax.jit(shared)(*arrays), jax.jit(below)(*arrays)
            core = DotProductAttention(16, 4, 2, attn_mask_type="causal",
                transpose_batch_sequence=False, context_parallel_strategy=strategy.name,
                context_parallel_causal_load_balanced=True)
            if not thd:
                def module(q, k, v):
                    return back(core.apply({}, *map(there, (q, k, v)), deterministic=True))
                held = jax.jit(module)(q, k, v)
        close((strategy, layout), ours, wanted, 0.02)
        close(("doors", strategy, layout), doors, ours, 1e-5)
        if not thd:
            core = DotProductAttention(16, 4, 2, attn_mask_type="causal",
                                       transpose_batch_sequence=False)
            close("module", held, core.apply({}, q, k, v, deterministic=True), 0.02)

with mesh, te.autocast(mesh_resource=resource):
    lengths = SequenceDescriptor.from_seqlens_and_offsets(jnp.full((2, 1), 32), jnp.zeros((2, 2)))
    for changes, text in (
        ({"descriptor": lengths}, "needs segment ids [2, 32] of query"),
        ({"stripe_size": 0, "strategy": CPStrategy.RING}, "stripe_size is 0; needs None, or at"),
    ):
        strategy = changes.pop("strategy", CPStrategy.ALL_GATHER)
        try:
            attention(q, k, v, offset, **{"descriptor": split, **changes},
                      **(more | {"context_parallel_strategy": strategy}))
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
"""

STRIPES = """
other = jnp.repeat(jnp.array([[1, 2, 2, 2], [1, 1, 2, 3]], jnp.int32), 8, axis=1)
mask, layout, kind = THD
for stripe in (1, 4):
    def there(x): return reorder_causal_load_balancing(x, kind, 2, 1, stripe)
    def back(x): return inverse_reorder_causal_load_balancing(x, kind, 2, 1, stripe)
    whole = SequenceDescriptor.from_segment_ids_and_pos((ids, other), is_thd=True)
    pairs = (tuple(map(there, x)) for x in (whole.segment_ids, whole.segment_pos))
    split = SequenceDescriptor(**dict(zip(("segment_ids", "segment_pos"), pairs)))

    def gradients(q, k, v, dout, descriptor, **more):
        def attention(*qkv):
            return fused_attn(qkv, None, descriptor, SEED, NONE, mask, layout,
                              AttnSoftmaxType.VANILLA_SOFTMAX, 0.25, 0.0, True, 3, (5, 0), **more)
        o, pull = jax.vjp(attention, q, k, v)
        return o, *pull(dout)

    wanted = jax.jit(gradients)(q, k, v, dout, whole)
    for strategy in CPStrategy:
        more = {"context_parallel_strategy": strategy, "stripe_size": stripe,
                "context_parallel_causal_load_balanced": True}
        def shared(*arrays):
            return tuple(map(back, gradients(*map(there, arrays), split, **more)))
        with mesh, te.autocast(mesh_resource=resource):
            ours = jax.jit(shared)(q, k, v, dout)
        close((strategy, stripe), ours, wanted, 0.02)
"""


def run(*command: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "ignore", *command], env=variables, check=True)


def test_both_doors_and_the_module_compute_what_one_device_does() -> None:
    run("-c", COMMON + DOORS)


def test_a_window_over_stripes_with_other_segments_of_key() -> None:
    """The segments of key are read also where each side has as many rows."""
    run("-c", COMMON + STRIPES)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_part_of_the_grids_of_distributed_attention(devices: int) -> None:
    """te_jax_mesh_cases.py runs all of them in `make test-jax`."""
    program = Path(__file__).parents[3] / "te_jax_mesh_cases.py"
    run(str(program), str(devices), "--divisor", "8", "--every", "29")
