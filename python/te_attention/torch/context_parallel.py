"""Attention on sequences whose rows several ranks share; docs/context-parallel.md has pictures.

context_parallel_attention() is attention() on local rows. shard() and unshard() cut tensors and put
them together; explain() prints which strategy a call takes, and what it costs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from te_attention._cp_cost import Topology as _Topology
from te_attention._library import setting
from te_attention.torch._arguments import Arguments
from te_attention.torch._autograd import is_traced
from te_attention.torch._bounded import keep
from te_attention.torch._cp_agree import DisagreementError, agree, report_error
from te_attention.torch._cp_call import Call, ContextParallel
from te_attention.torch._cp_choice import (
    DEFAULT_TOPOLOGY,
    Group,
    Sharding,
    Strategy,
    choose,
    cost_shape,
    groups_of,
    take_fp8,
)
from te_attention.torch._cp_exchange import Exchange
from te_attention.torch._cp_explain import explain
from te_attention.torch._cp_parts import Problem
from te_attention.torch._cp_problem import (
    SHARDINGS,
    Distribution,
    check_strategy,
    problem_of,
    refuse,
)
from te_attention.torch._cp_recording import ALIGNMENT
from te_attention.torch._cp_run import Inputs
from te_attention.torch._cp_shard import shard, unshard
from te_attention.torch._cp_transport import GroupTransport, transport_of
from te_attention.torch.functional import MULTIPLE, chosen, describe

MEBI = 2**20
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))  # options whose values are compared
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
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


_calls: dict[tuple, Call] = {}  # by their keys
_latest: dict[tuple, Call] = {}  # the last ones, by their sites


def _signature(a: Arguments, p: Problem, strategy: str, *wanted: object) -> dict[str, object]:
    """The values on which all ranks must agree, by name."""
    shapes = {}
    for name in ("bias", "sink", "slopes", "cu_seqlens_q", "cu_seqlens_kv", "offsets_q",
                 "offsets_kv", "k_descale", "v_descale"):  # fmt: skip
        tensor = getattr(a, name)
        if tensor is not None and name == "bias" and not p.q.ragged:  # of the local rows
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
            columns ``[b, heads_q, local rows, s_kv]``, with "thd" the rows of all ranks, too. The
            gradients of a sink, and of a bias with one row or with "thd", are sums over all ranks.
            rng_state is that of rank 0; dropout drops what one device would drop, for any number of
            ranks.

    torch.compile leaves the call out of its graphs. Transforms of torch.func, and forward-mode
    differentiation, are refused.

    Raises:
        ValueError, RuntimeError, TypeError: as attention().
        DisagreementError: ranks called with different arguments, or one did not call within 10 s.
    """
    how = (group, strategy, sharding, seqlens, topology, stream, check)
    wanted = (return_lse, return_max_logit)
    if _is_compiling():
        return _call_outside_graphs(q, k, v, how, options, wanted)
    return _call(q, k, v, how, options, wanted)


def _call_outside_graphs(*arguments: object) -> Tensor | tuple[Tensor, ...]:
    """A graph break: transfers and recordings are no operators that a graph could hold.

    torch.compiler.disable as a decorator would import the compiler, which takes a second.
    """
    return torch.compiler.disable(_call)(*arguments)


def _call(
    q: Tensor, k: Tensor, v: Tensor, how: tuple, options: dict, wanted: tuple[bool, bool]
) -> Tensor | tuple[Tensor, ...]:
    site = _site(q, k, v, options, (*how, *wanted))
    call = _latest.get(site)
    output = None if call is None else _repeat(q, k, v, call)
    if output is None:  # this call is not like the last one there
        output = _run(q, k, v, site, how, options, wanted)
    o, lse, *most = output
    if not any(wanted):
        return o
    return chosen((o, lse, most[0] if most else None), *wanted)


