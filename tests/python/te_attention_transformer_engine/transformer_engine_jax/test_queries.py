"""The functions of transformer_engine_jax: backends, workspace sizes, versions, registrations."""

import pytest

import transformer_engine_jax as tex

BF16, LAYOUT = tex.DType.kBFloat16, tex.NVTE_QKV_Layout
BACKEND = [True, BF16, BF16, LAYOUT.NVTE_BSHD_BSHD_BSHD, 0, 2, 0, 0.0, 8, 2, 64, 64, 64, 64, -1, -1]
BACKEND.append(False)
SIZES = [2, 0, 64, 64, 8, 2, 0, 64, 64, 0.125, 0.0, 0, 2, 0, 9, BF16, True, 1, -1, -1, False]


def changed(values: list, at: int, value: object) -> list:
    return [*values[:at], value, *values[at + 1 :]]


def test_backends() -> None:
    found = tex.get_fused_attn_backend(*BACKEND)
    assert found is tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    none = tex.get_fused_attn_backend(*changed(BACKEND, 12, 63))
    assert none is tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (BACKEND[:-1], TypeError, r"get_fused_attn_backend\(\) has 16 arguments; needs 17"),
        (changed(BACKEND, 10, -5), ValueError, "q_max_seqlen is -5; needs 0 to 2"),
        (changed(BACKEND, 3, 8), ValueError, "8 is not a valid NVTE_QKV_Layout"),
        (changed(BACKEND, 1, 99), ValueError, "99 is not a valid DType"),
        (changed(BACKEND, 2, tex.DType.kFloat16), ValueError, "same data type"),
        (changed(BACKEND, 8, 2.5), TypeError, "integer"),
    ],
)
def test_what_the_query_refuses(arguments: list, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tex.get_fused_attn_backend(*arguments)


def test_workspace_sizes() -> None:
    for shape, dtype in (
        tex.get_fused_attn_fwd_workspace_sizes(*SIZES),
        tex.get_fused_attn_bwd_workspace_sizes(*SIZES[:17], True, *SIZES[17:]),
    ):
        assert dtype is tex.DType.kByte
        assert len(shape) == 1
        assert shape[0] >= 1
    with pytest.raises(TypeError, match="has 21 arguments; needs 22"):
        tex.get_fused_attn_bwd_workspace_sizes(*SIZES)
    with pytest.raises(ValueError, match="no fused attention for these attributes"):
        tex.get_fused_attn_fwd_workspace_sizes(*changed(SIZES, 7, 63))


def test_formats_of_layouts() -> None:
    for layout in tex.NVTE_QKV_Layout:
        want = "NVTE_THD" if layout >= 10 else "NVTE_BSHD"
        assert tex.nvte_get_qkv_format(layout).name == want


def test_versions() -> None:
    assert tex.get_cudnn_version() > 91301  # which sinks need there
    assert tex.get_cuda_version() >= 12000
    assert tex.get_device_compute_capability(0) >= 80


def test_registrations() -> None:
    assert set(tex.registrations()) == {"te_fused_attn_forward_ffi", "te_fused_attn_backward_ffi"}
