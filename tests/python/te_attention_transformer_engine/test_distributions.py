"""Two distributions next to NVIDIA's: which one is imported, and whose files stay."""

import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS, NVIDIA = "te-attention-transformer-engine", "transformer-engine"
PACKAGE = OURS.replace("-", "_")
SOURCES = {  # of a distribution that stands for NVIDIA's
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/jax/__init__.py": "",
    "transformer_engine_torch/__init__.py": "",
    "transformer_engine_jax/__init__.py": "",
}
NAMES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")
FILES = """
import transformer_engine, importlib.util
print(transformer_engine.__file__)
for name in (
    "transformer_engine.pytorch",
    "transformer_engine.jax",
    "transformer_engine_torch",
    "transformer_engine_jax",
):
    print(importlib.util.find_spec(name).origin)
"""


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([str(a) for a in command], check=True)


class Environment:
    """A virtual environment without pip: that of the tests installs into it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder, self.program = folder, folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        # The interface calls version() when it is imported. No library is needed for that here.
        (self.site / "te_attention.py").write_text("def version():\n    return '0'\n")

    def pip(self, command: str, *arguments: object) -> None:
        pip("--python", self.program, command, *arguments)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-index", "--no-deps", wheel)

    def run(self, code: str, *paths: Path) -> subprocess.CompletedProcess:
        """Runs code, with folders on PYTHONPATH."""
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [self.program, "-c", code]
        return subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )

    def output(self, code: str, *paths: Path) -> list[str]:
        """The lines that code prints. Nothing may be written to stderr, at start-up neither."""
        done = self.run(code, *paths)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    def has(self, wheel: Path) -> bool:
        """Whether every file of a wheel is there as it was packed; False if none is."""
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if ".dist-info/" not in name]
            there = [name for name in names if (self.site / name).exists()]
            assert there in ([], names)
            assert all((self.site / name).read_bytes() == packed.read(name) for name in there)
        return bool(there)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    source = ROOT / "packaging" / "transformer_engine"
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvidia") / "transformer_engine-2.13.0-py3-none-any.whl"
    info = "transformer_engine-2.13.0.dist-info"
    files = SOURCES | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NVIDIA}\nVersion: 2.13.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
            record.append(f"{name},sha256={digest.rstrip('=')},{len(text)}")
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return path


@pytest.fixture(scope="module")
def installed(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With our distribution alone. Tests leave it as it is."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(ours)
    return environment


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_both_are_installed_in_either_order_and_each_is_removed(
    ours: Path, nvidia: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    of_nvidia = [str(environment.site / name) for name in SOURCES]
    of_ours = [str(environment.site / PACKAGE / name) for name in SOURCES]

    def check(has_ours: bool, has_nvidia: bool) -> None:
        assert (environment.has(ours), environment.has(nvidia)) == (has_ours, has_nvidia)
        assert environment.output(FILES) == (of_nvidia if has_nvidia else of_ours)

    environment.install(ours)
    check(True, False)
    environment.install(nvidia)
    check(True, True)
    environment.pip("uninstall", "--yes", OURS)
    check(False, True)
    environment.install(ours)
    check(True, True)
    environment.pip("uninstall", "--yes", NVIDIA)
    check(True, False)


def test_the_wheel_has_no_file_under_names_of_nvidia(ours: Path) -> None:
    with zipfile.ZipFile(ours) as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
    info = {name for name in tops if name.endswith(".dist-info")}
    assert tops - info == {PACKAGE, f"{PACKAGE}.pth"}
    core = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"wheel\.packages = (.*)", core) == ['["python/te_attention"]']


def test_the_wheel_needs_te_attention_of_its_own_version(ours: Path) -> None:
    project = (ROOT / "CMakeLists.txt").read_text()
    version = re.search(r"project\(te_attention VERSION ([0-9.]+)", project)[1]
    with zipfile.ZipFile(ours) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        lines = wheel.read(name).decode().splitlines()
    assert f"Version: {version}" in lines
    needed = [line for line in lines if line.startswith("Requires-Dist:")]
    both = [f"te-attention[{x}]=={version}; extra == '{x}'" for x in ("torch", "jax")]
    needed = {line.removeprefix("Requires-Dist: ").replace('"', "'") for line in needed}
    assert needed == {f"te-attention=={version}", *both, "flax; extra == 'jax'"}


def test_the_interpreter_starts_without_frameworks_and_te_attention(installed: Environment) -> None:
    names = (PACKAGE, "te_attention", "torch", "jax")
    code = f"import sys; print(*(n in sys.modules for n in {names}))"
    assert installed.output(code) == ["True", "False", "False", "False"]


def test_the_interpreter_starts_where_the_package_was_deleted(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    source = ROOT / "packaging" / "transformer_engine" / f"{PACKAGE}.pth"
    (environment.site / source.name).write_bytes(source.read_bytes())
    assert environment.output("print('started')") == ["started"]


def test_the_folders_have_one_name_each(installed: Environment) -> None:
    done = installed.run(f"import {PACKAGE}.transformer_engine")
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_served_next_to_one_of_another_package(
    name: str, installed: Environment, tmp_path: Path
) -> None:
    write(tmp_path, f"{name}/__init__.py")
    for other in set(NAMES) - {name}:
        done = installed.run(f"import {name}, {other}", tmp_path)
        assert f"ModuleNotFoundError: No module named '{other}'" in done.stderr
        module = f"sys.modules['{name}'] = types.ModuleType('{name}')"
        done = installed.run(f"import sys, types; {module}; import {other}")
        assert f"No module named '{other}'" in done.stderr


def test_a_later_finder_is_asked_first(installed: Environment, tmp_path: Path) -> None:
    write(tmp_path, "transformer_engine/__init__.py")
    code = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, ['{tmp_path}'])
sys.meta_path.append(Editable())
import transformer_engine
print(transformer_engine.__file__)
"""
    assert installed.output(code) == [str(tmp_path / "transformer_engine/__init__.py")]


def test_a_folder_without_a_package_in_it_is_named(installed: Environment, tmp_path: Path) -> None:
    """Python makes a namespace package of such a folder, before the last finder is asked."""
    folder = write(tmp_path, "transformer_engine/left.so") / "transformer_engine"
    done = installed.run("import transformer_engine.pytorch", tmp_path)
    needed = f"transformer_engine is {folder}, without __init__.py; needs that folder removed"
    assert needed in done.stderr
    done = installed.run("import transformer_engine; print(transformer_engine.__file__)", tmp_path)
    assert done.stdout.split() == ["None"]
    found = installed.output(
        "import importlib.util as u; print(u.find_spec('transformer_engine_torch').origin)",
        tmp_path,
    )
    assert found == [str(installed.site / PACKAGE / "transformer_engine_torch/__init__.py")]
