"""The arguments of attention(), checked, as arrays and options of the library."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_attention.jax._call import Options, statistics_dtype

MASKS = {
    (False, False): "none",
    (True, False): "causal",
    (False, True): "bottom_right",
    (True, True): "causal_bottom_right",
}
RANK = 4
TYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
WINDOW = "an integer, or (left, right), each from 0 to 2^62 or None"


def refuse(name: str, seen: object, needed: str) -> ValueError:
    """The error for an argument: the value seen, the value needed."""
    return ValueError(f"{name} is {seen}; needs {needed}")


def text_of(value: object) -> str:
    """A value as an error shows it."""
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"a {value.dtype.name} array of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) < 50 and "\n" not in text else f"of type {type(value).__name__}"


def number(name: str, value: object, usual: float | None = None) -> float | None:
    """A Python number; one that depends on a traced array is refused."""
    if value is None:
        return usual
    if isinstance(value, jax.core.Tracer):
        hint = ": multiply query by it and pass 1" if name == "scale" else ""
        raise TypeError(f"{name} is a traced array; needs a Python number{hint}")
    if isinstance(value, numbers.Real) or (hasattr(value, "item") and np.ndim(value) == 0):
        return float(value)
    raise TypeError(f"{name} is {text_of(value)}; needs a Python number")


def flag(name: str, value: object) -> bool:
    """True or False."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {text_of(value)}; needs True or False")


