"""attention() on a GPU: against the CPU's results in every option, and under command buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_attention import jax as tea

pytestmark = pytest.mark.gpu
KEYS = jax.random.split(jax.random.key(0), 5)
LENGTHS = jnp.array([128, 77], jnp.int32)
IDS = jnp.repeat(jnp.array([[1, 1, 2, 0], [1, 2, 2, 3]]), 32, axis=1)
DROPOUT = {"dropout": 0.3, "dropout_key": jax.random.PRNGKey(4)}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (31, 0)},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "segments": {"q_segment_ids": IDS, "max_segments": 3, "is_causal": True},
    "bias": {"bias": jax.random.normal(KEYS[3], (1, 8, 128, 128))},
    "alibi": {"alibi": True, "is_causal": True},
    "softcap": {"softcap": 5.0},
    "sink": {"sink": jax.random.normal(KEYS[4], (8,))},
    "dropout": DROPOUT,
    "deterministic": {"deterministic": True},
    "origin": {"origin": [0, 0, 64, 0], "is_causal": True},
}
SHAPES = {"64": (64, 64), "128": (128, 128), "192 and 128": (192, 128)}


def arrays(device: jax.Device, dtype: jnp.dtype, dims: tuple) -> list:
    shapes = ((2, 128, 8, dims[0]), (2, 128, 2, dims[0]), (2, 128, 2, dims[1]))
    made = [jax.random.normal(k, s) for k, s in zip(KEYS[:3], shapes, strict=True)]
    return [jax.device_put(np.asarray(x), device).astype(dtype) for x in made]


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gpu_computes_what_the_cpu_does(name: str, dtype: jnp.dtype, dims: tuple) -> None:
    def run(device):
        with jax.default_device(device):
            x = arrays(device, dtype, dims)
            given = {
                key: jax.device_put(np.asarray(value), device)
                if isinstance(value, jax.Array)
                else value
                for key, value in OPTIONS[name].items()
            }
            small = [given.pop(key) for key in ("bias", "sink") if key in given]
            key = "bias" if name == "bias" else "sink"

            def f(x, small):
                more = {key: small[0]} if small else {}
                o, lse = tea.attention(*x, **given, **more, return_residual=True)
                finite = jnp.where(jnp.isfinite(lse), lse, 0)
                return (o.astype(jnp.float32) ** 2).sum() + finite.sum(), (o, finite)

            value = jax.jit(jax.grad(f, (0, 1), has_aux=True))(x, small)
            return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(value)]

    tolerance = 0.04 if dtype == jnp.bfloat16 else 0.006
    for gpu, cpu in zip(run(jax.devices("gpu")[0]), run(jax.devices("cpu")[0]), strict=True):
        bound = tolerance * max(1.0, float(np.abs(cpu).max()))
        np.testing.assert_allclose(gpu, cpu, atol=bound)


def test_dropout_draws_the_same_on_both() -> None:
    masks = []
    for platform in ("cpu", "gpu"):
        with jax.default_device(jax.devices(platform)[0]):
            masks.append(np.asarray(tea.dropout_mask(jax.random.PRNGKey(4), 0.3, (2, 3, 40, 50))))
    np.testing.assert_array_equal(*masks)


def test_layers_scan_and_donation_under_command_buffers() -> None:
    """Several executions with new buffers: XLA captures the second one and replays the others."""
    q, k, v = arrays(jax.devices("gpu")[0], jnp.bfloat16, (64, 64))

    def layers(q, k, v):
        for _ in range(8):
            q = tea.attention(q, k, v, is_causal=True) + q
        return q

    def scanned(q, k, v):
        def body(c, _):
            return tea.attention(c, k, v, is_causal=True) + c, None

        return jax.lax.scan(jax.checkpoint(body), q, None, length=8)[0]

    def gradient(f):
        return jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).mean(), (0, 1, 2))

    for f in (layers, scanned):
        step, back = jax.jit(f, donate_argnums=0), jax.jit(gradient(f))
        for i in range(6):
            x = q * (1 + i / 8)
            want = f(x, k, v)  # one operation after the other
            gradients = back(x, k, v)
            got = step(x + 0, k, v)
            scale = float(jnp.abs(want.astype(jnp.float32)).max())
            np.testing.assert_allclose(
                np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02 * scale
            )
            again = back(x + 0, k, v)
            for a, b in zip(gradients, again, strict=True):
                np.testing.assert_allclose(
                    np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-3
                )
