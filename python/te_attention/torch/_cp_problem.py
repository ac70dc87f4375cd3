"""From the arguments of a call to the problem of a rank: lengths, shards and checks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch._arguments import FORMATS, NUM_INPUTS, Arguments, formats_of
from te_attention.torch._bounded import keep
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_parts import UNBOUNDED, Problem
from te_attention.torch._cp_run import Inputs

STRATEGIES = ("ring", "all_gather", "a2a", "halo", "gather_q")
SHARDINGS = ("zigzag", "contiguous")
OPTIONS = ("scale", "softcap", "pre_scale_bias", "deterministic", "batch_invariant", "engine",
           "max_ctas")  # fmt: skip
Lengths = int | Sequence[int] | None


def refuse(name: str, seen: object, needed: str) -> None:
    """Raises a ValueError."""
    raise ValueError(f"{name} is {seen}; needs {needed}")


def _pair(seqlens: object) -> tuple[Lengths, Lengths]:
    """Lengths of both sides from one, or from a pair."""
    if isinstance(seqlens, tuple):
        if len(seqlens) != 2:
            refuse("seqlens", seqlens, "the lengths of q, and those of k and v")
        return seqlens
    return seqlens, seqlens


def shares(lengths: Tensor, world: int, zigzag: bool) -> list[int]:
    """Tokens of each rank, of sequences whose room the host knows."""
    side = Side("thd", world, zigzag, starts=_prefix(lengths))
    counts = []
    for rank in range(world):
        pieces = side.shard(rank).pieces
        counts.append(int(sum((p.end - p.begin).sum() for p in pieces)))
    return counts


def _prefix(lengths: Tensor) -> Tensor:
    starts = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    starts[1:] = lengths.cumsum(0)
    return starts


def _dense(
    name: str, tensor: Tensor, form: str, world: int, rank: int, zigzag: bool, cu: Tensor | None,
    length: Lengths,
) -> Side:  # fmt: skip
    rows = tensor.shape[FORMATS[form][1]]
    if length is not None and not isinstance(length, int):
        refuse("seqlens", length, f"a number of rows for {form}")
    total = rows * world if length is None else length
    side = Side(form, world, zigzag, total, cu)
    needed = side.shard(rank).size
    if rows != needed:
        refuse(
            f"{name}.shape[{side.axis}]",
            rows,
            f"{needed}, the rows of rank {rank} of {world} of a sequence of {total}"
            + ("" if length is not None else ": give seqlens where chunks are not equal"),
        )
    return side


def _ragged(
    name: str, tensor: Tensor, world: int, rank: int, zigzag: bool, cu: Tensor | None,
    starts: Tensor | None, bound: int, lengths: Lengths,
) -> Side:  # fmt: skip
    if cu is None:
        refuse(f"cu_seqlens_{name}", None, "the global cumulative lengths, int32 [batch + 1]")
    starts = cu if starts is None else starts
    local = tensor.shape[0]
    known = None
    if isinstance(lengths, int):
        refuse("seqlens", lengths, "a list of lengths with padding for thd")
    if lengths is not None:
        known = torch.tensor(list(lengths), dtype=torch.int64)
        if known.shape[0] != cu.shape[0] - 1:
            refuse("seqlens", f"of {known.shape[0]} lengths", f"{cu.shape[0] - 1}, as cu_seqlens")
    elif starts.device.type == "cpu":
        known = starts.diff().long()
        if starts.numel() and int(starts[0]) != 0:
            refuse(f"offsets_{name}[0]", int(starts[0]), "0")
        if known.numel() and int(known.min()) < 0:
            refuse(f"offsets_{name}", "descending", "ascending starts of sequences")
    if known is None:  # equal chunks, as TransformerEngine needs them
        tokens = [local] * world
        longest = bound if bound > 0 else local * world
    else:
        tokens = shares(known, world, zigzag)
        longest = int(known.max()) if known.numel() else 0
    if local != tokens[rank]:
        refuse(
            f"{name}.shape[0]",
            local,
            f"{tokens[rank]} tokens, those of rank {rank} of {world} of {sum(tokens)}",
        )
    host = None if known is None else _prefix(known)
    return Side("thd", world, zigzag, 0, cu, starts, tuple(tokens), longest, host)


def _sides(
    a: Arguments, world: int, rank: int, zigzag: bool, lengths: tuple[Lengths, Lengths]
) -> list[Side]:
    """Both sides of a call, whose tensors have the rows of this rank."""
    form_q, form_kv = formats_of(a)
    for form in (form_q, form_kv):
        if form not in FORMATS:
            refuse("format", repr(a.format), "bhsd, bshd, sbhd, thd or two of them")
    sides = []
    for name, tensor, form, cu, starts, bound, length in (
        ("q", a.q, form_q, a.cu_seqlens_q, a.offsets_q, a.max_seqlen_q, lengths[0]),
        ("k", a.k, form_kv, a.cu_seqlens_kv, a.offsets_kv, a.max_seqlen_kv, lengths[1]),
    ):
        if tensor.dim() != (3 if form == "thd" else 4):
            refuse(name, f"of {tensor.dim()} dimensions", f"{form}")
        if form == "thd":
            side = _ragged(name, tensor, world, rank, zigzag, cu, starts, bound, length)
        else:
            side = _dense(name, tensor, form, world, rank, zigzag, cu, length)
        sides.append(side)
    kv = sides[1]
    if a.v.shape[kv.axis] != a.k.shape[kv.axis]:
        refuse("v", f"of shape {list(a.v.shape)}", f"the rows of k {list(a.k.shape)}")
    return sides


def _check_bias(bias: Tensor, a: Arguments, q: Side, kv: Side) -> None:
    """With thd the bias is that of all ranks, of padded sequences of at most max_seqlen."""
    rows, columns, which = a.q.shape[q.axis], kv.length, "local rows"
    if q.ragged:
        rows, which = a.max_seqlen_q if a.max_seqlen_q >= 0 else sum(q.tokens), "rows"
    if kv.ragged:
        columns = a.max_seqlen_kv if a.max_seqlen_kv >= 0 else sum(kv.tokens)
    if bias.shape[2] not in (1, rows) or bias.shape[3] not in (1, columns):
        needed = f"1 or {rows} {which} and 1 or {columns} columns"
        refuse("bias", f"of shape {list(bias.shape)}", needed)


class Distribution(NamedTuple):
    """How ranks share a call, as one of them sees it. seqlens: of q and k, where they differ."""

    world: int
    rank: int
    strategy: str
    inner: int  # ranks of a group that exchange heads
    zigzag: bool
    seqlens: object
    fp8: bool = False


_problems: dict[tuple, Problem] = {}


def problem_of(a: Arguments, how: Distribution) -> tuple[Problem, Inputs]:
    """make_problem(). A problem whose lengths the host knows is kept for equal calls."""
    if a.cu_seqlens_q is not None or a.cu_seqlens_kv is not None:
        return make_problem(a, how)
    key = (how._replace(seqlens=repr(how.seqlens)), a.q.device, a.q.shape, a.q.dtype,
           a.k.shape, a.k.dtype, a.v.shape)  # fmt: skip
    key = (*key, *[(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in a[NUM_INPUTS:]])
    kept = _problems.get(key)
    if kept is not None:
        return kept, inputs_of(a)
    problem, inputs = make_problem(a, how)
    return keep(_problems, key, problem), inputs


def inputs_of(a: Arguments) -> Inputs:
    """The tensors of a call."""
    return Inputs(a.q, a.k, a.v, a.bias, a.sink, a.slopes, a.rng_state, (a.k_descale, a.v_descale))


def make_problem(a: Arguments, how: Distribution) -> tuple[Problem, Inputs]:
    """The problem of a rank and its tensors. Raises ValueError for what does not fit together."""
    for name in ("page_table", "page_table_v", "origin"):
        if getattr(a, name) is not None:
            refuse(name, "given", "None: ranks share rows that are no pages, each with its origin")
    q, kv = _sides(a, how.world, how.rank, how.zigzag, _pair(how.seqlens))
    bias = a.bias
    if bias is not None:
        _check_bias(bias, a, q, kv)
    heads_q, heads_kv = a.q.shape[q.heads_axis], a.k.shape[kv.heads_axis]
    if heads_kv == 0 or heads_q % heads_kv:
        refuse("heads_q", heads_q, f"a multiple of heads_kv, which is {heads_kv}")
    causal = a.mask in ("causal", "causal_bottom_right")
    window = (a.window_left, UNBOUNDED if causal else a.window_right)
    options = {name: getattr(a, name) for name in OPTIONS}
    problem = Problem(
        q,
        kv,
        how.rank,
        how.strategy,
        how.inner,
        causal,
        "bottom_right" in a.mask and (causal or window != (UNBOUNDED, UNBOUNDED) or _alibi(a)),
        window,
        heads_q,
        heads_kv,
        alibi=a.alibi and a.slopes is None,
        dropout=a.dropout,
        off_by_one=a.off_by_one,
        training=a.training,
        max_logit=a.max_logit,
        bias_row=bias is not None if q.ragged else _has_one_row(bias, a.q.shape[q.axis], q.length),
        fp8=how.fp8,
        options=options,
    )
    return problem, inputs_of(a)


def _has_one_row(bias: Tensor | None, rows: int, length: int) -> bool | None:
    """Whether a bias has one row for all; None: as many as there are here, so that others know."""
    if bias is None or bias.shape[2] != 1:
        return False
    return None if rows == 1 and length > 1 else rows != 1


def _alibi(a: Arguments) -> bool:
    return a.alibi or a.slopes is not None


def check_strategy(p: Problem) -> None:
    """Raises ValueError where a strategy cannot run the problem."""
    if p.strategy != "halo":
        return
    for side in (p.q, p.kv):
        if side.ragged and side.host_starts is None:
            refuse(
                "seqlens", None, "lengths on the host for halo with thd on a GPU (or all_gather)"
            )
    if isinstance(p.shift, Tensor) and p.shift.device.type != "cpu":
        refuse("mask", "at the bottom right of lengths on a GPU",
               "the top left, or another strategy than halo")  # fmt: skip
