#!/usr/bin/env python3
"""Checks that ptxas serialises no wgmma of a source file, which costs a third of the speed.

usage: serialized.py COMPILE_COMMANDS SOURCE...

ptxas reports serialisation (C7510 to C7519) as information, which no option turns into an error.
The file is therefore compiled once more, with the command of the build.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def command_of(commands: list[dict], source: str) -> list[str]:
    """The command that compiles a source file for the library, without a compiler cache."""
    of_source = [c["command"] for c in commands if c["file"].endswith(source)]
    found = [command for command in of_source if "te_attention_hopper" in command]
    if not found:
        sys.exit(f"no command compiles {source}")
    words = shlex.split(found[0])
    return words[next(i for i, word in enumerate(words) if word.endswith("nvcc")) :]


def main() -> None:
    commands = json.loads(Path(sys.argv[1]).read_text())
    for source in sys.argv[2:]:
        words = command_of(commands, source)
        with tempfile.TemporaryDirectory() as folder:
            words[words.index("-o") + 1] = f"{folder}/object.o"
            done = subprocess.run(
                [*words, "-Xptxas=-v"],
                capture_output=True,
                text=True,
                check=False,
                cwd=Path(sys.argv[1]).parent,
            )
        report = done.stdout + done.stderr
        if done.returncode or "registers" not in report:
            sys.exit(f"{source} was not compiled:\n{report}")
        if found := re.search(r"C751\d.*", report):
            sys.exit(f"{source}: {found[0]}")
        print(f"{source}: {report.count('Used ')} kernels, no wgmma serialised")


if __name__ == "__main__":
    main()
