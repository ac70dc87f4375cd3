"""Attention on sequences whose rows several ranks share; docs/context-parallel.md has pictures.

context_parallel_attention() is attention() on local rows. shard() and unshard() cut tensors and put
them together; explain() prints which strategy a call takes, and what it costs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_attention._cp_cost import Prediction, Shape, predict
from te_attention._cp_cost import Topology as _Topology
from te_attention._library import setting
from te_attention.torch._arguments import Arguments
from te_attention.torch._bounded import keep
from te_attention.torch._cp_agree import DisagreementError, agree, report_error
from te_attention.torch._cp_call import ALIGNMENT, Call, ContextParallel
from te_attention.torch._cp_exchange import Exchange, exchange_all, ordered_sum
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_parts import UNBOUNDED, Problem, ring_parts
from te_attention.torch._cp_problem import (
    SHARDINGS,
    STRATEGIES,
    Distribution,
    check_strategy,
    make_problem,
    problem_of,
    refuse,
    shares,
)
from te_attention.torch._cp_run import Inputs
from te_attention.torch._cp_transport import GroupTransport, drive
from te_attention.torch._fp8 import check as check_fp8_option
from te_attention.torch.functional import MULTIPLE, chosen, describe

Group: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
Strategy: TypeAlias = (
    Literal["auto", "ring", "all_gather", "a2a", "halo", "gather_q"] | tuple[str, str]
)
Sharding: TypeAlias = Literal["zigzag", "contiguous"]
HIERARCHICAL = ("a2a", "ring")
MEBI = 2**20
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))  # options whose values are compared
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_are_all_deterministic = torch.are_deterministic_algorithms_enabled
__all__ = [
    "DisagreementError",
    "Topology",
    "context_parallel_attention",
    "explain",
    "shard",
    "unshard",
]


class Topology(_Topology):
    """Speed of a group's devices and links: TFLOP/s of attention, GB/s a rank and direction."""

    @classmethod
    def measure(cls, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> "Topology":
        """Measured on `device` and between adjacent ranks; every rank gets the slowest numbers."""
        device = torch.device(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows = 8192 if device.type == "cuda" else 256
        q = torch.randn(1, 8, rows, 128, dtype=dtype, device=device, requires_grad=True)
        pairs = 4 * rows * rows * 8 * 128

        def seconds(work, repeats: int = 3) -> float:
            best = float("inf")
            for _ in range(repeats):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                begin = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - begin)
            return best

        from te_attention.torch.functional import attention

        one_way = seconds(lambda: attention(q.detach(), q.detach(), q.detach()))
        both = seconds(lambda: attention(q, q, q).sum().backward())
        message = torch.zeros(16 * MEBI if device.type == "cuda" else MEBI, device=device)
        transport = GroupTransport((group,))
        rank, world = transport.rank, transport.world

        def pass_on() -> None:
            exchange = Exchange([((rank + 1) % world, message)],
                                [((rank - 1) % world, torch.empty_like(message))])  # fmt: skip
            transport.post(exchange).wait()

        rate = 4 * message.numel() / seconds(pass_on) / 1e9 if world > 1 else 1e3
        mine = (pairs / one_way / 1e12, 2.5 * pairs / max(both - one_way, 1e-9) / 1e12, rate)
        found: list = [None] * world
        dist.all_gather_object(found, mine, group=group)
        return cls(*(min(x) for x in zip(*found, strict=True)))


_DEFAULT = Topology()


# ------------------------------------------------------------------------------------- choices


def _groups(group: Group, strategy: Strategy) -> tuple[tuple[dist.ProcessGroup, ...], str, int]:
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


def candidates(p: Problem, x: Inputs, topology: _Topology) -> list[tuple[str, Prediction, str]]:
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


def choose(p: Problem, x: Inputs, topology: _Topology) -> str:
    """The strategy that is predicted to take least; ties go to the earlier one."""
    if p.world == 1:
        return "ring"
    possible = [(sum(b.seconds for b in both), s) for s, both, why in candidates(p, x, topology)
                if not why]  # fmt: skip
    return min(possible, key=lambda one: one[0])[1]


_calls: dict[tuple, Call] = {}  # by their keys
_transports: dict[tuple, GroupTransport] = {}


def transport_of(
    groups: tuple[dist.ProcessGroup, ...], stream: "torch.cuda.Stream | None"
) -> GroupTransport:
    """The transport of these groups; it counts their messages."""
    key = (*(g.group_name for g in groups), stream)
    found = _transports.get(key)
    if found is None or found.groups != groups:  # names are used again after groups are destroyed
        found = _transports[key] = GroupTransport(groups, stream)
    return found


# ----------------------------------------------------------------------------------------- API


def _signature(a: Arguments, p: Problem, strategy: str, *wanted: object) -> dict[str, object]:
    """The values on which all ranks must agree, by name."""
    shapes = {}
    for name in ("bias", "sink", "slopes", "cu_seqlens_q", "cu_seqlens_kv", "offsets_q",
                 "offsets_kv", "k_descale", "v_descale"):  # fmt: skip
        tensor = getattr(a, name)
        if tensor is not None and name == "bias":
            shape = [n if n == 1 else "full" for n in tensor.shape]
            del shape[2]
            shapes[name] = f"{tensor.dtype} {shape}"
        else:
            shapes[name] = None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
    return {
        "strategy": strategy,
        "sharding": "zigzag" if p.q.zigzag else "contiguous",
        "world": p.world,
        "format": a.format,
        "dtype": a.q.dtype,
        "dtype of k": a.k.dtype,
        "batch": None if p.q.ragged else cost_shape(p, Inputs(a.q, a.k, a.v)).batch,
        "seqlen_q": p.q.tokens if p.q.ragged else p.q.length,
        "seqlen_kv": p.kv.tokens if p.kv.ragged else p.kv.length,
        "heads_q": p.heads_q,
        "heads_kv": p.heads_kv,
        "dim_qk": a.q.shape[-1],
        "dim_v": a.v.shape[-1],
        "mask": a.mask,
        "fp8": "current" if p.fp8 else None,
        "window": (a.window_left, a.window_right),
        "training": a.training,
        "return_lse, return_max_logit": wanted,
        "one row of bias": p.bias_row,
        **{
            name: getattr(a, name)
            for name in ("scale", "softcap", "dropout", "alibi", "off_by_one", "pre_scale_bias")
        },
        **shapes,
    }


def _take_fp8(q: Tensor, options: dict) -> bool:
    """Removes fp8 from the options: whether it is "current"."""
    fp8 = options.pop("fp8", None)
    if fp8 is None:
        return False
    if not isinstance(fp8, str):
        refuse("fp8", f"of type {type(fp8).__name__}",
               "'current': ranks find the scales of all rows")  # fmt: skip
    check_fp8_option(q, fp8)
    return True


def _check_words(sharding: object, check: object) -> None:
    if sharding not in SHARDINGS:
        refuse("sharding", repr(sharding), f"one of {', '.join(SHARDINGS)}")
    if check not in (None, "always", "new"):
        refuse("check", repr(check), "'always', 'new' or None")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    strategy: Strategy = "auto",
    sharding: Sharding = "zigzag",
    seqlens: int | Sequence[int] | tuple | None = None,
    topology: _Topology | None = None,
    stream: "torch.cuda.Stream | None" = None,
    check: Literal["always", "new"] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: object,
) -> Tensor | tuple[Tensor, ...]:
    """attention() on sequences whose rows the ranks of `group` share, with the same gradients.

    Every rank calls with its own rows, and gets its own rows of O. Sequences are cut along their
    rows into chunks: with "zigzag", two for each rank, of which rank r has chunks r and
    2 * ranks - 1 - r, in that order; with "contiguous" one. :func:`shard` cuts so.

    Args:
        q, k, v: the local rows, as attention() takes them.
        group: a process group; for ("a2a", "ring") the pair (inner, outer), of consecutive ranks
            and of ranks with the same place in the inner groups.
        strategy: "ring": K and V go round; "all_gather": every rank receives all of K and V;
            "a2a": ranks exchange rows for heads; "halo": only rows within a window travel;
            "gather_q": all of Q goes to every rank, and partial results return;
            ("a2a", "ring"): the third inside the inner groups, the first between them; "auto": the
            one that is predicted to take least. docs/context-parallel.md tells how to choose.
        sharding: "zigzag", which balances causal masks, or "contiguous".
        seqlens: global lengths, of both sides or a pair (q, kv): for dense formats the rows of a
            sequence, by default the local rows times the ranks; for "thd" a list of the lengths
            with padding, by default read from lengths on the CPU, and on a GPU taken to be
            multiples of 2 * ranks. Lengths that are no such multiples need no padding.
        topology: what "auto" predicts with. Default: an H200 on NVLink.
        stream: a CUDA stream that orders NCCL's transfers. Default: the current one; NCCL
            transfers on a stream of its own in any case.
        check: "always": ranks compare their calls before each one, which takes about a millisecond;
            "new": before each that is unlike earlier ones. Default: "always" with gloo or with
            TE_ATTENTION_CHECK=1 in the environment, else "new".
        return_lse, return_max_logit: as attention(), for the local rows.
        options: all other options of attention(), except origin and page tables. fp8 is "current",
            with one scale for a tensor of all ranks; k_descale and v_descale are equal on all
            ranks. cu_seqlens, offsets and max_seqlen are global. bias has the local rows and all
            columns ``[b, heads_q, local rows, s_kv]``. The gradients of a sink, and of a bias with
            one row, are sums over all ranks. rng_state is that of rank 0; dropout drops what one
            device would drop, for any number of ranks.

    Raises:
        ValueError, RuntimeError, TypeError: as attention().
        DisagreementError: ranks called with different arguments, or one did not call within 10 s.
    """
    how = (group, strategy, sharding, seqlens, topology, stream, check)
    wanted = (return_lse, return_max_logit)
    key = _key(q, k, v, options, (*how, *wanted))
    call, x = _calls.get(key), Inputs(q, k, v)
    if call is None:
        call, x, always = _new_call(q, k, v, how, dict(options), wanted)
        if key is not None and not always:
            keep(_calls, key, call)
    if call.problem.training:
        output = ContextParallel.apply(x.q, x.k, x.v, x.bias, x.sink, x, call)
    else:
        output, _ = call.forward(x)
    o, lse, *most = output
    if o.shape[-1] != v.shape[-1]:  # head dims that are no multiples of 8 were padded
        o = o[..., : v.shape[-1]]
    if not (return_lse or return_max_logit):
        return o
    return chosen((o, lse, most[0] if most else None), return_lse, return_max_logit)


