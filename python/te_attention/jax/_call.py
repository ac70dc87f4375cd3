"""One custom call: its description by shapes alone, and the call. Nothing else knows ffi_call."""

import ctypes
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_attention.jax import _library

# The tensors of the C API (enum tea_tensor), and `origin`, which the handlers take as one more.
TENSORS = {
    **{"q": 0, "k": 1, "v": 2, "o": 3, "lse": 4, "max": 5, "bias": 7, "sink": 8, "slopes": 9},
    **{"cu_seqlens_q": 10, "cu_seqlens_kv": 11, "offsets_q": 12, "offsets_kv": 13},
    **{"rng_state": 16, "dout": 17, "dq": 18, "dk": 19, "dv": 20, "dbias": 21, "dsink": 22},
    **{"dlse": 23, "origin": 43},
}
# int64 numbers, which travel as pairs of uint32, low word first: jax_enable_x64 may be off. An
# origin may also be that of each sequence, with a shift of its diagonal: [sequences, 10] words.
WORDS = {"rng_state": 4, "origin": 8}
# The tensors that only backward reads; the description does not need it.
BACKWARD = ("o", "lse", "dout", "dlse")
ALIGNMENT = 256  # of the workspace, which XLA aligns to 64

# The arguments of attention() by the names of the library's options, for errors.
ARGUMENTS = {
    **{"q": "query", "k": "key", "v": "value", "heads_q": "heads of query"},
    **{"heads_kv": "heads of key", "dim_qk": "head dim of query", "dim_v": "head dim of value"},
    **{"window": "local_window_size", "cu_seqlens_q": "query_seq_lengths"},
    **{"cu_seqlens_kv": "key_value_seq_lengths", "slopes": "alibi", "rng_state": "dropout_key"},
}


class Options(NamedTuple):
    """The options that are no arrays, hashable; names as in src/frontend/options.def."""

    format: str = "bshd"
    mask: str = "none"
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    dropout: float = 0.0
    max_seqlen_q: int = -1
    max_seqlen_kv: int = -1
    softcap: float = 0.0
    alibi: bool = False
    pre_scale_bias: bool = False
    off_by_one: bool = False
    max_logit: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    engine: str = ""


class Described(NamedTuple):
    """The attributes of a call in addition to its arrays."""

    problem: str
    sizes: tuple[int, ...]
    forward: int  # bytes of workspace
    backward: int


def _word(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{name}={int(value)}"
    return f"{name}={value}"


def _tensor(name: str, array: jax.Array) -> str:
    if name in WORDS:
        shape = (*array.shape[:-1], array.shape[-1] // 2)
        return f"{name}=int64[{','.join(map(str, shape))}]"
    return f"{name}={array.dtype.name}[{','.join(map(str, array.shape))}]"


def request(options: Options, arrays: dict, **more: bool) -> str:
    """The call as text, by shapes and types alone; `more`: training, lse, lse_gradient."""
    words = [_tensor(name, x) for name, x in arrays.items() if name not in BACKWARD]
    usual = Options._field_defaults
    for name, value in options._asdict().items():
        if value != usual[name] or name in ("format", "mask"):
            words.append(_word(name, value))
    return " ".join((*words, *(_word(name, value) for name, value in more.items())))


def translated(text: str, ragged: bool = False) -> str:
    """An error of the library with the caller's name of the argument."""
    name = re.match(r"\w+", text)
    if not name or name[0] not in ARGUMENTS or (ragged and name[0].startswith("cu_seqlens")):
        return text
    return ARGUMENTS[name[0]] + text[name.end() :]


@functools.lru_cache(maxsize=4096)
def describe(text: str) -> Described:
    """The sizes of the requested call; a pure function. Raises ValueError if it is wrong."""
    call = _library.Call()
    if _library.library().te_attention_jax_describe(text.encode(), ctypes.byref(call)):
        raise ValueError(translated(call.text.decode(), "format=thd" in text.split()))
    return Described(call.text.decode(), tuple(call.sizes), *call.workspace)


def statistics_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of LSE, largest scores, sinks and slopes where query has that dtype."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def call(
    verb: str,
    options: Options,
    needs: Described,
    operands: dict,
    results: dict,
    *,
    partial: bool = False,
) -> dict:
    """One custom call. `operands`: arrays by name; `results`: shapes and types by name."""
    size = needs.forward if verb == "forward" else needs.backward
    workspace = jax.ShapeDtypeStruct((size + ALIGNMENT if size else 0,), jnp.uint8)
    run = jax.ffi.ffi_call(f"tea_attention_{verb}", (*results.values(), workspace))
    out = run(
        *operands.values(),
        problem=needs.problem,
        engine=options.engine,
        operands=np.array([TENSORS[name] for name in operands], np.int32),
        results=np.array([TENSORS[name] for name in results], np.int32),
        sizes=np.array((*needs.sizes, *(1,) * partial), np.int64),
    )
    return dict(zip(results, out[:-1], strict=True))


def forward(options: Options, outputs: tuple[str, ...], training: bool, arrays: dict) -> dict:
    """O and those of "lse" and "max" that `outputs` has."""
    q, v = arrays["q"], arrays["v"]
    needs = describe(request(options, arrays, training=training, lse="lse" in outputs))
    ragged = options.format == "thd"
    rows = q.shape[:-1] if ragged else (q.shape[0], q.shape[2], q.shape[1])
    results = {"o": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)}
    dtype = statistics_dtype(q.dtype)
    results |= {name: jax.ShapeDtypeStruct(rows, dtype) for name in outputs if name != "o"}
    return call("forward", options, needs, arrays, results)


def backward(
    options: Options, gradients: tuple[str, ...], arrays: dict, *, partial: bool = False
) -> dict:
    """The gradients of these names; `arrays` also has o, lse, dout and, if one arrives, dlse.

    partial: O and LSE are of more keys than those of this call.
    """
    options = options._replace(max_logit=False)
    text = request(options, arrays, training=True, lse=True, lse_gradient="dlse" in arrays)
    operands = {name: x for name, x in arrays.items() if name != "sink" or "sink" in gradients}
    results = {
        f"d{name}": jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
        for name in gradients
    }
    return call("backward", options, describe(text), operands, results, partial=partial)
