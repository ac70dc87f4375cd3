"""The examples for PyTorch run and find nothing wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "torch"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstart.py", "cpu: accepts"),
        ("sdpa.py", "operators: te_attention::backward_minimal_out te_attention::forward_minimal"),
        ("huggingface.py", "both write the same"),
        ("gpt.py", "the paged cache writes the same"),
        ("fp8_gpt.py", "current: 24 of 24 passes in FP8"),
        ("kv_cache.py", "the last step equals attention over all"),
        ("dot_product_attention.py", "torch.Size([128, 512])"),
    ],
)
def test_it_runs(name: str, words: str) -> None:
    short = ["--steps", "6"] if name.endswith("gpt.py") else []
    command = [sys.executable, EXAMPLES / name, *short]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout


def test_ranks_share_a_sequence() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(EXAMPLES / "context_parallel.py")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks differ from one device by at most" in done.stdout