def _repeat(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list | tuple | None:
    """O, LSE and row maxima by the recording of a call, if it has one that fits."""
    if not call.problem.training:
        return call.passes[0].repeat((q, k, v))
    with torch.no_grad():  # the device computes while autograd makes a node
        found = call.passes[0].repeat((q, k, v))
    if found is None:
        return None
    return ContextParallel.apply(q, k, v, None, None, None, call, found)


def _run(
    q: Tensor, k: Tensor, v: Tensor, site: tuple | None, how: tuple, options: dict,
    wanted: tuple[bool, bool],
) -> tuple:  # fmt: skip
    """O, LSE and row maxima."""
    key = None if site is None else _key(q, k, v, site)
    call, x = _calls.get(key), Inputs(q, k, v)
    if call is None:
        call, x, always = _new_call(q, k, v, how, dict(options), wanted)
        if key is not None and not always:
            keep(_calls, key, call)
    if call.problem.training:
        output = ContextParallel.apply(x.q, x.k, x.v, x.bias, x.sink, x, call, None)
    else:
        output, _ = call.forward(x)
    if key in _calls:
        keep(_latest, site, call)
    if output[0].shape[-1] != v.shape[-1]:  # head dims that are no multiples of 8 were padded
        return (output[0][..., : v.shape[-1]], *output[1:])
    return output


def _new_call(
    q: Tensor, k: Tensor, v: Tensor, how: tuple, options: dict, wanted: tuple[bool, bool]
) -> tuple[Call, Inputs, bool]:
    """A call on which all ranks agree, its tensors, and whether they compare each one like it."""
    group, strategy, sharding, seqlens, topology, stream, check = how
    _check_words(sharding, check)
    groups, strategy, inner = groups_of(group, strategy)
    transport = transport_of(groups, stream)
    always = check == "always" or (
        check is None and (transport.backend == "gloo" or setting("TE_ATTENTION_CHECK") == "1")
    )
    try:
        if is_traced():
            refuse("torch.func or torch.autograd.forward_ad", "active",
                   "torch.autograd: transfers have no rule for transforms")  # fmt: skip
        fp8 = take_fp8(q, options)
        a = describe(q, k, v, return_max_logit=wanted[1], **options)
        first, zigzag = "ring" if strategy == "auto" else strategy, sharding == "zigzag"
        shared = Distribution(transport.world, transport.rank, first, inner, zigzag, seqlens, fp8)
        p, x = problem_of(a, shared)
        if strategy == "auto":
            strategy = choose(p, x, topology or DEFAULT_TOPOLOGY)
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


def _site(q: Tensor, k: Tensor, v: Tensor, options: dict, how: tuple) -> tuple | None:
    """Equal for calls that differ in q, k and v alone; None: other tensors count.

    Reading the options of a call takes the host longer than anything else before it computes.
    """
    values = tuple(options.values())
    kinds = tuple(map(type, values))
    if (
        not (_TENSORS.issuperset((type(q), type(k), type(v))) and _PLAIN.issuperset(kinds))
        or q.is_nested or k.is_nested or v.is_nested
        or options.get("dropout") or _is_any_autocast_enabled() or is_traced()
    ):  # fmt: skip
        return None
    training = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    site = (how, tuple(options), values, kinds, training, _are_all_deterministic())
    try:
        hash(site)
    except TypeError:
        return None
    return site


def _key(q: Tensor, k: Tensor, v: Tensor, site: tuple) -> tuple | None:
    """Equal for calls of one site that differ in the values of q, k and v alone."""
    shape_v = v.shape
    if q.shape[-1] % MULTIPLE or shape_v[-1] % MULTIPLE:
        return None
    return (
        site, q.device, q.dtype, k.dtype, v.dtype,
        q.shape, k.shape, shape_v, q.stride(), k.stride(), v.stride(),
        q.data_ptr() % ALIGNMENT, k.data_ptr() % ALIGNMENT, v.data_ptr() % ALIGNMENT,
    )  # fmt: skip


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
