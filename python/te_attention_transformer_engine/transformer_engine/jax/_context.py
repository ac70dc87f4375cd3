"""Context parallelism, which one device does not need."""

from transformer_engine.jax._enums import CPStrategy, require_enum
from transformer_engine.jax.sharding import get_mesh, get_mesh_axis_size, global_mesh_resource


def refuse_context_parallelism(strategy: object, axis: str) -> None:
    """Refuses a mesh axis for context parallelism that has more than one device."""
    require_enum("context_parallel_strategy", strategy, CPStrategy)
    if not axis:
        if get_mesh().empty:
            return
        axis = global_mesh_resource().cp_resource
    size = get_mesh_axis_size(axis)
    if size > 1:
        raise NotImplementedError(
            f"context_parallel_axis {axis!r} has {size} devices; needs 1: te_attention.jax."
            "context_parallel computes it over several devices"
        )
