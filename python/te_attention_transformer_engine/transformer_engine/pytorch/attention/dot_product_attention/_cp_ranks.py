"""The ranks that share the sequences of a call, from TransformerEngine's cp_* arguments."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch import context_parallel_attention
from transformer_engine.pytorch._refusal import refuse, require
from transformer_engine.pytorch.constants import dist_group_type
from transformer_engine.pytorch.distributed import get_distributed_world_size

# The strategies of context_parallel_attention(), by TransformerEngine's names.
STRATEGIES = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "a2a": "a2a",
    "a2a+p2p": ("a2a", "ring"),
}
LEVELS = 2  # groups of a2a+p2p


def group_size(group: object) -> int:
    """The number of ranks of a process group or of a list of groups."""
    if group is None:
        return 1
    if not isinstance(group, list):
        return get_distributed_world_size(group)
    ranks = 1
    for one in group:
        ranks *= group_size(one)
    return ranks


class Ranks(NamedTuple):
    """Process groups of more than one rank, and how they share a call."""

    groups: tuple[object, ...]  # with two of them, a2a in the first and p2p in the second
    strategy: str | tuple[str, str]
    stream: object

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, object]) -> object:
        """context_parallel_attention() with the options of attention().

        p2p with a window transfers only the rows within it, if the host knows which these are.
        """
        group = self.groups if isinstance(self.strategy, tuple) else self.groups[0]
        strategy, (left, right) = self.strategy, options["window"] or (None, None)
        causal = (options["mask"] or "").startswith("causal")
        bounded = left is not None and (causal or right is not None)
        if strategy == "ring" and bounded and "thd" not in options["format"]:
            strategy = "halo"
        return context_parallel_attention(
            q, k, v, group=group, strategy=strategy, stream=self.stream, **options
        )

    def largest(self, of_heads: Tensor) -> Tensor:
        """The maximum over all ranks, in place."""
        for group in self.groups:
            torch.distributed.all_reduce(of_heads, torch.distributed.ReduceOp.MAX, group)
        return of_heads


def ranks_of(
    cp_group: object, cp_stream: object = None, cp_comm_type: str = "p2p", fp8: bool = False
) -> Ranks | None:
    """The ranks of a group or of a list of two groups; None if there is one rank."""
    if cp_group is None:
        return None
    require(cp_comm_type in STRATEGIES, "cp_comm_type", repr(cp_comm_type), ", ".join(STRATEGIES))
    groups = cp_group if isinstance(cp_group, list) else [cp_group]
    levels = LEVELS if cp_comm_type == "a2a+p2p" else 1
    if len(groups) != levels or not all(isinstance(g, dist_group_type) for g in groups):
        seen = [type(g).__name__ for g in groups]
        needed = "a list of two process groups" if levels == LEVELS else "a process group"
        refuse("cp_group", f"of {', '.join(seen)}", f"{needed} with cp_comm_type {cp_comm_type}")
    if group_size(cp_group) == 1:
        return None
    require(not fp8, "fp8", True, "False with context parallelism")
    if cp_stream is not None and not isinstance(cp_stream, torch.cuda.Stream):
        refuse("cp_stream", type(cp_stream).__name__, "a torch.cuda.Stream or None")
    return Ranks(tuple(groups), STRATEGIES[cp_comm_type], cp_stream)
