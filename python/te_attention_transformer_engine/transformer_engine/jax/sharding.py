"""Which mesh axis serves which kind of parallelism."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"


@dataclass
class MeshResource:
    """The mesh axis of each kind of parallelism; None: there is none."""

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None


_current: MeshResource | None = None


@contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Makes that the resource of the process for the duration; None unsets it."""
    global _current  # noqa: PLW0603
    before, _current = _current, resource
    try:
        yield
    finally:
        _current = before


def global_mesh_resource() -> MeshResource:
    """The resource that global_shard_guard() set."""
    if _current is None:
        raise AssertionError("global_mesh_resource is not set; needs global_shard_guard()")
    sizes = [get_mesh_axis_size(axis) for axis in (_current.tp_resource, _current.tpsp_resource)]
    if min(sizes) > 1:
        raise AssertionError(
            f"tp_resource and tpsp_resource have {sizes[0]} and {sizes[1]} devices; needs one of "
            "them to have 1"
        )
    return _current


def mesh_resource_if_set() -> MeshResource:
    """The resource of the process, or one without any axis."""
    return MeshResource() if _current is None else global_mesh_resource()


def get_mesh() -> Any:
    """The mesh of `with mesh:` or of jax.set_mesh()."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    with warnings.catch_warnings():  # JAX has deprecated `with mesh:`, which has no other reader
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.interpreters.pxla import thread_resources
        except ImportError:  # a version of JAX without `with mesh:`
            return mesh
        return thread_resources.env.physical_mesh


def get_mesh_axis_size(axis: str | None, mesh: Any = None) -> int:
    """The devices along a mesh axis; 1 for None."""
    if axis is None:
        return 1
    mesh = get_mesh() if mesh is None else mesh
    if axis not in mesh.axis_names and mesh.empty:
        return 1
    if axis not in mesh.axis_names:
        raise AssertionError(f"axis is {axis!r}; needs one of {', '.join(mesh.axis_names)}")
    return mesh.shape[axis]


def with_sharding_constraint(x: jax.Array, pspec: PartitionSpec | None) -> jax.Array:
    """x with that sharding; without a mesh, x. Axes that shard_map() has taken over are dropped."""
    mesh = get_mesh()
    if pspec is None or mesh.empty:
        return x
    manual = set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
    if manual >= set(mesh.axis_names):
        return x

    def left(part: Any) -> Any:
        names = part if isinstance(part, tuple) else (part,)
        kept = tuple(name for name in names if name is not None and name not in manual)
        return kept or None

    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(left, pspec)))


def _table() -> dict[str, str | None]:
    """The mesh axis of each logical axis."""
    resource = global_mesh_resource()
    heads = resource.tpsp_resource or resource.tp_resource
    return {
        BATCH_AXES: resource.fsdp_resource or resource.dp_resource,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: heads,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: heads,
    }


def with_sharding_constraint_by_logical_axes(
    x: jax.Array, logical_axis_names: tuple[str | None, ...] | None
) -> jax.Array:
    """x with the sharding of these axes, of the table of MeshResource."""
    if not logical_axis_names or get_mesh().empty:
        return x
    if len(logical_axis_names) != x.ndim:
        needed = f"{x.ndim} names: x has that many dimensions"
        raise AssertionError(f"logical_axis_names is {logical_axis_names}; needs {needed}")
    table = _table()
    spec = PartitionSpec(*(table.get(name) for name in logical_axis_names))
    return with_sharding_constraint(x, spec)
