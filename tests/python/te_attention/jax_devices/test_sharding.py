"""Batch and heads over a mesh: the results of one device, and no collective that is not needed."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_sharding_cases import (
    BATCH,
    DIM,
    HEADS,
    IDS,
    MESHES,
    OPTIONS,
    ROWS,
    check,
    mesh_of,
    normal,
    placed,
    program,
    qkv_of,
)
from te_attention.jax import attention

COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def collectives(compiled: jax.stages.Compiled) -> collections.Counter:
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


def test_heads_that_no_divisor_fits() -> None:
    """Six heads of key, twelve of query over four devices: shards cut a run of query heads."""
    f, qkv = jax.jit(program({"alibi": True})), qkv_of(6, 12)
    out = f(placed(mesh_of({"tp": 4}), qkv), {})
    check(out, f(qkv, {}), ("o", "lse", "dq"))


def test_heads_that_do_not_divide_are_whole() -> None:
    f, qkv = jax.jit(program({})), qkv_of(6, 6)
    given = [jax.device_put(x, NamedSharding(mesh_of({"tp": 4}), P())) for x in qkv]
    check(f(given, {}), f(qkv, {}), ("o", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("dims", [(None, "dp"), ("dp", "tp"), (None, None, None, "tp")])
def test_split_rows_and_dims_are_made_whole(dims: tuple) -> None:
    """The partitioner offers a split sequence, which would be another function."""
    f, qkv, on = jax.jit(program({"is_causal": True})), qkv_of(4), mesh_of(MESHES["2x4"])
    given = [jax.device_put(x, NamedSharding(on, P(*dims))) for x in qkv]
    check(f(given, {}), f(qkv, {}), ("o", "lse", "dq"))


@pytest.mark.parametrize("mesh", ["2", "tp4", "tp8", "2x4", "4x2"])
def test_no_collective(mesh: str) -> None:
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple:
        o, pull = jax.vjp(lambda *x: attention(*x, is_causal=True), q, k, v)
        return o, pull(dout)

    qkv = qkv_of(8)
    given = placed(mesh_of(MESHES[mesh]), [*qkv, normal(9, BATCH, ROWS, HEADS, DIM + 8)])
    assert not collectives(jax.jit(gradients).lower(*given).compile())


def test_a_collective_is_counted() -> None:
    given = jax.device_put(normal(0, 8, 8), NamedSharding(mesh_of({"dp": 8}), P("dp")))
    assert collectives(jax.jit(jnp.sum).lower(given).compile()) == {"all-reduce": 1}


def test_shared_heads_of_key_cost_one_sum_each() -> None:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        return jax.vjp(forward, q, k, v)[1](jnp.ones((BATCH, ROWS, HEADS, DIM + 8), q.dtype))

    given = placed(mesh_of({"tp": 4}), qkv_of(1))
    assert not collectives(jax.jit(forward).lower(*given).compile())
    found = collectives(jax.jit(gradients).lower(*given).compile())
    assert found.keys() == {"all-reduce"}
    assert found["all-reduce"] <= 2


@pytest.mark.parametrize("option", ["causal", "lengths", "alibi", "dropout", "sink", "bias of all"])
def test_explicit_axes(option: str) -> None:
    static, small = OPTIONS[option]
    f, qkv = jax.jit(program_of_results(static)), qkv_of(2)
    on = mesh_of(MESHES["2x4"], AxisType.Explicit)
    expected = f(qkv, small)
    with jax.set_mesh(on):
        given = placed(on, qkv)
        whole = NamedSharding(on, P())
        small = {name: jax.device_put(x, whole) for name, x in small.items()}
        out = f(given, small)
        assert jax.typeof(out[0][0]).sharding.spec == P("dp", None, "tp", None)
        for x, y in zip(out[1], (*given, *small.values()), strict=True):
            assert jax.typeof(x).sharding == jax.typeof(y).sharding
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def program_of_results(options: dict):
    """O, LSE, and gradients of ones as dO: nothing that mixes the dimensions."""

    def run(qkv: list, small: dict) -> tuple:
        def forward(qkv: list, small: dict) -> tuple:
            return attention(*qkv, **small, **options, return_residual=True)

        out, pull = jax.vjp(forward, qkv, small)
        dqkv, dsmall = pull((jnp.ones_like(out[0]), jnp.zeros_like(out[1])))
        return out, (*dqkv, *dsmall.values())

    return run


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 1])
def test_manual_axes(heads_kv: int, check_vma: bool) -> None:
    """Each shard is a plain call; with check_vma a replicated operand gets the sum of gradients."""
    on, qkv = mesh_of(MESHES["2x4"]), qkv_of(heads_kv)
    specs = tuple(P("dp", None, "tp" if x.shape[2] % 4 == 0 else None, None) for x in qkv)
    split = jax.shard_map(
        lambda q, k, v: attention(q, k, v, is_causal=True),
        **{"mesh": on, "in_specs": specs, "out_specs": specs[0], "check_vma": check_vma},
    )

    def run(f):
        def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            o = f(*qkv)
            return jnp.sum(jnp.sin(o)), o

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)

    out, expected = run(split), run(lambda *x: attention(*x, is_causal=True))
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_some_axes_manual() -> None:
    """The automatic ones are gathered: a rule of the partitioner inside would abort the process."""
    on, qkv = mesh_of(MESHES["2x4"]), qkv_of(4)
    split = jax.shard_map(
        attention, mesh=on, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}, check_vma=False
    )
    out = jax.jit(split)(*placed(on, qkv))
    np.testing.assert_array_equal(out, jax.jit(attention)(*qkv))


@pytest.mark.parametrize("heads_kv", [4, 1])
def test_segments(heads_kv: int) -> None:
    static = {"q_segment_ids": IDS, "max_segments": 3, "is_causal": True, "alibi": True}
    f, qkv = jax.jit(program(static)), qkv_of(heads_kv)
    out = f(placed(mesh_of(MESHES["2x4"]), qkv), {})
    check(out, f(qkv, {}), ("o", "lse", "dq") if heads_kv > 1 else ())


def test_vmap_of_sharded_heads() -> None:
    f, qkv = jax.jit(jax.vmap(attention)), [x[:, None] for x in qkv_of(4)]
    on = mesh_of({"tp": 4})
    given = [jax.device_put(x, NamedSharding(on, P(None, None, None, "tp"))) for x in qkv]
    np.testing.assert_array_equal(f(*given), f(*qkv))


@pytest.mark.parametrize("mapped", ["q", "qkv"])
def test_vmap_of_a_batch_that_explicit_axes_split(mapped: str) -> None:
    """JAX has no reshape that joins the mapped axis and a split batch behind it."""
    on, qkv = mesh_of(MESHES["2x4"], AxisType.Explicit), qkv_of(4)

    def gradients(qkv: list) -> tuple:
        named = zip("qkv", qkv, strict=True)
        given = [jnp.stack([x, 2 * x]) if n in mapped else x for n, x in named]
        axes = tuple(0 if n in mapped else None for n in "qkv")
        o, pull = jax.vjp(jax.vmap(attention, axes), *given)
        return o, pull(jnp.ones_like(o))

    expected = jax.jit(gradients)(qkv)
    with jax.set_mesh(on):
        out = jax.jit(gradients)(placed(on, qkv))
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_gspmd_is_refused_with_the_name_of_its_switch() -> None:
    """A rule for that partitioner aborts the process in some versions of JAX."""
    given = placed(mesh_of(MESHES["2x4"]), qkv_of(4))
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(NotImplementedError, match="jax_use_shardy_partitioner"):
            jax.jit(lambda *x: attention(*x) + 1)(*given)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
