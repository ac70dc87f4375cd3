"""Which strategy a call takes: what its words mean, what each strategy costs, and what may run."""

from typing import Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from te_attention._cp_cost import Prediction, Shape, Topology, predict
from te_attention.torch._cp_parts import UNBOUNDED, Problem
from te_attention.torch._cp_problem import STRATEGIES, refuse
from te_attention.torch._cp_run import Inputs
from te_attention.torch._fp8 import check as check_fp8_option

Group: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
Strategy: TypeAlias = (
    Literal["auto", "ring", "all_gather", "a2a", "halo", "gather_q"] | tuple[str, str]
)
Sharding: TypeAlias = Literal["zigzag", "contiguous"]
HIERARCHICAL = ("a2a", "ring")
DEFAULT_TOPOLOGY = Topology()


def groups_of(group: Group, strategy: Strategy) -> tuple[tuple[dist.ProcessGroup, ...], str, int]:
    """The groups that are used, the strategy of the outer one, and the ranks of the inner one."""
    if isinstance(strategy, (tuple, list)):
        if tuple(strategy) != HIERARCHICAL:
            refuse("strategy", strategy, f"one of auto, {', '.join(STRATEGIES)} or {HIERARCHICAL}")
        if not isinstance(group, (tuple, list)) or len(group) != 2:
            refuse("group", type(group).__name__, f"(inner, outer) groups for {HIERARCHICAL}")
        inner, outer = (dist.get_world_size(g) for g in group)
        if inner == 1:
            return (group[1],), "ring", 1
        if outer == 1:
            return (group[0],), "a2a", 1
        return tuple(group), "ring", inner
    if strategy not in ("auto", *STRATEGIES):
        refuse("strategy", repr(strategy), f"one of auto, {', '.join(STRATEGIES)}")
    if not isinstance(group, dist.ProcessGroup):
        refuse("group", type(group).__name__, "a ProcessGroup")
    return (group,), strategy, 1


def cost_shape(p: Problem, x: Inputs) -> Shape:
    """The problem as the formula of costs takes it."""
    batch = 1 if p.q.ragged else x.q.shape[1 if p.q.format == "sbhd" else 0]
    lengths = [sum(s.tokens) if s.ragged else s.length for s in (p.q, p.kv)]
    left, right = (None if bound == UNBOUNDED else bound for bound in p.window)
    return Shape(p.world, *lengths, p.heads_q, p.heads_kv, x.q.shape[-1], x.v.shape[-1], batch,
                 x.q.element_size(), p.causal, (left, right), p.q.zigzag, p.inner)  # fmt: skip


def candidates(p: Problem, x: Inputs, topology: Topology) -> list[tuple[str, Prediction, str]]:
    """Each strategy, what both directions take, and why it cannot run; the first to win ties."""
    out = []
    shape = cost_shape(p, x)
    for strategy in STRATEGIES:
        why = ""
        if strategy == "a2a" and p.heads_q < p.world:
            why = f"{p.heads_q} heads of q are fewer than {p.world} ranks"
        left, right = p.window
        if strategy == "halo":
            if left == UNBOUNDED or (right == UNBOUNDED and not p.causal):
                why = "no window on both sides"
            elif any(s.ragged and s.host_starts is None for s in (p.q, p.kv)):
                why = "lengths are on the device"
        both = [predict(strategy, shape, topology, backward=b) for b in (False, True)]
        out.append((strategy, both, why))
    return out


def choose(p: Problem, x: Inputs, topology: Topology) -> str:
    """The strategy that is predicted to take least; ties go to the earlier one."""
    if p.world == 1:
        return "ring"
    possible = [(sum(b.seconds for b in both), s) for s, both, why in candidates(p, x, topology)
                if not why]  # fmt: skip
    return min(possible, key=lambda one: one[0])[1]


def take_fp8(q: Tensor, options: dict) -> bool:
    """Removes fp8 from the options: whether it is "current"."""
    fp8 = options.pop("fp8", None)
    if fp8 is None:
        return False
    if not isinstance(fp8, str):
        refuse("fp8", f"of type {type(fp8).__name__}",
               "'current': ranks find the scales of all rows")  # fmt: skip
    check_fp8_option(q, fp8)
    return True
