"""attention() under JAX's transformations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from te_attention import jax as tea

KEYS = jax.random.split(jax.random.key(0), 3)
Q = jax.random.normal(KEYS[0], (2, 16, 4, 16))
K, V = (jax.random.normal(key, (2, 16, 2, 16)) for key in KEYS[1:])
THREE = jnp.arange(1.0, 4.0)


def stacked(x: jax.Array, n: int = 3) -> jax.Array:
    return jnp.stack([x * (i + 1) for i in range(n)])


def causal(q, k, v):
    return tea.attention(q, k, v, is_causal=True)


def loss(f):
    return lambda *x: (f(*x) ** 2).sum()


def close(a, b, atol: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4)


def looped(f, axes):
    """The definition of vmap: one call after the other, then a stack."""

    def run(*x):
        n = next(a.shape[axis] for a, axis in zip(x, axes, strict=True) if axis is not None)

        def member(i):
            return [
                a if axis is None else a[(slice(None),) * axis + (i,)]
                for a, axis in zip(x, axes, strict=True)
            ]

        outs = [f(*member(i)) for i in range(n)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    return run


LENGTHS = jnp.array([[16, 3], [5, 9], [0, 16]], jnp.int32)
BIAS = jax.random.normal(KEYS[0], (3, 1, 4, 16, 16))
SLOPES = jnp.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.2, 0.3], [0.1, 0.9, 0.2, 0.3]])
SINKS = jax.random.normal(KEYS[1], (3, 4))
DROPOUT_KEYS = jax.random.split(jax.random.key(1), 3)
CU = jnp.array([0, 7, 16], jnp.int32)
CUS = jnp.array([[0, 7, 16], [0, 4, 9], [0, 16, 16]], jnp.int32)
STARTS = jnp.array([[0, 8, 16], [2, 6, 16], [3, 11, 16]], jnp.int32)  # of the lengths 4 and 5
RAGGED_BIAS = jax.random.normal(KEYS[2], (3, 1, 4, 16, 16))


def ragged(q, k, v):
    return tea.ragged_attention(q[0], k[0], v[0], cu_seqlens_q=CU, cu_seqlens_kv=CU)


MAPPED = {
    "all": (causal, (stacked(Q), stacked(K), stacked(V)), (0, 0, 0)),
    "another axis": (causal, (jnp.moveaxis(stacked(Q), 0, 2), K, stacked(V)), (2, None, 0)),
    "query alone": (causal, (stacked(Q), K, V), (0, None, None)),
    "lengths": (
        lambda q, n: tea.attention(q, K, V, key_value_seq_lengths=n),
        (stacked(Q), LENGTHS),
        (0, 0),
    ),
    "lengths alone": (lambda n: tea.attention(Q, K, V, query_seq_lengths=n), (LENGTHS,), (0,)),
    "bias": (lambda q, b: tea.attention(q, K, V, b), (stacked(Q), BIAS), (0, 0)),
    "one bias": (lambda q, b: tea.attention(q, K, V, b), (stacked(Q), BIAS[0]), (0, None)),
    "bias of the batch": (
        lambda q, b: tea.attention(q, K, V, b),
        (Q, jnp.concatenate([BIAS, BIAS * 2], 1)),
        (None, 0),
    ),
    "slopes": (lambda q, a: tea.attention(q, K, V, alibi=a), (Q, SLOPES), (None, 0)),
    "slopes of the batch": (
        lambda q, a: tea.attention(q, K, V, alibi=a),
        (stacked(Q), SLOPES[:2]),
        (0, None),
    ),
    "sink": (lambda q, s: tea.attention(q, K, V, sink=s), (stacked(Q), SINKS), (0, 0)),
    "one sink": (lambda q, s: tea.attention(q, K, V, sink=s), (stacked(Q), SINKS[0]), (0, None)),
    "keys of dropout": (
        lambda q, key: tea.attention(q, K, V, dropout=0.5, dropout_key=key),
        (Q, DROPOUT_KEYS),
        (None, 0),
    ),
    "one key of dropout": (
        lambda q, key: tea.attention(q, K, V, dropout=0.5, dropout_key=key),
        (stacked(Q), DROPOUT_KEYS[0]),
        (0, None),
    ),
    "residual": (
        lambda q: tea.attention(q, K, V, return_residual=True, return_max_logit=True),
        (stacked(Q),),
        (0,),
    ),
    "ragged": (ragged, (stacked(Q), stacked(K), V), (0, 0, None)),
    "ragged lengths": (
        lambda q, cu: tea.ragged_attention(q, K[0], V[0], cu_seqlens_q=cu, cu_seqlens_kv=CU),
        (stacked(Q)[:, 0], CUS),
        (0, 0),
    ),
    "ragged gaps": (
        lambda q, k, starts: tea.ragged_attention(
            *(q, k, V[0]),
            cu_seqlens_q=CUS[1],
            cu_seqlens_kv=CUS[1],
            offsets_q=starts,
            offsets_kv=starts,
            return_residual=True,
        ),
        (Q[0], stacked(K)[:, 0], STARTS),
        (None, 0, 0),
    ),
    "ragged bias": (
        lambda q, b: tea.ragged_attention(q, K[0], V[0], b, cu_seqlens_q=CU, cu_seqlens_kv=CU),
        (stacked(Q)[:, 0], RAGGED_BIAS),
        (0, 0),
    ),
    "one ragged bias": (
        lambda q, b: tea.ragged_attention(q, K[0], V[0], b, cu_seqlens_q=CU, cu_seqlens_kv=CU),
        (stacked(Q)[:, 0], RAGGED_BIAS[0]),
        (0, None),
    ),
    "ragged slopes": (
        lambda q, a: tea.ragged_attention(
            q, K[0], V[0], alibi=a, cu_seqlens_q=CU, cu_seqlens_kv=CU
        ),
        (stacked(Q)[:, 0], SLOPES),
        (0, 0),
    ),
    "segments": (
        lambda q, ids: tea.attention(q, K, V, q_segment_ids=ids, max_segments=2),
        (Q, jnp.repeat(jnp.array([[1, 2], [1, 1], [0, 2]]), 8, 1)[:, None].repeat(2, 1)),
        (None, 0),
    ),
}


@pytest.mark.parametrize("name", [name for name in MAPPED if "ragged" in name])
def test_ragged_sequences_of_all_members_are_one_call(name: str) -> None:
    f, arrays, axes = MAPPED[name]
    text = (
        jax.jit(jax.vmap(jax.vmap(f, axes), axes))
        .lower(*(x[None] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)))
        .as_text()
    )
    assert "while" not in text
    assert text.count("@tea_attention_forward(") == 1


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_stack_of_calls(name: str) -> None:
    f, arrays, axes = MAPPED[name]
    loop = looped(f, axes)
    close(jax.jit(jax.vmap(f, axes))(*arrays), loop(*arrays))
    floats = [
        i
        for i, x in enumerate(arrays)
        if jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("slopes")
    ]

    def total(g):
        return lambda *x: sum((leaf**2).sum() for leaf in jax.tree.leaves(finite(g(*x))))

    def finite(tree):
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)

    if floats:
        grads = jax.jit(jax.grad(total(jax.vmap(f, axes)), floats))(*arrays)
        close(grads, jax.grad(total(loop), floats)(*arrays), 1e-3)
    # Gradients of each member.
    each = [i for i in floats if axes[i] is not None]
    if each:
        per_member = jax.vmap(jax.grad(total(f), each), axes)
        close(per_member(*arrays), looped(jax.grad(total(f), each), axes)(*arrays), 1e-3)


def test_gradients_of_each_member_of_unmapped_arrays() -> None:
    """jax.vmap of a gradient with respect to what the members share."""

    def f(q, bias, sink):
        return (tea.attention(q, K, V, bias, sink=sink) ** 2).sum()

    shared = jax.vmap(jax.grad(f, (1, 2)), (0, None, None))
    got = shared(stacked(Q), BIAS[0], SINKS[0])
    want = [jax.grad(f, (1, 2))(q, BIAS[0], SINKS[0]) for q in stacked(Q)]
    close(got, [jnp.stack(parts) for parts in zip(*want, strict=True)], 1e-4)


def test_vmap_of_vmap() -> None:
    x = [stacked(stacked(a, 2)) for a in (Q, K, V)]
    nested = jax.vmap(jax.vmap(causal))
    flat = causal(*(a.reshape(-1, *a.shape[3:]) for a in x)).reshape(x[0].shape)
    close(nested(*x), flat)
    close(jax.grad(loss(nested))(*x), jax.vmap(jax.vmap(jax.grad(loss(causal))))(*x), 1e-3)


def test_jacobians_of_dropout_use_one_pattern() -> None:
    """jacrev maps the cotangent alone: forward has run before, with the pattern of one call."""

    def f(q):
        o = tea.attention(q, K, V, dropout=0.5, dropout_key=DROPOUT_KEYS[0])
        return o[0, 3, 1, :2]

    rows = [jax.grad(lambda q, i=i: f(q)[i])(Q) for i in range(2)]
    close(jax.jacrev(f)(Q), jnp.stack(rows))


def test_scan_of_rematerialised_layers() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("context")

    def layers(f):
        def run(q, k, v):
            body = jax.checkpoint(lambda c, _: (f(c, k, v), None), policy=policy)
            return jax.lax.scan(body, q, None, length=3)[0]

        return run

    def plain(q, k, v):
        return causal(causal(causal(q, k, v), k, v), k, v)

    got = jax.jit(jax.value_and_grad(loss(layers(causal)), (0, 1, 2)))(Q, K, V)
    close(got, jax.value_and_grad(loss(plain), (0, 1, 2))(Q, K, V), 1e-4)


def calls(f, *arrays) -> dict[str, int]:
    """How often the program, before XLA joins equal calls, has each custom call."""
    text = jax.jit(f).lower(*arrays).as_text()
    return {verb: text.count(f"@tea_attention_{verb}(") for verb in ("forward", "backward")}


@pytest.mark.parametrize(
    ("policy", "count"), [("save_only_these_names", 1), ("nothing_saveable", 2)]
)
def test_policies_decide_how_often_forward_runs(policy: str, count: int) -> None:
    chosen = getattr(jax.checkpoint_policies, policy)
    chosen = chosen("context") if policy == "save_only_these_names" else chosen
    f = jax.grad(loss(jax.checkpoint(causal, policy=chosen)), (0, 1, 2))
    assert calls(f, Q, K, V) == {"forward": count, "backward": 1}


def test_another_name_for_policies() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("attention")

    def f(q):
        return tea.attention(q, K, V, checkpoint_name="attention")

    assert calls(jax.grad(loss(jax.checkpoint(f, policy=policy))), Q) == {
        "forward": 1,
        "backward": 1,
    }


def test_while_and_cond() -> None:
    def body(i, q):
        return jax.lax.cond(i % 2 == 0, lambda q: causal(q, K, V), lambda q: q, q)

    got = jax.jit(lambda q: jax.lax.fori_loop(0, 3, body, q))(Q)
    close(got, causal(causal(Q, K, V), K, V))


def test_export_round_trip() -> None:
    allowed = export.DisabledSafetyCheck.custom_call("tea_attention_forward")
    exported = export.export(jax.jit(causal), platforms=("cpu",), disabled_checks=[allowed])(
        Q, K, V
    )
    close(export.deserialize(exported.serialize()).call(Q, K, V), causal(Q, K, V))


def test_lowering_for_cuda_needs_no_gpu() -> None:
    f = jax.jit(jax.grad(loss(causal), (0, 1, 2)))
    text = f.trace(Q, K, V).lower(lowering_platforms=("cuda",)).as_text()
    assert "@tea_attention_forward" in text and "@tea_attention_backward" in text
    assert 'problem = "dtype=fp32 training=1' in text


def test_donated_buffers() -> None:
    step = jax.jit(lambda q, k, v: causal(q, k, v) * 0.5, donate_argnums=0)
    want = causal(causal(Q, K, V) * 0.5, K, V) * 0.5
    x = step(Q + 0, K, V)
    close(step(x, K, V), want)


def test_forward_mode_and_second_derivatives_are_refused() -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(causal, (Q, K, V), (Q, K, V))
    with pytest.raises(Exception, match=r"(?i)jvp|differentiat|transpose"):
        jax.grad(lambda q: jax.grad(loss(causal))(q, K, V).sum())(Q)


def test_float64_has_float64_statistics() -> None:
    """LSE, sinks and slopes are float64 then: smaller buffers would be written beyond their end."""
    jax.config.update("jax_enable_x64", True)
    try:
        q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in (Q, K, V))
        sink, slopes = jnp.arange(4.0), jnp.arange(4.0) / 8

        def f(q, k, v, sink):
            zero = jnp.array([0, 0, 0, 0])
            return tea.attention(
                q, k, v, sink=sink, alibi=slopes, origin=zero, return_residual=True
            )

        def reference(q, k, v, sink):
            k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
            far = jnp.abs(jnp.arange(16)[:, None] - jnp.arange(16))
            s = jnp.einsum("btnh,bsnh->bnts", q, k) / 4 - slopes[:, None, None] * far
            wide = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (2, 4, 16, 1))], -1)
            lse = jax.nn.logsumexp(wide, -1)
            o = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), v)
            return o, lse.swapaxes(1, 2)

        def both(f):
            def total(*x):
                o, lse = f(*x)
                return (o**2).sum() + (lse**2).sum()

            out = f(q, k, v, sink)
            assert {x.dtype for x in out} == {jnp.dtype("float64")}
            return out, jax.jit(jax.grad(total, (0, 1, 2, 3)))(q, k, v, sink)

        for a, b in zip(jax.tree.leaves(both(f)), jax.tree.leaves(both(reference)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_small_gradients_are_computed_only_where_they_are_wanted() -> None:
    def f(q, bias, sink):
        return (tea.attention(q, K, V, bias, sink=sink) ** 2).sum()

    for wanted, results in (
        ((0,), "18, 19, 20"),
        ((0, 1), "18, 19, 20, 21"),
        ((2,), "18, 19, 20, 22"),
    ):
        text = jax.jit(jax.grad(f, wanted)).lower(Q, BIAS[0], SINKS[0]).as_text()
        (found,) = re.findall(r"@tea_attention_backward.*? results = dense<\[([\d, ]+)\]>", text)
        assert found == results


def test_a_gradient_of_lse_alone() -> None:
    def f(q, k):
        return (tea.attention(q, k, V, return_residual=True)[1] ** 2).sum()

    def reference(q, k):
        s = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, 2, 2)) / 4
        return (jax.nn.logsumexp(s, -1) ** 2).sum()

    close(jax.grad(f, (0, 1))(Q, K), jax.grad(reference, (0, 1))(Q, K), 1e-4)


def test_the_largest_score_has_no_gradient() -> None:
    f = jax.grad(lambda q: tea.attention(q, K, V, return_max_logit=True)[1].sum())
    assert (f(Q) == 0).all()
