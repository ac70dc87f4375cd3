"""The queries of the extension module: backends, workspace sizes, versions."""

import operator

import jax

from te_attention.jax import custom_calls
from te_attention.jax.custom_calls import registrations
from transformer_engine_jax.enums import (
    DType,
    NVTE_Fused_Attn_Backend,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
)

WITHOUT_A_GPU = 90  # the compute capability whose rules callers then follow
_BACKEND = str.split(
    "is_training q_dtype kv_dtype qkv_layout bias_type mask_type softmax_type dropout_probability "
    "attn_heads num_gqa_groups q_max_seqlen kv_max_seqlen qk_head_dim v_head_dim "
    "window_size_left window_size_right deterministic"
)
_FORWARD = str.split(
    "input_batch bias_batch q_max_seqlen kv_max_seqlen attn_heads num_gqa_groups bias_heads "
    "qk_head_dim v_head_dim scaling_factor dropout_probability bias_type mask_type softmax_type "
    "qkv_layout dtype is_training max_segments_per_seq window_size_left window_size_right "
    "bottom_right_diagonal"
)
_BACKWARD = [*_FORWARD[:17], "deterministic", *_FORWARD[17:]]
_FLOATS = ("scaling_factor", "dropout_probability")
_FLAGS = ("is_training", "deterministic", "bottom_right_diagonal")
_SIGNED = ("window_size_left", "window_size_right")


def _read(name: str, value: object) -> bool | int | float:
    if name in _FLAGS:
        return bool(value)
    if name in _FLOATS:
        return float(value)
    number = operator.index(value)
    least = -1 if name in _SIGNED else 0
    if not least <= number < 2**62:
        raise ValueError(f"{name} is {number}; needs {least} to 2^62 - 1")
    return number


def _given(function: str, names: list[str], arguments: tuple) -> dict:
    if len(arguments) != len(names):
        raise TypeError(
            f"{function}() has {len(arguments)} arguments; needs {len(names)}: {', '.join(names)}"
        )
    return {name: _read(name, value) for name, value in zip(names, arguments, strict=True)}


def get_fused_attn_backend(*arguments: object) -> NVTE_Fused_Attn_Backend:
    """The backend for a call with these options, by the checks of the core library.

    Takes is_training, q_dtype, kv_dtype, qkv_layout, bias_type, mask_type, softmax_type, dropout,
    q_heads, kv_heads, q_max_seqlen, kv_max_seqlen, qk_head_dim, v_head_dim, window_left,
    window_right, deterministic.
    """
    given = _given("get_fused_attn_backend", _BACKEND, arguments)
    dtypes = DType(given.pop("q_dtype")), DType(given.pop("kv_dtype"))
    NVTE_QKV_Layout(given["qkv_layout"])  # others are refused
    config = custom_calls.FusedAttnConfig(**given)
    return NVTE_Fused_Attn_Backend(custom_calls.fused_attn_backend(config, *dtypes))


def _workspace(function: str, names: list[str], arguments: tuple, verb: int) -> tuple:
    given = _given(function, names, arguments)
    dtype = DType(given.pop("dtype"))
    config = custom_calls.FusedAttnConfig(**given)
    return [custom_calls.fused_attn_workspace(config, dtype)[verb]], DType.kByte


def get_fused_attn_fwd_workspace_sizes(*arguments: object) -> tuple[list[int], DType]:
    """Shape and type of the forward workspace; a pure function that needs no GPU.

    Takes input_batch, bias_batch, q_max_seqlen, kv_max_seqlen, attn_heads, num_gqa_groups,
    bias_heads, qk_head_dim, v_head_dim, scaling_factor, dropout_probability, bias_type, mask_type,
    softmax_type, qkv_layout, dtype, is_training, max_segments_per_seq, window_size_left,
    window_size_right, bottom_right_diagonal.
    """
    return _workspace("get_fused_attn_fwd_workspace_sizes", _FORWARD, arguments, 0)


def get_fused_attn_bwd_workspace_sizes(*arguments: object) -> tuple[list[int], DType]:
    """The same for backward; `deterministic` comes after is_training."""
    return _workspace("get_fused_attn_bwd_workspace_sizes", _BACKWARD, arguments, 1)


def nvte_get_qkv_format(qkv_layout: NVTE_QKV_Layout) -> NVTE_QKV_Format:
    """The order of dimensions of a layout."""
    is_ragged = NVTE_QKV_Layout(qkv_layout).name.startswith("NVTE_T")
    return NVTE_QKV_Format.NVTE_THD if is_ragged else NVTE_QKV_Format.NVTE_BSHD


def get_cudnn_version() -> int:
    """A version that passes callers' checks for cuDNN, which is not used here."""
    return 92100


def get_device_compute_capability(gpu_id: int) -> int:
    """10 * major + minor of a GPU; 90 without one, so that callers take the same paths."""
    found = [device for device in jax.local_devices() if device.platform != "cpu"]
    if not found:
        return WITHOUT_A_GPU
    return int(found[gpu_id].compute_capability.replace(".", ""))


def get_cuda_version() -> int:
    """The version of CUDA's runtime whose features callers may expect: 13.0."""
    return 13000


__all__ = [
    "get_cuda_version",
    "get_cudnn_version",
    "get_device_compute_capability",
    "get_fused_attn_backend",
    "get_fused_attn_bwd_workspace_sizes",
    "get_fused_attn_fwd_workspace_sizes",
    "nvte_get_qkv_format",
    "registrations",
]
