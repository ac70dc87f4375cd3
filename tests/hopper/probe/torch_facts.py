#!/usr/bin/env python3
"""The ceilings of the card through PyTorch: large matrix products, and a large copy."""

import json
import statistics
import subprocess

import torch


def median_ms(work, repeats: int = 30) -> float:
    """The median over single runs, each between events of its own."""
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def clocks() -> str:
    """SM clock and power, as nvidia-smi sees them now."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def report(fact: str, **figures) -> None:
    print(json.dumps({"fact": fact, "holds": True, **figures}), flush=True)


def main() -> None:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name in ("bf16 matrix product, random", "again"):
        ms = median_ms(lambda: a @ b)
        report(name, tflops=2 * n**3 / ms / 1e9, ms=ms, after=clocks())
    x, y = (t.to(torch.float8_e4m3fn) for t in (a, b))
    one = torch.ones((), device="cuda")

    def narrow():
        return torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16)

    ms = median_ms(narrow)
    report("e4m3 matrix product, random", tflops=2 * n**3 / ms / 1e9, ms=ms, after=clocks())
    source = torch.randint(255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source))
    report("copy of 4 GiB", tb_per_s=2 * source.numel() / ms / 1e9, ms=ms)


if __name__ == "__main__":
    main()
