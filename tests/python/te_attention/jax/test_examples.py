"""The examples for JAX run and find nothing wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "jax"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("quickstart.py", (), "cpu: accepts"),
        ("gpt.py", ("--steps", "40"), "jax.nn: "),
        ("fused_attn.py", (), "(2, 128, 8, 64)"),
        ("context_parallel.py", (), "8 devices"),
    ],
)
def test_it_runs(name: str, arguments: tuple, words: str) -> None:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout
