"""The core library, loaded once through ctypes, for functions that need no framework."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent / "lib"
HOST = -1
_LARGEST_STRUCT = 4096  # bytes that the library accepts for any of its structs


class Error(RuntimeError):
    """The library refused or failed. The text has argument, value seen, value needed."""


@functools.cache
def library() -> ctypes.CDLL:
    """libte_attention.so of this package: the C API, for functions that have no Python name."""
    out = ctypes.CDLL(str(FOLDER / "libte_attention.so"))
    out.tea_error.restype = ctypes.c_char_p
    out.tea_version.restype = out.tea_setting.restype = ctypes.c_char_p
    return out


def version() -> str:
    """Version of the core library, as "major.minor.patch"."""
    return library().tea_version().decode()


def setting(variable: str) -> str:
    """The value of an environment variable that the core library reads; "" if it is not set."""
    return library().tea_setting(variable.encode()).decode()


def require(status: int) -> None:
    """Raises Error with the library's text unless `status` is TEA_OK."""
    if status:
        raise Error(library().tea_error().decode())


def _text(write: Callable[[object, int, object], int]) -> str:
    needed = ctypes.c_size_t()
    require(write(None, 0, ctypes.byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    require(write(buffer, needed.value, None))
    return buffer.value.decode()


def _problem_buffer() -> ctypes.Array:
    """Room for a tea_problem of any version, which says so in struct_size, its first field."""
    buffer = ctypes.create_string_buffer(_LARGEST_STRUCT)
    ctypes.c_uint32.from_buffer(buffer).value = _LARGEST_STRUCT
    return buffer


def fields() -> list[str]:
    """The fields of a problem, each with the values that it takes, if they have names."""
    # Every byte 1, so that every field is set. A problem of a newer version is refused with the
    # size that this library knows, which no function returns.
    problem = ctypes.create_string_buffer(bytes([1]) * _LARGEST_STRUCT, _LARGEST_STRUCT)
    struct_size = ctypes.c_uint32.from_buffer(problem)
    struct_size.value = _LARGEST_STRUCT
    library().tea_problem_print(problem, None, ctypes.c_size_t(), ctypes.byref(ctypes.c_size_t()))
    struct_size.value = int(library().tea_error().decode().rpartition("at most ")[2].split(",")[0])
    parsed = _problem_buffer()
    text = _text(
        lambda to, room, needed: library().tea_problem_print(
            problem, to, ctypes.c_size_t(room), needed
        )
    )
    out = []
    for word in text.split():
        name = word.partition("=")[0]
        library().tea_problem_parse(f"{name}=?".encode(), parsed)
        needed = library().tea_error().decode().rpartition("needs ")[2]
        out.append(f"{name}: {needed.removesuffix(' that fits the field')}")
    return out


def explain(problem: str, device: int = HOST) -> str:
    """The answer of each engine to a problem, which is a line of field=value pairs.

    `device` is the index of a GPU, or -1 for the CPU. Raises Error if the line is wrong.
    """
    parsed = _problem_buffer()
    require(library().tea_problem_parse(problem.encode(), parsed))
    return _text(
        lambda to, size, needed: library().tea_explain(
            parsed, device, to, ctypes.c_size_t(size), needed
        )
    )
