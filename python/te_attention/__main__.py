"""python -m te_attention: prints the installation, and the engine that runs a problem.

usage: python -m te_attention info
       python -m te_attention explain dtype=bf16 batch=2 heads_q=8 ... [--device N]
       python -m te_attention collect-env
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

import te_attention
from te_attention import _library as core
from te_attention import environment

PROBLEM = "dtype=bf16 batch=1 heads_q=8 heads_kv=8 dim_qk=64 seqlen_q=128 seqlen_kv=128"
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
PACKAGES = ("torch", "jax", "jaxlib", "numpy", "transformers", "nvidia-cudnn-cu13", "flash-attn")


def _devices() -> list[int]:
    """The host and every GPU that the library can use."""
    out = [core.HOST]
    while True:
        try:
            core.explain(PROBLEM, len(out) - 1)
        except core.Error:
            return out
        out.append(len(out) - 1)


def _usable(device: int) -> str:
    """The engines that accept a plain problem on the device, in order of preference."""
    answers = [line.split(": ", 1) for line in core.explain(PROBLEM, device).splitlines()]
    return ", ".join(
        name + (" (by name)" if "named" in answer else "")
        for name, answer in answers
        if answer.startswith("accepts")
    )


def _threads() -> str:
    for name in ("TE_ATTENTION_THREADS", "OMP_NUM_THREADS"):
        if value := core.setting(name):
            return f"{value} ({name})"
    return f"{len(os.sched_getaffinity(0))} (cores of this process; PyTorch: its own number)"


def _device_code() -> str:
    if any(line.startswith("portable:") for line in core.explain(PROBLEM).splitlines()):
        return "built in"
    return "not in this build (TE_ATTENTION_CUDA=OFF): GPUs are not used"


def info() -> list[str]:
    """The version, what was built, and what is usable on this machine."""
    parts = sorted(path.name for path in core.FOLDER.glob("*.so"))
    devices = _devices()
    rows = [("libraries", ", ".join(parts)), ("device code", _device_code())]
    rows += [("gpus", "none found")] if len(devices) == 1 else []
    rows += [("on the CPU" if d == core.HOST else f"on GPU {d}", _usable(d)) for d in devices]
    rows += [("cpu", _cpu()), ("threads", _threads())]
    return [
        f"te-attention {te_attention.__version__}",
        *(f"{name:<11} {text}" for name, text in rows),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    pairs = (line.partition(":") for line in lines)
    found = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(found.get("flags", "").split())
    sets = [name for name in INSTRUCTIONS if name in flags]
    return f"{found.get('model name', 'unknown')}; {' '.join(sets) or 'no vector sets known here'}"


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["unknown (torch would tell)"]
    import torch  # only here: it takes seconds

    if not torch.cuda.is_available():
        return [f"none (torch for CUDA {torch.version.cuda})"]
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 20} MiB" for p in found]


def collect_env() -> list[str]:
    """The facts about the machine that a bug report needs. None of them identifies the user."""
    return [
        *info(),
        f"python      {platform.python_version()} ({platform.python_implementation()})",
        f"system      {platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        *(f"gpu         {gpu}" for gpu in _gpus()),
        *(f"{name:<11} {_version(name)}" for name in PACKAGES),
        *(f"{name}={value}" for name, value in environment.variables_set().items()),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 if the problem was valid."""
    parser = argparse.ArgumentParser(prog="python -m te_attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, libraries, engines")
    explain = commands.add_parser(
        "explain",
        help="the answer of each engine to a problem",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["fields:", *(f"  {line}" for line in core.fields())]),
    )
    explain.add_argument("problem", nargs="+", metavar="field=value")
    explain.add_argument("--device", type=int, default=core.HOST, help="index of a GPU; -1: CPU")
    commands.add_parser("collect-env", help="the facts about the machine for a bug report")
    options = parser.parse_args(arguments)
    try:
        if options.command == "explain":
            print(core.explain(" ".join(options.problem), options.device), end="")
        else:
            print("\n".join(info() if options.command == "info" else collect_env()))
    except core.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
