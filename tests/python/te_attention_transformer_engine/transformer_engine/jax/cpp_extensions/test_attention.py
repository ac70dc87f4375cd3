"""fused_attn() and the functions below it: the same bits by both ways, transformations, errors."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import transformer_engine.jax as te
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
    fused_attn_thd,
    is_fused_attn_kernel_available,
)
from transformer_engine.jax.cpp_extensions import FusedAttnHelper, fused_attn_bwd, fused_attn_fwd

B, S, T, H, G, D, E = 2, 12, 16, 4, 2, 16, 8
KEYS = jax.random.split(jax.random.key(0), 6)
SEED = jax.random.PRNGKey(7)
NO_BIAS, POST = AttnBiasType.NO_BIAS, AttnBiasType.POST_SCALE_BIAS
NO_MASK, CAUSAL = AttnMaskType.NO_MASK, AttnMaskType.CAUSAL_MASK
PADDING, PADDING_CAUSAL = AttnMaskType.PADDING_MASK, AttnMaskType.PADDING_CAUSAL_MASK
VANILLA = AttnSoftmaxType.VANILLA_SOFTMAX
LEARNABLE = AttnSoftmaxType.LEARNABLE_SOFTMAX
SEPARATE = QKVLayout.BSHD_BSHD_BSHD


def normal(i: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(KEYS[i], shape, dtype)


def qkv_of(layout: QKVLayout, dtype=jnp.bfloat16) -> tuple:
    if layout.is_qkvpacked():
        return (normal(0, B, S, 3, H, D, dtype=dtype),)
    q = normal(0, B, S, H, D, dtype=dtype)
    if layout.is_kvpacked():
        return q, normal(1, B, T, 2, G, D, dtype=dtype)
    return q, normal(1, B, T, G, D, dtype=dtype), normal(2, B, T, G, E, dtype=dtype)


def lengths() -> SequenceDescriptor:
    return SequenceDescriptor.from_seqlens((jnp.array([12, 7]), jnp.array([5, 16])))


def ids() -> SequenceDescriptor:
    q = jnp.array([[1] * 5 + [0] + [2] * 6, [1] * 3 + [2] * 7 + [0] * 2])
    kv = jnp.array([[1] * 6 + [0] * 3 + [2] * 7, [1] * 4 + [2] * 12])
    return SequenceDescriptor.from_segment_ids_and_pos((q, kv), None, is_thd=True)


def same_ids() -> SequenceDescriptor:
    q = jnp.array([[1] * 5 + [0] + [2] * 6, [1] * 3 + [2] * 7 + [0] * 2])
    return SequenceDescriptor.from_segment_ids_and_pos(q, None, is_thd=True)


CASES = {  # layout, mask, softmax, bias shape, dropout, window, descriptor
    "plain": (SEPARATE, NO_MASK, VANILLA, None, 0.0, None, SequenceDescriptor),
    "causal window": (SEPARATE, CAUSAL, VANILLA, None, 0.0, (3, 0), SequenceDescriptor),
    "bottom right": (
        *(SEPARATE, AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, VANILLA, None, 0.0, None),
        SequenceDescriptor,
    ),
    "padding": (SEPARATE, PADDING, VANILLA, None, 0.0, None, lengths),
    "qkv packed": (QKVLayout.BS3HD, CAUSAL, VANILLA, None, 0.0, None, SequenceDescriptor),
    "kv packed": (QKVLayout.BSHD_BS2HD, PADDING_CAUSAL, VANILLA, None, 0.0, None, lengths),
    "bias": (SEPARATE, NO_MASK, VANILLA, (1, H), 0.0, None, SequenceDescriptor),
    "bias of heads in common": (SEPARATE, CAUSAL, VANILLA, (B, 1), 0.0, None, SequenceDescriptor),
    "learnable, bias": (SEPARATE, CAUSAL, LEARNABLE, (B, H), 0.0, None, SequenceDescriptor),
    "off by one": (
        *(SEPARATE, CAUSAL, AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, None, 0.0, None),
        SequenceDescriptor,
    ),
    "dropout": (SEPARATE, CAUSAL, VANILLA, None, 0.25, None, SequenceDescriptor),
    "ragged": (QKVLayout.THD_THD_THD, PADDING_CAUSAL, VANILLA, None, 0.0, None, ids),
    "ragged, kv packed": (QKVLayout.THD_T2HD, PADDING, LEARNABLE, None, 0.0, (4, 0), ids),
    "ragged, packed": (QKVLayout.T3HD, PADDING_CAUSAL, VANILLA, None, 0.0, None, same_ids),
    "ragged, bottom right": (
        *(QKVLayout.THD_THD_THD, AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK, VANILLA),
        *(None, 0.0, None, ids),
    ),
}


def equal(name: str, ours: jax.Array, theirs: jax.Array) -> None:
    np.testing.assert_array_equal(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), name
    )


@pytest.mark.parametrize("name", CASES)
def test_both_ways_compute_the_same_bits(name: str) -> None:
    layout, mask, softmax, bias_shape, dropout, window, describe = CASES[name]
    qkv = qkv_of(layout)
    rows_kv = S if layout.is_qkvpacked() else T
    bias = None if bias_shape is None else normal(4, *bias_shape, S, rows_kv)
    offset = normal(5, 1, H, 1, 1, dtype=jnp.float32) if softmax == LEARNABLE else None
    seed = SEED if dropout else None
    kinds = (NO_BIAS if bias is None else POST, mask, layout, softmax, 0.25, dropout, True)
    segments = 2 if layout.is_thd() else 1
    dout = normal(3, B, S, H, E if layout.is_separate() else D)

    @jax.jit
    def ours(qkv, bias, offset, descriptor):
        def forward(qkv, bias, offset):
            return fused_attn(
                *(qkv, bias, descriptor, seed, *kinds, segments, window), softmax_offset=offset
            )

        out, pull = jax.vjp(forward, qkv, bias, offset)
        return out, *pull(dout)

    @jax.jit
    def theirs(qkv, bias, offset, descriptor):
        out, aux, rng = fused_attn_fwd(
            qkv, bias, offset, descriptor, seed, *kinds, segments, window
        )
        given = (aux, rng, out, dout, descriptor)
        return out, *fused_attn_bwd(qkv, bias, offset, *given, *kinds, segments, window), aux

    out, dqkv, dbias, doffset = ours(qkv, bias, offset, describe())
    out_2, dqkv_2, dbias_2, doffset_2, aux = theirs(qkv, bias, offset, describe())
    equal("output", out, out_2)
    assert len(dqkv) == len(dqkv_2) == len(qkv)
    for which, a, b in zip("qkv"[: len(qkv)], dqkv, dqkv_2, strict=True):
        equal(f"d{which}", a, b)
    assert aux.shape == ((B, S, H, 1) if layout.is_thd() else (B, H, S, 1))
    for which, a, b in (("dbias", dbias, dbias_2), ("doffset", doffset, doffset_2)):
        if a is None:
            assert b.size == 0 or not b.any(), which
        else:
            equal(which, a, b)
    if name == "dropout":
        assert out.astype(jnp.float32).std() > 0


def call(**changes) -> jax.Array:
    """A plain call; fused_attn()'s arguments by name."""
    given = {
        **{"qkv": qkv_of(SEPARATE), "bias": None, "sequence_descriptor": SequenceDescriptor()},
        **{"seed": None, "attn_bias_type": NO_BIAS, "attn_mask_type": NO_MASK},
        **{"qkv_layout": SEPARATE, "softmax_type": VANILLA, "scaling_factor": 0.25},
        **{"dropout_probability": 0.0, "is_training": True},
    }
    return fused_attn(**given | changes)


