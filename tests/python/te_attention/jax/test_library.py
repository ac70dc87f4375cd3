"""The versions of jax and of XLA's FFI are compared before anything is registered."""

import subprocess
import sys

import jax
import pytest

from te_attention.jax import _library


def test_the_installed_version_is_supported() -> None:
    _library.check_versions(jax.__version_info__, _library.runtime_api(), (0, 1))


@pytest.mark.parametrize(
    ("version", "api", "text"),
    [
        ((0, 6, 2), (0, 1), "jax is 0.6.2; needs 0.7 or later"),
        ((0, 12, 0), (0, 0), "has version 0.0; needs 0.1 or a later minor version"),
        ((1, 0, 0), (1, 3), "has version 1.3; needs 0.1 or a later minor version"),
    ],
)
def test_other_versions_are_refused(version: tuple, api: tuple, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        _library.check_versions(version, api, (0, 1))


def test_an_import_registers_nothing() -> None:
    """And a refused version leaves JAX as it is."""
    program = """
import jax
import te_attention.jax as tea
from te_attention.jax import _library
real = _library.MINIMUM
_library.MINIMUM = (9, 0)
x = jax.numpy.ones((1, 4, 2, 8))
try:
    tea.attention(x, x, x)
except ImportError as error:
    assert "needs 0.7" in str(error)
else:
    raise SystemExit("not refused")
assert float((x + 1).sum()) == 128
_library.MINIMUM = real
assert float(tea.attention(x, x, x).sum()) == 64
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
