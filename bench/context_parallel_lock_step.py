"""The part "lock-step" of context_parallel.py: virtual ranks on one GPU."""

import time
from collections.abc import Callable

import torch
from context_parallel_parts import Rank
from torch import Tensor

from te_attention.torch import _cp_accumulate as accumulate
from te_attention.torch._cp_problem import Distribution, make_problem
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.functional import describe


class _Timed:
    """A function that records when it begins and ends on the device."""

    def __init__(self, function: Callable) -> None:
        self.function, self.events = function, []

    def __call__(self, *arguments: object) -> object:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.events.append(pair)
        pair[0].record()
        out = self.function(*arguments)
        pair[1].record()
        return out

    def milliseconds(self) -> float:
        """Of all calls."""
        return sum(a.elapsed_time(b) for a, b in self.events)


class _TimedTransfers(LockStep):
    """Ranks in lock-step. Their transfers are copies on the device, whose times are taken."""

    def __init__(self, programs: list) -> None:
        super().__init__(programs)
        self.copies = (_Timed(Tensor.clone), _Timed(Tensor.copy_))

    def run(self) -> list[object]:
        """The results of all programs."""
        clone, copy = self.copies
        # A function becomes a method, as which it gets the tensor; a _Timed would not.
        Tensor.clone = lambda *all: clone(*all)  # noqa: PLW0108
        Tensor.copy_ = lambda *all: copy(*all)  # noqa: PLW0108
        try:
            return super().run()
        finally:
            Tensor.clone, Tensor.copy_ = clone.function, copy.function

    def milliseconds(self) -> float:
        """Of all transfers."""
        return sum(one.milliseconds() for one in self.copies)


def lock_step(here: Rank) -> None:
    """Eight virtual ranks on one GPU: the time of all over that of their parts."""
    if not here.on_gpu or here.rank:
        here.figure("lock-step", "needs a GPU, of rank 0", "a GPU", ok=True)
        return
    ranks, rows, heads = 8, here.options.rows, here.options.heads
    q, k, v, dout = here.tensors(rows // ranks, (heads, heads))
    a = describe(q, k, v, format="bshd", mask="causal")._replace(training=True)
    shared = [Distribution(ranks, r, "ring", 1, True, rows) for r in range(ranks)]
    calls = [make_problem(a, how) for how in shared]

    def run() -> tuple[float, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        first = _TimedTransfers([forward(p, x) for p, x in calls])
        results = first.run()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        saved = [s for _, s in results]
        second = _TimedTransfers(
            [backward(p, x, s, dout, None) for (p, x), s in zip(calls, saved, strict=True)]
        )
        second.run()
        torch.cuda.synchronize()
        end = time.perf_counter()
        return (1e3 * (middle - begin) - first.milliseconds(),
                1e3 * (end - middle) - second.milliseconds())  # fmt: skip

    run()
    names = (("run_forward", "merge_forward"), ("run_backward", "add_backward"))
    parts = [[_Timed(getattr(accumulate, name)) for name in of] for of in names]
    for of, timed in zip(names, parts, strict=True):
        for name, one in zip(of, timed, strict=True):
            setattr(accumulate, name, one)
    times = run()
    sums = [sum(one.milliseconds() for one in timed) for timed in parts]
    for name, total, alone in zip(("forward", "backward"), times, sums, strict=True):
        text = f"{name} of 8 ranks: {total:.1f} ms / {alone:.1f} ms of parts"
        here.figure(text, round(total / alone, 3), "none", ok=True)
    ratio = sum(times) / sum(sums)
    here.figure("both, time over that of the parts", round(ratio, 3), "<= 1.05", ratio <= 1.05)
