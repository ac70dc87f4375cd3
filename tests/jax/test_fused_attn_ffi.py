"""TransformerEngine's custom calls by hand, bitwise equal to attention() of the same work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_attention import jax as tea
from te_attention.jax import custom_calls

B, S, T, H, G, D = 2, 12, 16, 4, 2, 16
NONE = jnp.zeros(0)
SEED = jnp.array([11, 22], jnp.uint32)
BSHD, THD = {1: 9, 2: 7, 3: 5}, {1: 14, 2: 12, 3: 10}  # layouts by the tensors packed together
KEYS = jax.random.split(jax.random.key(0), 6)
DTYPE = jnp.bfloat16


def normal(i: int, *shape: int, dtype=DTYPE) -> jax.Array:
    return jax.random.normal(KEYS[i], shape, dtype)


class Work:
    """One call with TransformerEngine's operands and attributes."""

    def __init__(self, packed: int = 1, ragged: bool = False, **changes) -> None:
        self.packed, self.ragged = packed, ragged
        self.rows_kv = S if packed == 3 else T
        self.groups = H if packed == 3 else G
        self.q = normal(0, B, S, H, D)
        self.k, self.v = (normal(i, B, self.rows_kv, self.groups, D) for i in (1, 2))
        self.dout = normal(3, B, S, H, D)
        self.bias, self.offset, self.lengths = NONE.astype(DTYPE), NONE, [NONE] * 4
        given = {
            **{"input_batch": B, "q_max_seqlen": S, "kv_max_seqlen": self.rows_kv},
            **{"attn_heads": H, "num_gqa_groups": self.groups, "qk_head_dim": D, "v_head_dim": D},
            **{"max_segments_per_seq": 2 if ragged else 1, "scaling_factor": 0.25},
            **{"window_size_left": -1, "window_size_right": -1, "is_training": True},
            "qkv_layout": (THD if ragged else BSHD)[packed],
        }
        if changes.get("bias_type"):
            self.bias = normal(4, *changes.pop("bias_shape"), S, self.rows_kv)
            given |= {"bias_batch": self.bias.shape[0], "bias_heads": self.bias.shape[1]}
        if changes.get("softmax_type") == 2:
            self.offset = normal(5, 1, H, 1, 1, dtype=jnp.float32)
        self.config = custom_calls.FusedAttnConfig(**(given | changes))

    def operands(self) -> tuple:
        """q, k, v as the layout has them."""
        dummy = jnp.zeros(0, DTYPE)
        if self.packed == 3:
            return jnp.stack([self.q, self.k, self.v], 2), dummy, dummy
        if self.packed == 2:
            return self.q, jnp.stack([self.k, self.v], 2), dummy
        return self.q, self.k, self.v

    def call(self, verb: str, operands: tuple, results: list) -> list:
        sizes = custom_calls.fused_attn_workspace(self.config, 6)
        workspace = jax.ShapeDtypeStruct((sizes[verb == "backward"],), jnp.uint8)
        run = jax.ffi.ffi_call(f"te_fused_attn_{verb}_ffi", [*results, workspace])
        return jax.jit(lambda *x: run(*x, **self.config.attributes()))(*operands, *[NONE] * 4)

    def forward(self, aux: jax.ShapeDtypeStruct | None = None) -> list:
        self_q = jax.ShapeDtypeStruct(self.q.shape, DTYPE)
        shape = (B, S, H, 1) if self.ragged else (B, H, S, 1)
        results = [self_q, jax.ShapeDtypeStruct(shape, jnp.float32) if aux is None else aux]
        results.append(jax.ShapeDtypeStruct((2, 4), jnp.uint32))
        operands = (*self.operands(), self.bias, self.offset, SEED, *self.lengths)
        return self.call("forward", operands, results)

    def backward(self, aux: jax.Array, rng_state: jax.Array, output: jax.Array) -> list:
        like = [*self.operands(), self.bias, self.offset]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
        operands = (*like, aux, rng_state, output, self.dout, *self.lengths)
        gradients = self.call("backward", operands, results)
        if self.packed == 3:
            gradients[:3] = [gradients[0][:, :, i] for i in range(3)]
        if self.packed == 2:
            gradients[1:3] = [gradients[1][:, :, i] for i in range(2)]
        return gradients


def cu(lengths: list) -> jax.Array:
    return jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(jnp.array(lengths))]).astype(jnp.int32)


