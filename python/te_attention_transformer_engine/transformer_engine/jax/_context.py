"""Context parallelism: rows of Q, K and V over an axis of the mesh, by te_attention.jax."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from te_attention.jax import context_parallel
from te_attention.jax.context_parallel import context_parallel_gradients
from transformer_engine._refusal import refuse, require
from transformer_engine.jax._descriptor import SequenceDescriptor, sequences_of
from transformer_engine.jax._enums import AttnMaskType, CPStrategy, QKVLayout, require_enum
from transformer_engine.jax.sharding import (
    get_mesh,
    get_mesh_axis_size,
    global_mesh_resource,
    mesh_resource_if_set,
)

# The dimensions of each array: b batch, s rows, h heads; "-": whole on each device.
ARRAYS = {
    **dict.fromkeys(("query", "key", "value", "output", "doutput"), "bsh-"),
    **{"lse": "bsh", "sink": "h", "dropout_key": "-"},
    **dict.fromkeys(("q_segment_ids", "kv_segment_ids"), "bs"),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), "b"),
}


class Sharing(NamedTuple):
    """How the rows of a call are shared."""

    axis: str
    strategy: str
    layout: str
    stripe_size: int


def shared_axis(strategy: object, axis: str) -> str | None:
    """The mesh axis that shares rows; None where it has one device, or there is no mesh."""
    require_enum("context_parallel_strategy", strategy, CPStrategy)
    if not axis:
        if get_mesh().empty:
            return None
        axis = global_mesh_resource().cp_resource
    return axis if get_mesh_axis_size(axis) > 1 else None


def sharing_of(
    axis: str, strategy: CPStrategy, layout: QKVLayout, is_balanced: bool, stripe: int | None
) -> Sharing:
    """The order of rows that TransformerEngine's arguments stand for."""
    require(
        not layout.is_qkvpacked(), "qkv_layout", layout.name, "K separate from Q, as its rows move"
    )
    how = "ring" if strategy == CPStrategy.RING else "all_gather"
    if not layout.is_thd():
        needed = f"None with {layout.name}: its order is DualChunkSwap"
        require(stripe is None, "stripe_size", stripe, needed)
        return Sharing(axis, how, "zigzag" if is_balanced else "contiguous", 1)
    if not is_balanced:
        require(stripe is None, "stripe_size", stripe, "None: rows are not load balanced")
        return Sharing(axis, how, "contiguous", 1)
    return Sharing(axis, how, "striped", stripe or 1)


def sequence_options(
    descriptor: SequenceDescriptor,
    mask: AttnMaskType,
    layout: QKVLayout,
    window: tuple[int, int],
    segments: int,
    shape: tuple[int, int, int],
) -> tuple[dict, dict]:
    """The arrays and the bound that say where sequences are, as te_attention.jax names them."""
    if not layout.is_thd():
        found = sequences_of(descriptor, mask, layout, window, segments, shape)
        if found is None:
            return {}, {}
        lengths = (jax.numpy.diff(x) for x in found[:2])
        return dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True)), {}
    ids = descriptor.segment_ids
    for name, x, rows in zip(("query", "key"), ids, shape[1:], strict=True):
        needed = f"segment ids [{shape[0]}, {rows}] of {name}: rows are shared by devices"
        require(x.shape == (shape[0], rows), "sequence_descriptor", "of other parts", needed)
    arrays = {"q_segment_ids": ids[0].astype("int32")}
    if ids[1] is not ids[0]:
        arrays["kv_segment_ids"] = ids[1].astype("int32")
    return arrays, {"max_segments": segments}


def _further_axes(mesh: Any, batch: int, heads: tuple[int, int]) -> tuple[tuple, tuple]:
    """The mesh axes that split batch and heads evenly, by the MeshResource of the process."""
    resource = mesh_resource_if_set()

    def known(*names: str | None) -> tuple[str, ...]:
        found = dict.fromkeys(n for n in names if n is not None and n in mesh.axis_names)
        return tuple(n for n in found if mesh.shape[n] > 1)

    of_batch = known(resource.dp_resource, resource.fsdp_resource)
    of_heads = known(resource.tpsp_resource, resource.tp_resource)
    count_batch, count_heads = (math.prod(mesh.shape[n] for n in x) for x in (of_batch, of_heads))
    of_batch = of_batch if batch % count_batch == 0 else ()
    return of_batch, of_heads if all(n % count_heads == 0 for n in heads) else ()


def _over_devices(
    function: Callable, sharing: Sharing, arrays: dict, static: dict, results: dict
) -> dict:
    """`function` of the arrays of one device, over the mesh; `results`: dimensions by name."""
    mesh = get_mesh()
    shapes = [arrays[name].shape for name in ("query", "key")]
    batch, heads = _further_axes(mesh, shapes[0][0], (shapes[0][2], shapes[1][2]))
    manual = set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))

    def spec(dimensions: str) -> PartitionSpec:
        at = {"b": batch or None, "s": sharing.axis, "h": heads or None}
        return PartitionSpec(*(at.get(x) for x in dimensions))

    def local(arrays: dict) -> dict:
        how = {"axis_name": sharing.axis, "strategy": sharing.strategy, "layout": sharing.layout}
        how |= {"stripe_size": sharing.stripe_size, "batch_axes": batch, "head_axes": heads}
        return function(**arrays, **how, **static)

    if sharing.axis in manual:
        batch, heads = (tuple(a for a in axes if a in manual) for axes in (batch, heads))
        return local(arrays)
    specs = {name: spec(ARRAYS[name]) for name in arrays}
    if AxisType.Explicit in getattr(mesh, "axis_types", ()):
        arrays = {
            name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name]))
            for name, x in arrays.items()
        }
    outputs = {name: spec(dimensions) for name, dimensions in results.items()}
    split = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=outputs, check_vma=False)
    return split(arrays)


def split_options(options: dict) -> tuple[dict, dict]:
    """The arrays among the options of a call, and the rest without a bias, which is refused."""
    if options.get("bias") is not None:
        refuse("bias", "given", "None: devices share the rows")
    arrays = {n: options[n] for n in ("sink", "dropout_key") if hasattr(options.get(n), "ndim")}
    unused = ("bias", "bias_type", *arrays)
    return arrays, {name: x for name, x in options.items() if name not in unused}


def forward(sharing: Sharing, arrays: dict, options: dict, *, return_lse: bool = False) -> dict:
    """O as "o", differentiable; with return_lse also LSE ``[batch, rows, heads]`` as "lse"."""
    more, static = split_options(options)
    results = {"o": "bsh-", "lse": "bsh"} if return_lse else {"o": "bsh-"}

    def function(**given: Any) -> dict:
        out = context_parallel(**given, return_residual=return_lse)
        return dict(zip(results, out if return_lse else (out,), strict=True))

    return _over_devices(function, sharing, arrays | more, static, results)


def backward(sharing: Sharing, arrays: dict, options: dict) -> dict:
    """The gradients of query, key, value and sink by their names; LSE is ``[batch, rows, heads]``.

    `arrays` also has output, lse and doutput.
    """
    more, static = split_options(options)
    static.pop("checkpoint_name", None)
    names = ("query", "key", "value", *(n for n in more if n == "sink"))

    def function(**given: Any) -> dict:
        out = context_parallel_gradients(**given)
        if "sink" in out:  # of the rows of this device
            out["sink"] = jax.lax.psum(out["sink"], (sharing.axis, *given["batch_axes"]))
        return out

    results = {name: ARRAYS[name] for name in names}
    return _over_devices(function, sharing, arrays | more, static, results)
