"""The size of every tensor of a problem, by which operands and results are checked."""

import re

import jax
import jax.numpy as jnp
import pytest

from te_attention import jax as tea
from te_attention.jax import _call

KEY = jax.random.key(0)
NAMES = {
    **{"q": 0, "k": 1, "v": 2, "bias": 7, "sink": 8, "slopes": 9, "cu_seqlens_q": 10},
    **{"cu_seqlens_kv": 11, "offsets_q": 12, "offsets_kv": 13, "rng_state": 16, "origin": 43},
}


def shrunk(monkeypatch: pytest.MonkeyPatch, name: str, x: jax.Array) -> None:
    """The description is made for x, then the call gets an array with fewer elements."""
    real = _call.call

    def call(verb, options, needs, operands, results):
        return real(verb, options, needs, operands | {name: x.ravel()[:-1]}, results)

    monkeypatch.setattr(_call, "call", call)


@pytest.mark.parametrize("name", NAMES)
def test_an_operand_of_another_size_is_refused(monkeypatch, name: str) -> None:
    cu = jnp.array([0, 3, 7], jnp.int32)
    arrays = {
        **{"q": jnp.ones((9, 4, 16)), "k": jnp.ones((9, 2, 16)), "v": jnp.ones((9, 2, 8))},
        **{"bias": jnp.ones((2, 1, 9, 9)), "sink": jnp.ones(4), "slopes": jnp.ones((2, 4))},
        **{"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "offsets_q": cu, "offsets_kv": cu},
        **{"rng_state": jnp.ones(4, jnp.uint32), "origin": jnp.zeros(8, jnp.uint32)},
    }
    options = _call.Options(format="thd", dropout=0.1)
    _call.forward(options, ("o", "lse"), True, arrays)
    shrunk(monkeypatch, name, arrays[name])
    element = arrays[name].dtype.itemsize
    text = rf"tensor {NAMES[name]}, has (\d+) bytes; needs (\d+)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as error:
        jax.block_until_ready(_call.forward(options, ("o", "lse"), True, arrays))
    has, needs = map(int, re.search(text, str(error.value)).groups())
    assert needs - has == element
    assert needs == arrays[name].size * element


def test_origins_of_each_sequence() -> None:
    """Rows 4 and 5 of a sequence of 6 at their place, with the diagonal shifted as that of 9 keys.

    Of two sequences in a batch each has an origin of its own. Another size of that array is
    refused.
    """
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 6, 2, 16)) for i in range(3))
    whole = [
        tea.attention(q[i : i + 1], k[i : i + 1, :5], v[i : i + 1, :5], is_causal=True, **more)
        for i, more in enumerate(({"bottom_right": True}, {}))
    ]
    arrays = {"q": q[:, 4:], "k": k[:, :5], "v": v[:, :5]}
    numbers = jnp.array([[0, 0, 4, 0, -1], [0, 0, 4, 0, 0]])
    words = jnp.stack([numbers, jnp.where(numbers < 0, -1, 0)], -1).astype(jnp.uint32)
    arrays["origin"] = words.reshape(2, 10)
    options = _call.Options(mask="causal")
    o = _call.forward(options, ("o",), False, arrays)["o"]
    for ours, one in zip(o, whole, strict=True):
        assert jnp.allclose(ours, one[0, 4:], atol=1e-6)
    assert not jnp.allclose(o[1], tea.attention(*(x[1:] for x in (q, k, v)))[0, 4:], atol=1e-3)
    with pytest.raises(ValueError, match="origin"):
        _call.forward(options, ("o",), False, arrays | {"origin": jnp.zeros((3, 10), jnp.uint32)})


def test_results_have_these_sizes_too() -> None:
    """Forward and backward with every result; a wrong size would be refused."""
    q, k, v = jnp.ones((2, 5, 4, 16)), jnp.ones((2, 7, 2, 16)), jnp.ones((2, 7, 2, 8))
    bias, sink = jnp.ones((1, 4, 1, 7)), jnp.ones(4)

    def loss(q, k, v, bias, sink):
        outputs = tea.attention(
            q, k, v, bias, sink=sink, return_residual=True, return_max_logit=True
        )
        return sum(x.sum() for x in outputs)

    gradients = jax.grad(loss, range(5))(q, k, v, bias, sink)
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v, bias, sink)]
