"""Every name of TransformerEngine's JAX attention is here, and takes what it takes there."""

import dataclasses
import inspect
from importlib import import_module

import pytest

import transformer_engine as te
import transformer_engine.jax as te_jax
import transformer_engine_jax as tex
from transformer_engine.jax import attention

NAMES = {
    "jax": "autocast MeshResource flax attention sharding cpp_extensions quantize",
    "jax.attention": "AttnBiasType AttnMaskType AttnSoftmaxType QKVFormat QKVLayout CPStrategy "
    "ReorderStrategy SequenceDescriptor fused_attn fused_attn_thd canonicalize_attn_mask_type "
    "is_fused_attn_kernel_available make_swa_mask run_length_fill reorder_causal_load_balancing "
    "inverse_reorder_causal_load_balancing",
    "jax.cpp_extensions": "FusedAttnHelper fused_attn_fwd fused_attn_bwd",
    "jax.cpp_extensions.attention": "AttnBiasType AttnMaskType AttnSoftmaxType QKVFormat QKVLayout "
    "CPStrategy SequenceDescriptor FusedAttnHelper fused_attn_fwd fused_attn_bwd "
    "FusedAttnFwdPrimitive FusedAttnBwdPrimitive FusedAttnCPWithAllGatherFwdPrimitive "
    "FusedAttnCPWithAllGatherBwdPrimitive FusedAttnCPStripedWithAllGatherFwdPrimitive "
    "FusedAttnCPStripedWithAllGatherBwdPrimitive FusedRingAttnFwdPrimitive "
    "FusedRingAttnBwdPrimitive FusedRingAttnStripedFwdPrimitive FusedRingAttnStripedBwdPrimitive "
    "reorder_causal_dual_chunk_swap reorder_causal_striped",
    "jax.cpp_extensions.base": "BasePrimitive register_primitive",
    "jax.cpp_extensions.misc": "get_cudnn_version",
    "jax.sharding": "MeshResource global_shard_guard global_mesh_resource get_mesh_axis_size "
    "with_sharding_constraint with_sharding_constraint_by_logical_axes",
    "jax.quantize.helper": "DType",
    "jax.flax": "DotProductAttention",
    "jax.flax.transformer": "DotProductAttention",
}
TEX = (
    "DType NVTE_Bias_Type NVTE_Mask_Type NVTE_QKV_Layout NVTE_QKV_Format NVTE_Softmax_Type "
    "NVTE_Fused_Attn_Backend get_fused_attn_backend get_cudnn_version get_cuda_version "
    "get_device_compute_capability get_fused_attn_fwd_workspace_sizes "
    "get_fused_attn_bwd_workspace_sizes nvte_get_qkv_format registrations"
)
KINDS = "attn_bias_type, attn_mask_type, qkv_layout"
CALL = "scaling_factor, dropout_probability, is_training"
STRATEGY = "context_parallel_strategy=<CPStrategy.DEFAULT: 0>"
PARALLEL = f"{STRATEGY}, context_parallel_causal_load_balanced=False, context_parallel_axis=''"
REORDER = "tensor, strategy, cp_size, seq_dim, stripe_size=None"
SIGNATURES = {
    "attention.fused_attn": f"qkv, bias, sequence_descriptor, seed, {KINDS}, softmax_type, {CALL}, "
    f"max_segments_per_seq=1, window_size=None, {PARALLEL}, "
    "context_checkpoint_name='context', softmax_offset=None, stripe_size=None",
    "attention.fused_attn_thd": "qkv, bias, q_seq_lens, kv_seq_lens, q_seq_offsets, "
    f"kv_seq_offsets, seed, {KINDS}, {CALL}, max_segments_per_seq=1, window_size=None, {PARALLEL}, "
    "softmax_offset=None",
    "attention.is_fused_attn_kernel_available": "is_training, q_dtype, kv_dtype, qkv_layout, "
    "attn_bias_type, attn_mask_type, softmax_type, dropout_probability, q_num_heads, kv_num_heads, "
    "q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v, window_size=None",
    "attention.make_swa_mask": "segment_pos_q, segment_pos_kv, window_size=None, "
    "dtype=<class 'jax.numpy.float32'>, segment_ids_q=None, segment_ids_kv=None",
    "attention.run_length_fill": "segment_ids",
    "attention.reorder_causal_load_balancing": REORDER,
    "attention.inverse_reorder_causal_load_balancing": REORDER,
    "attention.canonicalize_attn_mask_type": "attn_mask_type",
    "attention.SequenceDescriptor.from_seqlens": "seqlens",
    "attention.SequenceDescriptor.from_seqlens_and_offsets": "seqlens, seq_offsets",
    "attention.SequenceDescriptor.get_seqlens_and_offsets": "attn_mask_type, qkv_layout, "
    "window_size, max_segments_per_seq",
    "cpp_extensions.fused_attn_fwd": "qkv, bias, softmax_offset, sequence_descriptor, seed, "
    f"{KINDS}, softmax_type, {CALL}, max_segments_per_seq, window_size=None, {PARALLEL}, "
    "stripe_size=None",
    "cpp_extensions.fused_attn_bwd": "qkv, bias, softmax_offset, softmax_aux, rng_state, output, "
    f"doutput, sequence_descriptor, {KINDS}, softmax_type, {CALL}, max_segments_per_seq, "
    f"window_size=None, {PARALLEL}, stripe_size=None",
    "cpp_extensions.attention.reorder_causal_dual_chunk_swap": "tensor, cp_size, seq_dim, "
    "to_contiguous",
    "cpp_extensions.attention.reorder_causal_striped": "tensor, cp_size, seq_dim, is_inverse, "
    "stripe_size=1",
    "cpp_extensions.FusedAttnHelper.parse_qkv_aval": "q_aval, k_aval, v_aval, qkv_layout",
    "sharding.MeshResource": "dp_resource=None, tp_resource=None, tpsp_resource=None, "
    "fsdp_resource=None, pp_resource=None, cp_resource=None",
    "autocast": "enabled=False, recipe=None, mesh_resource=None",
    "flax.DotProductAttention.__call__": "query, key, value, sequence_descriptor=None, bias=None, "
    "deterministic=False, mask=None",
}
FLAX = (
    "head_dim num_attention_heads num_gqa_groups=None attention_dropout=0.0 "
    "attn_mask_type='causal' attn_bias_type=None dtype=None dropout_rng_name='dropout' "
    "float32_logits=False qkv_layout='bshd_bshd_bshd' scale_factor=None "
    "transpose_batch_sequence=None window_size=None max_segments_per_seq=1 "
    "context_parallel_causal_load_balanced=False context_parallel_axis='' "
    "context_parallel_strategy='DEFAULT' context_checkpoint_name='context' softmax_type='vanilla'"
)
HELPER = (
    "is_training q_dtype kv_dtype qkv_layout attn_bias_type attn_mask_type softmax_type "
    "dropout_probability q_num_heads kv_num_heads q_max_seqlen kv_max_seqlen head_dim_qk "
    "head_dim_v window_size"
)
CONFIG = (
    "attn_bias_type attn_mask_type softmax_type qkv_layout scaling_factor dropout_probability "
    "is_training max_segments_per_seq window_size bottom_right_diagonal "
    "context_parallel_load_balanced cp_axis cp_striped_window_size stripe_size"
)
VALUES = {
    "NVTE_Bias_Type": {"NO_BIAS": 0, "PRE_SCALE_BIAS": 1, "POST_SCALE_BIAS": 2},
    "NVTE_Mask_Type": {
        **{"NO_MASK": 0, "PADDING_MASK": 1, "CAUSAL_MASK": 2, "PADDING_CAUSAL_MASK": 3},
        **{"CAUSAL_BOTTOM_RIGHT_MASK": 4, "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": 5},
    },
    "NVTE_Softmax_Type": {"VANILLA_SOFTMAX": 0, "OFF_BY_ONE_SOFTMAX": 1, "LEARNABLE_SOFTMAX": 2},
    "NVTE_QKV_Layout": {
        **{"BS3HD": 5, "BSHD_BS2HD": 7, "BSHD_BSHD_BSHD": 9},
        **{"T3HD": 10, "THD_T2HD": 12, "THD_THD_THD": 14},
    },
    "NVTE_QKV_Format": {"SBHD": 0, "BSHD": 1, "THD": 2},
    "NVTE_Fused_Attn_Backend": {
        **{"No_Backend": -1, "F16_max512_seqlen": 0, "F16_arbitrary_seqlen": 1, "FP8": 2}
    },
}
DTYPES = {
    **{"Byte": 0, "Int32": 2, "Int64": 3, "Float32": 4, "Float16": 5, "BFloat16": 6},
    **{"Float8E4M3": 7, "Float8E5M2": 8, "Float8E8M0": 9, "Float4E2M1": 10},
}
ENUMS = {
    "AttnBiasType": "NVTE_Bias_Type",
    "AttnMaskType": "NVTE_Mask_Type",
    "AttnSoftmaxType": "NVTE_Softmax_Type",
    "QKVLayout": "NVTE_QKV_Layout",
    "QKVFormat": "NVTE_QKV_Format",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    for name in NAMES[module].split():
        assert hasattr(import_module(f"transformer_engine.{module}"), name), name


def test_names_of_the_extension_module() -> None:
    assert set(TEX.split()) == set(tex.__all__)
    assert all(hasattr(tex, name) for name in tex.__all__)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    value = te_jax
    for part in path.split("."):
        value = getattr(value, part)
    texts = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(value).parameters.values()
        if p.name != "self"
    ]
    assert ", ".join(texts) == SIGNATURES[path]


