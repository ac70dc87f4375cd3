"""The facts about a benchmark's run: its commit, its processor; and common command-line options."""

import platform
import subprocess
from pathlib import Path


def numbers(text: str) -> list[int]:
    """Integers separated by commas."""
    return [int(word) for word in text.split(",")]


def processor() -> str:
    """The kernel's name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def commit() -> str:
    """The commit of the sources, or nothing where git does not know."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""  # no git
