"""Batch and heads over a mesh: the results of one device, and no collective that is not needed."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_attention.jax import attention

COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")
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


# Options, the arrays among them with a gradient, and whether one of these is summed over devices.
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


def collectives(compiled: jax.stages.Compiled) -> collections.Counter:
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


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


def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mesh", ["2", "tp4", "2x4"])
def test_options(mesh: str, option: str) -> None:
    static, small = OPTIONS[option]
    f, qkv = jax.jit(program(static)), qkv_of(4)
    out = f(placed(mesh_of(MESHES[mesh]), qkv), small)
    check(out, f(qkv, small), ("o", "lse", "dq"))


@pytest.mark.parametrize("heads_kv", [8, 4, 2, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_and_heads(mesh: str, heads_kv: int) -> None:
    f, qkv, on = jax.jit(program({"is_causal": True})), qkv_of(heads_kv), mesh_of(MESHES[mesh])
    given = placed(on, qkv)
    # The engine may sum query heads of one key head in another order for fewer of them.
    exact = ("o", "lse", "dq", *("dk", "dv") * (heads_kv == HEADS))
    out = f(given, {})
    check(out, f(qkv, {}), exact)
    assert out[0][1][0].sharding.is_equivalent_to(given[0].sharding, 4)


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
        def loss(*qkv: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(f(*qkv)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)

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
    ids = np.repeat(np.array([[1, 1, 2, 0], [1, 2, 2, 3]] * 4, np.int32), ROWS // 4, axis=1)
    static = {"q_segment_ids": ids, "max_segments": 3, "is_causal": True, "alibi": True}
    f, qkv = jax.jit(program(static)), qkv_of(heads_kv)
    out = f(placed(mesh_of(MESHES["2x4"]), qkv), {})
    check(out, f(qkv, {}), ("o", "lse", "dq") if heads_kv > 1 else ())


def test_vmap_of_sharded_heads() -> None:
    f, qkv = jax.jit(jax.vmap(attention)), [x[:, None] for x in qkv_of(4)]
    on = mesh_of({"tp": 4})
    given = [jax.device_put(x, NamedSharding(on, P(None, None, None, "tp"))) for x in qkv]
    np.testing.assert_array_equal(f(*given), f(*qkv))


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
