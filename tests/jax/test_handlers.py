"""The custom calls by hand: a handler refuses any program that does not fit, and survives it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_attention.jax import _library

LINE = "dtype=fp32 outputs=lse heads_q=2 heads_kv=2 dim_qk=8 batch=1 seqlen_q=4 seqlen_kv=4"
BSHD, LSE = (1, 4, 2, 8), (1, 2, 4)


def call(
    verb: str = "forward", shapes: dict | None = None, results: dict | None = None, **attributes
):
    """tea_attention_forward of zeros, with some of its parts replaced."""
    _library.library()
    shapes = {0: BSHD, 1: BSHD, 2: BSHD} if shapes is None else shapes
    results = {3: BSHD, 4: LSE} if results is None else results
    given = {  # attributes
        "problem": LINE,
        "engine": "",
        "operands": np.array(list(shapes), np.int32),
        "results": np.array(list(results), np.int32),
        "sizes": np.zeros(7, np.int64),
    }
    dropped = [name for name, value in attributes.items() if value is None]
    given = {name: x for name, x in (given | attributes).items() if name not in dropped}
    given["results"] = given.pop("listed", given["results"])
    outputs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in results.values()]
    workspace = jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)
    run = jax.ffi.ffi_call(f"tea_attention_{verb}", (*outputs, workspace))
    out = run(*(jnp.zeros(s) for s in shapes.values()), **given)
    return jax.block_until_ready(out)


def test_a_program_that_fits_runs() -> None:
    o, lse, _ = call()
    assert (np.asarray(o) == 0).all()
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


def test_an_empty_batch_runs() -> None:
    line = LINE.replace("batch=1", "batch=0")
    empty = (0, 4, 2, 8)
    call(shapes={0: empty, 1: empty, 2: empty}, results={3: empty, 4: (0, 2, 4)}, problem=line)


WRONG = {
    "not a line": ({"problem": "garbage"}, "garbage"),
    "an invalid problem": ({"problem": LINE.replace("dim_qk=8", "dim_qk=7")}, "dim_qk is 7"),
    "strides": ({"problem": LINE + " q=64,16,16"}, "problem has strides; needs none"),
    "an unknown engine": ({"engine": "fast"}, "fast"),
    "an engine that allocates": ({"engine": "cudnn"}, 'engine is "cudnn"; needs one that'),
    "few sizes": ({"sizes": np.zeros(3, np.int64)}, "sizes has 3 numbers; needs the 7 of a run"),
    "no flag of more keys": (
        {"sizes": np.array([0, 0, 0, 0, 0, 0, 0, 2], np.int64)},
        "sizes[7] is 2; needs 0 or 1",
    ),
    "sizes of another type": ({"sizes": np.zeros(7, np.int32)}, "expected S64 but got S32"),
    "no problem": ({"problem": None}, "expected 5 but got 4"),
    "an index below": (
        {"operands": np.array([-1, 1, 2], np.int32)},
        "operands[0] is -1; needs the index of a tensor, from 0 to 43",
    ),
    "an index above": ({"operands": np.array([0, 44, 2], np.int32)}, "operands[1] is 44; needs"),
    "few indices": (
        {"operands": np.array([0, 1], np.int32)},
        "operands lists 2 tensors; needs one for each of 3 operands",
    ),
    "few results": (
        {"listed": np.array([3], np.int32)},
        "results lists 1 tensors; needs one for each of 3 results but the last",
    ),
    "a small operand": (
        {"shapes": {0: (1, 4, 2, 4), 1: BSHD, 2: BSHD}},
        "operands[0], tensor 0, has 128 bytes; needs 256",
    ),
    "a small result": (
        {"results": {3: BSHD, 4: (1, 2, 3)}},
        "results[1], tensor 4, has 24 bytes; needs 32",
    ),
    "a missing operand": ({"shapes": {0: BSHD, 1: BSHD}}, "tensor V is NULL"),
    "a missing result": ({"results": {4: LSE}}, "tensor O is NULL"),
    "backward without training": ({"verb": "backward"}, "training"),
    "negative sizes": (
        {
            "problem": "dtype=fp32 q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 dim_qk=8",
            "sizes": np.array([1, 4, 4, -4, 4, 0, 0], np.int64),
        },
        "sizes is -4 in part; needs sizes from 0",
    ),
    "sizes that overflow": (
        {
            "problem": "dtype=fp32 q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 dim_qk=8",
            "sizes": np.array([1, 4, 4, 2**62, 4, 0, 0], np.int64),
        },
        "whose product fits in 64 bits",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_does_not_fit_is_refused(name: str) -> None:
    given, text = WRONG[name]
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(**given)
    assert text in str(error.value)
    call()  # the process is well


def test_large_work_runs_on_the_threads_of_xla() -> None:
    """More parts than threads, from several calls at the same time in one program."""
    from te_attention import jax as tea

    x = jax.random.normal(jax.random.key(0), (4, 300, 8, 64))
    calls = jax.jit(lambda x: [tea.attention(x * n, x, x, is_causal=True) for n in range(1, 5)])
    for n, o in enumerate(calls(x), 1):
        one = tea.attention(x * n, x, x, is_causal=True)
        assert (o == one).all()