def _new_call(
    q: Tensor, k: Tensor, v: Tensor, how: tuple, options: dict, wanted: tuple[bool, bool]
) -> tuple[Call, Inputs, bool]:
    """A call on which all ranks agree, its tensors, and whether they compare each one like it."""
    group, strategy, sharding, seqlens, topology, stream, check = how
    _check_words(sharding, check)
    groups, strategy, inner = _groups(group, strategy)
    transport = transport_of(groups, stream)
    always = check == "always" or (
        check is None and (transport.backend == "gloo" or setting("TE_ATTENTION_CHECK") == "1")
    )
    try:
        fp8 = _take_fp8(q, options)
        a = describe(q, k, v, return_max_logit=wanted[1], **options)
        first, zigzag = "ring" if strategy == "auto" else strategy, sharding == "zigzag"
        shared = Distribution(transport.world, transport.rank, first, inner, zigzag, seqlens, fp8)
        p, x = problem_of(a, shared)
        if strategy == "auto":
            strategy = choose(p, x, topology or _DEFAULT)
            p, x = problem_of(a, shared._replace(strategy=strategy))
        check_strategy(p)
    except BaseException as error:
        for one in groups:
            report_error(one, error)
        raise
    if p.world > 1:
        name = strategy if inner == 1 else f"a2a of {inner} + ring"
        p = _agreed(p, a, name, groups, always, wanted)
    return Call(p, transport), x, always


