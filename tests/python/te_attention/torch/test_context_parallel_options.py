"""Every option with every strategy and format, over ranks in lock-step: what one device gives.

The rows are those of the table of options in docs/context-parallel.md. Refused are REFUSED alone.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from te_attention.torch import attention
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_problem import Distribution, make_problem, shares
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.functional import describe

WORLD = 4
HOW = [("ring", 1), ("all_gather", 1), ("a2a", 1), ("halo", 1), ("gather_q", 1), ("ring", 2)]
DENSE = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
FORMATS = (*DENSE, "thd")
LENGTHS = (25, 40)  # of the two sequences of q with thd, or of padded ones
FP8, IN_FP8 = {"fp8": "current"}, {"dtype": torch.bfloat16, "dims": (32, 32)}
CAUSAL, WINDOW = {"mask": "causal"}, {"mask": "causal", "window": (9, None)}
HEADS = 4


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 2 - 1


@dataclass
class Row:
    """An option. rows: of q, and of k and v. tensors: options that are, made anew for each case."""

    options: dict = field(default_factory=dict)
    rows: tuple[int, int] = (40, 40)
    heads: int = HEADS  # of k and v
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    tensors: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    formats: tuple[str, ...] = ("bshd", "thd")
    padded: bool = False  # rows of which some do not count
    trains: bool = True
    dlse: bool = False


def bias(heads: int = HEADS, rows: int = 40, columns: int = 40) -> dict:
    return {"bias": lambda: uniform(1, heads, rows, columns)}


ROWS = {
    "float16": Row(CAUSAL, dtype=torch.float16),
    "bfloat16": Row(CAUSAL, dtype=torch.bfloat16),
    "float32": Row(CAUSAL, formats=FORMATS),
    "float64": Row(CAUSAL, dtype=torch.float64),
    "full": Row(),
    "padding": Row(CAUSAL, padded=True),
    "bottom right": Row({"mask": "causal_bottom_right"}, rows=(40, 56)),
    "bottom right of padded": Row({"mask": "causal_bottom_right"}, rows=(40, 56), padded=True),
    "other rows of keys": Row(rows=(40, 72)),
    "other rows of keys, causal": Row(CAUSAL, rows=(40, 72)),
    "window": Row(WINDOW),
    "window on both sides": Row({"window": (9, 5)}),
    "window at the bottom right": Row({"mask": "bottom_right", "window": (9, 5)}, rows=(40, 56)),
    "grouped queries": Row(CAUSAL, formats=FORMATS, heads=2),
    "one head of keys": Row(CAUSAL, heads=1),
    "MLA": Row(CAUSAL, dims=(24, 16)),
    "bias": Row(CAUSAL, tensors=bias(), formats=FORMATS),
    "bias before scale": Row({"bias_type": "pre_scale"}, tensors=bias()),
    "bias of a window": Row(WINDOW, tensors=bias()),
    "bias of all heads": Row(CAUSAL, tensors=bias(1)),
    "bias of all rows": Row(CAUSAL, tensors=bias(rows=1)),
    "bias of all columns": Row(tensors=bias(columns=1)),
    "bias of a sequence each": Row(tensors={"bias": lambda: uniform(2, HEADS, 40, 40)}),
    "bias of padded": Row(CAUSAL, tensors=bias(), padded=True),
    "bias in bfloat16": Row(CAUSAL, dtype=torch.bfloat16, tensors=bias()),
    "ALiBi": Row(CAUSAL | {"alibi": True}),
    "ALiBi by slopes": Row(CAUSAL, tensors={"alibi": lambda: uniform(HEADS).abs()}),
    "sink": Row(CAUSAL, tensors={"sink": lambda: uniform(HEADS)}),
    "sink off by one": Row(CAUSAL | {"sink": "off_by_one"}),
    "sink of a window": Row(WINDOW, tensors={"sink": lambda: uniform(HEADS)}),
    "softcap": Row(CAUSAL | {"softcap": 0.5}),
    "scale": Row(CAUSAL | {"scale": 0.7}),
    "gradient of LSE": Row(CAUSAL, dlse=True),
    "gradient of LSE of a window": Row(WINDOW, dlse=True),
    "dropout": Row(CAUSAL | {"dropout": 0.3}, tensors={"rng_state": lambda: torch.tensor([3, 5])}),
    "max_logit": Row(CAUSAL | {"return_max_logit": True}),
    "deterministic": Row(CAUSAL | {"deterministic": True}),
    "batch_invariant": Row(CAUSAL | {"batch_invariant": True}),
    "max_ctas": Row(CAUSAL | {"max_ctas": 8}),
    "a KV cache": Row({"mask": "causal_bottom_right"}, rows=(8, 72), padded=True, trains=False,
                      formats=tuple(DENSE)),
    "FP8": Row(CAUSAL | FP8, **IN_FP8),
    "FP8, full": Row(FP8, **IN_FP8),
    "FP8 of a window": Row(WINDOW | FP8, **IN_FP8),
    "FP8, padding": Row(CAUSAL | FP8, padded=True, **IN_FP8),
    "FP8, grouped queries": Row(CAUSAL | FP8, heads=2, **IN_FP8),
    "FP8, MLA": Row(CAUSAL | FP8, **IN_FP8 | {"dims": (48, 32)}),
    "FP8, bias": Row(CAUSAL | FP8, tensors=bias(), **IN_FP8),
    "FP8, ALiBi": Row(CAUSAL | FP8 | {"alibi": True}, **IN_FP8),
    "FP8, sink": Row(CAUSAL | FP8, tensors={"sink": lambda: uniform(HEADS)}, **IN_FP8),
    "FP8, max_logit": Row(CAUSAL | FP8 | {"return_max_logit": True}, **IN_FP8),
}  # fmt: skip
REFUSED = {  # what one device takes and ranks do not
    "page_table": lambda: torch.zeros(1, 1, dtype=torch.int32),
    "page_table_v": lambda: torch.zeros(1, 1, dtype=torch.int32),
    "origin": lambda: torch.zeros(4, dtype=torch.int64),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are so small that a pool of threads takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Rows:
    """One side: two sequences, as a tensor of the format, and which rows a rank has."""

    def __init__(self, form: str, rows: int, lengths: tuple[int, ...] | None) -> None:
        self.form, self.lengths = form, lengths
        self.cu = None
        if lengths is not None:
            self.cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if form != "thd":
            self.side, self.axis = Side(form, WORLD, True, rows, self.cu), DENSE[form].index(1)
        else:
            tokens = tuple(shares(self.cu.diff().long(), WORLD, True))
            self.side, self.axis = Side("thd", WORLD, True, 0, self.cu, self.cu, tokens), 0

    def spread(self, tensor: Tensor) -> Tensor:
        """[2, rows, heads, ...] in the format."""
        if self.form == "thd":
            return torch.cat([x[:n] for x, n in zip(tensor, self.lengths, strict=True)])
        return tensor.permute(DENSE[self.form]).contiguous()

    def of_rank(self, rank: int) -> Tensor:
        pieces, found = self.side.shard(rank).pieces, []
        starts = [0] if self.form != "thd" else self.cu.tolist()[:-1]
        for i, start in enumerate(starts):
            for piece in pieces:
                begin, end = (int(n[i]) if isinstance(n, Tensor) else n for n in piece[:2])
                found += range(start + begin, start + end)
        return torch.tensor(found, dtype=torch.int64)

    def cut(self, tensor: Tensor, rank: int, axis: int | None = None) -> Tensor:
        axis = self.axis if axis is None else axis
        return tensor.index_select(axis, self.of_rank(rank))

    def join(self, parts: list[Tensor], axis: int | None = None) -> Tensor:
        order = torch.cat([self.of_rank(r) for r in range(WORLD)]).argsort()
        return torch.cat(parts, self.axis if axis is None else axis).index_select(
            self.axis if axis is None else axis, order
        )


class Case:
    """A row of the table in a format."""

    def __init__(self, row: Row, form: str) -> None:
        torch.manual_seed(7)
        self.row, self.form, ragged = row, form, form == "thd"
        lengths: tuple = (None, None)
        if ragged or row.padded:
            lengths = (tuple(min(n, row.rows[0]) for n in LENGTHS),
                       tuple(row.rows[1] - LENGTHS[1] + n for n in LENGTHS))  # fmt: skip
        self.q, self.kv = (Rows(form, n, some) for n, some in zip(row.rows, lengths, strict=True))
        dim, dim_v = row.dims
        of_q, of_kv = (self.q, row.rows[0], HEADS), (self.kv, row.rows[1], row.heads)
        shapes = ((*of_q, dim), (*of_kv, dim), (*of_kv, dim_v), (*of_q, dim_v))
        *self.inputs, self.dout = (
            side.spread(uniform(2, *shape)).to(row.dtype) for side, *shape in shapes
        )
        self.options = {"format": form} | row.options
        self.tensors = {name: make() for name, make in row.tensors.items()}
        if "bias" in self.tensors:
            self.tensors["bias"] = self.tensors["bias"].to(row.dtype)
        for side, name, most in ((self.q, "q", row.rows[0]), (self.kv, "kv", row.rows[1])):
            if side.cu is not None:
                self.options[f"cu_seqlens_{name}"] = side.cu
            if ragged:
                self.options[f"max_seqlen_{name}"] = most
        self.dlse = None
        if row.dlse:
            count = (2, HEADS, row.rows[0])
            self.dlse = uniform(sum(self.q.lengths), HEADS) if ragged else uniform(*count)

    def alone(self, dtype: torch.dtype) -> list[Tensor]:
        """O, LSE and the gradients of q, k, v, a bias and a sink of one device."""
        trains = self.row.trains
        leaves = [t.to(dtype, copy=True).requires_grad_(trains) for t in self.inputs]
        options, wanted = dict(self.options), list(leaves)
        for name, tensor in self.tensors.items():
            if not tensor.is_floating_point():
                options[name] = tensor
                continue
            wide = dtype if name == "bias" else torch.promote_types(dtype, torch.float32)
            options[name] = tensor.to(wide, copy=True)
            if name in ("bias", "sink"):
                wanted.append(options[name].requires_grad_(trains))
        if dtype == torch.float64:
            options.pop("fp8", None)
        o, lse, *_ = attention(*leaves, return_lse=True, **options)
        if not trains:
            return [o, lse]
        outputs, given = [o], [self.dout.to(o.dtype)]
        if self.dlse is not None:
            outputs, given = [o, lse], [*given, self.dlse.to(lse.dtype)]
        return [o, lse, *torch.autograd.grad(outputs, wanted, given)]

    def calls(self, how: tuple[str, int]) -> list[tuple]:
        """The problem and the tensors of each rank."""
        row, ragged = self.row, self.form == "thd"
        options, found = dict(self.options), []
        fp8 = options.pop("fp8", None) is not None
        sides = (self.q, self.kv, self.kv)
        rows = tuple(list(s.lengths) if ragged else n
                     for s, n in zip(sides, row.rows, strict=False))  # fmt: skip
        for r in range(WORLD):
            local = [side.cut(t, r) for side, t in zip(sides, self.inputs, strict=True)]
            mine = dict(self.tensors)
            for name in mine.keys() & {"alibi", "sink"}:
                mine[name] = mine[name].to(torch.promote_types(row.dtype, torch.float32))
            if self.has_rows_of_bias():
                mine["bias"] = self.q.cut(mine["bias"], r, 2)
            a = describe(*local, **options, **mine)._replace(training=row.trains)
            found.append(make_problem(a, Distribution(WORLD, r, *how, True, rows, fp8)))
        return found

    def has_rows_of_bias(self) -> bool:
        """Whether each rank has the bias of its rows alone."""
        bias = self.tensors.get("bias")
        return bias is not None and self.form != "thd" and bias.shape[2] > 1

    def together(self, how: tuple[str, int]) -> list[Tensor]:
        """The same of the ranks."""
        calls, axis = self.calls(how), 0 if self.form == "thd" else 2
        results = LockStep([forward(p, x) for p, x in calls]).run()
        out = [self.q.join([o for (o, *_), _ in results]),
               self.q.join([lse for (_, lse, _), _ in results], axis)]  # fmt: skip
        if not self.row.trains:
            return out
        programs = []
        for (p, x), (_, saved) in zip(calls, results, strict=True):
            dlse = self.dlse
            dlse = None if dlse is None else self.q.cut(dlse, p.rank, axis).to(out[1].dtype)
            programs.append(backward(p, x, saved, self.q.cut(self.dout, p.rank), dlse))
        found = LockStep(programs).run()
        for i, side in enumerate((self.q, self.kv, self.kv)):
            out.append(side.join([g[i] for g in found]))
        if self.has_rows_of_bias():
            out.append(self.q.join([g[3] for g in found], 2))
        elif "bias" in self.tensors:
            out.append(_same_everywhere([g[3] for g in found]))
        if "sink" in self.tensors:
            out.append(_same_everywhere([g[4] for g in found]))
        return out


def _same_everywhere(of_ranks: list[Tensor]) -> Tensor:
    """A sum over ranks, which has the same bits on each."""
    assert all(torch.equal(one, of_ranks[0]) for one in of_ranks)
    return of_ranks[0]


def difference(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm; rows without keys have equal infinities in LSE."""
    found, exact = found.double(), exact.double()
    same = found == exact
    return (torch.where(same, 0, found - exact).norm() / exact[exact.isfinite()].norm()).item()


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, row in ROWS.items() for form in row.formats]
)
def test_an_option_gives_what_one_device_gives(name: str, form: str) -> None:
    row = ROWS[name]
    case = Case(row, form)
    exact, alone = case.alone(torch.float64), case.alone(row.dtype)
    least = 1e-12 if row.dtype == torch.float64 else 1e-6
    for how in HOW:
        for one, wanted, of_one in zip(case.together(how), exact, alone, strict=True):
            assert one.dtype == of_one.dtype, how
            assert one.shape == of_one.shape, how
            assert difference(one, wanted) <= 2 * difference(of_one, wanted) + least, how


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    q = torch.zeros(1, 16, 2, 8)
    a = describe(q, q, q, format="bshd")._replace(**{name: REFUSED[name]()})
    with pytest.raises(ValueError, match=f"{name} is given; needs None"):
        make_problem(a, Distribution(2, 0, "ring", 1, True, None))