def test_dropout_is_a_function_of_the_seed() -> None:
    def draw(seed: jax.Array, **more) -> jax.Array:
        return call(seed=seed, dropout_probability=0.5, **more)

    assert (draw(SEED) == draw(SEED)).all()
    assert not (draw(SEED) == draw(SEED + 1)).all()
    assert (draw(jnp.tile(SEED, (4, 1))) == draw(SEED)).all()  # one key for each device
    assert (draw(SEED, is_training=False) == call()).all()
    with pytest.warns(UserWarning, match="seed.dtype is int32; cast to uint32"):
        assert (draw(SEED.astype(jnp.int32)) == draw(SEED)).all()


def test_the_names_of_the_results_keep_them_from_recomputation() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("mine")
    q, k, v = qkv_of(SEPARATE)

    def calls(name: str) -> int:
        def loss(q: jax.Array) -> jax.Array:
            out = call(qkv=(q, k, v), context_checkpoint_name=name)
            return (out.astype(jnp.float32) ** 2).sum()

        both = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
        return jax.jit(both).lower(q).as_text().count("@tea_attention_forward(")

    assert (calls("mine"), calls("other")) == (1, 2)


def test_vmap_of_both_ways() -> None:
    q, k, v = (jnp.stack([x, -x, 2 * x]) for x in qkv_of(SEPARATE))
    rows = jnp.array([[12, 7], [3, 4], [1, 12]])

    def one(q, k, v, rows):
        descriptor = SequenceDescriptor.from_seqlens((rows, jnp.array([5, 16])))
        return call(qkv=(q, k, v), attn_mask_type=PADDING, sequence_descriptor=descriptor)

    def below(q, k, v, rows):
        descriptor = SequenceDescriptor.from_seqlens((rows, jnp.array([5, 16])))
        kinds = (NO_BIAS, PADDING, SEPARATE, VANILLA, 0.25, 0.0, True, 1)
        return fused_attn_fwd((q, k, v), None, None, descriptor, None, *kinds)[0]

    want = jnp.stack([one(q[i], k[i], v[i], rows[i]) for i in range(3)])
    equal("fused_attn", jax.vmap(one)(q, k, v, rows), want)
    equal("fused_attn_fwd", jax.vmap(below)(q, k, v, rows), want)
    several = jax.jit(lambda *x: call(qkv=x))(q, k, v)  # more leading dimensions than one
    equal("leading", several, jax.vmap(lambda *x: call(qkv=x))(q, k, v))


