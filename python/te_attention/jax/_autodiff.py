"""Attention with its gradient: one custom call forward and one backward."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from te_attention.jax import _call
from te_attention.jax._batching import batched
from te_attention.jax._sharding import cast_to_varying, check_partitioner, sharded

SMALL = ("bias", "sink")  # gradients that are computed only where they are wanted


class Config(NamedTuple):
    """The static part of a call."""

    options: _call.Options
    outputs: tuple[str, ...]  # of "o", "lse", "max"
    checkpoint_name: str


@jax.tree_util.register_static
class Wanted(tuple):
    """Names of the small tensors that need a gradient, among the residuals."""

    __slots__ = ()


def _forward(config: Config, outputs: tuple[str, ...], training: bool, arrays: dict) -> dict:
    options = config.options

    def call(options: _call.Options, arrays: dict) -> dict:
        return _call.forward(options, outputs, training, arrays)

    run = sharded(call, options, outputs)
    out = batched(run, options.format == "thd", options.dropout > 0)(arrays)
    return cast_to_varying(out, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, arrays: dict) -> tuple[jax.Array, ...]:
    training = config.options.dropout > 0  # which turns dropout on, and writes LSE
    outputs = {*config.outputs, "lse"} if training else {*config.outputs}
    outputs = tuple(name for name in ("o", "lse", "max") if name in outputs)
    out = _forward(config, outputs, training, arrays)
    return tuple(out[name] for name in config.outputs)


def _attention_forward(config: Config, primals: dict) -> tuple[tuple, tuple]:
    arrays = {name: x.value for name, x in primals.items()}
    wanted = Wanted(name for name in SMALL if name in primals and primals[name].perturbed)
    outputs = ("o", "lse", *(name for name in config.outputs if name == "max"))
    out = _forward(config, outputs, True, arrays)
    out |= {name: checkpoint_name(out[name], config.checkpoint_name) for name in ("o", "lse")}
    kept = (arrays, out["o"], out["lse"], wanted)
    return tuple(out[name] for name in config.outputs), kept


def zero_of(x: jax.Array) -> jax.Array | None:
    """The cotangent of an array that needs none: dead code, but jax 0.7 cannot take None here."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None


def _attention_backward(config: Config, kept: tuple, cotangents: tuple) -> tuple[dict]:
    arrays, o, lse, wanted = kept
    arriving = dict(zip(config.outputs, cotangents, strict=True))
    zero = {name for name, x in arriving.items() if isinstance(x, SymbolicZero)}
    dout = jnp.zeros_like(o) if "o" in zero else arriving["o"]
    operands = {**arrays, "o": o, "lse": lse, "dout": dout}
    if "lse" in arriving and "lse" not in zero:
        operands["dlse"] = arriving["lse"]
    options = config.options
    names = ("q", "k", "v", *wanted)

    def call(options: _call.Options, arrays: dict) -> dict:
        return _call.backward(options, names, arrays)

    run = sharded(call, options, tuple(f"d{name}" for name in names))
    out = batched(run, options.format == "thd", options.dropout > 0, wanted)(operands)
    out = cast_to_varying(out, arrays)
    return ({name: out.get(f"d{name}", zero_of(x)) for name, x in arrays.items()},)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)

# Compiled where it is called eagerly; a part of the caller's program under jit.
_compiled = jax.jit(_attention, static_argnums=0, inline=True)


def run(config: Config, arrays: dict) -> tuple[jax.Array, ...]:
    """The outputs of a call, in the order of `config.outputs`."""
    check_partitioner()
    return _compiled(config, cast_to_varying(arrays, arrays))
