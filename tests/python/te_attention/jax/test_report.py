"""explain() and cost(): by shapes alone, with every option."""

import jax
import jax.numpy as jnp
import pytest

from te_attention import jax as tea

Q = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)


def test_explain_prints_the_problem_and_every_engine() -> None:
    line, *engines = tea.explain(Q, K, K, is_causal=True, softcap=3.0).splitlines()
    assert line.startswith("dtype=bf16 training=1") and "softcap=3" in line and "causal=1" in line
    assert any(row.startswith("cpu: accepts") for row in engines)


def test_explain_refuses_an_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine is 'fast'; needs one of those that explain"):
        tea.explain(Q, K, K, engine="fast")


def test_explain_takes_arrays_of_every_kind() -> None:
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    text = tea.explain(
        Q, K, K, q_segment_ids=ids, max_segments=3, dropout=0.5, dropout_key=jax.random.key(0)
    )
    assert "q_form=ragged" in text and "dropout=0.5" in text


def test_cost_counts_visible_pairs() -> None:
    whole, half = tea.cost(Q, K, K), tea.cost(Q, K, K, is_causal=True)
    assert whole.visible == 2 * 8 * 64 * 64
    assert half.visible == 2 * 8 * 64 * 65 // 2
    assert whole.forward_flops == 2 * whole.visible * 128
    assert half.backward_flops == 2 * half.visible * 5 * 64


def test_cost_reads_lengths() -> None:
    x = jnp.zeros((2, 64, 8, 64))
    lengths = {"query_seq_lengths": jnp.array([3, 5]), "key_value_seq_lengths": jnp.array([7, 64])}
    assert tea.cost(x, x, x, **lengths).visible == 8 * (3 * 7 + 5 * 64)


def test_cost_names_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match="with 3 heads; needs a number of heads that divides"):
        tea.cost(Q, K.update(shape=(2, 64, 3, 64)), K.update(shape=(2, 64, 3, 64)))
