"""A case of the kit shared by virtual ranks in lock-step, and its results in the case's memory."""

import random
import re
from dataclasses import replace

import torch

from cases import ORDERS, options_of
from kit import Case
from te_attention.torch._arguments import FORMATS
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_problem import Distribution, make_problem
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.functional import describe

WORLDS = (1, 2, 3, 4, 8)


def adapted(line: str) -> str | None:
    """The case without what ranks do not share; None: pages and FP8."""
    if "paged" in line or re.search(r"\bdtype=e[45]m", line):
        return None
    return re.sub(r" (origin|origin_in_memory)=\S+", "", " " + line).strip()


class Shared:
    """One side of a case: its rows as global tensors with padding, cut for each rank."""

    def __init__(self, case: Case, side: str, form: str, world: int, zigzag: bool, rng) -> None:
        self.case, self.format, self.ragged = case, form, case.form(side) == "ragged"
        self.cu = case[f"CU_SEQLENS_{side.upper()}"]
        self.starts, self.room = None, None
        if self.ragged:
            lengths = self.cu.diff()
            room = torch.tensor([int(n) + rng.choice((0, 0, 1, 7)) for n in lengths]).int()
            self.room = room.tolist()
            self.starts = torch.zeros_like(self.cu)
            self.starts[1:] = room.cumsum(0)
            offsets = case[f"OFFSETS_{side.upper()}"]
            self.places = self.cu if offsets is None else offsets
            self.side = Side(form, world, zigzag, 0, self.cu, self.starts,
                             tokens=tuple(_tokens(room, world, zigzag)),
                             longest=int(room.max()) if room.numel() else 0,
                             host_starts=self.starts)  # fmt: skip
        else:
            self.rows = case["Q" if side == "q" else "K"].shape[1]
            self.side = Side(form, world, zigzag, self.rows, self.cu)

    def rank(self, tensor: torch.Tensor, r: int, axis: int | None = None) -> torch.Tensor:
        """The rows of a rank of a global tensor."""
        axis = self.side.axis if axis is None else axis
        shard = self.side.shard(r)
        if self.ragged:
            keys, every = (self.side.keys(s) for s in (shard, self.side.shard(0, self.side.world)))
            return tensor.index_select(axis, torch.searchsorted(every, keys).to(tensor.device))
        pieces = [tensor.narrow(axis, p.begin, p.end - p.begin) for p in shard.pieces]
        return torch.cat(pieces, axis).contiguous()

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the case as a global one, in the format; NaN in padding."""
        if not self.ragged:
            return tensor.permute(ORDERS[self.format]).clone()
        out = tensor.new_full((int(self.starts[-1]), *tensor.shape[1:]), torch.nan)
        for i, n in enumerate(self.cu.diff().tolist()):
            at, to = int(self.places[i]), int(self.starts[i])
            out[to : to + n] = tensor[at : at + n]
        return out

    def gather(self, target: torch.Tensor, value: torch.Tensor, blank: float) -> torch.Tensor:
        """Writes a global tensor with rows first into the case; padding of it must be `blank`."""
        if not self.ragged:
            target.copy_(value)
            return
        target.fill_(blank)
        covered = torch.zeros(value.shape[0], dtype=torch.bool)
        for i, n in enumerate(self.cu.diff().tolist()):
            at, to = int(self.places[i]), int(self.starts[i])
            target[at : at + n] = value[to : to + n]
            covered[to : to + n] = True
        assert (value[~covered] == blank).all(), "padding was written"


def _tokens(room: torch.Tensor, world: int, zigzag: bool) -> list[int]:
    from te_attention.torch._cp_problem import shares

    return shares(room.long(), world, zigzag)


def strategies_of(world: int) -> list[tuple[str, int]]:
    """Strategies and inner groups of so many ranks."""
    found = [("ring", 1), ("all_gather", 1), ("a2a", 1), ("halo", 1)]
    return found + [("ring", n) for n in (2, 4) if n < world and world % n == 0]


def run(line: str, seed: int, device: str = "cpu", how: tuple | None = None) -> str | None:
    """The error of a case by a number of ranks and a strategy that the seed picks, or `how`."""
    line = adapted(line)
    if line is None or (device != "cpu" and "dtype=fp64" in line):
        return None
    rng = random.Random(seed)
    world = rng.choice(WORLDS)
    strategy, inner = rng.choice(strategies_of(world))
    if how is not None:
        strategy, inner = how
    zigzag = rng.random() < 0.7
    if device != "cpu" and "bottom_right=1" in line and re.search("ragged|padded", line):
        strategy = "ring" if strategy == "halo" else strategy  # which needs shifts on the host
    names = tuple(ORDERS)
    with Case(line) as case:
        case.fill(large=False)
        forms = ["thd" if case.form(s) == "ragged" else rng.choice(names) for s in ("q", "kv")]
        sides = [
            Shared(case, s, form, world, zigzag, rng)
            for s, form in zip(("q", "kv"), forms, strict=True)
        ]
        where = f"world={world} strategy={strategy} inner={inner} zigzag={zigzag} {forms} {line}"
        try:
            wrong = _run(case, sides, (world, strategy, inner, zigzag), device)
        except Exception as error:
            raise AssertionError(where) from error
        return wrong and f"{where}\n{wrong}"


def _run(case: Case, sides: list[Shared], how: tuple, device: str) -> str:
    world, strategy, inner, zigzag = how
    q_side, kv_side = sides
    training = case.field("training") == "1"
    options = options_of(case, device)
    for name, side in (("q", q_side), ("kv", kv_side)):
        if side.ragged:
            options[f"offsets_{name}"] = side.starts.to(device)
            if options["bias"] is None:  # whose shape is that of the case
                options[f"max_seqlen_{name}"] = side.side.longest
    options["origin"] = None
    if case.field("kv_dtype", "default") != "default":
        for name in "KV":
            scale = case[f"{name}_SCALE_INV"]
            options[f"{name.lower()}_descale"] = None if scale is None else scale.to(device)
    bias = options.pop("bias")
    whole = [s.spread(case[n]).to(device) for n, s in zip("QKV", (*sides, kv_side), strict=True)]
    # The host reads lengths that are not on a GPU.
    ragged = [None if device == "cpu" else s.room for s in sides]
    lengths = tuple(r if s.ragged else s.rows for r, s in zip(ragged, sides, strict=True))
    problems, inputs = [], []
    for r in range(world):
        local = [s.rank(t, r) for t, s in zip(whole, (q_side, kv_side, kv_side), strict=True)]
        rows = bias
        if bias is not None and not q_side.ragged and bias.shape[2] == q_side.rows:
            rows = q_side.rank(bias, r, 2)
        a = describe(*local, format=f"{q_side.format}_{kv_side.format}", bias=rows,
                     return_max_logit=True, **options)._replace(training=training)  # fmt: skip
        p, x = make_problem(a, Distribution(world, r, strategy, inner, zigzag, lengths))
        problems.append(p)
        inputs.append(x)
    # Where every rank has one row, no rank can tell the rows of a bias: the case does.
    broadcast = bias is not None and (q_side.ragged or bias.shape[2] == 1)
    row = next((p.bias_row for p in problems if p.bias_row is not None), broadcast)
    problems = [replace(p, bias_row=row) for p in problems]
    results = LockStep([forward(p, x) for p, x in zip(problems, inputs, strict=True)]).run()
    outputs, saved = zip(*results, strict=True)
    _write_forward(case, q_side, outputs)
    wrong = case.damage(backward=False)
    if training:
        _differentiate(case, sides, problems, inputs, saved)
        wrong += case.damage(backward=True)
    return wrong + case.compare("cpu" if device == "cpu" else "portable")


def _write_forward(case: Case, side: Shared, outputs: tuple) -> None:
    def joined(i: int, axis: int | None = None) -> torch.Tensor:
        return side.side.join([o[i].cpu() for o in outputs], 0, axis)

    o = joined(0)
    side.gather(case["O"], o if side.ragged else o.permute(ORDERS[side.format]), 0)
    rows = 0 if side.ragged else 2
    lse, largest = joined(1, rows), joined(2, rows)
    for name, value in (("LSE", lse), ("MAX", largest)):
        if case[name] is not None:
            side.gather(case[name], value, -torch.inf)
    if case["SUM_EXP"] is not None:
        sums = (lse.double() - largest.double()).exp()
        side.gather(case["SUM_EXP"], torch.where(largest == -torch.inf, 0, sums).to(lse.dtype), 0)


def _differentiate(case, sides, problems, inputs, saved) -> None:
    q_side, kv_side = sides
    device = inputs[0].q.device
    dout = q_side.spread(case["DOUT"]).to(device)
    dlse = case["DLSE"]
    if dlse is not None:
        dlse = (q_side.spread(dlse) if q_side.ragged else dlse).to(device)
    programs = []
    for p, x, s in zip(problems, inputs, saved, strict=True):
        rows = 0 if q_side.ragged else 2
        local = None if dlse is None else q_side.rank(dlse, p.rank, rows)
        programs.append(backward(p, x, s, q_side.rank(dout, p.rank), local))
    gradients = [[g if g is None else g.cpu() for g in of] for of in LockStep(programs).run()]
    for i, (name, side) in enumerate((("DQ", q_side), ("DK", kv_side), ("DV", kv_side))):
        value = side.side.join([g[i] for g in gradients], 0)
        side.gather(case[name], value if side.ragged else value.permute(ORDERS[side.format]), 0)
    if case["DBIAS"] is not None:
        of = [g[3] for g in gradients]
        if not problems[0].bias_row:
            case["DBIAS"].copy_(q_side.side.join(of, 0, 2))
        else:
            _check_equal(of, "dbias")
            case["DBIAS"].copy_(of[0])
    if case["DSINK"] is not None:
        of = [g[4] for g in gradients]
        _check_equal(of, "dsink")
        case["DSINK"].copy_(of[0])


def _check_equal(of: list[torch.Tensor], name: str) -> None:
    """Sums over ranks have the same bits on every rank."""
    for one in of:
        torch.testing.assert_close(one, of[0], atol=0, rtol=0, equal_nan=True, msg=name)


__all__ = ["FORMATS", "run"]