PADDED = {"query_seq_lengths": jnp.array([12, 7]), "key_value_seq_lengths": jnp.array([5, 16])}
CASES = {
    "no mask": ({}, {}),
    "causal": ({"mask_type": 2}, {"is_causal": True}),
    "bottom right": ({"mask_type": 4}, {"is_causal": True, "bottom_right": True}),
    "window": (
        {"mask_type": 2, "window_size_left": 3},
        {"is_causal": True, "local_window_size": (3, None)},
    ),
    "padding": ({"mask_type": 1}, PADDED),
    "padding causal": ({"mask_type": 3}, PADDED | {"is_causal": True}),
    "kv packed": ({"packed": 2, "mask_type": 2}, {"is_causal": True}),
    "qkv packed": ({"packed": 3, "mask_type": 2}, {"is_causal": True}),
    "bias": ({"bias_type": 2, "bias_shape": (1, H)}, {"bias": None}),
    "bias of the batch": ({"bias_type": 2, "bias_shape": (B, 1)}, {"bias": None}),
    "off by one": ({"softmax_type": 1}, {"sink": "off_by_one"}),
    "learnable": ({"softmax_type": 2}, {"sink": None}),
    "learnable, bias": (
        {"softmax_type": 2, "bias_type": 2, "bias_shape": (B, H)},
        {"sink": None, "bias": None},
    ),
    "dropout": (
        {"dropout_probability": 0.25, "mask_type": 2},
        {"is_causal": True, "dropout": 0.25, "dropout_key": SEED},
    ),
    "deterministic": ({"deterministic": True}, {"deterministic": True}),
}


