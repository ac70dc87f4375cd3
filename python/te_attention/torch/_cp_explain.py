"""Text about a call: which strategy it takes, and what that costs."""

from collections.abc import Sequence

from torch import Tensor

from te_attention._cp_cost import Topology
from te_attention._library import setting
from te_attention.torch import _cp_window as window
from te_attention.torch._cp_choice import (
    DEFAULT_TOPOLOGY,
    Group,
    Sharding,
    Strategy,
    candidates,
    choose,
    groups_of,
    take_fp8,
)
from te_attention.torch._cp_halo import halo_plan
from te_attention.torch._cp_parts import Operands, Problem, has_no_other, ring_parts
from te_attention.torch._cp_problem import Distribution, make_problem, refuse
from te_attention.torch._cp_run import Inputs
from te_attention.torch._cp_transport import GroupTransport
from te_attention.torch.functional import MULTIPLE, describe

MEBI = 2**20


def why_not_repeated(p: Problem, x: Inputs, backend: str = "nccl") -> str:
    """Why no forward pass like this one is repeated from a recording (_cp_call.py); "": it is."""
    operands = Operands(x.q, x.bias, x.sink, x.slopes, x.rng_state, descales=x.descales)
    lengths = p.q.has_lengths or p.kv.has_lengths
    is_halo = p.strategy == "halo"
    for reason, holds in (
        ("one rank has no transfers", p.world == 1),
        (f"transfers over {backend}", backend != "nccl"),
        ("TE_ATTENTION_CHECK=1", setting("TE_ATTENTION_CHECK") == "1"),
        (f"the strategy {p.strategy}", p.strategy not in ("ring", "halo")),
        ("two groups", p.inner > 1),
        ("dropout", bool(p.dropout)),
        ("FP8", p.fp8),
        ("return_max_logit", p.max_logit),
        ("options that are tensors", lengths or not has_no_other(operands)),
        (f"head dims that are no multiples of {MULTIPLE}",
         any(t.shape[-1] % MULTIPLE for t in (x.q, x.v))),
        ("a ring with an off-by-one sink", p.off_by_one and not is_halo),
        ("ALiBi", p.alibi and is_halo),
    ):  # fmt: skip
        if holds:
            return reason
    # Last, because a plan needs the lengths on the host.
    if is_halo and not (p.window[0] and halo_plan(p, window.serves(p, operands)).local):
        return "a window with later keys, or without earlier ones"
    return ""


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world: int | None = None,
    rank: int = 0,
    group: Group | None = None,
    strategy: Strategy = "auto",
    sharding: Sharding = "zigzag",
    inner: int = 1,
    seqlens: int | Sequence[int] | tuple | None = None,
    topology: Topology | None = None,
    **options: object,
) -> str:
    """Text: the strategy of a call, why not the others, its steps, bytes and predicted times.

    Of the rank of `group`, or without a group of `rank` among `world` ranks, over NCCL; nothing is
    sent.
    """
    backend = "nccl"
    if group is not None:
        groups, strategy, inner = groups_of(group, strategy)
        transport = GroupTransport(groups)
        world, rank, backend = transport.world, transport.rank, transport.backend
    elif world is None:
        refuse("world", None, "a number of ranks, or a group")
    elif isinstance(strategy, (tuple, list)):
        strategy = "ring"
    topology = topology or DEFAULT_TOPOLOGY
    fp8 = take_fp8(q, options)
    a = describe(q, k, v, **options)
    first = "ring" if strategy == "auto" else strategy
    how = Distribution(world, rank, first, inner, sharding == "zigzag", seqlens, fp8)
    p, x = make_problem(a, how)
    lines = []
    if strategy == "auto":
        strategy = choose(p, x, topology)
        p, x = make_problem(a, how._replace(strategy=strategy))
    name = strategy if p.group in (1, p.world) else f"a2a of {p.group} ranks + ring"
    lines.append(f"rank {rank} of {world}: {name}, {sharding} shards")
    for one, (ahead, back), why in candidates(p, x, topology):
        verdict = f"cannot run: {why}" if why else (
            f"forward {1e3 * ahead.seconds:.3f} ms, backward {1e3 * back.seconds:.3f} ms, "
            f"{ahead.received / MEBI:.2f} MiB received forward, {ahead.extra / MEBI:.2f} MiB more "
            "memory"
        )  # fmt: skip
        lines.append(f"  {one}{' (chosen)' if one == strategy else ''}: {verdict}")
    why = why_not_repeated(p, x, backend)
    lines.append(f"  each call runs its program in Python: {why}" if why else
                 "  equal calls after the second are repeated from a recording")  # fmt: skip
    if p.strategy in ("ring", "a2a"):
        positions = bool(p.dropout or p.alibi or x.slopes is not None or x.bias is not None)
        parts, sends, receives = ring_parts(p, positions)
        for step in range(p.members):
            here = [part for part in parts if part.step == step]
            blocks = ", ".join(
                f"queries {part.q} x keys {part.kv} of {part.source}"
                + (" masked" if part.masked else "")
                for part in here
            )
            moves = [w for w, s in (("sends", sends), ("receives", receives)) if step in s]
            lines.append(
                f"  step {step}: {blocks or 'nothing'}; {' and '.join(moves) or 'no'} keys"
            )
    return "\n".join(lines)
