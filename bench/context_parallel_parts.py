"""The parts of context_parallel.py: what each rank does."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from te_attention.torch import attention, context_parallel_attention
from te_attention.torch import context_parallel as cp
from te_attention.torch._cp_transport import GroupTransport
from te_attention.torch.context_parallel import _latest

DIM = 128
CYCLES = 4_000_000  # of a kernel that waits: about 2 ms, in which the host queues a call
SECONDS = 15.0  # until a failure is an error
TURNS = 5  # of two measurements that are compared


class Rank:
    """This process: its device, and where its figures go."""

    def __init__(self, rank: int, options, device: torch.device, hosts, file: TextIO) -> None:
        """hosts: a gloo group of all ranks."""
        self.rank, self.options, self.device, self.hosts, self.file = (
            *(rank, options, device, hosts, file),
        )
        self.world, self.group = options.ranks, dist.group.WORLD
        self.on_gpu = device.type == "cuda"

    def figure(self, name: str, value: object, wanted: object, ok: bool | None = None) -> None:
        """Records a figure and its bar. ok: whether it is met, by default value == wanted."""
        ok = value == wanted if ok is None else bool(ok)
        line = {"name": name, "value": value, "bar": wanted, "ok": ok}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def together(self) -> None:
        """All ranks arrive here, without a kernel that waits."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self.hosts)

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks."""
        found: list = [None] * self.world
        dist.all_gather_object(found, seconds, group=self.hosts)
        return max(found)

    def milliseconds(self, call: Callable, repeats: int = 7, queued: int = 1) -> float:
        """The median time of a call on the device; queued: calls before the host waits."""
        times = []
        for i in range(repeats + 2):
            if self.on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(queued):
                call()
            if self.on_gpu:
                torch.cuda.synchronize()
            if i >= 2:
                times.append(1e3 * (time.perf_counter() - begin) / queued)
        return statistics.median(times)

    def device_milliseconds(self, call: Callable, repeats: int = 9) -> float:
        """The median time of a call on the GPU, where all of it is queued before it begins."""
        times = []
        for i in range(repeats + 2):
            torch.cuda.synchronize()
            dist.barrier(self.hosts)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(CYCLES)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def tensors(self, rows: int, heads=(32, 32), batch: int = 1, dtype=torch.bfloat16) -> list:
        """q, k, v and dO of all rows, bshd, the same on every rank."""
        words = {"device": self.device, "dtype": dtype}
        words["generator"] = torch.Generator(self.device).manual_seed(11)
        counts = (heads[0], heads[1], heads[1], heads[0])
        return [torch.randn(batch, rows, h, DIM, **words) for h in counts]


def both(call: Callable, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """O and the gradients."""
    o = call()
    return o, *torch.autograd.grad(o, leaves, dout)


# --------------------------------------------------------------------------------------- results

OPTIONS = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal", "window": (300, None)},
    "bottom right": {"mask": "causal_bottom_right"},
    "ALiBi": {"mask": "causal", "alibi": True},
    "dropout": {"mask": "causal", "dropout": 0.2},
    "soft cap": {"mask": "causal", "softcap": 20.0},
    "sink": {"mask": "causal", "sink": "off_by_one"},
    "padding": {"mask": "causal", "lengths": (0.7, 0.4)},  # of all rows
}
STRATEGIES = ("ring", "all_gather", "a2a", "halo", "gather_q")


def results(here: Rank) -> None:
    """Every strategy with every option against one device."""
    for heads in ((8, 8), (8, 2)):
        for rows in (2048, 2000) if here.on_gpu else (128, 100):  # 2000: chunks of different sizes
            whole = here.tensors(rows, heads, batch=2)
            for name, options in OPTIONS.items():
                for strategy in STRATEGIES:
                    if strategy == "halo" and "window" not in options:
                        continue
                    label = f"{strategy}, {name}, {rows} rows, {heads[1]} key heads"
                    one_result(here, whole, label, strategy, dict(options))


def one_result(here: Rank, whole: list[Tensor], label: str, strategy: str, options: dict) -> None:
    """Compares one strategy with one device."""
    options["format"] = "bshd"
    rows = whole[0].shape[1]
    if "dropout" in options:
        options["rng_state"] = torch.tensor([5, 6], device=here.device)
    if lengths := options.pop("lengths", None):
        first, second = (int(rows * share) for share in lengths)
        cu = torch.tensor([0, first, first + second], dtype=torch.int32, device=here.device)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    leaves = [t.detach().requires_grad_() for t in whole[:3]]
    wanted = both(lambda: attention(*leaves, **options), leaves, whole[3])
    mine = [cp.shard(t.detach(), here.group).requires_grad_() for t in leaves]

    def call() -> Tensor:
        return context_parallel_attention(
            *mine, group=here.group, strategy=strategy, seqlens=rows, **options
        )

    try:  # equal calls may be recorded and repeated
        found = [both(call, mine, cp.shard(whole[3], here.group)) for _ in range(3)]
    except (RuntimeError, NotImplementedError) as error:
        here.figure(f"{label}: refused", str(error)[:300], "no error", ok=False)
        return
    worst = 0.0
    for got in found[::2]:
        for one, of_all in zip(got, wanted, strict=True):
            exact = cp.shard(of_all, here.group).double()
            size = exact.square().mean().sqrt().clamp(min=1e-6)
            worst = max(worst, ((one.double() - exact).square().mean().sqrt() / size).item())
    here.figure(f"{label}: RMS error over RMS", round(worst, 5), "<= 0.01", worst <= 0.01)


def transformer_engine(here: Rank) -> None:
    """TransformerEngine's cases for so many ranks."""
    from te_cp_cases import CASES, ROWS, check

    pairs = [dist.new_group([i, i + 1]) for i in range(0, here.world, 2)]
    strided = [dist.new_group([i, i + 2]) for i in range(2)] if here.world == 4 else []
    count = 0
    for case in CASES:
        if case.world == here.world or (case.world == 2 and here.world == 4 and here.rank < 2):
            group: object = pairs[here.rank // 2]
            if case.world == 4:
                group = [pairs[here.rank // 2], strided[here.rank % 2]]
            rows = ROWS if here.on_gpu else 128
            wrong = check(case, here.rank % case.world, group, here.device, rows)
            here.figure(str(case), wrong[:500] or "agrees", "agrees")
            count += 1
    here.figure("cases", count, {2: 38, 4: 43 if here.rank < 2 else 5}.get(here.world, count))


# -------------------------------------------------------------------------------------- failures


def disagreements(here: Rank) -> None:
    """Ranks that call with different arguments, or not at all."""
    for name, change in (("lengths", {"seqlens": 34}), ("options", {"mask": None}),
                         ("type", {"dtype": torch.float16}), ("absent", None)):  # fmt: skip
        here.together()
        begin = time.monotonic()
        if here.rank == 1 and change is None:
            continue
        changes = change if here.rank == 1 else {}
        try:
            small_call(here, **changes)
            seen = "no error"
        except (RuntimeError, ValueError) as error:
            seen = f"{type(error).__name__}: {error}"
        taken = round(time.monotonic() - begin, 1)
        here.figure(f"{name}: seconds until {seen[:200]}", taken, f"an error, <= {SECONDS}",
                    taken <= SECONDS and seen != "no error")  # fmt: skip


def small_call(here: Rank, **changes: object) -> Tensor:
    """16 rows of each rank, compared before they travel."""
    q = torch.zeros(1, 16, 2, 64, dtype=changes.pop("dtype", torch.bfloat16), device=here.device)
    options = {"mask": "causal", "strategy": "ring", "format": "bshd"} | changes
    out = context_parallel_attention(q, q, q, group=here.group, check="always", **options)
    if here.on_gpu:
        torch.cuda.synchronize()
    return out


def killed_before(here: Rank) -> None:
    """A rank is killed between two calls."""
    small_call(here)
    if here.rank == 1:
        os._exit(9)
    await_error(here, lambda: small_call(here))


def killed_within(here: Rank) -> None:
    """A rank is killed in a call, after ranks have agreed, long before NCCL's timeout."""
    small_call(here)
    if here.rank == 1:
        GroupTransport.post = lambda *_: os._exit(9)
    await_error(here, lambda: small_call(here))


def await_error(here: Rank, call: Callable) -> None:
    """Records how long a call takes to raise; NCCL may end the process instead."""
    begin = time.monotonic()
    here.figure("begin", begin, "the time of this line, where it is the last one", ok=True)
    try:
        call()
        seen = "no error"
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    taken = round(time.monotonic() - begin, 1)
    here.figure(f"seconds until {seen[:200]}", taken, f"an error, <= {SECONDS}",
                taken <= SECONDS and seen != "no error")  # fmt: skip


# ----------------------------------------------------------------------------- times and memory


def one_and_many(here: Rank, rows: int, strategy: str, options: dict) -> dict:
    """Milliseconds of forward, and of both, on one device and on all."""
    heads = here.options.heads
    times = {}
    if here.rank == 0:
        alone = here.tensors(rows, (heads, heads))
        leaves = [t.requires_grad_() for t in alone[:3]]
        with torch.no_grad():
            times["one forward"] = here.milliseconds(
                lambda: attention(*leaves, format="bshd", **options)
            )
        times["one both"] = here.milliseconds(
            lambda: both(lambda: attention(*leaves, format="bshd", **options), leaves, alone[3])
        )
        del alone, leaves
        if here.on_gpu:
            torch.cuda.empty_cache()
    here.together()
    mine = here.tensors(rows // here.world, (heads, heads))
    leaves = [t.requires_grad_() for t in mine[:3]]

    def call() -> Tensor:
        return context_parallel_attention(
            *leaves, group=here.group, strategy=strategy, format="bshd",
            max_ctas=here.options.max_ctas, **options,
        )  # fmt: skip

    with torch.no_grad():
        forward = here.milliseconds(call)
    total = here.milliseconds(lambda: both(call, leaves, mine[3]))
    times["many forward"], times["many both"] = here.slowest(forward), here.slowest(total)
    here.together()
    return times


def speed(here: Rank) -> None:
    """Causal attention of all rows, and of a quarter, by each strategy."""
    for rows in (here.options.rows, here.options.rows // 4):
        for strategy in here.options.strategies:
            times = one_and_many(here, rows, strategy, {"mask": "causal"})
            if here.rank:
                continue
            for what in ("forward", "both"):
                one, many = times[f"one {what}"], times[f"many {what}"]
                linear = one / (here.world * many)
                bar = strategy == "ring" and what == "both" and rows == here.options.rows
                here.figure(f"{strategy}, {rows} rows, {what}: {one:.2f} ms / {many:.2f} ms, "
                            "over linear", round(linear, 3), ">= 0.9" if bar else "none",
                            linear >= 0.9 or not bar)  # fmt: skip


def window(here: Rank) -> None:
    """A window of 1,024 keys: each rank against its own GPU alone, with the rank's rows."""
    heads, options = here.options.heads, {"mask": "causal", "window": (1023, None)}
    mine = here.tensors(here.options.rows // here.world, (heads, heads))
    leaves = [t.requires_grad_() for t in mine[:3]]

    def shared() -> Tensor:
        return context_parallel_attention(
            *leaves, group=here.group, strategy="halo", check="new", format="bshd", **options
        )

    def alone() -> Tensor:
        return attention(*leaves, format="bshd", **options)

    def forward(of: Callable) -> Callable:
        return torch.no_grad()(of)

    def both_of(of: Callable) -> Callable:
        return lambda: both(of, leaves, mine[3])

    for how, measure in {
        "": here.milliseconds,
        "10 calls at a time, ": lambda call: here.milliseconds(call, queued=10),
        "on the device, ": here.device_milliseconds,
    }.items():
        if how == "on the device, " and not here.on_gpu:
            continue
        for what, calls in (("forward", forward), ("both", both_of)):
            times: list[list[float]] = [[], []]
            for _ in range(TURNS):
                for found, of in zip(times, (shared, alone), strict=True):
                    here.together()
                    found.append(measure(calls(of)))
            many, one = map(statistics.median, times)
            bar, ratio = "none" if how else "<= 1.1", many / one
            here.figure(f"{how}{what}: {many:.3f} ms / {one:.3f} ms", round(ratio, 3), bar,
                        ratio <= 1.1 or bar == "none" or not here.on_gpu)  # fmt: skip
    here.together()


def memory(here: Rank) -> None:
    """Memory of a rank beyond its tensors and O; a ring has a bar."""
    if not here.on_gpu:
        here.figure("memory", "needs a GPU", "a GPU", ok=True)
        return
    heads, rows = here.options.heads, here.options.rows // here.world
    shard = 2 * rows * heads * DIM * 2  # K and V
    bar = 2 * shard + rows * heads * DIM * 4
    mine = here.tensors(rows, (heads, heads))
    leaves = [t.requires_grad_() for t in mine[:3]]
    for strategy in ("ring", "all_gather", "a2a"):

        def call(strategy: str = strategy) -> Tensor:
            return context_parallel_attention(
                *leaves, group=here.group, strategy=strategy, format="bshd", mask="causal"
            )

        def peak(work: Callable) -> int:
            work()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before

        with torch.no_grad():
            extra = peak(call) - mine[3].nbytes  # O
        here.figure(f"{strategy}: MiB beyond the tensors, forward", extra >> 20,
                    f"<= {bar >> 20}" if strategy == "ring" else "none",
                    strategy != "ring" or extra <= bar)  # fmt: skip
        extra = peak(lambda: both(call, leaves, mine[3])) - 4 * mine[3].nbytes  # gradients too
        here.figure(f"{strategy}: MiB beyond the tensors, both", extra >> 20, "none", ok=True)


# --------------------------------------------------------------------------------- the timeline


def timeline(here: Rank) -> None:
    """The share of NCCL's time during which other kernels run."""
    if not here.on_gpu:
        here.figure("timeline", "needs a GPU", "a GPU", ok=True)
        return
    heads, rows = here.options.heads, here.options.rows // here.world
    mine = here.tensors(rows, (heads, heads))
    leaves = [t.requires_grad_() for t in mine[:3]]
    for strategy in ("ring", "all_gather"):

        def call(strategy: str = strategy) -> Tensor:
            return context_parallel_attention(
                *leaves, group=here.group, strategy=strategy, format="bshd", mask="causal",
                max_ctas=here.options.max_ctas,
            )  # fmt: skip

        both(call, leaves, mine[3])
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            here.together()  # a profiler takes tens of milliseconds to begin, not the same on all
            both(call, leaves, mine[3])
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        spans = [
            (e.name, e.time_range.start, e.time_range.end)
            for e in profile.events()
            if e.device_type == on_gpu and not getattr(e, "is_user_annotation", False)
        ]
        nccl = joined([s[1:] for s in spans if "nccl" in s[0].lower()])
        others = joined([s[1:] for s in spans if "nccl" not in s[0].lower()])
        total, hidden = length(nccl), length(nccl) + length(others) - length(joined(nccl + others))
        share = hidden / total if total else 0.0
        bar = strategy == "ring" and rows >= 8192
        here.figure(f"{strategy}, {rows} rows a rank: {total / 1e3:.2f} ms of transfers, of which "
                    "hidden", round(share, 3), ">= 0.95" if bar else "none",
                    share >= 0.95 or not bar)  # fmt: skip
        busy: dict[str, float] = {}
        for name, begin, end in spans:
            busy[name[:80]] = busy.get(name[:80], 0.0) + (end - begin) / 1e3
        most = sorted(busy.items(), key=lambda one: -one[1])[:8]
        here.figure(f"{strategy}: ms by kernel", {k: round(v, 3) for k, v in most}, "none", ok=True)
        if here.options.trace:
            Path(here.options.trace).mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(
                str(Path(here.options.trace, f"{strategy}-{here.rank}.json"))
            )


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union, as spans that do not overlap."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def length(spans: list[tuple[float, float]]) -> float:
    """Of the union."""
    return sum(end - begin for begin, end in joined(spans))


def replay_of(tensors: list[Tensor]) -> Callable | None:
    """The operator that repeats the last call of these tensors; None: it was not recorded."""
    for call in _latest.values():
        recording = call.passes[0].recording
        if recording is not None:
            table = call.transport.direct()
            return lambda: recording.replay(tensors, table)
    return None


def host(here: Rank) -> None:
    """Host time of a step of the ring beyond that of attention().

    Ten calls are queued at a time, so that none waits for room in the device's queue. Rows are as
    many as the kernels of hopper take, which merge a part: fewer are merged in a launch of its own.
    """
    mine = here.tensors(512, (2, 2))
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    options = {"format": "bshd", "mask": "causal"}

    def microseconds(call: Callable, queued: int = 10) -> float:
        times = []
        for _ in range(30):
            here.together()
            begin = time.perf_counter()
            for _ in range(queued):
                call()
            times.append(1e6 * (time.perf_counter() - begin) / queued)
        here.together()  # a rank that ended with transfers to do would be lost to the others
        return statistics.median(times)

    def shared(tensors: list = mine) -> Tensor:
        return context_parallel_attention(
            *tensors[:3], group=here.group, strategy="ring", check="new", **options
        )

    with torch.no_grad():
        alone = microseconds(lambda: attention(*mine[:3], **options))
        steps = microseconds(shared)
        replayed = replay_of(mine[:3])
        within = microseconds(replayed) if replayed else 0.0
        first, first_alone = (
            microseconds(f, 1) for f in (shared, lambda: attention(*mine[:3], **options))
        )
        table = GroupTransport.direct
        GroupTransport.direct = lambda _: None
        through_torch = microseconds(shared)
        GroupTransport.direct = table
    step = steps / here.world - alone
    here.figure(f"microseconds a step beyond attention()'s {alone:.1f}", round(step, 1), "<= 30",
                step <= 30 or not here.on_gpu)  # fmt: skip
    here.figure(f"microseconds of a call, of which {within:.1f} are those of the operator",
                round(steps, 1), "none", ok=True)  # fmt: skip
    here.figure(f"microseconds of a call after a wait; attention()'s are {first_alone:.1f}",
                round(first, 1), "none", ok=True)  # fmt: skip
    step = through_torch / here.world - alone
    here.figure("the same where torch.distributed begins transfers", round(step, 1), "none",
                ok=True)  # fmt: skip
    alone = microseconds(lambda: both(lambda: attention(*leaves, **options), leaves, mine[3]))
    step = microseconds(lambda: both(lambda: shared(leaves), leaves, mine[3])) / here.world - alone
    here.figure(f"microseconds a step of both passes beyond attention()'s {alone:.1f}",
                round(step, 1), "none", ok=True)  # fmt: skip


def graph(here: Rank) -> None:
    """A captured forward pass, replayed on other values."""
    if not here.on_gpu:
        here.figure("graph", "needs a GPU", "a GPU", ok=True)
        return
    for strategy in ("ring", "all_gather", "a2a", "halo"):
        mine = here.tensors(1024, (8, 8))
        window = (127, None) if strategy == "halo" else None

        def call(
            strategy: str = strategy, mine: list[Tensor] = mine, window: tuple | None = window
        ) -> Tensor:
            with torch.no_grad():
                return context_parallel_attention(
                    *mine[:3], group=here.group, strategy=strategy, format="bshd", mask="causal",
                    window=window,
                )  # fmt: skip

        for _ in range(3):
            call()
        here.together()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            o = call()
        for tensor in mine:
            tensor.copy_(tensor.flip(1) * 1.5)
        captured.replay()
        torch.cuda.synchronize()
        here.figure(f"{strategy}: a replay equals a call", bool(torch.equal(o, call())), True)
        here.together()
