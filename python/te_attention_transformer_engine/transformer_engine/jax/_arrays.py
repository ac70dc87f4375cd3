"""Arrays of a call, whose layouts pack Q, K and V, and its seed."""

import warnings
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine._refusal import refuse, require
from transformer_engine.jax._enums import QKVLayout

RANK = 4  # at least: batch, rows, heads, dim


class Sizes(NamedTuple):
    """The result of parse_qkv_aval()."""

    batch_shape: list[int]
    q_max_seqlen: int
    kv_max_seqlen: int
    attn_heads: int
    num_gqa_groups: int
    q_head_dim: int
    v_head_dim: int


def _packed(name: str, x: Any, count: int) -> tuple:
    seen, needed = f"of shape {list(x.shape)}", f"[..., rows, {count}, heads, dim]"
    require(x.ndim > RANK and x.shape[-3] == count, name, seen, needed)
    return (*x.shape[:-3], *x.shape[-2:])


def sizes_of(q: Any, k: Any, v: Any, layout: QKVLayout) -> Sizes:
    """The sizes of three arrays of a layout, of which k and v may be unused."""
    used = {"q": q} if layout.is_qkvpacked() else {"q": q, "k": k}
    if layout.is_separate():
        used["v"] = v
    for name, x in used.items():
        require(x.dtype == q.dtype, f"{name}.dtype", x.dtype.name, f"that of q, {q.dtype.name}")
    if layout.is_qkvpacked():
        shapes = [_packed("q", q, 3)] * 3
    elif layout.is_kvpacked():
        shapes = [q.shape, *[_packed("k", k, 2)] * 2]
    else:
        shapes = [q.shape, k.shape, v.shape]
    for name, shape in zip("qkv", shapes, strict=True):
        require(len(shape) >= RANK, name, f"of shape {list(shape)}", "[..., rows, heads, dim]")
        needed = f"the batch of q, {list(shapes[0][:-3])}"
        require(shape[:-3] == shapes[0][:-3], name, f"of shape {list(shape)}", needed)
    (*batch, s_q, heads, dim_q), (*_, s_kv, groups, dim_k) = shapes[:2]
    needed = f"{dim_q}, the head dim of q"
    require(dim_k == dim_q, "head dim of k", dim_k, needed)
    seen, needed = f"of shape {list(shapes[2])}", f"rows and heads of k, [{s_kv}, {groups}]"
    require(shapes[2][-3:-1] == (s_kv, groups), "v", seen, needed)
    return Sizes(list(batch), s_q, s_kv, heads, groups, dim_q, shapes[2][-1])


def given(qkv: Any, layout: QKVLayout) -> tuple:
    """The arrays of a layout, and dummies for those that it has not."""
    count = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
    seen = len(qkv) if isinstance(qkv, (tuple, list)) else type(qkv).__name__
    require(seen == count, "qkv", seen, f"a tuple of {count} with {layout.name}")
    arrays = [jnp.asarray(x) for x in qkv]
    return (*arrays, *(jnp.zeros(0, arrays[0].dtype) for _ in range(3 - count)))


def separate(qkv: tuple, layout: QKVLayout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Q, K and V."""
    q, k, v = qkv
    if layout.is_qkvpacked():
        return tuple(q[..., i, :, :] for i in range(3))
    return (q, k[..., 0, :, :], k[..., 1, :, :]) if layout.is_kvpacked() else (q, k, v)


def seed_of(seed: Any, is_dropping: bool) -> jax.Array:
    """The data of a random key, uint32; zeros for every device where it is not needed."""
    if seed is None:
        if is_dropping:
            refuse("seed", None, "an array: dropout_probability is above 0")
        return jnp.zeros(2 * jax.device_count(), jnp.uint32)
    words = jnp.asarray(seed)
    if jnp.issubdtype(words.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(words)
    if words.dtype != jnp.uint32:
        warnings.warn(f"seed.dtype is {words.dtype.name}; cast to uint32", stacklevel=3)
        words = words.astype(jnp.uint32)
    require(words.size >= 2, "seed", f"of shape {list(words.shape)}", "2 numbers")
    return words


def window_of(given: Any) -> tuple[int, int]:
    """The columns before and after a row's own; -1, for None and negative ones: no limit."""
    try:
        left, right = (None, None) if given is None else given
        return tuple(-1 if x is None else max(index(x), -1) for x in (left, right))
    except (TypeError, ValueError):
        return refuse("window_size", repr(given), "(left, right), two integers, or None")
