"""Attention whose sequences several devices share: context parallelism inside `shard_map`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_attention._alibi import published_slopes
from te_attention.jax import _call, _cp_operands
from te_attention.jax._arguments import flag, refuse
from te_attention.jax._autodiff import Wanted
from te_attention.jax._cp_exchange import adjacent, exchanged
from te_attention.jax._cp_keys import STRATEGIES
from te_attention.jax._cp_parts import LAYOUTS, Shape
from te_attention.jax._cp_run import Config, backward, compiled
from te_attention.jax._sharding import axes_of, cast_to_varying, moved
from te_attention.jax.functional import (
    CHECKPOINT_NAME,
    DEFAULTS,
    Prepared,
    ids_of,
    prepare,
    refuse_with_segments,
)


def _check(shape: Shape, prepared: Prepared) -> None:
    options, arrays = prepared.options, prepared.arrays
    unit = shape.stripe if shape.layout == "striped" else 2 if shape.layout == "zigzag" else 1
    for name, rows in (("query", shape.rows_q), ("key", shape.rows_kv)):
        if rows % unit:
            how = f" with layout {shape.layout}"
            raise refuse(f"rows of {name} on a device", rows, f"a multiple of {unit}{how}")
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


class Sharing(NamedTuple):
    """The arguments of context_parallel() that attention() has not."""

    axis_name: str
    strategy: str
    layout: str
    stripe_size: int
    batch_axes: Any
    head_axes: Any


def _shape_of(sharing: Sharing, prepared: Prepared) -> Shape:
    """How rows are shared, without segments."""
    axis, strategy, layout, stripe, *_ = sharing
    for name, value_, known in (("strategy", strategy, STRATEGIES), ("layout", layout, LAYOUTS)):
        if value_ not in known:
            raise refuse(name, repr(value_), f"one of {', '.join(known)}")
    if not isinstance(stripe, int) or stripe < 1:
        raise refuse("stripe_size", stripe, "an integer from 1")
    if stripe > 1 and layout != "striped":
        raise refuse("stripe_size", stripe, f"1 with layout {layout}, or layout striped")
    arrays = prepared.arrays
    is_bottom_right = "bottom_right" in prepared.options.mask
    return Shape(
        *(axis, jax.lax.psum(1, axis), strategy, layout),
        *(arrays[name].shape[1] for name in "qk"),
        stripe=stripe,
        bottom_right=is_bottom_right,
        aligned=not (is_bottom_right and any(name.startswith("cu_") for name in arrays)),
    )


def _with_segments(shape: Shape, given: dict, arrays: dict) -> tuple[Shape, dict]:
    """Rows that are several sequences: where each of them is in the whole rows."""
    segments, batch = given["max_segments"], arrays["q"].shape[0]
    sides = ((batch, shape.rows_q), (batch, shape.rows_kv))
    q_ids, kv_ids = ids_of(*sides, given["q_segment_ids"], given["kv_segment_ids"], segments)
    shape = shape._replace(segments=segments, aligned=kv_ids is q_ids)
    ids = cast_to_varying({"q": q_ids, "kv": kv_ids}, {"query": arrays["q"]})
    out = _cp_operands.spans_of(shape, ids, jax.lax.axis_index(shape.axis))
    if "slopes" in arrays and arrays["slopes"].ndim > 1:
        out["slopes"] = jnp.repeat(arrays["slopes"], segments, axis=0)
    return shape, out


def _moves_diagonal(origin: Any) -> bool:
    """Whether rows and columns begin at different positions; True if only the device knows."""
    if origin is None:
        return False
    is_known = isinstance(origin, (list, tuple, np.ndarray)) and not any(
        isinstance(x, jax.Array) for x in origin
    )
    return not is_known or origin[2] != origin[3]


def _with_further_axes(shape: Shape, sharing: Sharing, prepared: Prepared) -> Prepared:
    """ALiBi's slopes of the heads of this device, and an origin with its first batch and head."""
    options, arrays = prepared.options, dict(prepared.arrays)
    batch_axes, head_axes = (axes_of(x) for x in sharing[-2:])
    if options.alibi and sharing.head_axes is None:
        mesh = jax.sharding.get_abstract_mesh()
        more = [a for a in mesh.manual_axes if a != shape.axis and mesh.shape[a] > 1]
        if more:
            needed = "its axes, or (): alibi is True, whose slopes depend on which heads these are"
            raise refuse("head_axes", f"None within axes {', '.join(more)}", needed)
    batch, _, heads, _ = arrays["q"].shape
    index = jax.lax.axis_index
    first = index(batch_axes) * batch * max(shape.segments, 1) if batch_axes else 0
    head = index(head_axes) * heads if head_axes else 0
    if options.alibi and head_axes:
        dtype = _call.statistics_dtype(arrays["q"].dtype)
        slopes = jnp.array(published_slopes(heads * jax.lax.psum(1, head_axes)), dtype)
        arrays["slopes"] = jax.lax.dynamic_slice_in_dim(slopes, head, heads)
        options = options._replace(alibi=False)
    if options.dropout and (batch_axes or head_axes):
        arrays["origin"] = moved(arrays.get("origin"), first, head, 0, 0)
    return prepared._replace(options=options, arrays=arrays)


