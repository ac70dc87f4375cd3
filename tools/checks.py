"""Common parts of the check_*.py scripts: the project's files, C++ without comments, and main()."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CPP = {".h", ".c", ".cpp", ".cu", ".cuh"}


def project_files(root: Path) -> list[Path]:
    """Every file of the project, tracked or about to be; never a build output."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # no git, or a source archive
        paths = [
            p for p in root.rglob("*") if p.relative_to(root).parts[0] not in {".git", "build"}
        ]
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


def cpp_sources(root: Path, folder: str) -> list[Path]:
    """The C, C++ and CUDA files below root/folder."""
    return sorted(p for p in (root / folder).rglob("*") if p.suffix in CPP)


def without_comments(text: str) -> str:
    """C++ text with its comments blanked; line numbers stay."""
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n")

    return re.sub(pattern, blank, text, flags=re.DOTALL)


def main(check: Callable[[Path], list[str]]) -> None:
    """Runs one check over the project (or the folder given) and exits 1 if it finds anything."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    problems = check(root)
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)
