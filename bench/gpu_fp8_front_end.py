#!/usr/bin/env python3
"""FP8 attention through PyTorch on a GPU: rates, host time, capture, accuracy, training, draws.

usage: PYTHONPATH=BUILD/python:BUILD/python/te_attention_transformer_engine:tests/python
       TE_ATTENTION_KIT=BUILD/tests/python/libte_attention_kit_shim.so
       python3 bench/gpu_fp8_front_end.py [--parts NAME,...] [--output FILE] [--device cuda]

Each part runs in a process of its own, for at most its limit, and prints figures with their bars,
one line of JSON each. Exit code 0 only if every part ends in time and no bar is missed. --device
cpu tests the program with small sizes; rates then have no bar.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_vs_torch import block_ms
from torch.utils._python_dispatch import TorchDispatchMode

import te_attention.torch as tea
from te_attention.torch.fp8 import DelayedScaling, Float8CurrentScaling, FP8GlobalStateManager
from transformer_engine.pytorch import DotProductAttention, autocast

ROOT = Path(__file__).resolve().parents[1]
SECONDS = {"rates": 180, "host": 120, "capture": 120, "accuracy": 120, "configurations": 500,
           "gpt": 500, "draws": 580}  # fmt: skip
DRAWS, PROCESSES = 5000, 16
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
# Of the norms of errors, with results of 16 bits: current scaling and attention().
NORMS = {"o": 0.06, "dq": 0.11, "dk": 0.11, "dv": 0.085}
# TFLOP/s of cuDNN alone, d128 16k (bench/results/h200/fp8.jsonl), by mask.
RATES = {"no_mask": (1009.1, 702.5), "causal": (936.2, 716.1)}
MODELS = {"mha": (2, 2048, 16, 16), "gqa": (2, 2048, 24, 12), "long": (1, 8192, 32, 4)}
MASKS = ("no_mask", "causal", "padding", "padding_causal")


class Program:
    """The figures of one part."""

    def __init__(self, part: str, device: str) -> None:
        """Nothing is missed yet."""
        self.part, self.device, self.gpu, self.missed = part, device, device != "cpu", False

    def figure(self, what: str, value: object, *, most: float | None = None,
               least: float | None = None) -> None:  # fmt: skip
        """Prints a figure and its bar; NaN misses every bar."""
        ok = (most is None or value <= most) and (least is None or value >= least)
        self.missed |= not ok
        bar = {n: x for n, x in (("most", most), ("least", least)) if x is not None}
        line = {"part": self.part, "what": what, "value": value, **bar, "ok": ok}
        print(json.dumps(line), flush=True)

    def normal(self, *shape: int, gradient: bool = True) -> torch.Tensor:
        """A bf16 tensor."""
        x = torch.randn(*shape, device=self.device).to(torch.bfloat16)
        return x.requires_grad_(gradient)

    def settle(self) -> None:
        """Waits for the device."""
        if self.gpu:
            torch.cuda.synchronize()


def recipe_of(kind: str) -> object:
    """A recipe with attention in FP8."""
    history = {"amax_history_len": 16} if kind == "delayed" else {}
    return RECIPES[kind](fp8_dpa=True, **history)


def alone_milliseconds(program: Program, task: Callable) -> float:
    """The median of a call on an idle device, from the host's call until the results are there."""
    for _ in range(5):
        task()
    found = []
    for _ in range(11):
        program.settle()
        start = time.perf_counter()
        task()
        program.settle()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def kernels(task: Callable) -> dict[str, float]:
    """The milliseconds of one call in each kernel, fill and copy, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            task()
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total / 5e3 for e in profile.key_averages()}
    return dict(sorted(((n, t) for n, t in spent.items() if t), key=lambda item: -item[1]))


def is_cast(kernel: str) -> bool:
    """Whether it is one of src/ops/fp8_cast.cu; every other one counts as attention."""
    return any(word in kernel for word in ("quantize", "find_maxima", "raise_to_largest"))


def rates(p: Program) -> None:
    """DotProductAttention, delayed scaling, d128 16k: the kernel within a call, and the call."""
    rows, heads, dim = (16384, 16, 128) if p.gpu else (256, 2, 128)
    for mask, bars in RATES.items():
        q, k, v = (p.normal(1, rows, heads, dim) for _ in range(3))
        dout = p.normal(1, rows, heads * dim, gradient=False)
        module = DotProductAttention(heads, dim, qkv_format="bshd", attn_mask_type=mask)
        context = autocast(recipe=recipe_of("delayed"))
        with context:
            form = {"format": "bshd", "mask": "causal" if mask == "causal" else None}
            codes = [t.detach().to(torch.float8_e4m3fn) for t in (q, k, v)]
            said = tea.explain(*codes, fp8=tea.Fp8(o_dtype=torch.float8_e4m3fn), **form)
            engine = next(s for s in said.splitlines()[1:] if s.endswith("accepts"))
            p.figure(f"{mask}: engine", engine)
            flops = 4 * rows * rows * dim * heads * (0.5 if mask == "causal" else 1) / 1e9
            forward = partial(module, q, k, v)
            backward = partial(torch.autograd.grad, forward(), (q, k, v), dout, retain_graph=True)
            for task, work, bar in ((forward, flops, bars[0]), (backward, 2.5 * flops, bars[1])):
                name = f"{mask} {'forward' if task is forward else 'backward'}"
                alone = round(work / alone_milliseconds(p, task), 1)
                p.figure(f"{name}: one call on an idle device, TFLOP/s", alone)
                if not p.gpu:
                    continue
                # As the rates of cuDNN alone are measured: by events around each of many calls.
                whole = round(work / block_ms(task), 1)
                p.figure(f"{name}: whole call, TFLOP/s", whole, least=0.93 * bar)
                spent = kernels(task)
                rate = round(work / sum(t for k, t in spent.items() if not is_cast(k)), 1)
                p.figure(f"{name}: attention kernels, TFLOP/s", rate, least=0.97 * bar)
                for kernel, time_of in spent.items():
                    p.figure(f"{name}: ms in {kernel[:90]}", round(time_of, 4))


def microseconds(p: Program, *tasks: tuple[object, Callable]) -> list[float]:
    """The least mean of blocks of calls, as the host sees it; no queue fills.

    The tasks take turns. Each comes with the recipe of an autocast() around its blocks, or None.
    Blocks are short and many: on a host with other load, few long ones differ by tens of percent.
    """
    best = [float("inf")] * len(tasks)
    for _, (i, (recipe, task)) in itertools.product(range(150), enumerate(tasks)):
        with autocast(enabled=recipe is not None, recipe=recipe):
            for _ in range(2):
                task()
            p.settle()
            start = time.perf_counter()
            for _ in range(10):
                task()
            best[i] = min(best[i], (time.perf_counter() - start) / 10)
    p.settle()
    return [seconds * 1e6 for seconds in best]


class Operators(TorchDispatchMode):
    """Counts operators of the library and of PyTorch that compute or allocate."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operator; views do not count."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(p: Program, task: Callable) -> int:
    """The kernels, fills and copies of a call on a GPU; on the CPU the operators."""
    if not p.gpu:
        with Operators() as called:
            task()
        return called.count
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        task()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.self_device_time_total > 0)