def test_a_mask_in_place_of_a_descriptor() -> None:
    masked = np.ones((B, 1, S, T), bool)
    for row, (rows, keys) in zip(masked, ((12, 5), (7, 16)), strict=True):
        row[0, :rows, :keys] = False
    want = call(attn_mask_type=PADDING, sequence_descriptor=lengths())
    for mask in (jnp.array(masked), masked, jnp.array(masked, jnp.uint8)):
        with pytest.warns(DeprecationWarning, match="sequence_descriptor is a mask or None"):
            equal("mask", call(attn_mask_type=PADDING, sequence_descriptor=mask), want)
    with pytest.warns(DeprecationWarning):
        equal(
            "None",
            call(attn_mask_type=CAUSAL, sequence_descriptor=None),
            call(attn_mask_type=CAUSAL),
        )


def test_the_deprecated_function_of_ragged_rows() -> None:
    layout = QKVLayout.THD_THD_THD
    rows = (jnp.array([[5, 6], [3, 7]]), jnp.array([[6, 7], [4, 12]]))
    starts = (jnp.array([[0, 6, -1], [0, 3, -1]]), jnp.array([[0, 9, -1], [0, 4, -1]]))
    kinds = (NO_BIAS, PADDING_CAUSAL, layout)
    with pytest.warns(DeprecationWarning, match="fused_attn_thd"):
        out = fused_attn_thd(
            *(qkv_of(layout), None, *rows, *starts, None, *kinds, 0.25, 0.0, True), 2
        )
    more = {"qkv_layout": layout, "max_segments_per_seq": 2, "attn_mask_type": PADDING_CAUSAL}
    equal("output", out, call(sequence_descriptor=ids(), **more))
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(AssertionError, match="q_seq_offsets is of"),
    ):
        fused_attn_thd(
            *(qkv_of(layout), None, *rows, starts[0][:, :2], starts[1], None, *kinds),
            *(0.25, 0.0, True, 2),
        )


def test_a_sequence_of_rows_without_keys_is_zero() -> None:
    """Each sequence keeps its own keys also where the one before has none."""
    layout = QKVLayout.THD_THD_THD
    q_ids = jnp.array([[1] * 4 + [2] * 8, [1] * 12])
    kv_ids = jnp.array([[2] * 16, [1] * 16])
    descriptor = SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids), is_thd=True)
    more = {"qkv_layout": layout, "attn_mask_type": PADDING, "max_segments_per_seq": 2}
    out = call(sequence_descriptor=descriptor, **more)
    assert not out[0, :4].any()
    q, k, v = qkv_of(SEPARATE)
    equal("output", out[0, 4:], call(qkv=(q[:1, 4:], k[:1], v[:1]))[0])


