"""python -m te_attention: prints the installation, and the engine that runs a problem.

usage: python -m te_attention info
       python -m te_attention explain "dtype=bf16 batch=2 heads_q=8 ..." [--device N]
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

PROBLEM = "dtype=bf16 batch=1 heads_q=8 heads_kv=8 dim_qk=64 seqlen_q=128 seqlen_kv=128"
PACKAGES = ("torch", "jax", "jaxlib", "numpy", "transformers", "nvidia-cudnn-cu13", "flash-attn")


def info() -> list[str]:
    """The version, what was built, and the engines of the CPU in order of preference."""
    parts = sorted(path.name for path in core.FOLDER.glob("*.so"))
    engines = [line.split(":")[0] for line in core.explain(PROBLEM).splitlines()]
    return [
        f"te-attention {te_attention.__version__}",
        f"libraries   {', '.join(parts)}",
        f"engines     {', '.join(engines)}",
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
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} threads"


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
    ours = sorted(name for name in os.environ if name.startswith(("TE_ATTENTION_", "NVTE_")))
    return [
        *info(),
        f"python      {platform.python_version()} ({platform.python_implementation()})",
        f"system      {platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        f"cpu         {_cpu()}",
        *(f"gpu         {gpu}" for gpu in _gpus()),
        *(f"{name:<11} {_version(name)}" for name in PACKAGES),
        *(f"{name}={os.environ[name]}" for name in ours),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 if the problem was valid."""
    parser = argparse.ArgumentParser(prog="python -m te_attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, libraries, engines")
    explain = commands.add_parser("explain", help="the answer of each engine to a problem")
    explain.add_argument("problem", help="a line of field=value words")
    explain.add_argument("--device", type=int, default=core.HOST, help="index of a GPU; -1: CPU")
    commands.add_parser("collect-env", help="the facts about the machine for a bug report")
    options = parser.parse_args(arguments)
    try:
        if options.command == "explain":
            print(core.explain(options.problem, options.device), end="")
        else:
            print("\n".join(info() if options.command == "info" else collect_env()))
    except core.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