def host(p: Program) -> None:
    """Host time of FP8 over bf16, with tiny tensors; and that nothing waits for the device."""
    rows, dim = (128, 128) if p.gpu else (4, 16)
    torch.set_num_threads(1)
    q, k, v = (p.normal(1, rows, 1, dim) for _ in range(3))
    dout = p.normal(1, rows, dim, gradient=False)

    def forward(module: DotProductAttention) -> None:
        module(q, k, v)

    def both(module: DotProductAttention) -> None:
        torch.autograd.grad(module(q, k, v), (q, k, v), dout)

    word = torch.zeros(1, device=p.device)
    (launch,) = microseconds(p, (None, partial(tea.operators.ops.fill.default, word, 1.0)))
    p.figure("an operator with one launch, us", round(launch, 1))
    plain = DotProductAttention(1, dim, qkv_format="bshd")
    unit = "kernels" if p.gpu else "operators"
    for kind in RECIPES:
        recipe, module = recipe_of(kind), DotProductAttention(1, dim, qkv_format="bshd")
        for _ in range(2):  # the end of the second one updates the scales of gradients, too
            with autocast(recipe=recipe):
                both(module)
        for task, name, most in ((forward, "forward", 12), (both, "both passes", None)):
            in_bf16, in_fp8 = partial(task, plain), partial(task, module)
            base, fp8 = microseconds(p, (None, in_bf16), (recipe, in_fp8))
            p.figure(f"{kind}: {name} of bf16, us", round(base, 1))
            p.figure(f"{kind}: {name} over bf16, us", round(fp8 - base, 1), most=most)
            base = launches(p, in_bf16)
            with autocast(recipe=recipe):
                more = launches(p, in_fp8) - base
            p.figure(f"{kind}: {name}: {unit} over the {base} of bf16", more)
        if p.gpu:
            with autocast(recipe=recipe):
                torch.cuda.set_sync_debug_mode("error")
                both(module)
                torch.cuda.set_sync_debug_mode("default")
        p.figure(f"{kind}: synchronisations", 0)


