"""DotProductAttention of transformer_engine.jax.flax: fused and unfused, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine.jax.attention import SequenceDescriptor
from transformer_engine.jax.flax import DotProductAttention

B, S, H, G, D = 2, 12, 4, 2, 16
KEYS = jax.random.split(jax.random.key(0), 5)
Q, K, V = (jax.random.normal(KEYS[i], (B, S, h, D)) for i, h in enumerate((H, G, G)))
BIAS = jax.random.normal(KEYS[3], (1, H, S, S))
PADDED = np.zeros((B, 1, S, S), bool)
PADDED[1, :, 7:] = PADDED[1, :, :, 9:] = True
TRIANGLE = ~np.tri(S, dtype=bool)


def module(**changes) -> DotProductAttention:
    given = {"head_dim": D, "num_attention_heads": H, "num_gqa_groups": G}
    return DotProductAttention(**given | {"transpose_batch_sequence": False} | changes)


def run(fused: bool, monkeypatch, changes: dict, *args, params: dict | None = None, **more):
    monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
    return module(**changes).apply({"params": params or {}}, *args, **more)


CASES = {
    "causal": ({}, (Q, K, V), {}),
    "no mask": ({"attn_mask_type": "no_mask"}, (Q, K, V), {}),
    "window": ({"window_size": (3, 0)}, (Q, K, V), {}),
    "post-scale bias": ({}, (Q, K, V), {"bias": BIAS}),
    "pre-scale bias": ({"attn_bias_type": "pre_scale_bias"}, (Q, K, V), {"bias": BIAS}),
    "scale": ({"scale_factor": 0.7}, (Q, K, V), {}),
    "scale of 0": ({"scale_factor": 0.0}, (Q, K, V), {}),
    "window without bounds": ({"window_size": (-2, -3)}, (Q, K, V), {}),
    "off by one": ({"softmax_type": "off_by_one"}, (Q, K, V), {}),
    "padding": ({"attn_mask_type": "padding"}, (Q, K, V, jnp.array(PADDED)), {}),
    "causal padding": (
        {"attn_mask_type": "causal_padding"},
        (Q, K, V, jnp.array(PADDED | TRIANGLE)),
        {},
    ),
    "one array": ({"qkv_layout": "bs3hd", "num_gqa_groups": None}, (jnp.stack([Q] * 3, 2),), {}),
    "two arrays": ({"qkv_layout": "BSHD_BS2HD"}, (Q, jnp.stack([K, V], 2)), {}),
    "one head dim for V": ({}, (Q, K, V[..., :8]), {}),
    "float32 logits": ({"float32_logits": True}, (Q, K, V), {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:sequence_descriptor is a mask")
def test_fused_and_unfused_compute_the_same(name: str, monkeypatch) -> None:
    changes, args, more = CASES[name]
    args = (*args, *(None,) * (3 - len(args)))
    both = [run(fused, monkeypatch, changes, *args, **more) for fused in (True, False)]
    assert both[0].shape == (B, S, H, args[2].shape[-1] if args[2] is not None else D)
    valid = np.ones((B, S), bool) if "padding" not in name else ~PADDED[:, 0, :, 0]
    np.testing.assert_allclose(both[0][valid], both[1][valid], rtol=1e-5, atol=1e-5)


def test_the_learnable_number_is_a_parameter_of_the_way(monkeypatch) -> None:
    value = jax.random.normal(KEYS[4], (1, H, 1, 1))
    outs, gradients = [], []
    for fused, name in ((True, "_Fused"), (False, "_Unfused")):
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
        core = module(softmax_type="learnable")
        params = core.init(jax.random.key(0), Q, K, V)["params"]
        where = f"{name}DotProductAttention_0"
        assert list(params) == [where]
        offset = params[where]["softmax_offset"]
        assert offset.names == (None, "nvte_head", None, None)
        assert not offset.value.any()
        params = {where: {"softmax_offset": value}}

        def loss(params: dict, core=core) -> jax.Array:
            return (core.apply({"params": params}, Q, K, V) ** 2).sum()

        outs.append(core.apply({"params": params}, Q, K, V))
        gradients.append(jax.grad(loss)(params)[where]["softmax_offset"])
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


def test_dropout_takes_a_key_of_the_stream(monkeypatch) -> None:
    for fused in (True, False):
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
        core = module(attention_dropout=0.5, dropout_rng_name="mine")
        one = core.apply({}, Q, K, V, rngs={"mine": jax.random.key(1)})
        assert (one == core.apply({}, Q, K, V, rngs={"mine": jax.random.key(1)})).all()
        assert not (one == core.apply({}, Q, K, V, rngs={"mine": jax.random.PRNGKey(2)})).all()
        still = core.apply({}, Q, K, V, deterministic=True)
        assert (still == module().apply({}, Q, K, V)).all()


def test_rows_first(monkeypatch) -> None:
    for fused in (True, False):
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
        q, k, v = (x.swapaxes(0, 1) for x in (Q, K[:, :7], V[:, :7]))
        options = {"attn_mask_type": "no_mask"}
        out = module(transpose_batch_sequence=True, **options).apply({}, q, k, v)
        want = module(**options).apply({}, Q, K[:, :7], V[:, :7])
        np.testing.assert_array_equal(out.swapaxes(0, 1), want)
    with pytest.warns(UserWarning, match="transpose_batch_sequence is None; False is taken"):
        module(transpose_batch_sequence=None).apply({}, Q, K, V)


def test_ragged_rows() -> None:
    ids = jnp.array([[1] * 5 + [0] + [2] * 6, [1] * 3 + [2] * 7 + [0] * 2])
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids, None, is_thd=True)
    options = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"}
    core = module(max_segments_per_seq=2, **options)
    out = core.apply({}, Q, K, V, descriptor)
    alone = module().apply({}, *(x[:1, 6:] for x in (Q, K, V)))
    np.testing.assert_allclose(out[0, 6:], alone[0], rtol=1e-5, atol=1e-5)
    assert not out[0, 5].any()


def test_without_a_kernel_the_unfused_way_runs() -> None:
    q, k, v = (x[..., :7] for x in (Q, K, V))
    with pytest.warns(UserWarning, match=r"Fused attention is not enabled because there is no av"):
        out = module(head_dim=7).apply({}, q, k, v)
    zeros = ((0, 0),) * 3 + ((0, 1),)
    padded = [jnp.pad(x, zeros) for x in (q, k, v)]
    want = module(head_dim=8, scale_factor=7**-0.5).apply({}, *padded)
    np.testing.assert_allclose(out, want[..., :7], rtol=1e-5, atol=1e-5)


def test_mask_is_another_name_of_the_descriptor() -> None:
    descriptor = SequenceDescriptor.from_seqlens(jnp.array([12, 7]))
    core = module(attn_mask_type="padding")
    with pytest.warns(DeprecationWarning, match="mask is deprecated"):
        out = core.apply({}, Q, K, V, mask=descriptor)
    np.testing.assert_array_equal(out, core.apply({}, Q, K, V, descriptor))


REFUSALS = {
    "two masks": ({}, {"mask": PADDED, "sequence_descriptor": PADDED}, ValueError, "mask is given"),
    "no bias": (
        {"attn_bias_type": "post_scale_bias"},
        {},
        AssertionError,
        "bias is None; needs an array: attn_bias_type is 'post_scale_bias'",
    ),
    "a bias": ({"attn_bias_type": "no_bias"}, {"bias": BIAS}, AssertionError, "bias is given"),
    "bias type": ({"attn_bias_type": "alibi"}, {}, AssertionError, "attn_bias_type is 'alibi'"),
    "mask type": ({"attn_mask_type": "arbitrary"}, {}, ValueError, "attn_mask_type is 'arbitrary'"),
    "softmax": ({"softmax_type": "off-by-one"}, {}, ValueError, "softmax_type is 'off-by-one'"),
    "layout": ({"qkv_layout": "sbhd"}, {}, AssertionError, "qkv_layout is 'sbhd'; needs one of"),
    "strategy": (
        {"context_parallel_strategy": "a2a"},
        {},
        AssertionError,
        "context_parallel_strategy is 'a2a'; needs one of DEFAULT",
    ),
    "dtype": (
        {"dtype": jnp.float16},
        {},
        AssertionError,
        "dtype is float16; needs that of",
    ),
    "heads": ({"num_attention_heads": 8}, {}, AssertionError, "heads of query is 4; needs 8"),
    "groups": ({"num_gqa_groups": None}, {}, AssertionError, "heads of key is 2; needs 4"),
    "no groups": ({"num_gqa_groups": 0}, {}, AssertionError, "heads of key is 2; needs 0"),
    **{
        f"dropout of {p}": (
            {"attention_dropout": p},
            {},
            AssertionError,
            f"attention_dropout is {p}; needs a number from 0 to below 1",
        )
        for p in (1.5, -0.1, float("nan"))
    },
    **{
        f"window of {window}": (
            {"window_size": window},
            {},
            AssertionError,
            r"window_size is .*; needs \(left, right\), two integers, or None",
        )
        for window in ((1, 2, 3), (1.5, 0), 3)
    },
    "head dim": ({"head_dim": 8}, {}, AssertionError, "head dim of query is 16; needs 8"),
}


def test_a_scale_of_0_is_the_mean_of_the_visible_values() -> None:
    out = module(scale_factor=0.0, attn_mask_type="no_mask").apply({}, Q, K, V)
    mean = jnp.repeat(V.mean(1, keepdims=True), H // G, 2)
    np.testing.assert_allclose(out, jnp.broadcast_to(mean, out.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, more, error, text = REFUSALS[name]
    with pytest.raises(error, match=text):
        module(**changes).apply({}, Q, K, V, **more)


def test_what_the_unfused_way_refuses(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(ValueError, match="mask is None; needs an array without fusion: PADDING"):
        module(attn_mask_type="padding").apply({}, Q, K, V)
    descriptor = SequenceDescriptor.from_seqlens(jnp.array([12, 7]))
    with pytest.raises(ValueError, match="sequence_descriptor is a SequenceDescriptor; needs"):
        module(attn_mask_type="padding").apply({}, Q, K, V, descriptor)
    with pytest.raises(ValueError, match="qkv_layout is THD_THD_THD; needs one of bshd"):
        module(qkv_layout="thd_thd_thd").apply({}, Q, K, V)