def _key(q: Tensor, k: Tensor, v: Tensor, options: dict, how: tuple) -> tuple | None:
    """Equal for calls that differ in the values of q, k and v alone; None: other tensors count.

    Reading the options of a call takes the host longer than anything else before it computes.
    """
    values = tuple(options.values())
    kinds = (type(q), type(k), type(v), *map(type, values))
    shape_v = v.shape
    if (
        not (_TENSORS.issuperset(kinds[:3]) and _PLAIN.issuperset(kinds[3:]))
        or options.get("dropout") or q.is_nested
        or q.shape[-1] % MULTIPLE or shape_v[-1] % MULTIPLE or _is_any_autocast_enabled()
    ):  # fmt: skip
        return None
    key = (
        how, tuple(options), values, kinds,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        _are_all_deterministic(), q.device, q.dtype, k.dtype, v.dtype,
        q.shape, k.shape, shape_v, q.stride(), k.stride(), v.stride(),
        q.data_ptr() % ALIGNMENT, k.data_ptr() % ALIGNMENT, v.data_ptr() % ALIGNMENT,
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _agreed(
    p: Problem,
    a: Arguments,
    strategy: str,
    groups: tuple[dist.ProcessGroup, ...],
    always: bool,
    wanted: tuple[bool, bool],
) -> Problem:
    """The problem, after all ranks have said that they have it too. What they said is kept."""
    key = ("agreed", *(g.group_name for g in groups), wanted)
    row = None if always else p.memo.get(key)
    if row is None:
        signature = _signature(a, p, strategy, *wanted)
        for one in groups:
            signature = agree(one, signature, always)
        row = p.memo[key] = signature["one row of bias"] == "True"
    return p if p.bias_row is row else replace(p, bias_row=row)


# ------------------------------------------------------------------------- cutting and joining


def _side(
    size: int, world: int, sharding: Sharding, cu_seqlens: Tensor | None, seqlen: int | None
) -> Side:
    """How a tensor is cut; `size`: its rows."""
    if sharding not in SHARDINGS:
        refuse("sharding", repr(sharding), f"one of {', '.join(SHARDINGS)}")
    zigzag = sharding == "zigzag"
    if cu_seqlens is None:
        return Side("bshd", world, zigzag, size if seqlen is None else seqlen)
    lengths = cu_seqlens.diff().long()
    if cu_seqlens.device.type == "cpu":
        tokens = tuple(shares(lengths, world, zigzag))
    else:
        tokens = (size // world,) * world
    return Side("thd", world, zigzag, 0, cu_seqlens, cu_seqlens, tokens, size)


def shard(
    x: Tensor,
    group: dist.ProcessGroup,
    axis: int = 1,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    rank: int | None = None,
) -> Tensor:
    """The rows of this rank, or of `rank`, along `axis` of a tensor with all rows: a copy.

    cu_seqlens: for tokens of ragged sequences, where each sequence starts, with its padding; on a
    GPU all lengths are multiples of twice the ranks. Lengths that are not give ranks different
    numbers of rows: chunks are multiples of 16 then, and the last ones short.
    """
    world = dist.get_world_size(group)
    rank = dist.get_rank(group) if rank is None else rank
    side = _side(x.shape[axis], world, sharding, cu_seqlens, None)
    if side.ragged:
        keys = side.keys(side.shard(rank))
        every = side.keys(side.shard(0, world))
        return x.index_select(axis, torch.searchsorted(every, keys).to(x.device))
    pieces = side.shard(rank).pieces
    return torch.cat([x.narrow(axis, p.begin, p.end - p.begin) for p in pieces], axis)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, side, axis, transport):
        ctx.side, ctx.axis, ctx.transport = side, axis, transport
        rank, world = transport.rank, transport.world
        buffers = []
        for r in range(world):
            shape = list(x.shape)
            shape[axis] = side.shard(r).size
            buffers.append(x if r == rank else x.new_empty(shape))
        drive(exchange_all([x.contiguous()] * world, buffers, rank), transport)
        return side.join(buffers, 0, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        transport = ctx.transport
        rank, world = transport.rank, transport.world
        parts = ctx.side.split(gradient, 0, world, ctx.axis)
        parts = [part.contiguous() for part in parts]
        buffers = [parts[rank] if r == rank else torch.empty_like(parts[rank])
                   for r in range(world)]  # fmt: skip
        drive(exchange_all(parts, buffers, rank), transport)
        return ordered_sum(buffers), None, None, None


def unshard(
    x: Tensor,
    group: dist.ProcessGroup,
    axis: int = 1,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
) -> Tensor:
    """All rows, on every rank, from the rows of each: the inverse of shard().

    seqlen: all rows, where ranks have different numbers of them. The gradient of a row is the sum
    of those that the ranks have for it.
    """
    world = dist.get_world_size(group)
    rows = x.shape[axis]
    side = _side(rows * world, world, sharding, cu_seqlens, seqlen)
    needed = side.shard(dist.get_rank(group)).size
    if rows != needed:
        refuse(f"x.shape[{axis}]", rows, f"{needed} rows (seqlen= gives the sum of all ranks)")
    return _Unshard.apply(x, side, axis, transport_of((group,), None))


# ------------------------------------------------------------------------------------- explain


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
    topology: _Topology | None = None,
    **options: object,
) -> str:
    """Text: the strategy of a call, why not the others, its steps, bytes and predicted times.

    Of the rank of `group`, or without a group of `rank` among `world` ranks; nothing is sent.
    """
    if group is not None:
        groups, strategy, inner = _groups(group, strategy)
        transport = GroupTransport(groups)
        world, rank = transport.world, transport.rank
    elif world is None:
        refuse("world", None, "a number of ranks, or a group")
    elif isinstance(strategy, (tuple, list)):
        strategy = "ring"
    topology = topology or _DEFAULT
    fp8 = _take_fp8(q, options)
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