def capture(p: Program) -> None:
    """Graphs of both recipes and of attention(fp8="current") replay what eager calls compute."""
    if not p.gpu:
        return
    shape = (2, 512, 4, 128)

    def run(function: Callable, inputs: list) -> list:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    functions = {"attention": (lambda *x: tea.attention(*x, format="bshd", fp8="current"), None)}
    for kind in RECIPES:
        functions[kind] = (DotProductAttention(4, 128, qkv_format="bshd"), recipe_of(kind))
    for name, (function, recipe) in functions.items():
        torch.manual_seed(1)
        static = [p.normal(*shape) for _ in range(3)]
        fresh = [p.normal(*shape) for _ in range(3)]
        with autocast(enabled=recipe is not None, recipe=recipe, _graph=True):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    run(function, static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = run(function, static)
            with torch.no_grad():
                for a, b in zip(static, fresh, strict=True):
                    a.copy_(b)
            graph.replay()
            wanted = run(function, static)
        for which, a, b in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
            change = float((a - b).float().norm() / b.float().norm())
            p.figure(f"{name} {which}: replay over eager", change, most=0.01)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool,
          lengths: torch.Tensor | None = None) -> dict[str, torch.Tensor]:  # fmt: skip
    """O and gradients in float32, by the library itself."""
    inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
    words = {"format": "bshd", "mask": "causal" if causal else None}
    words |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    o = tea.attention(*inputs, **words)
    gradients = torch.autograd.grad(o, inputs, dout.float().view_as(o))
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def rounding(wanted: dict) -> dict[str, float]:
    """The norms of the errors of casting exact results to FP8, as delayed scaling casts results."""
    found = {}
    for names, dtype in ((("o",), torch.float8_e4m3fn), (("dq", "dk", "dv"), torch.float8_e5m2)):
        scale = torch.finfo(dtype).max / max(wanted[n].abs().max() for n in names)
        for n in names:
            cast = (wanted[n] * scale).to(dtype).float() / scale
            found[n] = float((cast - wanted[n]).norm() / wanted[n].norm())
    return found


def compare(p: Program, name: str, found: dict, wanted: dict) -> None:
    """The norms of the errors, with their bars."""
    for which, value in found.items():
        error = float((value.float() - wanted[which]).norm() / wanted[which].norm())
        p.figure(f"{name} {which}", round(error, 4), most=NORMS[which])


def steps(
    module: DotProductAttention, kind: str, qkv: tuple, dout: torch.Tensor, **words: object
) -> torch.Tensor:
    """O of the second step, whose scales are from the first one."""
    for _ in range(2):
        with autocast(recipe=recipe_of(kind)):
            o = module(*qkv, **words)
        torch.autograd.grad(o, qkv, dout.view_as(o), retain_graph=True)
    return o


def accuracy(p: Program) -> None:
    """1024 rows causal and 2048 rows full, d64, by every way into FP8.

    The bars were set for results of 16 bits. Delayed scaling casts its results as well; the norm
    of that rounding, which is independent of the other errors, is shown with no bar.
    """
    for rows, causal in ((1024, True), (2048, False)):
        torch.manual_seed(3)
        q, k, v = (p.normal(1, rows, 2, 64) for _ in range(3))
        dout = p.normal(1, rows, 2, 64, gradient=False)
        wanted = exact(q, k, v, dout, causal)
        form = {"format": "bshd", "mask": "causal" if causal else None}
        ways = {"attention": partial(tea.attention, q, k, v, fp8="current", **form)}
        for kind in RECIPES:
            FP8GlobalStateManager.reset()
            mask = "causal" if causal else "no_mask"
            module = DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type=mask)
            ways[kind] = partial(steps, module, kind, (q, k, v), dout)
        for name, way in ways.items():
            o = way()
            gradients = torch.autograd.grad(o, (q, k, v), dout.view_as(o))
            found = {"o": o.detach().view(wanted["o"].shape)}
            found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            compare(p, f"{name} {rows} rows", found, wanted)
            for n, norm in rounding(wanted).items() if name == "delayed" else ():
                p.figure(f"{name} {rows} rows {n}: rounding to FP8 alone", round(norm, 4))


