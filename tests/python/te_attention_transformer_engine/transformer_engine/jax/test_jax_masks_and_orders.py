"""Helpers of transformer_engine.jax.attention: masks, orders of tokens, names; and the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import transformer_engine.jax as te
from transformer_engine.jax import sharding
from transformer_engine.jax.attention import (
    AttnMaskType,
    AttnSoftmaxType,
    QKVFormat,
    QKVLayout,
    ReorderStrategy,
    canonicalize_attn_mask_type,
    inverse_reorder_causal_load_balancing,
    make_swa_mask,
    reorder_causal_load_balancing,
    run_length_fill,
)

SWAP, STRIPED = ReorderStrategy.DualChunkSwap, ReorderStrategy.Striped


def test_run_lengths() -> None:
    ids = jnp.array([[1, 1, 0, 0, 2, 2, 2, 0], [3, 1, 1, 1, 1, 1, 1, 1]])
    want = [[2, 2, 0, 0, 3, 3, 3, 0], [1] + [7] * 7]
    assert run_length_fill(ids).tolist() == want
    assert jax.jit(run_length_fill)(ids[None])[0].tolist() == want


@pytest.mark.parametrize("window", [None, (-1, -1), (2, 0), (1, 3), (0, -1)])
def test_windows(window: tuple | None) -> None:
    q, kv = jnp.arange(6)[None], jnp.arange(8)[None]
    mask = jax.jit(lambda a, b: make_swa_mask(a, b, window, dtype=jnp.bool_))(q, kv)
    left, right = window or (-1, -1)
    distance = np.arange(6)[:, None] - np.arange(8)[None, :]
    want = (distance <= left) | (left < 0)
    want &= (-distance <= right) | (right < 0)
    assert mask.shape == (1, 1, 6, 8)
    assert np.array_equal(mask[0, 0], want)
    assert make_swa_mask(q, kv, window).dtype == jnp.float32


def test_windows_from_the_end_of_each_run() -> None:
    ids_q, ids_kv = jnp.array([[1, 1, 2]]), jnp.array([[1, 1, 1, 2, 2]])
    pos_q, pos_kv = jnp.array([[0, 1, 0]]), jnp.array([[0, 1, 2, 0, 1]])
    mask = make_swa_mask(pos_q, pos_kv, (0, 0), jnp.int32, ids_q, ids_kv)[0, 0]
    # Distances from the ends are 2, 1, 1 and 3, 2, 1, 2, 1.
    assert mask.tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]


def test_orders() -> None:
    x = jnp.arange(16)
    swapped = reorder_causal_load_balancing(x, SWAP, 4, 0)
    assert swapped.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    striped = reorder_causal_load_balancing(x, STRIPED, 4, 0)
    assert striped.tolist() == [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    assert reorder_causal_load_balancing(x, SWAP, 1, 0).tolist() == x.tolist()


# TransformerEngine's grid: every order is undone exactly.
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", [(3, 32, 8, 64), (4, 32, 12, 32), (1, 16, 1, 1)])
@pytest.mark.parametrize("form", list(QKVFormat))
@pytest.mark.parametrize(("strategy", "stripe"), [(SWAP, None), (STRIPED, 1), (STRIPED, 4)])
def test_every_order_is_undone(ranks, shape, form, strategy, stripe) -> None:
    axis = 0 if form == QKVFormat.SBHD else 1
    x = jax.random.normal(jax.random.key(0), shape)
    x = x.swapaxes(0, 1) if axis == 0 else x
    given = {"strategy": strategy, "cp_size": ranks, "seq_dim": axis, "stripe_size": stripe}
    if strategy == STRIPED and x.shape[axis] % (ranks * stripe):
        with pytest.raises(ValueError, match=f"dimension {axis} is 16; needs a multiple of 32"):
            reorder_causal_load_balancing(x, **given)
        return
    go = jax.jit(reorder_causal_load_balancing, static_argnums=(1, 2, 3, 4))
    back = jax.jit(inverse_reorder_causal_load_balancing, static_argnums=(1, 2, 3, 4))
    moved = go(x, *given.values())
    is_one_stripe_each = strategy == STRIPED and x.shape[axis] == ranks * stripe
    assert (moved == x).all() == is_one_stripe_each
    assert (back(moved, *given.values()) == x).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((SWAP, 3, 0, None), "cp_size is 3; needs an even number"),
        ((SWAP, 4, 0, 1), "stripe_size is 1; needs None with DualChunkSwap"),
        ((SWAP, 16, 0, None), "dimension 0 is 16; needs a multiple of 32"),
        ((STRIPED, 4, 0, 0), "stripe_size is 0; needs at least 1"),
        (("Striped", 4, 0, None), "strategy is 'Striped'; needs a member of ReorderStrategy"),
    ],
)
def test_orders_that_are_refused(given: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        reorder_causal_load_balancing(jnp.arange(16), *given)


def test_names_of_masks_and_softmax() -> None:
    names = {
        "NO_MASK": "no_mask",
        "PADDING_MASK": "padding",
        "CAUSAL_MASK": "causal",
        "PADDING_CAUSAL_MASK": "padding_causal causal_padding",
        "CAUSAL_BOTTOM_RIGHT_MASK": "causal_bottom_right bottom_right_causal",
        "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": "padding_causal_bottom_right "
        "causal_padding_bottom_right bottom_right_causal_padding bottom_right_padding_causal",
    }
    for member, texts in names.items():
        for text in texts.split():
            assert canonicalize_attn_mask_type(text) is AttnMaskType[member]
    with pytest.raises(ValueError, match="attn_mask_type is 'arbitrary'; needs one of no_mask"):
        canonicalize_attn_mask_type("arbitrary")
    for text in ("vanilla", "off_by_one", "learnable"):
        assert AttnSoftmaxType.from_str(text).name == f"{text.upper()}_SOFTMAX"
    with pytest.raises(ValueError, match="softmax_type is 'off-by-one'; needs one of vanilla"):
        AttnSoftmaxType.from_str("off-by-one")


def test_what_masks_and_layouts_are() -> None:
    which = {m.name: (m.is_causal(), m.is_padding(), m.is_bottom_right()) for m in AttnMaskType}
    assert which == {
        "NO_MASK": (False, False, False),
        "PADDING_MASK": (False, True, False),
        "CAUSAL_MASK": (True, False, False),
        "PADDING_CAUSAL_MASK": (True, True, False),
        "CAUSAL_BOTTOM_RIGHT_MASK": (True, False, True),
        "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": (True, True, True),
    }
    for layout in QKVLayout:
        kinds = (layout.is_qkvpacked(), layout.is_kvpacked(), layout.is_separate())
        assert sum(kinds) == 1
        assert layout.is_thd() == (layout.get_qkv_format() == QKVFormat.THD)
        others = (layout.to_qkvpacked(), layout.to_kvpacked(), layout.to_separate())
        assert others[kinds.index(True)] is layout
        assert {x.get_qkv_format() for x in others} == {layout.get_qkv_format()}


def test_the_mesh_resource_is_that_of_the_context() -> None:
    with pytest.raises(AssertionError, match="global_mesh_resource is not set"):
        sharding.global_mesh_resource()
    resource = te.MeshResource("dp", cp_resource="cp")
    with te.autocast(mesh_resource=resource):
        assert sharding.global_mesh_resource() is resource
        with te.autocast(enabled=False), pytest.raises(AssertionError):
            sharding.global_mesh_resource()
        assert sharding.global_mesh_resource().cp_resource == "cp"
    with pytest.raises(NotImplementedError, match="enabled is True"), te.autocast(enabled=True):
        pass


def test_axes_of_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    assert sharding.get_mesh_axis_size(None) == 1
    assert sharding.get_mesh_axis_size("dp") == 1  # without a mesh
    x = jnp.ones((2, 4))
    assert sharding.with_sharding_constraint(x, PartitionSpec("dp", None)) is x
    names = (sharding.BATCH_AXES, sharding.HEAD_AXES)
    for context in (mesh, jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else mesh):
        with context, sharding.global_shard_guard(te.MeshResource("dp", "tp")):
            assert sharding.get_mesh_axis_size("tp") == 1
            with pytest.raises(AssertionError, match="axis is 'cp'; needs one of dp, tp"):
                sharding.get_mesh_axis_size("cp")
            out = jax.jit(lambda x: sharding.with_sharding_constraint_by_logical_axes(x, names))(x)
            assert (out == x).all()