def test_lengths_of_64_bits_are_cast() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        descriptor = jax.tree.map(lambda x: x.astype(jnp.int64), lengths())
        out = call(attn_mask_type=PADDING, sequence_descriptor=descriptor)
    finally:
        jax.config.update("jax_enable_x64", False)
    equal("output", out, call(attn_mask_type=PADDING, sequence_descriptor=lengths()))


def test_one_rank_of_context_parallelism_is_an_ordinary_call() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",))
    for strategy in CPStrategy:
        more = {"context_parallel_strategy": strategy, "stripe_size": 64}
        more["context_parallel_causal_load_balanced"] = True
        with mesh, te.autocast(mesh_resource=te.MeshResource(cp_resource="cp")):
            equal("resource", call(**more), call())
            equal("axis", call(**more, context_parallel_axis="cp"), call())
    with mesh, pytest.raises(AssertionError, match="global_mesh_resource is not set"):
        call()


def test_the_backend_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (SEPARATE, NO_BIAS, CAUSAL, VANILLA, 0.0)
    sizes = (12, 6, 2048, 2048, 64, 64)
    assert is_fused_attn_kernel_available(True, jnp.bfloat16, jnp.bfloat16, *kinds, *sizes)
    odd = (*sizes[:4], 63, 63)
    assert not is_fused_attn_kernel_available(True, jnp.float16, jnp.float16, *kinds, *odd)
    helper = FusedAttnHelper(True, jnp.bfloat16, jnp.bfloat16, *kinds, *sizes, (-1, -1))
    assert helper.get_fused_attn_backend().name == "NVTE_F16_arbitrary_seqlen"
    assert {helper: 1}[helper] == 1
    with pytest.raises(ValueError, match="jax_dtype is complex64; needs one of"):
        is_fused_attn_kernel_available(True, jnp.complex64, jnp.complex64, *kinds, *sizes)
    assert FusedAttnHelper.is_non_deterministic_allowed()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert not FusedAttnHelper.is_non_deterministic_allowed()
    program = jax.jit(lambda q, k, v: call(qkv=(q, k, v))).lower(*qkv_of(SEPARATE)).as_text()
    assert "deterministic" in program


