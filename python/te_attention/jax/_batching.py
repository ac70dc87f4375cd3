"""vmap: the mapped axis becomes a part of the batch where that computes the same, or a loop.

The tokens of ragged sequences are joined: the sequences of all members are one batch, with the
start of each. A loop (`jax.lax.map`) where the batch cannot take the axis: a mapped sink or key,
or a mapped origin of all sequences, of which a call has one; the gradient of a sink, which a call
adds up over its batch; and dropout, because the pattern depends on the index in the batch: each
member of a mapped axis draws what the unmapped function draws. A loop too where explicit axes of a
mesh split the batch, because JAX has no reshape that puts another dimension before a split one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

# Arrays whose first dimension is the batch, or the tokens of ragged sequences.
PER_BATCH = ("q", "k", "v", "o", "lse", "max", "dout", "dlse", "dq", "dk", "dv")
SHARED = ("sink", "rng_state", "origin")


def _has_origins(arrays: dict, mapped: dict) -> bool:
    """Whether each sequence has an origin of its own."""
    return "origin" in arrays and arrays["origin"].ndim - mapped["origin"] > 1


def _is_batch_split(arrays: dict, mapped: dict) -> bool:
    """Whether explicit axes of a mesh split the batch of an array."""

    def split(name: str) -> bool:
        kind, at = jax.typeof(arrays[name]), 1 if mapped[name] else 0
        spec = kind.sharding.spec
        return kind.ndim > at and len(spec) > at and spec[at] is not None

    return any(split(name) for name in arrays if name in (*PER_BATCH, "bias"))


def _is_foldable(arrays: dict, mapped: dict, dropout: bool, dsink: bool) -> bool:
    shared = (n for n in SHARED if n != "origin" or not _has_origins(arrays, mapped))
    if dropout or dsink or any(mapped.get(name) for name in shared):
        return False
    return not _is_batch_split(arrays, mapped)


def _fold_lengths(cu: jax.Array, size: int, mapped: bool) -> jax.Array:
    """cu_seqlens of `size` batches one after the other."""
    lengths = jnp.diff(cu, axis=-1)
    if not mapped:
        lengths = jnp.broadcast_to(lengths, (size, *lengths.shape))
    return jnp.concatenate([jnp.zeros(1, cu.dtype), jnp.cumsum(lengths.ravel(), dtype=cu.dtype)])


def _fold_starts(starts: jax.Array, size: int, mapped: bool, tokens: int) -> jax.Array:
    """The first token of each sequence in the tokens of `size` members, then their number."""
    every = starts if mapped else jnp.broadcast_to(starts, (size, *starts.shape))
    first = every[:, :-1] + tokens * jnp.arange(size, dtype=starts.dtype)[:, None]
    return jnp.concatenate([first.ravel(), jnp.full(1, size * tokens, starts.dtype)])


def _with_starts(arrays: dict, mapped: dict) -> tuple[dict, dict]:
    """Ragged sequences with the start of each, which joined tokens need: those have gaps."""
    if "offsets_q" in arrays or "offsets_kv" in arrays:
        return arrays, mapped
    arrays, mapped = dict(arrays), dict(mapped)
    for side in ("q", "kv"):
        arrays[f"offsets_{side}"] = arrays[f"cu_seqlens_{side}"]
        mapped[f"offsets_{side}"] = mapped[f"cu_seqlens_{side}"]
    return arrays, mapped


def _fold(arrays: dict, mapped: dict, size: int, batch: int, dbias: bool) -> dict:
    def joined(x: jax.Array, is_mapped: bool) -> jax.Array:
        full = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        return full.reshape(size * full.shape[1], *full.shape[2:])

    out = {}
    for name, x in arrays.items():
        if name in PER_BATCH or (name == "origin" and _has_origins(arrays, mapped)):
            out[name] = joined(x, mapped[name])
        elif name in ("cu_seqlens_q", "cu_seqlens_kv"):
            out[name] = _fold_lengths(x, size, mapped[name])
        elif name in ("offsets_q", "offsets_kv"):
            of = "q" if name == "offsets_q" else "k"
            tokens = arrays[of].shape[1 if mapped[of] else 0]
            out[name] = _fold_starts(x, size, mapped[name], tokens)
        elif name == "bias":
            own = x.shape[1 if mapped[name] else 0]
            if not mapped[name] and own == 1 and not dbias:
                out[name] = x  # one for all
            else:
                rest = x.shape[-3:]
                full = x if mapped[name] else x[None]
                full = jnp.broadcast_to(full, (size, batch, *rest))
                if dbias and own != batch:  # gradients are added up here, so they are not rounded
                    full = full.astype(jnp.promote_types(full.dtype, jnp.float32))
                out[name] = full.reshape(size * batch, *rest)
        elif name == "slopes":
            per_batch = x.ndim - mapped[name] == 2
            full = x if mapped[name] else x[None]
            full = full if per_batch else full[:, None]
            shape = (size, batch, x.shape[-1])
            one = not mapped[name] and not per_batch
            out[name] = x if one else jnp.broadcast_to(full, shape).reshape(-1, x.shape[-1])
        else:
            out[name] = x
    return out


def _unfold(name: str, x: jax.Array, size: int, batch: int, bias: jax.Array | None) -> jax.Array:
    """A result of joined batches; `bias` as it was, of one batch."""
    x = x.reshape(size, x.shape[0] // size, *x.shape[1:])
    if name == "dbias" and bias.shape[0] != batch:
        x = jnp.sum(x, axis=1, keepdims=True)
    return x.astype(bias.dtype) if name == "dbias" else x


def batched(
    function: Callable[[dict], dict], ragged: bool, dropout: bool, wanted: tuple[str, ...] = ()
) -> Callable[[dict], dict]:
    """`function` of arrays by name, with a rule for vmap. `wanted`: gradients of small tensors."""
    mappable = custom_vmap(function)

    @mappable.def_vmap
    def _(size: int, in_batched: list, arrays: dict) -> tuple[dict, dict]:
        (mapped,) = in_batched
        if not _is_foldable(arrays, mapped, dropout, "sink" in wanted):
            moving = {name: x for name, x in arrays.items() if mapped[name]}
            fixed = {name: x for name, x in arrays.items() if not mapped[name]}
            out = jax.lax.map(lambda some: mappable({**fixed, **some}), moving)
            return out, dict.fromkeys(out, True)
        if ragged:
            arrays, mapped = _with_starts(arrays, mapped)
            batch = arrays["cu_seqlens_q"].shape[-1] - 1
        else:
            batch = arrays["q"].shape[1 if mapped["q"] else 0]
        bias = arrays.get("bias")
        if bias is not None and mapped["bias"]:
            bias = bias[0]
        out = mappable(_fold(arrays, mapped, size, batch, "bias" in wanted))
        out = {name: _unfold(name, x, size, batch, bias) for name, x in out.items()}
        return out, dict.fromkeys(out, True)

    return mappable
