"""TransformerEngine's custom calls, for callers that bind them themselves.

`te_fused_attn_forward_ffi` and `te_fused_attn_backward_ffi` have the operands, results and
attributes of TransformerEngine; a program that it exported runs unchanged. :func:`register` makes
them known to JAX; so does the first call of :func:`te_attention.jax.attention`.
"""

import ctypes
from typing import Any

from te_attention.jax import _library

ERROR = 4096  # bytes of a text


class FusedAttnConfig(ctypes.Structure):
    """The attributes of both custom calls; enums as numbers. Fields that are left out are 0."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("input_batch", "bias_batch", "q_max_seqlen", "kv_max_seqlen", "attn_heads"),
                *("num_gqa_groups", "bias_heads", "qk_head_dim", "v_head_dim"),
                *("max_segments_per_seq", "window_size_left", "window_size_right"),
            )
        ),
        ("scaling_factor", ctypes.c_double),
        ("dropout_probability", ctypes.c_double),
        *(
            (name, ctypes.c_int64)
            for name in ("bias_type", "mask_type", "qkv_layout", "softmax_type")
        ),
        ("is_training", ctypes.c_bool),
        ("deterministic", ctypes.c_bool),
        ("bottom_right_diagonal", ctypes.c_bool),
    )

    def attributes(self) -> dict[str, Any]:
        """The attributes as ``jax.ffi.ffi_call`` takes them."""
        return {name: getattr(self, name) for name, _ in self._fields_}


def register() -> None:
    """Registers the custom calls for "cpu" and "CUDA", once."""
    _library.library()


def registrations() -> dict[str, dict[str, object]]:
    """Capsules of TransformerEngine's custom calls for CUDA: {target: {stage: capsule}}."""
    return _library.capsules(_library.TRANSFORMER_ENGINE, "CUDA")


def _ask(function: str, *arguments: object) -> None:
    error = ctypes.create_string_buffer(ERROR)
    call = getattr(_library.library(), function)
    if call(*arguments, error, ctypes.c_size_t(ERROR)):
        raise ValueError(error.value.decode())


def fused_attn_backend(config: FusedAttnConfig, q_dtype: int, kv_dtype: int) -> int:
    """The class of a call (NVTE_Fused_Attn_Backend); -1 if no engine accepts it.

    Args:
        config: the attributes.
        q_dtype, kv_dtype: members of TransformerEngine's DType, as numbers.
    """
    out, dtypes = ctypes.c_int32(), (ctypes.c_int32 * 2)(q_dtype, kv_dtype)
    _ask("te_fused_attn_backend", ctypes.byref(config), dtypes, ctypes.byref(out))
    return out.value


def fused_attn_workspace(config: FusedAttnConfig, dtype: int) -> tuple[int, int]:
    """Bytes of workspace, forward and backward, at least 1; a pure function that needs no GPU.

    Args:
        config: the attributes.
        dtype: a member of TransformerEngine's DType, as a number.

    Raises:
        ValueError: an attribute is wrong, or no engine accepts the call.
    """
    out = (ctypes.c_uint64 * 2)()
    _ask("te_fused_attn_workspace", ctypes.byref(config), ctypes.c_int32(dtype), out)
    return tuple(out)