Q, K, V = qkv_of(SEPARATE)
LEARNED = {"softmax_type": LEARNABLE}
WRONG = {
    "arrays": ({"qkv": (Q, K)}, r"qkv is 2; needs a tuple of 3 with BSHD_BSHD_BSHD"),
    "an array": ({"qkv": Q}, r"qkv is ArrayImpl; needs a tuple of 3"),
    "dimensions": ({"qkv": (Q[0], K, V)}, r"q is of shape \[12, 4, 16\]; needs \[..., rows"),
    "batch": (
        {"qkv": (Q, K[:1], V)},
        r"k is of shape \[1, 16, 2, 16\]; needs the batch of q, \[2\]",
    ),
    "dtype": ({"qkv": (Q, K, V.astype(jnp.float16))}, r"v.dtype is float16; needs that of q"),
    "head dim": ({"qkv": (Q, K[..., :8], V)}, r"head dim of k is 8; needs 16"),
    "rows of v": ({"qkv": (Q, K, V[:, :9])}, r"v is of shape .*; needs rows and heads of k"),
    "packing": (
        {"qkv": (Q,), "qkv_layout": QKVLayout.BS3HD},
        r"q is of shape .*; needs \[..., rows, 3, heads, dim\]",
    ),
    "no bias": ({"attn_bias_type": POST}, "bias is None; needs an array: attn_bias_type is POST_"),
    "a bias": ({"bias": normal(4, 1, H, S, T)}, "bias is given; needs None: attn_bias_type is NO"),
    "bias dtype": (
        {"bias": normal(4, 1, H, S, T, dtype=jnp.float32), "attn_bias_type": POST},
        "bias.dtype is float32; needs bfloat16, as q",
    ),
    "bias shape": ({"bias": normal(4, 3, H, S, T), "attn_bias_type": POST}, "bias is of shape"),
    "offset unused": (
        {"softmax_offset": jnp.zeros((1, H, 1, 1))},
        "softmax_offset is given; needs None: softmax_type is VANILLA_SOFTMAX",
    ),
    "window of one number": ({"window_size": 3}, r"window_size is 3; needs \(left, right\)"),
    "no offset": (LEARNED, r"softmax_offset is None; needs float32\[1, 4, 1, 1\]"),
    "an offset": (
        LEARNED | {"softmax_offset": jnp.zeros((H,))},
        r"softmax_offset is float32\[4\]; needs float32\[1, 4, 1, 1\]",
    ),
    "an offset's dtype": (
        LEARNED | {"softmax_offset": jnp.zeros((1, H, 1, 1), jnp.bfloat16)},
        r"softmax_offset is bfloat16\[1, 4, 1, 1\]; needs float32",
    ),
    "no seed": ({"dropout_probability": 0.1}, "seed is None; needs an array"),
    "a seed": (
        {"dropout_probability": 0.1, "seed": jnp.zeros(1, jnp.uint32)},
        r"seed is of shape \[1\]; needs 2 numbers",
    ),
    "dropout": (
        {"dropout_probability": 1.5, "seed": SEED},
        "dropout_probability is 1.5; needs a number from 0 to below 1",
    ),
    "dropout below 0": (
        {"dropout_probability": -0.5},
        "dropout_probability is -0.5; needs a number from 0 to below 1",
    ),
    "ragged without padding": (
        {"qkv_layout": QKVLayout.THD_THD_THD},
        "attn_mask_type is NO_MASK; needs one with padding: qkv_layout is THD_THD_THD",
    ),
    "lengths": (
        {
            "attn_mask_type": PADDING,
            "sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.ones(3, jnp.int32)),
        },
        r"seqlens is of shape \[3\]; needs \[2\] with PADDING_MASK",
    ),
    "no lengths": ({"attn_mask_type": PADDING}, r"seqlens is of shape \[0\]; needs \[2\]"),
    "a mask type": ({"attn_mask_type": "causal"}, "attn_mask_type is 'causal'; needs a member of"),
    "a layout": ({"qkv_layout": 9}, "qkv_layout is 9; needs a member of QKVLayout"),
    "a strategy": ({"context_parallel_strategy": 1}, "context_parallel_strategy is 1; needs a mem"),
    "a stripe": ({"stripe_size": 0}, "stripe_size is 0; needs None, or at least 1"),
    "a head dim": (
        {"qkv": tuple(x[..., :7] for x in (Q, K, V))},
        "head dim of query is 7; needs a multiple of 8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals_name_the_argument_what_was_seen_and_what_is_needed(name: str) -> None:
    changes, text = WRONG[name]
    with pytest.raises((ValueError, AssertionError), match=text):
        call(**changes)
    with pytest.raises((ValueError, AssertionError), match=text):
        jax.jit(lambda: call(**changes))()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qkv_layout": QKVLayout.THD_THD_THD, "attn_mask_type": PADDING}, "a descriptor: THD"),
        ({"max_segments_per_seq": 2}, "a descriptor: max_segments_per_seq is 2"),
    ],
)
def test_a_mask_is_refused_where_it_says_too_little(changes: dict, text: str) -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(AssertionError, match=text):
        call(sequence_descriptor=None, **changes)


# A caller may delete all live arrays between calls, as TransformerEngine's tests do; and a program
# for JAX needs no PyTorch.
DELETING = """
import sys
sys.modules["torch"] = None
import jax, jax.numpy as jnp
from transformer_engine.jax.attention import *
from transformer_engine.jax.cpp_extensions import fused_attn_fwd
KINDS = (AttnBiasType.NO_BIAS, AttnMaskType.PADDING_MASK)
MORE = (AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, 0.1, 0.0, True, 2)
def ragged(q, ids):
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids, is_thd=True)
    layout = QKVLayout.THD_THD_THD
    below = fused_attn_fwd((q, q, q), None, None, descriptor, None, *KINDS, layout, *MORE)[0]
    return below - fused_attn((q, q, q), None, descriptor, None, *KINDS, layout, *MORE)
for _ in range(2):
    q, ids = jnp.ones((2, 8, 2, 16), jnp.bfloat16), jnp.ones((2, 8), jnp.int32)
    assert not ragged(q, ids).any()
    assert not jax.jit(ragged)(q, ids).any()
    assert not jax.vmap(ragged)(q[None], ids[None]).any()
    for x in jax.live_arrays():
        x.delete()
"""


def test_nothing_is_kept_between_calls_and_nothing_needs_pytorch() -> None:
    subprocess.run([sys.executable, "-c", DELETING], check=True)
