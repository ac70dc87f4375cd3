"""Keys of a call whose rows several devices share: K and V are sent, dK and dV come back."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from te_attention.jax import _cp_parts
from te_attention.jax._arguments import refuse
from te_attention.jax._call import Options
from te_attention.jax._cp_operands import add_rows
from te_attention.jax._cp_parts import LAYOUTS, Part, Shape


def reorder(
    x: Any, size: int, layout: str, axis: int = 1, *, inverse: bool = False, stripe_size: int = 1
) -> jax.Array:
    """Rows of whole sequences in the order in which `size` devices hold them, or back.

    Args:
        x: an array.
        size: devices that share the rows.
        layout: as in :func:`context_parallel`.
        axis: the dimension of the rows.
        inverse: from the order of the devices to that of the sequence.
        stripe_size: adjacent rows of a stripe.
    """
    if layout not in LAYOUTS:
        raise refuse("layout", repr(layout), f"one of {', '.join(LAYOUTS)}")
    x = jnp.asarray(x)
    parts = size * {"zigzag": 2, "striped": stripe_size}.get(layout, 1)
    if x.shape[axis] % parts:
        raise refuse(f"dimension {axis} of x", x.shape[axis], f"a multiple of {parts}")
    if layout == "contiguous":
        return x
    axis %= x.ndim
    before, rows, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if layout == "striped":
        grid = (size, rows // parts) if inverse else (rows // parts, size)
        stripes = x.reshape(*before, *grid, stripe_size, *after)
        return stripes.swapaxes(axis, axis + 1).reshape(x.shape)
    held = [piece for r in range(size) for piece in (r, 2 * size - 1 - r)]
    order = sorted(range(parts), key=held.__getitem__) if inverse else held
    pieces = x.reshape(*before, parts, rows // parts, *after)
    return jnp.take(pieces, jnp.array(order), axis=axis).reshape(x.shape)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """K and V as one message."""
    return jnp.concatenate([k, v], axis=-1)


def _unpack(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return x[..., :dim], x[..., dim:]


def _shifted(shape: Shape, x: jax.Array, by: int) -> jax.Array:
    """The array of the device that is `by` places before this one."""
    pairs = [(i, (i + by) % shape.size) for i in range(shape.size)]
    return jax.lax.ppermute(x, shape.axis, pairs)


def _reordered(shape: Shape, x: jax.Array, *, inverse: bool) -> jax.Array:
    """Gathered rows in the order of the sequence, or back; single stripes stay as they are."""
    if shape.stride > 1:
        return x
    layout, stripe = shape.held or (shape.layout, shape.stripe)
    return reorder(x, shape.size, layout, inverse=inverse, stripe_size=stripe)


class Ring:
    """The keys of one device at each step; sums of dK and dV are sent along with them."""

    def __init__(self, shape: Shape, options: Options, arrays: dict, sums: bool) -> None:
        self.shape, self.options = shape, options
        self.dim = arrays["k"].shape[-1]
        self.held = _pack(arrays["k"], arrays["v"])
        self.sums = jnp.zeros_like(wide(self.held)) if sums else None
        self.steps = _cp_parts.steps_of(self.shape, self.options)
        self.last = max((t for t, pairs in enumerate(self.steps) if pairs), default=0)

    def visits(self, me: jax.Array) -> Iterator[tuple[tuple, list[Part]]]:
        """Keys, and the parts with them."""
        for t in range(self.last + 1):
            # Before the parts of this step, so that both can overlap.
            coming = _shifted(self.shape, self.held, 1) if t < self.last else None
            parts = _cp_parts.parts_of_step(self.shape, self.options, self.steps[t], t, me)
            if self.steps[t]:
                yield _unpack(self.held, self.dim), parts
            if coming is not None:
                self.held = coming
                self.sums = None if self.sums is None else _shifted(self.shape, self.sums, 1)

    def add(self, part: Part, dk: jax.Array, dv: jax.Array) -> None:
        """Adds the gradients of the keys of a part."""
        self.sums = add_rows(self.sums, part.kv[0], _pack(dk, dv))

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """The sums of the own keys."""
        home = _shifted(self.shape, self.sums, -self.last) if self.last else self.sums
        return _unpack(home, self.dim)


class Gathered:
    """The keys of all devices at once."""

    def __init__(self, shape: Shape, options: Options, arrays: dict, sums: bool) -> None:
        self.shape, self.options = shape, options
        self.dim = arrays["k"].shape[-1]
        packed = _pack(arrays["k"], arrays["v"])
        gathered = jax.lax.all_gather(packed, self.shape.axis, axis=1, tiled=True)
        self.keys = _reordered(self.shape, gathered, inverse=True)
        self.sums = jnp.zeros_like(wide(self.keys)) if sums else None

    def visits(self, me: jax.Array) -> Iterator[tuple[tuple, list[Part]]]:
        """Keys, and the parts with them."""
        shape, options = self.shape, self.options
        if shape.is_direct:
            yield _unpack(self.keys, self.dim), _cp_parts.parts_of_all(shape, options, me)
            return
        for t, pairs in enumerate(_cp_parts.steps_of(shape, options)):
            if pairs:
                parts = _cp_parts.parts_of_step(shape, options, pairs, t, me)
                first = parts[0].source * shape.rows_kv
                some = jax.lax.dynamic_slice_in_dim(self.keys, first, shape.rows_kv, 1)
                yield _unpack(some, self.dim), parts

    def add(self, part: Part, dk: jax.Array, dv: jax.Array) -> None:
        """Adds the gradients of the keys of a part."""
        more = _pack(wide(dk), wide(dv))
        if part.source is None:
            self.sums += more
            return
        first, rows = part.source * self.shape.rows_kv, self.shape.rows_kv
        some = jax.lax.dynamic_slice_in_dim(self.sums, first, rows, 1) + more
        self.sums = jax.lax.dynamic_update_slice_in_dim(self.sums, some, first, 1)

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """The sums of the own keys."""
        sums = _reordered(self.shape, self.sums, inverse=False)
        own = jax.lax.psum_scatter(sums, self.shape.axis, scatter_dimension=1, tiled=True)
        return _unpack(own, self.dim)


STRATEGIES = {"all_gather": Gathered, "ring": Ring}
