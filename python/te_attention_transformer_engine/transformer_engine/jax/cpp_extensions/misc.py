"""Versions and dtypes."""

from typing import Any

import jax.numpy as jnp

import transformer_engine_jax as tex

DTYPES = {
    jnp.dtype(name): dtype
    for name, dtype in (
        ("uint8", tex.DType.kByte),
        ("int32", tex.DType.kInt32),
        ("int64", tex.DType.kInt64),
        ("float32", tex.DType.kFloat32),
        ("float16", tex.DType.kFloat16),
        ("bfloat16", tex.DType.kBFloat16),
        ("float8_e4m3fn", tex.DType.kFloat8E4M3),
        ("float8_e5m2", tex.DType.kFloat8E5M2),
        ("float8_e8m0fnu", tex.DType.kFloat8E8M0),
        ("float4_e2m1fn", tex.DType.kFloat4E2M1),
    )
}


def jax_dtype_to_te_dtype(jax_dtype: Any) -> tex.DType:
    """The member of DType for a dtype of NumPy or of JAX."""
    dtype = jnp.dtype(jax_dtype)
    if dtype not in DTYPES:
        raise ValueError(f"jax_dtype is {dtype.name}; needs one of {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


def te_dtype_to_jax_dtype(te_dtype: tex.DType) -> jnp.dtype:
    """The dtype for a member of DType."""
    return next(dtype for dtype, member in DTYPES.items() if member == te_dtype)


def get_cudnn_version() -> tuple[int, int, int]:
    """Major, minor and patch of the version that passes callers' checks; cuDNN is not used."""
    major, rest = divmod(tex.get_cudnn_version(), 10000)
    return major, *divmod(rest, 100)