def array(name: str, value: object) -> jax.Array:
    """An array; what cannot become one is refused by its name."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {text_of(value)}; needs an array") from error


def tensor(name: str, value: object) -> jax.Array:
    """query, key or value, in a type that the functions here have."""
    x = array(name, value)
    if x.dtype not in TYPES:
        raise refuse(f"{name}.dtype", x.dtype.name, "float16, bfloat16, float32 or float64")
    return x


def floats(
    name: str, value: object, dtype: jnp.dtype, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """A floating-point array in that dtype."""
    x = array(name, value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise refuse(f"{name}.dtype", x.dtype.name, dtype.name)
    if shape is not None and x.shape != shape:
        raise refuse(name, f"of shape {list(x.shape)}", f"{dtype.name} {list(shape)}")
    return x.astype(dtype)


def integers(name: str, value: object, shape: tuple[int, ...] | None = None) -> jax.Array:
    """An int32 array."""
    x = array(name, value)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise refuse(f"{name}.dtype", x.dtype.name, "int32")
    if shape is not None and x.shape != shape:
        raise refuse(name, f"of shape {list(x.shape)}", f"int32 {list(shape)}")
    return x.astype(jnp.int32)


def window(value: object) -> tuple[int, int]:
    """Left and right bound, -1 for none."""
    if value is None:
        return -1, -1
    if isinstance(value, numbers.Integral):
        value = (value, value)
    try:
        left, right = value
    except (TypeError, ValueError) as error:
        raise TypeError(f"local_window_size is {text_of(value)}; needs {WINDOW}") from error
    for bound in (left, right):
        if bound is not None and not isinstance(bound, numbers.Integral):
            raise TypeError(f"local_window_size is {text_of(value)}; needs {WINDOW}")
        if bound is not None and not 0 <= bound <= 2**62:
            raise refuse("local_window_size", value, WINDOW)
    return -1 if left is None else int(left), -1 if right is None else int(right)


def cumulative(lengths: jax.Array) -> jax.Array:
    """cu_seqlens of lengths."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def words(name: str, value: object) -> jax.Array:
    """Four integers as int64, in pairs of uint32, low word first."""
    if isinstance(value, (list, tuple)) and all(isinstance(x, numbers.Integral) for x in value):
        value = np.array(value, np.int64)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.shape == (RANK,):
        return jnp.asarray(value.astype(np.int64).view(np.uint32))
    x = array(name, value)
    if x.shape != (RANK,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise refuse(name, text_of(x), "4 integers: batch, head, row, column")
    low = x.astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits
    high = (x >> 32 if bits == 64 else jnp.where(x < 0, -1, 0)).astype(jnp.uint32)
    return jnp.stack([low, high], axis=-1).ravel()


def rng_state(key: object) -> jax.Array:
    """Seed and offset, int64 in pairs of uint32: the first 128 bits of the key's data."""
    x = array("dropout_key", key)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype != jnp.uint32 or x.shape not in ((2,), (4,)):
        raise refuse("dropout_key", text_of(x), "one key, as of jax.random.key()")
    return x if x.shape == (4,) else jnp.concatenate([x, jnp.zeros(2, jnp.uint32)])


def bias_of(
    bias: object, mask: object, dtype: Any, scores: tuple[int, ...] | None = None
) -> jax.Array | None:
    """The bias with its four dimensions; a boolean mask becomes 0 and -inf in its own shape.

    scores: their shape, of which each dimension of bias and mask is a whole one or 1; None: the
    caller checks that.
    """

    def full(name: str, x: jax.Array) -> jax.Array:
        if x.ndim > RANK:
            raise refuse(name, f"of shape {list(x.shape)}", "at most 4 dimensions")
        x = x.reshape((1,) * (RANK - x.ndim) + x.shape)
        if scores and any(n not in (1, size) for n, size in zip(x.shape, scores, strict=True)):
            raise refuse(name, f"of shape {list(x.shape)}", f"{list(scores)}, each of them or 1")
        return x

    given = None if bias is None else full("bias", array("bias", bias))
    if given is not None and not jnp.issubdtype(given.dtype, jnp.floating):
        hint = ": pass it as mask" if given.dtype == jnp.bool_ else ""
        raise refuse("bias.dtype", given.dtype.name, f"that of query, or float32{hint}")
    if mask is None:
        return given
    allowed = full("mask", array("mask", mask))
    if allowed.dtype != jnp.bool_:
        raise refuse("mask.dtype", allowed.dtype.name, "bool; numbers to be added are a bias")
    if given is None:
        return jnp.where(allowed, 0, -jnp.inf).astype(dtype)
    return jnp.where(allowed, given, -jnp.inf)


def _random_arrays(dropout: object, key: object) -> tuple[float, dict]:
    """The probability of dropping, and the random state where there is one."""
    rate = number("dropout", dropout, 0.0)
    if not 0 <= rate < 1:
        raise refuse("dropout", rate, "at least 0 and less than 1")
    if not rate:
        return rate, {}
    if key is None:
        raise refuse("dropout_key", None, f"a key: dropout is {rate}")
    return rate, {"rng_state": rng_state(key)}


def _slopes(alibi: object, heads: int, batch: int, dtype: jnp.dtype) -> dict:
    """The slopes of ALiBi, if they are given."""
    if alibi is None or isinstance(alibi, bool):
        return {}
    slopes = jax.lax.stop_gradient(floats("alibi", alibi, dtype))
    if slopes.shape not in ((heads,), (batch, heads)):
        needed = f"[{heads}] or [{batch}, {heads}]"
        raise refuse("alibi", f"of shape {list(slopes.shape)}", needed)
    return {"slopes": slopes}


def _sink(sink: object, heads: int, dtype: jnp.dtype) -> dict:
    """The logits of the sink, if they are given."""
    if isinstance(sink, str) and sink != "off_by_one":
        raise refuse("sink", repr(sink), "'off_by_one', or an array, one number for each head")
    if sink is None or isinstance(sink, str):
        return {}
    return {"sink": floats("sink", sink, dtype, (heads,))}


def options_of(
    *,
    heads: int,
    batch: int,
    dtype: jnp.dtype,
    scale: object,
    is_causal: object,
    local_window_size: object,
    bottom_right: object,
    alibi: object,
    softcap: object,
    sink: object,
    dropout: object,
    dropout_key: object,
    origin: object,
    bias_type: object,
    return_max_logit: object,
    deterministic: object,
    batch_invariant: object,
    engine: object,
) -> tuple[Options, dict]:
    """The options that every form of attention has, and their arrays."""
    if bias_type not in ("post_scale", "pre_scale"):
        raise refuse("bias_type", repr(bias_type), "'post_scale' or 'pre_scale'")
    if not isinstance(engine, str):
        raise TypeError(f"engine is {text_of(engine)}; needs a name")
    if engine == "cudnn" or engine.split() != ([engine] if engine else []):
        raise refuse("engine", repr(engine), "'' or the name of an engine other than cudnn")
    left, right = window(local_window_size)
    dtype = statistics_dtype(dtype)
    rate, arrays = _random_arrays(dropout, dropout_key)
    arrays |= _slopes(alibi, heads, batch, dtype) | _sink(sink, heads, dtype)
    if origin is not None:
        arrays["origin"] = words("origin", origin)
    options = Options(
        mask=MASKS[flag("is_causal", is_causal), flag("bottom_right", bottom_right)],
        scale=number("scale", scale),
        window_left=left,
        window_right=right,
        dropout=rate,
        softcap=number("softcap", softcap, 0.0),
        alibi=alibi is True,
        pre_scale_bias=bias_type == "pre_scale",
        off_by_one=isinstance(sink, str),
        max_logit=flag("return_max_logit", return_max_logit),
        deterministic=flag("deterministic", deterministic),
        batch_invariant=flag("batch_invariant", batch_invariant),
        engine=engine,
    )
    return options, arrays