def fields(cls: type) -> list[str]:
    missing = dataclasses.MISSING
    found = [f for f in dataclasses.fields(cls) if f.name not in ("parent", "name")]
    return [f.name if f.default is missing else f"{f.name}={f.default!r}" for f in found]


def test_fields() -> None:
    assert fields(te_jax.flax.DotProductAttention) == FLAX.split()
    assert fields(te_jax.cpp_extensions.FusedAttnHelper) == HELPER.split()
    assert fields(te_jax.cpp_extensions.attention._FusedAttnConfig) == CONFIG.split()


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    found = {member.name: int(member) for member in getattr(tex, name)}
    assert found == {f"NVTE_{key}": n for key, n in VALUES[name].items()}


def test_dtypes() -> None:
    assert {m.name: int(m) for m in tex.DType} == {f"k{key}": n for key, n in DTYPES.items()}


@pytest.mark.parametrize("name", ENUMS)
def test_the_values_of_enums_are_those_of_the_extension_module(name: str) -> None:
    members = getattr(attention, name)
    for member in members:
        assert member.value is getattr(tex, ENUMS[name])[f"NVTE_{member.name}"]
    assert len(members) == len(getattr(tex, ENUMS[name]))


def test_numbers_of_strategies() -> None:
    assert [m.value for m in attention.CPStrategy] == [0, 1, 2]
    assert [(m.name, m.value) for m in attention.ReorderStrategy] == [
        ("DualChunkSwap", 0),
        ("Striped", 1),
    ]


@pytest.mark.parametrize("module", [te, te_jax, tex, te_jax.flax])
def test_other_layers_are_not_there(module: object) -> None:
    with pytest.raises(AttributeError, match="TransformerLayer"):
        module.TransformerLayer  # noqa: B018


def test_primitives_of_context_parallelism_have_the_names_of_the_calls() -> None:
    module = te_jax.cpp_extensions.attention
    names = [n for n in module.__all__ if n.endswith("Primitive") and ("CP" in n or "Ring" in n)]
    assert len(names) == 8
    for name in names:
        cls = getattr(module, name)
        assert cls.name in ("te_fused_attn_forward_ffi", "te_fused_attn_backward_ffi")
        assert cls.__name__ == name
        assert cls.outer_primitive is not None
