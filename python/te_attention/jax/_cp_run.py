"""Forward and backward of attention whose rows several devices share: parts, and their merge."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named
from jax.custom_derivatives import SymbolicZero

from te_attention.jax import _call, _cp_operands
from te_attention.jax._autodiff import SMALL, Wanted, zero_of
from te_attention.jax._batching import batched
from te_attention.jax._cp_exchange import exchanged
from te_attention.jax._cp_keys import STRATEGIES, wide
from te_attention.jax._cp_operands import add_rows
from te_attention.jax._cp_parts import Shape
from te_attention.jax._sharding import cast_to_varying


class Config(NamedTuple):
    """The static part of a call."""

    shape: Shape
    options: _call.Options
    outputs: tuple[str, ...]
    checkpoint_name: str


def _weight(x: jax.Array) -> jax.Array:
    """[B, N, T] in the order of O."""
    return x.swapaxes(1, 2)[..., None]


def _log_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """log(exp(a) + exp(b)), -inf where both are."""
    return jnp.where(jnp.maximum(a, b) == -jnp.inf, -jnp.inf, jnp.logaddexp(a, b))


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """exp(part - whole), 0 where the part attends to nothing."""
    return jnp.where(part == -jnp.inf, 0, jnp.exp(part - jnp.where(part == -jnp.inf, 0, whole)))


def _merged(a: dict | None, b: dict) -> dict:
    """Two parts of the same rows."""
    b = b | {"o": wide(b["o"])}
    if a is None:
        return b
    out = {"lse": _log_sum(a["lse"], b["lse"])}
    scaled = [x["o"] * _weight(_ratio(x["lse"], out["lse"])) for x in (a, b)]
    out["o"] = scaled[0] + scaled[1]
    if "max" in a:
        out["max"] = jnp.maximum(a["max"], b["max"])
    return out


def _has_late_sink(config: Config, arrays: dict) -> bool:
    """Whether a sink is added after the parts."""
    return not config.shape.is_direct and (config.options.off_by_one or "sink" in arrays)


def _sink_of(config: Config, arrays: dict, me: jax.Array) -> jax.Array:
    """The logits of a sink for each row of this device: -inf in padded rows. [B or 1, N, T]."""
    batch, rows, heads, _ = arrays["q"].shape
    dtype = _call.statistics_dtype(arrays["q"].dtype)
    sink = jnp.zeros(heads, dtype) if config.options.off_by_one else arrays["sink"]
    out = jnp.broadcast_to(sink[:, None], (1, heads, rows))
    position = _cp_operands.positions(config.shape, me)
    if config.shape.segments:
        since = position[:, None] - arrays["start_q"][:, None]
        is_row = jnp.any((since >= 0) & (since < arrays["length_q"][:, None]), axis=-1)
    elif "cu_seqlens_q" in arrays:
        is_row = position < jnp.diff(arrays["cu_seqlens_q"])[:, None]
    else:
        return out
    out = jnp.broadcast_to(out, (batch, heads, rows))
    return jnp.where(is_row[:, None], out, -jnp.inf)


def _without_sink(config: Config, arrays: dict) -> tuple[_call.Options, dict]:
    """The problem of the parts: those know no sink that is added after them."""
    if not _has_late_sink(config, arrays):
        return config.options, arrays
    arrays = {name: x for name, x in arrays.items() if name != "sink"}
    return config.options._replace(off_by_one=False), arrays


def _run(verb: Any, config: Config, arrays: dict, wanted: tuple[str, ...] = ()) -> dict:
    """A part, mappable."""
    drops, ragged = config.options.dropout > 0, config.shape.segments > 0
    given = _cp_operands.ragged(arrays) if ragged else arrays
    out = batched(verb, ragged, drops, wanted)(given)
    if ragged:
        out = _cp_operands.dense(out, arrays["q"].shape[0])
    return cast_to_varying(out, arrays)


def _forward(config: Config, training: bool, given: dict) -> dict:
    options, arrays = _without_sink(config, given)
    shape, me = config.shape, jax.lax.axis_index(config.shape.axis)
    names = ("o", "lse", *("max",) * ("max" in config.outputs))
    found: list[dict | None] = [None] * shape.pieces
    for keys, parts in STRATEGIES[shape.strategy](shape, options, arrays, sums=False).visits(me):
        for part in parts:
            operands = _cp_operands.arrays_of(shape, arrays, part, keys, me)
            local = _cp_operands.options_of(shape, part)
            verb = functools.partial(_call.forward, local, names, training)
            out = _run(verb, config, operands)
            found[part.piece] = out if shape.is_direct else _merged(found[part.piece], out)
    axis = {"o": 1, "lse": 2, "max": 2}
    rows = shape.rows_q // shape.pieces
    for i, x in enumerate(found):
        found[i] = x if x is not None else _nothing(arrays, rows)
    out = {n: jnp.concatenate([x[n] for x in found], axis=axis[n]) for n in names}
    if _has_late_sink(config, given):
        sink = _sink_of(config, given, me)
        total = _log_sum(out["lse"], sink)
        out["o"] *= _weight(_ratio(out["lse"], total))
        out["lse"] = total
    return cast_to_varying(out | {"o": out["o"].astype(arrays["q"].dtype)}, given)


def _nothing(arrays: dict, rows: int) -> dict:
    """The results of rows that attend to nothing on any device."""
    batch, _, heads, _ = arrays["q"].shape
    o = jnp.zeros((batch, rows, heads, arrays["v"].shape[-1]), wide(arrays["q"]).dtype)
    lse = jnp.full((batch, heads, rows), -jnp.inf, _call.statistics_dtype(arrays["q"].dtype))
    return {"o": o, "lse": lse, "max": lse}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, arrays: dict) -> tuple[jax.Array, ...]:
    out = _forward(config, config.options.dropout > 0, exchanged(config.shape, arrays))
    return _results(config, out)


def _results(config: Config, out: dict) -> tuple[jax.Array, ...]:
    out = exchanged(config.shape, {name: out[name] for name in config.outputs}, back=True)
    return tuple(out[name] for name in config.outputs)


def _attention_forward(config: Config, primals: dict) -> tuple[tuple, tuple]:
    arrays = exchanged(config.shape, {name: x.value for name, x in primals.items()})
    wanted = Wanted(name for name in SMALL if name in primals and primals[name].perturbed)
    out = _forward(config, True, arrays)
    out |= {name: named(out[name], config.checkpoint_name) for name in ("o", "lse")}
    return _results(config, out), (arrays, out["o"], out["lse"], wanted)


def backward(config: Config, kept: tuple, cotangents: tuple) -> tuple[dict]:
    """The gradients of all arrays, from the residuals of forward, in the order of the parts."""
    given, o, lse, wanted = kept
    arriving = dict(zip(config.outputs, cotangents, strict=True))
    arriving = {n: x for n, x in arriving.items() if not isinstance(x, SymbolicZero)}
    arriving = exchanged(config.shape, {n: arriving[n] for n in ("o", "lse") if n in arriving})
    dout, dlse = arriving.get("o", jnp.zeros_like(o)), arriving.get("lse")
    options, arrays = _without_sink(config, given)
    shape, me = config.shape, jax.lax.axis_index(config.shape.axis)
    gradients = {n: jnp.zeros_like(wide(arrays[n])) for n in ("q", *wanted) if n in arrays}
    of_parts = tuple(n for n in wanted if n in arrays)
    keys = STRATEGIES[shape.strategy](shape, options, arrays, sums=True)
    for held, parts in keys.visits(me):
        for part in parts:
            rows = slice(part.q[0], part.q[0] + part.q[1])
            operands = _cp_operands.arrays_of(shape, arrays, part, held, me)
            operands |= {"o": o[:, rows], "lse": lse[:, :, rows], "dout": dout[:, rows]}
            if dlse is not None:
                operands["dlse"] = dlse[:, :, rows]
            local = _cp_operands.options_of(shape, part)
            verb = functools.partial(
                _call.backward, local, ("q", "k", "v", *of_parts), partial=not shape.is_direct
            )
            out = _run(verb, config, operands, of_parts)
            gradients["q"] = add_rows(gradients["q"], part.q[0], out["dq"])
            keys.add(part, out["dk"], out["dv"])
            if "bias" in of_parts:
                gradients["bias"] = _cp_operands.add_dbias(
                    shape, gradients["bias"], part, out["dbias"]
                )
            if "sink" in of_parts:
                gradients["sink"] += out["dsink"]
    gradients["k"], gradients["v"] = keys.finish()
    if "sink" in wanted and not shape.is_direct:
        sink = jnp.broadcast_to(_sink_of(config, given, me), lse.shape)
        change = jnp.sum(wide(dout) * wide(o), axis=-1).swapaxes(1, 2)
        change = -change if dlse is None else dlse - change
        gradients["sink"] = jnp.sum(_ratio(sink, lse) * change, (0, 2))
    own = {name: x.astype(given[name].dtype) for name, x in gradients.items()}
    own = cast_to_varying(exchanged(shape, own, back=True), given)
    return ({name: own.get(name, zero_of(x)) for name, x in given.items()},)


_attention.defvjp(_attention_forward, backward, symbolic_zeros=True)
# An eager shard_map evaluates no custom_vjp with symbolic zeros, but compiles a jitted function.
compiled = jax.jit(_attention, static_argnums=0, inline=True)