def prepared_call(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    sharing: Sharing,
    outputs: tuple[str, ...],
    checkpoint_name: str,
    given: dict,
) -> tuple[Config, Prepared]:
    """The arguments of context_parallel(), checked; `given`: the options of attention()."""
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"{names} is no option of context_parallel(); needs one of attention()'s")
    given = DEFAULTS | given
    own, has_segments = given, given["q_segment_ids"] is not None
    if has_segments:
        refuse_with_segments(given | {"bias": bias, "mask": mask})
        own = given | dict.fromkeys(("q_segment_ids", "kv_segment_ids", "max_segments"))
    prepared = prepare(query, key, value, bias, mask, whole_bias=False, **own)
    shape = _shape_of(sharing, prepared)
    if has_segments:
        shape, spans = _with_segments(shape, given, prepared.arrays)
    if _moves_diagonal(given["origin"]):
        shape = shape._replace(aligned=False)
    _check(shape, prepared)
    if shape.size == 1:  # every order is that of the sequence
        shape = shape._replace(layout="contiguous", stripe=1)
    if has_segments:
        prepared = prepared._replace(arrays=prepared.arrays | spans)
    prepared = _with_further_axes(shape, sharing, prepared)
    shape = adjacent(shape, prepared.options, prepared.arrays)
    outputs += ("max",) * prepared.options.max_logit
    return Config(shape, prepared.options, outputs, checkpoint_name), prepared


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
    stripe_size: int = 1,
    batch_axes: str | tuple[str, ...] | None = None,
    head_axes: str | tuple[str, ...] | None = None,
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
            every n-th stripe. :func:`reorder` brings an array into that order.
        stripe_size: adjacent rows of a stripe. Some calls need adjacent rows: dropout, ALiBi, a
            window of sequences whose diagonals differ (`bottom_right` with lengths,
            `kv_segment_ids`), a mask with an `origin`, and a ring of stripes of several rows. There
            the rows of Q, and in a ring of K and V, are exchanged for those of another layout by
            one message each, and one puts those of O back. Otherwise "all_gather" computes each
            stripe of several rows on its own.
        batch_axes, head_axes: further axes of the `shard_map` that split batch and heads: dropout
            then draws the bits of one device, and ``alibi=True`` has the slopes of these heads.
        return_residual, checkpoint_name, options: as in :func:`attention`, which has
            `implementation` in addition. Lengths and segments are those of the whole sequences, of
            which segment ids are given for the rows of this device.
            `batch_invariant` holds for what one call computes: where partial results are merged (a
            ring, and single stripes that are not exchanged), the bits depend on the number of
            devices.

    Returns:
        As :func:`attention`, the rows of this device.

    Raises:
        ValueError, TypeError: as :func:`attention`; also for ``alibi=True`` within further axes
            without `head_axes`.
    """
    sharing = Sharing(axis_name, strategy, layout, stripe_size, batch_axes, head_axes)
    outputs = ("o", *("lse",) * flag("return_residual", return_residual))
    config, prepared = prepared_call(
        query, key, value, bias, mask, sharing, outputs, checkpoint_name, options
    )
    out = compiled(config, cast_to_varying(prepared.arrays, prepared.arrays))
    out = [prepared.restore(n, x) for n, x in zip(config.outputs, out, strict=True)]
    return out[0] if len(out) == 1 else tuple(out)


def context_parallel_gradients(
    query: Any,
    key: Any,
    value: Any,
    *,
    output: Any,
    lse: Any,
    doutput: Any,
    axis_name: str,
    strategy: str = "all_gather",
    layout: str = "contiguous",
    stripe_size: int = 1,
    batch_axes: str | tuple[str, ...] | None = None,
    head_axes: str | tuple[str, ...] | None = None,
    **options: Any,
) -> dict:
    """The gradients of context_parallel() by argument: query, key, value, and sink if it has one.

    Args:
        query, key, value, axis_name, strategy, layout, stripe_size, batch_axes, head_axes, options:
            as in :func:`context_parallel`, of arrays with a batch.
        output, lse: its results, the rows of this device.
        doutput: the gradient of output.
    """
    sharing = Sharing(axis_name, strategy, layout, stripe_size, batch_axes, head_axes)
    config, prepared = prepared_call(query, key, value, None, None, sharing, ("o",), "", options)
    given = {"o": output, "lse": lse.swapaxes(1, 2)}
    arrays = exchanged(config.shape, prepared.arrays | given)
    o, lse = arrays.pop("o"), arrays.pop("lse")
    kept = (arrays, o, lse, Wanted(n for n in ("sink",) if n in arrays))
    (out,) = backward(config._replace(outputs=("o",)), kept, (doutput,))
    names = {"q": "query", "k": "key", "v": "value", "sink": "sink"}
    return {names[n]: x for n, x in out.items() if n in names}
