"""The handlers' library: checked against the installed jaxlib, loaded and registered at first use.

XLA compares versions when a backend starts, and a handler that is too new can keep the whole
backend from starting; hence the check before anything is registered.
"""

import ctypes
import functools
import re
import threading
from pathlib import Path

import jax

from te_attention import _library as core

MINIMUM = (0, 7)
PATH = core.FOLDER / "libte_attention_jax.so"
LENGTH = 4096  # of texts
# The handlers of each custom call, by stage; those of CUDA have the suffix.
OURS = {
    name: {"execute": name}
    for name in ("tea_attention_forward", "tea_attention_backward", "tea_attention_dropout_mask")
}
TRANSFORMER_ENGINE = {
    f"te_fused_attn_{verb.lower()}_ffi": {
        "prepare": "CudnnHandleInitHandler",
        "execute": f"FusedAttn{verb}Handler",
    }
    for verb in ("Forward", "Backward")
}
SUFFIX = {"cpu": "", "CUDA": "_cuda"}
_lock = threading.Lock()


class Call(ctypes.Structure):
    """The sizes and attributes of a call: te_attention_jax_call."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * 7),
        ("workspace", ctypes.c_uint64 * 2),
        ("text", ctypes.c_char * LENGTH),
    )


def runtime_api() -> tuple[int, int] | None:
    """The version of XLA's FFI that the installed jaxlib has; None where its header is missing."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    if not header.exists():
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def check_versions(
    version: tuple[int, ...], api: tuple[int, int] | None, built: tuple[int, int]
) -> None:
    """Raises ImportError unless that jax and its FFI can run handlers built for `built`."""
    if version[:2] < MINIMUM:
        text = ".".join(map(str, version))
        raise ImportError(f"te_attention.jax: jax is {text}; needs 0.7 or later")
    if api is not None and (api[0] != built[0] or api[1] < built[1]):
        raise ImportError(
            f"te_attention.jax: XLA's FFI of the installed jaxlib has version {api[0]}.{api[1]}; "
            f"needs {built[0]}.{built[1]} or a later minor version"
        )


def _load() -> ctypes.CDLL:
    if not PATH.exists():
        raise ImportError(
            f"te_attention.jax: {PATH.name} is not part of this build; "
            "needs jaxlib 0.7 or later installed when the package is built"
        )
    core.library()  # first: this one links against it
    out = ctypes.CDLL(str(PATH))
    api = (ctypes.c_int32 * 2)()
    out.te_attention_jax_api(api)
    check_versions(jax.__version_info__, runtime_api(), tuple(api))
    return out


def _capsules(library: ctypes.CDLL, targets: dict, platform: str) -> dict:
    def capsule(stage: str, name: str) -> object:
        suffix = SUFFIX[platform] if stage == "execute" else ""
        return jax.ffi.pycapsule(getattr(library, name + suffix))

    return {
        target: {stage: capsule(stage, name) for stage, name in stages.items()}
        for target, stages in targets.items()
    }


@functools.cache
def _registered() -> ctypes.CDLL:
    out = _load()
    for platform in SUFFIX:
        for target, handlers in _capsules(out, OURS | TRANSFORMER_ENGINE, platform).items():
            jax.ffi.register_ffi_target(target, handlers, platform=platform)
    return out


def capsules(targets: dict, platform: str) -> dict[str, dict[str, object]]:
    """The handlers of these custom calls as capsules."""
    return _capsules(library(), targets, platform)


def library() -> ctypes.CDLL:
    """libte_attention_jax.so, its handlers registered: once, and for the life of the process."""
    with _lock:
        return _registered()
