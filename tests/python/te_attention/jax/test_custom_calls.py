"""TransformerEngine's queries for JAX: backends, workspace and registrations."""

import pytest

from te_attention.jax import custom_calls

BF16 = 6
CONFIG = {
    **{"input_batch": 2, "q_max_seqlen": 64, "kv_max_seqlen": 64, "attn_heads": 4},
    **{"num_gqa_groups": 2, "qk_head_dim": 64, "v_head_dim": 64, "max_segments_per_seq": 1},
    **{"window_size_left": -1, "window_size_right": -1, "scaling_factor": 0.125},
    **{"qkv_layout": 9, "is_training": True},
}


def config(**changes) -> custom_calls.FusedAttnConfig:
    return custom_calls.FusedAttnConfig(**(CONFIG | changes))


def test_the_backend_is_that_of_any_length() -> None:
    assert custom_calls.fused_attn_backend(config(), BF16, BF16) == 1
    assert custom_calls.fused_attn_backend(config(qk_head_dim=7, v_head_dim=7), BF16, BF16) == -1
    with pytest.raises(ValueError, match="same data type"):
        custom_calls.fused_attn_backend(config(), BF16, BF16 - 1)


def test_workspace_has_at_least_a_byte() -> None:
    assert min(custom_calls.fused_attn_workspace(config(), BF16)) >= 1
    assert custom_calls.fused_attn_workspace(config(is_training=False), BF16)[1] == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qkv_layout": 8}, "qkv_layout is 8; needs 5, 7, 9, 10, 12 or 14"),
        ({"bias_type": 3}, "bias_type is 3; needs 0 to 2"),
        ({"mask_type": 6}, "mask_type is 6; needs 0 to 5"),
        ({"input_batch": -1}, "input_batch is -1; needs 0 to"),
        ({"attn_heads": 0}, "attn_heads is 0; needs 1 to"),
        ({"attn_heads": 3}, "no fused attention for these attributes"),
    ],
)
def test_refusals(changes: dict, text: str) -> None:
    with pytest.raises(ValueError) as error:
        custom_calls.fused_attn_workspace(config(**changes), BF16)
    assert str(error.value).startswith(text)


def test_registrations_are_capsules_by_stage() -> None:
    found = custom_calls.registrations()
    assert set(found) == {"te_fused_attn_forward_ffi", "te_fused_attn_backward_ffi"}
    for stages in found.values():
        assert set(stages) == {"prepare", "execute"}
        assert all("PyCapsule" in str(type(x)) for x in stages.values())