def configurations(p: Program) -> None:
    """TransformerEngine's FP8 configurations of DotProductAttention, at their sizes."""
    for (model, sizes), mask in itertools.product(MODELS.items(), MASKS):
        b, s, heads, groups = sizes if p.gpu else (sizes[0], 96, 4, 4 if model == "mha" else 2)
        dim = 128 if p.gpu else 32
        torch.manual_seed(5)
        q = p.normal(b, s, heads, dim)
        k, v = (p.normal(b, s, groups, dim) for _ in range(2))
        dout = p.normal(b, s, heads, dim, gradient=False)
        lengths, words = None, {}
        if "padding" in mask:
            counts = torch.arange(b, device=p.device) * 32 + s - 32 * b
            padded = torch.arange(s, device=p.device) >= counts[:, None]
            words["attention_mask"] = padded[:, None, None]
            lengths = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
            dout = dout.masked_fill(padded[:, :, None, None], 0)
        wanted = exact(q, k, v, dout, "causal" in mask, lengths)
        for kind in RECIPES:
            FP8GlobalStateManager.reset()
            options = {"qkv_format": "bshd", "attn_mask_type": mask}
            module = DotProductAttention(heads, dim, groups, **options)
            o = steps(module, kind, (q, k, v), dout, **words)
            gradients = torch.autograd.grad(o, (q, k, v), dout.view_as(o))
            found = {"o": o.detach().view(wanted["o"].shape)}
            found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            compare(p, f"{model} {mask} {kind}", found, wanted)
            for n, norm in rounding(wanted).items() if kind == "delayed" else ():
                p.figure(f"{model} {mask} {kind} {n}: rounding to FP8 alone", round(norm, 4))
        del wanted, found, gradients, o


def gpt(p: Program) -> None:
    """The small GPT of examples/torch/fp8_gpt.py, 300 steps."""
    command = [sys.executable, ROOT / "examples/torch/fp8_gpt.py", "--device", p.device]
    command += [] if p.gpu else ["--steps", "4"]
    p.figure("exit code", subprocess.run(command, check=False).returncode, most=0)


def draws(p: Program) -> None:
    """Random cases against the oracle, which takes a core: in as many processes as there are."""
    jobs = min(PROCESSES, os.cpu_count() or 1)
    count = -(-DRAWS // jobs) if p.gpu else 10
    command = [sys.executable, ROOT / "tests/python/fp8_draws.py", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, str(3_000_000 + 100_000 * i), p.device], env=environment)
        for i in range(jobs)
    ]
    for process in running:
        p.figure(f"exit code after {count} draws", process.wait(), most=0)


PARTS = {f.__name__: f for f in (rates, host, capture, accuracy, configurations, gpt, draws)}


def run_part(part: str, device: str) -> tuple[int | str, list[str]]:
    """Runs a part in a process of its own, and prints its lines as they come.

    Returns its exit code, or why it has none, and its lines.
    """
    command = [sys.executable, __file__, "--inside", part, "--device", device]
    options, lines = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}, []
    with subprocess.Popen(command, **options) as run:
        # With the processes that it started, which keep the pipe open.
        limit = threading.Timer(SECONDS[part], os.killpg, (run.pid, signal.SIGKILL))
        limit.start()
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    killed = run.returncode == -signal.SIGKILL
    return f"none within {SECONDS[part]} s" if killed else run.returncode, lines


def main() -> int:
    """0 if no bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        program = Program(options.inside, options.device)
        PARTS[options.inside](program)
        return int(program.missed)
    missed, lines = [], []
    for part in options.parts.split(","):
        code, found = run_part(part, options.device)
        print(f"{part}: exit code {code}", flush=True)
        lines += [line for line in found if line.startswith("{")]
        missed += [part] if code else []
    if options.output:
        options.output.write_text("".join(lines))
    print(f"missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
