"""attention(): jax.nn's convention, packed rows, gradients, and what each refusal names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_attention import jax as tea

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


Q, K, V = normal(2, 12, 4, 16), normal(2, 9, 2, 16), normal(2, 9, 2, 16)
LENGTHS = {
    "query_seq_lengths": jnp.array([12, 7], jnp.int32),
    "key_value_seq_lengths": jnp.array([5, 9], jnp.int32),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    # jax 0.7 applies a window only where there is another mask.
    "window": {"local_window_size": 3, "mask": jnp.ones((1, 1, 1, 1), bool)},
    "window of two": {"local_window_size": (4, 1), "mask": jnp.ones((1, 1, 1, 1), bool)},
    "causal window": {"is_causal": True, "local_window_size": (4, 5)},
    "lengths": LENGTHS,
    "length of keys": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]},
    "causal lengths": {**LENGTHS, "is_causal": True},
    "bias": {"bias": normal(2, 4, 12, 9)},
    "bias of heads": {"bias": normal(1, 4, 1, 9)},
    "mask": {"mask": jnp.asarray(RNG.random((2, 1, 12, 9)) < 0.7).at[..., 0].set(True)},
    "mask and bias": {
        "bias": normal(1, 4, 12, 9),
        "mask": jnp.arange(9).reshape(1, 1, 1, 9) < 6,
    },
}
if "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters:
    CALLS["residual"] = {"return_residual": True}


def valid(o: jax.Array, options: dict) -> jax.Array:
    """Without padded rows, where jax.nn has the mean of the values and we have zero."""
    if "query_seq_lengths" not in options:
        return o
    rows = jnp.arange(o.shape[1]) < options["query_seq_lengths"][:, None]
    return jnp.where(rows[:, :, None, None], o, 0)


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_jax_nn(name: str) -> None:
    options = CALLS[name]

    def loss(attention):
        def f(q, k, v, bias):
            given = options if bias is None else options | {"bias": bias}
            out = attention(q, k, v, **given)
            o, *lse = out if isinstance(out, tuple) else (out,)
            o = valid(o, options)
            return (o**2).sum(), [o, *lse]

        arguments = (0, 1, 2) if "bias" not in options else (0, 1, 2, 3)
        return jax.jit(jax.grad(f, arguments, has_aux=True))(Q, K, V, options.get("bias"))

    gradients, results = loss(tea.dot_product_attention)
    expected, references = loss(jax.nn.dot_product_attention)
    for ours, theirs in zip(results, references, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_arrays_without_a_batch() -> None:
    o, lse = tea.attention(Q[0], K[0], V[0], return_residual=True)
    whole, rows = tea.attention(Q, K, V, return_residual=True)
    assert (o == whole[0]).all() and (lse == rows[0]).all()
    assert o.shape == (12, 4, 16) and lse.shape == (12, 4)


def test_implementation_hands_over_to_jax() -> None:
    theirs = jax.nn.dot_product_attention(Q, K, V, is_causal=True)
    assert (tea.attention(Q, K, V, is_causal=True, implementation="xla") == theirs).all()
    with pytest.raises(ValueError, match="softcap is given; needs None with implementation='xla'"):
        tea.attention(Q, K, V, implementation="xla", softcap=3.0)


def test_padded_rows_are_zero() -> None:
    o, lse = tea.attention(Q, K, V, **LENGTHS, return_residual=True)
    assert (o[1, 7:] == 0).all() and (lse[1, 7:] == -jnp.inf).all()


def segment(ids: np.ndarray, n: int) -> slice:
    rows = np.flatnonzero(ids == n)
    return slice(rows[0], rows[-1] + 1)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "bottom_right": True}, {"sink": "off_by_one"}]
)
def test_packed_rows_are_their_sequences(options: dict) -> None:
    q_ids = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 0, 3, 3, 0], [0, 0, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]])
    kv_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3], [2, 2, 2, 2, 0, 3, 3, 3, 3]])

    def packed(q, k, v):
        ids = {"q_segment_ids": jnp.asarray(q_ids), "kv_segment_ids": jnp.asarray(kv_ids)}
        return tea.attention(q, k, v, **ids, max_segments=4, **options)

    def apart(q, k, v):
        out = jnp.zeros((2, 12, 4, 16))
        for b in range(2):
            for n in sorted({*q_ids[b]} - {0}):
                rows, cols = segment(q_ids[b], n), segment(kv_ids[b], n)
                o = tea.attention(q[b, rows], k[b, cols], v[b, cols], **options)
                out = out.at[b, rows].set(o)
        return out

    np.testing.assert_allclose(jax.jit(packed)(Q, K, V), apart(Q, K, V), atol=1e-6)
    weights = normal(2, 12, 4, 16)
    got, want = (
        jax.grad(lambda *x, f=f: (f(*x) * weights).sum(), (0, 1, 2))(Q, K, V)
        for f in (packed, apart)
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_dropout_is_the_mask_of_its_key() -> None:
    key = jax.random.key(7)
    keep = tea.dropout_mask(key, 0.4, (2, 4, 12, 9))

    def reference(q, k, v):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 4)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, p / 0.6, 0), v)

    def ours(q, k, v):
        return tea.attention(q, k, v, dropout=0.4, dropout_key=key)

    np.testing.assert_allclose(ours(Q, K, V), reference(Q, K, V), atol=1e-5)
    got, want = (
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2))(Q, K, V) for f in (ours, reference)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_keys_of_every_kind_are_taken() -> None:
    for key in (
        jax.random.key(1),
        jax.random.PRNGKey(1),
        jax.random.key(1, impl="rbg"),
        jax.random.key_data(jax.random.key(1, impl="rbg")),
    ):
        a, b = (tea.attention(Q, K, V, dropout=0.5, dropout_key=key) for _ in range(2))
        assert (a == b).all()
    other = tea.attention(Q, K, V, dropout=0.5, dropout_key=jax.random.key(2))
    assert not (other == a).all()


def test_origin_may_be_traced() -> None:
    whole = tea.attention(Q, K, V, is_causal=True)

    def part(row):
        return tea.attention(Q[:, 5:], K, V, is_causal=True, origin=[0, 0, row, 0])

    np.testing.assert_allclose(jax.jit(part)(5), whole[:, 5:], atol=1e-6)
    np.testing.assert_allclose(part(5), whole[:, 5:], atol=1e-6)


IDS = jnp.ones((2, 12), jnp.int32)
KEY = jax.random.key(0)
CU = jnp.array([0, 5, 9], jnp.int32)
T = normal(9, 4, 16)
REFUSALS = {
    "query": ((Q[..., None], K, V), {}, "query is of shape [2, 12, 4, 16, 1]; needs 4 dimensions"),
    "no array": (("q", K, V), {}, "query is 'q'; needs an array"),
    "key": ((Q, K[0], V), {}, "key is of shape [9, 2, 16]; needs 4 dimensions"),
    "batch": ((Q, K[:1], V[:1]), {}, "key is of shape [1, 9, 2, 16]; needs a batch of 2"),
    "value": ((Q, K, V[:, :8]), {}, "value is of shape [2, 8, 2, 16]; needs the heads and rows"),
    "dim": ((Q[..., :8], K, V), {}, "key is of shape [2, 9, 2, 16]; needs the head dim of q"),
    "odd dim": ((Q[..., :6], K[..., :6], V), {}, "head dim of query is 6; needs a multiple of 8"),
    "heads": (
        (Q[:, :, :3], K, V),
        {},
        "key is of shape [2, 9, 2, 16] with 2 heads; needs a number of heads",
    ),
    "dtype": ((Q, K.astype(jnp.bfloat16), V), {}, "key.dtype is bfloat16; needs float32 as q"),
    "fp8": ((Q.astype(jnp.float8_e4m3fn), K, V), {}, "query.dtype is float8_e4m3fn; needs float16"),
    "complex": ((Q, K, V.astype(complex)), {}, "value.dtype is complex64; needs float16"),
    "integers": ((Q.astype(int), K, V), {}, "query.dtype is int32; needs float16, bfloat16"),
    "bias": ((Q, K, V), {"bias": normal(12, 8)}, "bias is of shape [1, 1, 12, 8]; needs [2, 4,"),
    "bool bias": ((Q, K, V), {"bias": jnp.ones((12, 9), bool)}, "bias.dtype is bool; needs that"),
    "deep bias": ((Q, K, V), {"bias": normal(1, 1, 1, 1, 1)}, "bias is of shape [1, 1, 1, 1, 1]"),
    "half bias": ((Q, K, V), {"bias": normal(12, 9, dtype=jnp.float16)}, "bias.dtype is float16"),
    "mask": ((Q, K, V), {"mask": normal(12, 9)}, "mask.dtype is float32; needs bool"),
    "mask of 3": (
        (Q, K, V),
        {"mask": jnp.ones((3, 12, 9), bool)},
        "mask is of shape [1, 3, 12, 9]",
    ),
    "scale": ((Q, K, V), {"scale": "half"}, "scale is 'half'; needs a Python number"),
    "causal": ((Q, K, V), {"is_causal": 1}, "is_causal is 1; needs True or False"),
    "window": ((Q, K, V), {"local_window_size": -1}, "local_window_size is (-1, -1); needs"),
    "long window": ((Q, K, V), {"local_window_size": (1, 2, 3)}, "local_window_size is (1, 2, 3)"),
    "float window": ((Q, K, V), {"local_window_size": (1.5, 2)}, "local_window_size is (1.5, 2)"),
    "lengths": ((Q, K, V), {"query_seq_lengths": jnp.ones(3, int)}, "query_seq_lengths is of"),
    "float lengths": ((Q, K, V), {"query_seq_lengths": jnp.ones(2)}, "query_seq_lengths.dtype is"),
    "implementation": ((Q, K, V), {"implementation": "fast"}, "implementation is 'fast'; needs"),
    "alibi": ((Q, K, V), {"alibi": jnp.ones(3)}, "alibi is of shape [3]; needs [4] or [2, 4]"),
    "softcap": ((Q, K, V), {"softcap": -1.0}, "softcap is -1; needs 0 or more"),
    "sink": ((Q, K, V), {"sink": jnp.ones(3)}, "sink is of shape [3]; needs float32 [4]"),
    "sink text": ((Q, K, V), {"sink": "two"}, "sink is 'two'; needs 'off_by_one', or"),
    "no key": ((Q, K, V), {"dropout": 0.1}, "dropout_key is None; needs a key: dropout is 0.1"),
    "dropout": ((Q, K, V), {"dropout": 1.0, "dropout_key": KEY}, "dropout is 1.0; needs at"),
    "keys": (
        (Q, K, V),
        {"dropout": 0.1, "dropout_key": jax.random.split(KEY)},
        "dropout_key is a uint32 array of shape [2, 2]; needs one key",
    ),
    "no segments": ((Q, Q, Q), {"q_segment_ids": IDS}, "max_segments is None; needs an integer"),
    "segments": (
        (Q, Q, Q),
        {"q_segment_ids": IDS[:1], "max_segments": 2},
        "q_segment_ids is of shape [1, 12]; needs [2, 12]",
    ),
    "no kv segments": (
        (Q, K, V),
        {"q_segment_ids": IDS, "max_segments": 2},
        "kv_segment_ids is None; needs integers [2, 9]",
    ),
    "only kv segments": ((Q, K, V), {"kv_segment_ids": IDS}, "q_segment_ids is None; needs"),
    "segments and lengths": (
        (Q, Q, Q),
        {"q_segment_ids": IDS, "max_segments": 2, "query_seq_lengths": CU[1:]},
        "query_seq_lengths is given; needs None: q_segment_ids is given",
    ),
    "segments and bias": (
        (Q, Q, Q),
        {"q_segment_ids": IDS, "max_segments": 2, "bias": normal(12, 12)},
        "bias is given; needs None: q_segment_ids is given",
    ),
    "origin": ((Q, K, V), {"origin": [1, 2]}, "origin is a int"),
    "engine": ((Q, K, V), {"engine": "cudnn"}, "engine is 'cudnn'; needs"),
    "engine with spaces": ((Q, K, V), {"engine": "cpu colour=1"}, "engine is 'cpu colour=1'"),
    "bias type": ((Q, K, V), {"bias_type": "later"}, "bias_type is 'later'; needs"),
    "bias type alone": ((Q, K, V), {"bias_type": "pre_scale"}, "bias_type is"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument_what_was_seen_and_what_is_needed(name: str) -> None:
    arrays, options, text = REFUSALS[name]
    with pytest.raises((ValueError, TypeError)) as error:
        tea.attention(*arrays, **options)
    assert str(error.value).startswith(text)


RAGGED = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU}
RAGGED_REFUSALS = {
    "dimensions": ((Q, T, T), RAGGED, "query is of shape [2, 12, 4, 16]; needs 3 dimensions"),
    "lengths": ((T, T, T), {**RAGGED, "cu_seqlens_kv": CU[:2]}, "cu_seqlens_kv is of shape [2]"),
    "no lengths": ((T, T, T), {**RAGGED, "cu_seqlens_q": None}, "cu_seqlens_q is None; needs"),
    "fp8": ((T.astype(jnp.float8_e5m2), T, T), RAGGED, "query.dtype is float8_e5m2; needs float16"),
    "bound": ((T, T, T), {**RAGGED, "max_seqlen_q": -5}, "max_seqlen_q is -5; needs 0 or more"),
    "offsets": ((T, T, T), {**RAGGED, "offsets_q": CU}, "offsets_kv is None; needs a tensor"),
}


@pytest.mark.parametrize("name", RAGGED_REFUSALS)
def test_refusals_of_ragged_attention(name: str) -> None:
    arrays, options, text = RAGGED_REFUSALS[name]
    with pytest.raises(ValueError) as error:
        tea.ragged_attention(*arrays, **options)
    assert str(error.value).startswith(text)


def test_a_traced_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="scale is a traced array; needs a Python number: multiply"):
        jax.jit(lambda s: tea.attention(Q, K, V, scale=s))(0.5)


def test_lengths_that_cannot_be_are_refused_on_the_cpu() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of range in part; needs lengths"):
        jax.block_until_ready(tea.attention(Q, K, V, query_seq_lengths=jnp.array([13, 1])))
    tea.attention(Q, K, V)


def test_an_engine_is_chosen_by_its_name() -> None:
    o = tea.attention(Q, K, V, engine="reference")
    np.testing.assert_allclose(o, tea.attention(Q, K, V), atol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fast"):
        jax.block_until_ready(tea.attention(Q, K, V, engine="fast"))


def test_deterministic_gradients_are_equal_to_the_bit() -> None:
    f = jax.jit(jax.grad(lambda q: (tea.attention(q, K, V, deterministic=True) ** 2).sum()))
    assert (f(Q) == f(Q)).all()