def test_the_short_sequence_backend_takes_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVTE_F16_max512_seqlen: forward has one auxiliary tensor, and backward gets the bias too."""
    for name, value in (("S", 64), ("T", 64), ("G", H), ("D", 64)):
        monkeypatch.setitem(globals(), name, value)
    for attributes in ({}, {"bias_type": 2, "bias_shape": (1, H)}):
        work = Work(mask_type=2, dropout_probability=0.25, **attributes)
        ordinary = work.forward()
        wanted = work.backward(ordinary[1], ordinary[2], ordinary[0])
        monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "0")
        output, aux, rng_state, _ = work.forward(jax.ShapeDtypeStruct((B, H, 64, 64), DTYPE))
        found = work.backward(aux, rng_state, output)
        monkeypatch.delenv("NVTE_FUSED_ATTN_BACKEND")
        equal("output", output, ordinary[0])
        for name, ours, theirs in zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=False):
            equal(name, ours, theirs)


def equal(name: str, ours: jax.Array, theirs: jax.Array) -> None:
    np.testing.assert_array_equal(
        np.asarray(ours, np.float32).ravel(), np.asarray(theirs, np.float32).ravel(), name
    )


@pytest.mark.parametrize("name", CASES)
def test_both_ways_compute_the_same_bits(name: str) -> None:
    attributes, options = CASES[name]
    work = Work(**attributes)
    if "padding" in name:
        lengths = [cu(PADDED["query_seq_lengths"]), cu(PADDED["key_value_seq_lengths"])]
        work.lengths = [*lengths, NONE, NONE]
    output, aux, rng_state, _ = work.forward()
    *gradients, _ = work.backward(aux, rng_state, output)
    given = dict(options)
    names = [n for n in ("bias", "sink") if n in options and options[n] is None]
    small = [work.bias if n == "bias" else work.offset.ravel() for n in names]

    def ours(q, k, v, *small):
        more = given | dict(zip(names, small, strict=True))
        return tea.attention(q, k, v, scale=0.25, return_residual=True, **more)

    (o, lse), pull = jax.vjp(ours, work.q, work.k, work.v, *small)
    expected = pull((work.dout, jnp.zeros_like(lse)))
    equal("output", output, o)
    equal("softmax_aux", aux, lse.transpose(0, 2, 1))
    # Without a gradient of LSE, as TransformerEngine.
    expected = jax.vjp(lambda *x: ours(*x)[0], work.q, work.k, work.v, *small)[1](work.dout)
    for which, got, want in zip(("q", "k", "v"), gradients[:3], expected[:3], strict=True):
        equal(f"d{which}", got, want)
    for which, want in zip(names, expected[3:], strict=True):
        equal(f"d{which}", gradients[3 if which == "bias" else 4], want)
    words = np.asarray(rng_state).ravel()[:4]
    assert words.tolist() == [11, 22, 0, 0]


@pytest.mark.parametrize("packed", [1, 2])
def test_ragged_rows_are_those_of_segment_ids(packed: int) -> None:
    work = Work(packed, ragged=True, mask_type=3)
    q_ids = jnp.array([[1] * 5 + [0] + [2] * 6, [1] * 3 + [2] * 7 + [0] * 2])
    kv_ids = jnp.array([[1] * 6 + [0] * 3 + [2] * 7, [1] * 4 + [2] * 12])
    work.lengths = [
        *(cu([5, 6, 3, 7]), cu([6, 7, 4, 12])),
        *(jnp.array(x, jnp.int32) for x in ([0, 6, 12, 15, 24], [0, 9, 16, 20, 32])),
    ]
    output, aux, rng_state, _ = work.forward()
    *gradients, _ = work.backward(aux, rng_state, output)

    def ours(q, k, v):
        ids = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "max_segments": 2}
        return tea.attention(
            q, k, v, scale=0.25, is_causal=True, checkpoint_name="x", return_residual=True, **ids
        )

    o, lse = ours(work.q, work.k, work.v)
    equal("output", output, o)
    equal("softmax_aux", aux, lse)
    expected = jax.vjp(lambda *x: ours(*x)[0], work.q, work.k, work.v)[1](work.dout)
    for which, got, want in zip(("q", "k", "v"), gradients[:3], expected, strict=True):
        equal(f"d{which}", got, want)


def test_inference_writes_statistics_too() -> None:
    work = Work(is_training=False)
    output, aux, *_ = work.forward()
    o, lse = tea.attention(work.q, work.k, work.v, scale=0.25, return_residual=True)
    equal("output", output, o)
    equal("softmax_aux", aux, lse.transpose(0, 2, 1))


WRONG = {
    "a missing attribute": ({}, "qk_head_dim", None, "attribute qk_head_dim is missing or of"),
    "another type": ({}, "scaling_factor", 1, "attribute scaling_factor is missing or of another"),
    "a layout": ({}, "qkv_layout", 8, "qkv_layout is 8; needs 5, 7, 9, 10, 12 or 14"),
    "more heads": ({}, "attn_heads", 8, "q has"),
    "longer rows": ({}, "kv_max_seqlen", 1024, "k has"),
    "a mask that needs lengths": ({}, "mask_type", 1, "cu_seqlens or offsets, operand 6"),
    "a bias that is not there": ({}, "bias_type", 2, "bias"),
    "an offset that is not there": ({}, "softmax_type", 2, "softmax_offset has 0 bytes; needs 16"),
    "packed dims": ({"packed": 2}, "v_head_dim", 8, "v_head_dim is 8; needs that of q"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_does_not_fit_is_refused(name: str) -> None:
    arguments, attribute, value, text = WRONG[name]
    work = Work(**arguments)
    attributes = work.config.attributes()
    if value is None:
        del attributes[attribute]
    else:
        attributes[attribute] = value
    if name == "a bias that is not there":
        attributes |= {"bias_batch": 1, "bias_heads": 1}
        text = "bias has 0 bytes; needs 384"
    results = [
        jax.ShapeDtypeStruct((B, S, H, D), DTYPE),
        jax.ShapeDtypeStruct((B, H, S, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, 4), jnp.uint32),
        jax.ShapeDtypeStruct((1 << 16,), jnp.uint8),
    ]
    run = jax.ffi.ffi_call("te_fused_attn_forward_ffi", results)
    operands = (*work.operands(), work.bias, work.offset, SEED, *work.lengths, *[NONE] * 4)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(run(*operands, **attributes))
    assert text in str(error.value)


def test_softmax_type_may_be_left_out() -> None:
    work = Work()
    attributes = work.config.attributes()
    del attributes["softmax_type"]
    results = [
        jax.ShapeDtypeStruct((B, S, H, D), DTYPE),
        jax.ShapeDtypeStruct((B, H, S, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, 4), jnp.uint32),
        jax.ShapeDtypeStruct((custom_calls.fused_attn_workspace(work.config, 6)[0],), jnp.uint8),
    ]
    run = jax.ffi.ffi_call("te_fused_attn_forward_ffi", results)
    operands = (*work.operands(), work.bias, work.offset, SEED, *[NONE] * 8)
    equal("output", run(*operands, **attributes)[0], work.forward()[0])
