"""Attention whose sequences several devices share: context parallelism inside `shard_map`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named
from jax.custom_derivatives import SymbolicZero

from te_attention.jax import _call, _cp_parts
from te_attention.jax._arguments import flag, refuse
from te_attention.jax._autodiff import SMALL, Wanted, zero_of
from te_attention.jax._batching import batched
from te_attention.jax._cp_keys import STRATEGIES, wide
from te_attention.jax._cp_parts import LAYOUTS, Shape, add_rows
from te_attention.jax._sharding import cast_to_varying
from te_attention.jax.functional import CHECKPOINT_NAME, DEFAULTS, Prepared, prepare


class Config(NamedTuple):
    """The static part of a call."""

    shape: Shape
    options: _call.Options
    outputs: tuple[str, ...]
    checkpoint_name: str


# ------------------------------------------------------------------------------ forward, backward


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
    if "cu_seqlens_q" not in arrays:
        return out
    is_row = _cp_parts.positions(config.shape, me) < jnp.diff(arrays["cu_seqlens_q"])[:, None]
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
    drops = config.options.dropout > 0
    return cast_to_varying(batched(verb, False, drops, wanted)(arrays), arrays)


def _forward(config: Config, training: bool, given: dict) -> dict:
    options, arrays = _without_sink(config, given)
    shape, me = config.shape, jax.lax.axis_index(config.shape.axis)
    names = ("o", "lse", *("max",) * ("max" in config.outputs))
    found: list[dict | None] = [None] * shape.pieces
    for keys, parts in STRATEGIES[shape.strategy](shape, options, arrays, sums=False).visits(me):
        for part in parts:
            verb = functools.partial(_call.forward, part.options, names, training)
            operands = _cp_parts.arrays_of(shape, arrays, part, keys, me)
            out = _run(verb, config, operands)
            found[part.piece] = out if shape.is_direct else _merged(found[part.piece], out)
    axis = {"o": 1, "lse": 2, "max": 2}
    rows = shape.rows_q // shape.pieces
    for i, x in enumerate(found):
        found[i] = x if x is not None else _nothing(config, arrays, rows)
    out = {n: jnp.concatenate([x[n] for x in found], axis=axis[n]) for n in names}
    if _has_late_sink(config, given):
        sink = _sink_of(config, given, me)
        total = _log_sum(out["lse"], sink)
        out["o"] *= _weight(_ratio(out["lse"], total))
        out["lse"] = total
    return cast_to_varying(out | {"o": out["o"].astype(arrays["q"].dtype)}, given)


def _nothing(config: Config, arrays: dict, rows: int) -> dict:
    """The results of rows that attend to nothing on any device."""
    batch, _, heads, _ = arrays["q"].shape
    o = jnp.zeros((batch, rows, heads, arrays["v"].shape[-1]), wide(arrays["q"]).dtype)
    lse = jnp.full((batch, heads, rows), -jnp.inf, _call.statistics_dtype(arrays["q"].dtype))
    return {"o": o, "lse": lse, "max": lse}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, arrays: dict) -> tuple[jax.Array, ...]:
    out = _forward(config, config.options.dropout > 0, arrays)
    return tuple(out[name] for name in config.outputs)


def _attention_forward(config: Config, primals: dict) -> tuple[tuple, tuple]:
    arrays = {name: x.value for name, x in primals.items()}
    wanted = Wanted(name for name in SMALL if name in primals and primals[name].perturbed)
    out = _forward(config, True, arrays)
    out |= {name: named(out[name], config.checkpoint_name) for name in ("o", "lse")}
    return tuple(out[name] for name in config.outputs), (arrays, out["o"], out["lse"], wanted)


def _attention_backward(config: Config, kept: tuple, cotangents: tuple) -> tuple[dict]:
    given, o, lse, wanted = kept
    arriving = dict(zip(config.outputs, cotangents, strict=True))
    arriving = {n: x for n, x in arriving.items() if not isinstance(x, SymbolicZero)}
    dout, dlse = arriving.get("o", jnp.zeros_like(o)), arriving.get("lse")
    options, arrays = _without_sink(config, given)
    shape, me = config.shape, jax.lax.axis_index(config.shape.axis)
    gradients = {n: jnp.zeros_like(wide(arrays[n])) for n in ("q", *wanted) if n in arrays}
    of_parts = tuple(n for n in wanted if n in arrays)
    keys = STRATEGIES[shape.strategy](shape, options, arrays, sums=True)
    for held, parts in keys.visits(me):
        for part in parts:
            rows = slice(part.q[0], part.q[0] + part.q[1])
            operands = _cp_parts.arrays_of(shape, arrays, part, held, me)
            operands |= {"o": o[:, rows], "lse": lse[:, :, rows], "dout": dout[:, rows]}
            if dlse is not None:
                operands["dlse"] = dlse[:, :, rows]
            verb = functools.partial(_call.backward, part.options, ("q", "k", "v", *of_parts))
            out = _run(verb, config, operands, of_parts)
            gradients["q"] = add_rows(gradients["q"], part.q[0], out["dq"])
            keys.add(part, out["dk"], out["dv"])
            if "bias" in of_parts:
                gradients["bias"] = _cp_parts.add_dbias(
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
    own = cast_to_varying(own, given)
    return ({name: own.get(name, zero_of(x)) for name, x in given.items()},)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)
# An eager shard_map evaluates no custom_vjp with symbolic zeros, but compiles a jitted function.
_compiled = jax.jit(_attention, static_argnums=0, inline=True)


# ------------------------------------------------------------------------------------- the caller


def _check(shape: Shape, prepared: Prepared) -> None:
    options, arrays = prepared.options, prepared.arrays
    is_striped, is_bottom_right = shape.layout == "striped", "bottom_right" in options.mask
    for name, rows in (("query", shape.rows_q), ("key", shape.rows_kv)):
        if rows % shape.pieces:
            raise refuse(f"rows of {name} on a device", rows, "an even number with layout zigzag")
    if is_bottom_right and any(n.startswith("cu_") for n in arrays):
        raise refuse("bottom_right", True, "False with query_seq_lengths or key_value_seq_lengths")
    if is_bottom_right and options.dropout and shape.rows_q != shape.rows_kv:
        raise refuse("bottom_right", True, "False with dropout and unequal lengths")
    if is_striped and (options.alibi or "slopes" in arrays):
        raise refuse("alibi", "given", "None with layout striped: contiguous or zigzag have it")
    if is_striped and options.dropout:
        raise refuse("dropout", options.dropout, "0 with layout striped: the others have it")
    columns = shape.size * shape.rows_kv
    if "bias" in arrays and arrays["bias"].shape[3] not in (1, columns):
        seen = f"of shape {list(arrays['bias'].shape)}"
        raise refuse("bias", seen, f"1 or all {columns} columns of the whole sequence")
    # K and V become one message, which would hide that their shapes or dtypes differ: the library
    # checks the rows of this device as a problem of their own.
    of_device = dict(arrays)
    if "bias" in arrays:
        bias = arrays["bias"]
        own = (*bias.shape[:3], min(bias.shape[3], shape.rows_kv))
        of_device["bias"] = jax.ShapeDtypeStruct(own, bias.dtype)
    _call.describe(_call.request(options, of_device, training=options.dropout > 0, lse=True))


def context_parallel(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_name: str,
    strategy: str = "all_gather",
    layout: str = "contiguous",
    return_residual: bool = False,
    checkpoint_name: str = CHECKPOINT_NAME,
    **options: Any,
) -> Any:
    """attention() of sequences whose rows the devices of an axis share, inside `jax.shard_map`.

    Args:
        query, key, value: the rows of this device, as many on each.
        bias, mask: the rows of this device, the columns of the whole sequence.
        axis_name: the axis of the mesh that shares the rows.
        strategy: "all_gather": K and V of all devices at once, in one message; dK and dV are
            scattered back. "ring": those of one device after the other, and partial results are
            merged: memory for the keys of two devices.
        layout: which rows a device has: "contiguous": one run of them; "zigzag": chunks r and
            2 n - 1 - r of 2 n, so that a causal mask costs all of n devices the same; "striped":
            every n-th. :func:`reorder` brings an array into that order.
        return_residual, checkpoint_name, options: as in :func:`attention`, which has
            `implementation` in addition. Lengths are those of the whole sequences.
            `batch_invariant` holds for what one call computes: where partial results are merged (a
            ring, and "striped"), the bits depend on the number of devices.

    Returns:
        As :func:`attention`, the rows of this device.

    Raises:
        ValueError, TypeError: as :func:`attention`; also for `q_segment_ids`; for `bottom_right`
            with lengths, or with dropout where rows and columns differ in number; and for dropout
            and ALiBi with "striped", because their positions are not those of adjacent rows.
    """
    for name, value_, known in (("strategy", strategy, STRATEGIES), ("layout", layout, LAYOUTS)):
        if value_ not in known:
            raise refuse(name, repr(value_), f"one of {', '.join(known)}")
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"{names} is no option of context_parallel(); needs one of attention()'s")
    return_lse = flag("return_residual", return_residual)
    prepared = prepare(query, key, value, bias, mask, **(DEFAULTS | options))
    if prepared.options.format == "thd":
        needed = "None: devices share the rows of whole batch entries, not of segments"
        raise refuse("q_segment_ids", "given", needed)
    size = jax.lax.psum(1, axis_name)
    rows = [prepared.arrays[name].shape[1] for name in "qk"]
    shape = Shape(axis_name, size, strategy, layout, *rows)
    _check(shape, prepared)
    if size == 1:  # every order is that of the sequence
        shape = shape._replace(layout="contiguous")
    outputs = ("o", *("lse",) * return_lse, *("max",) * prepared.options.max_logit)
    config = Config(shape, prepared.options, outputs, checkpoint_name)
    out = _compiled(config, cast_to_varying(prepared.arrays, prepared.arrays))
    out = [prepared.restore(name, x) for name, x in zip(outputs, out, strict=True)]
    return out[0] if len(out) == 1 else tuple(out)
