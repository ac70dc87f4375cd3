"""Every name of TransformerEngine's attention is here, and takes what it takes there."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex

DPA = "pytorch.attention.dot_product_attention"
NAMES = {
    "pytorch": "CudaRNGStatesTracker DotProductAttention InferenceParams autocast checkpoint "
    "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage "
    "QuantizedTensor QuantizedTensorStorage Quantizer fp8_autocast get_cudnn_version "
    "get_default_recipe get_device_compute_capability is_bf16_available prepare_for_saving "
    "restore_from_saved MultiheadAttention RotaryPositionEmbedding TransformerLayer "
    "make_graphed_callables quantized_model_init fp8_model_init "
    "is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available",
    "pytorch.attention": "DotProductAttention InferenceParams MultiheadAttention "
    "RotaryPositionEmbedding _attention_backends",
    "pytorch.attention.multi_head_attention": "MultiheadAttention",
    "pytorch.attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb",
    "pytorch.transformer": "TransformerLayer",
    DPA: "DotProductAttention _attention_backends",
    f"{DPA}.backends": "FP8EmulationFunc FlashAttention FusedAttention FusedAttnFunc "
    "UnfusedDotProductAttention _PrepareQKVForFA",
    f"{DPA}.context_parallel": "AttnFuncWithCPAndKVAllGather AttnFuncWithCPAndKVP2P "
    "AttnFuncWithCPAndQKVOA2A attn_forward_func_with_cp flash_attn_p2p_communicate "
    "generate_positional_ids_for_cp get_batch_on_this_cp_rank get_cu_seqlens_on_cp_rank "
    "get_kv_seq_info_after_all_gather get_seq_chunk_ids_for_reordering_after_attn "
    "get_seq_chunk_ids_for_reordering_before_attn pad_thd_sequences_for_cp "
    "reorder_seq_chunks_after_a2a_before_attn_thd reorder_seq_chunks_before_a2a_after_attn_thd "
    "reorder_seq_chunks_for_a2a_after_attn reorder_seq_chunks_for_a2a_before_attn",
    f"{DPA}.softmax": "FusedScaleMaskSoftmax ScaledAlignedCausalMaskedSoftmax "
    "ScaledMaskedSoftmax ScaledSoftmax ScaledUpperTriangMaskedSoftmax",
    f"{DPA}.utils": "AttentionLogging AttentionParams ConvertBSHDtoTHD ConvertTHDtoBSHD "
    "FlashAttentionUtils PackTensors UnpackTensor check_set_window_size combine_and_dequantize "
    "combine_and_quantize get_alibi get_attention_backend get_attention_quantizers get_cu_seqlens "
    "get_cu_seqlens_and_indices get_full_cu_seqlens get_full_mask get_indices get_padding_mask "
    "get_qkv_format get_qkv_layout maybe_contiguous",
    "pytorch.attention.inference": "InferenceParams KVCacheManager NonPagedKVCacheManager "
    "PagedKVCacheManager",
    "pytorch.cpp_extensions": "fused_attn_bwd fused_attn_fwd copy_to_kv_cache NVTE_QKV_Layout",
    "pytorch.cpp_extensions.fused_attn": "AttnBiasType AttnMaskType FusedAttnBackend META_DO "
    "META_DP META_DQKV META_O META_QKV META_S QKVFormat QKVLayout SoftmaxType TORCH_DType",
    "pytorch.constants": "AttnBiasTypes AttnMaskTypes AttnTypes QKVLayouts TE_DType "
    "TE_DType_To_Torch dist_group_type",
    "pytorch.utils": "SplitAlongDim attention_mask_func combine_tensors get_cudnn_version "
    "get_device_compute_capability init_method_normal scaled_init_method_normal "
    "split_tensor_along_dim",
    "pytorch.distributed": "CudaRNGStatesTracker checkpoint gather_along_first_dim "
    "get_distributed_rank get_distributed_world_size reduce_scatter_along_first_dim",
    "pytorch.quantization": "FP8GlobalStateManager RecipeState autocast fp8_autocast "
    "get_default_recipe get_fp8_te_dtype get_fp8_torch_dtype is_fp8_available",
    "pytorch.fp8": "FP8GlobalStateManager autocast fp8_autocast is_fp8_available",
    "pytorch.module.base": "TransformerEngineBaseModule",
    "pytorch.jit": "jit_fuser no_torch_dynamo",
    "pytorch.graph": "is_graph_capturing make_graphed_callables",
    "pytorch.cpu_offload": "get_cpu_offload_context is_cpu_offload_enabled "
    "mark_activation_offload start_offload NVTE_CPU_OFFLOAD_V1",
}
TEX = (
    "DType NVTE_QKV_Layout NVTE_QKV_Format NVTE_Bias_Type NVTE_Mask_Type NVTE_Softmax_Type "
    "NVTE_Fused_Attn_Backend FP8FwdTensors FP8BwdTensors get_fused_attn_backend fused_attn_fwd "
    "fused_attn_bwd fa_prepare_fwd fa_prepare_bwd convert_thd_to_bshd convert_bshd_to_thd "
    "copy_to_kv_cache thd_read_half_tensor thd_second_half_lse_correction "
    "thd_read_second_half_lse thd_out_correction thd_grad_correction thd_get_partitioned_indices "
    "scaled_softmax_forward scaled_softmax_backward scaled_masked_softmax_forward "
    "scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_forward "
    "scaled_upper_triang_masked_softmax_backward scaled_aligned_causal_masked_softmax_forward "
    "scaled_aligned_causal_masked_softmax_backward get_cudnn_version quantize dequantize "
    "compute_amax fused_amax_and_scale_update_after_reduction mha_fill"
)
ABSENT = "fp8_transpose bgrad_quantize generic_gemm"
GROUP = "cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p'"
LENGTHS = "cu_seqlens_q=None, cu_seqlens_kv=None"
PADDED = "cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None"
MOST = "max_seqlen_q=None, max_seqlen_kv=None"
BACKEND = (
    "attention_dropout=0.0, attention_dropout_ctx=<class 'contextlib.nullcontext'>, "
    "attention_type='self', layer_number=None, deterministic=False"
)
WORDS = (
    "attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d', "
    "attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', "
    "window_size=(-1, -1), bottom_right_diagonal=None"
)
STEP = "layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format"
LAYER = "query_layer, key_layer, value_layer"
# With what ours may take beyond it, at the end.
SIGNATURES = {
    f"{DPA}.DotProductAttention.__init__": "num_attention_heads, kv_channels, num_gqa_groups=None, "
    "attention_dropout=0.0, qkv_format='sbhd', attn_mask_type='causal', window_size=None, "
    "bottom_right_diagonal=None, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None, "
    f"tp_group=None, layer_number=None, attention_type='self', {GROUP}, softmax_scale=None, "
    "softmax_type='vanilla', return_max_logit=False",
    f"{DPA}.DotProductAttention.forward": f"{LAYER}, attention_mask=None, qkv_format=None, "
    f"{LENGTHS}, {PADDED}, {MOST}, attn_mask_type=None, window_size=None, "
    "bottom_right_diagonal=None, checkpoint_core_attention=False, "
    "core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None, "
    "fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False, "
    "num_splits=1",
    f"{DPA}.DotProductAttention.set_context_parallel_group": "cp_group, cp_global_ranks, "
    "cp_stream, cp_comm_type='p2p'",
    f"{DPA}.backends.UnfusedDotProductAttention.__init__": "softmax_scale, attention_type='self', "
    "attention_dropout=0.0, attention_dropout_ctx=<class 'contextlib.nullcontext'>, "
    "layer_number=None, softmax_type='vanilla', return_max_logit=False",
    f"{DPA}.backends.UnfusedDotProductAttention.forward": f"_alibi_cache, {LAYER}, "
    f"qkv_layout='sbh3d', {LENGTHS}, {MOST}, attn_mask_type='causal', attention_mask=None, "
    "window_size=None, bottom_right_diagonal=None, core_attention_bias_type='no_bias', "
    "core_attention_bias=None, alibi_slopes=None, inference_params=None, softmax_offset=None, "
    "fp8=False, fp8_meta=None, quantizers=None, fp8_output=False",
    f"{DPA}.backends.FlashAttention.__init__": f"softmax_scale=None, {BACKEND}",
    f"{DPA}.backends.FlashAttention.forward": f"{LAYER}, attention_mask=None, qkv_layout='sbh3d', "
    f"{LENGTHS}, {MOST}, attn_mask_type='causal', window_size=None, alibi_slopes=None, {GROUP}, "
    "fp8=False, fp8_meta=None, quantizers=None, inference_params=None, "
    "flash_attention_backend=<Version('0')>, fp8_output=False, num_splits=1",
    f"{DPA}.backends.FusedAttention.__init__": f"softmax_scale=None, {BACKEND}, "
    "softmax_type='vanilla', return_max_logit=False",
    f"{DPA}.backends.FusedAttention.forward": f"{LAYER}, qkv_layout='sbh3d', {LENGTHS}, {PADDED}, "
    f"{MOST}, attn_mask_type='causal', attention_mask=None, window_size=(-1, -1), "
    "bottom_right_diagonal=None, "
    "fused_attention_backend=<NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen: 1>, "
    f"core_attention_bias_type='no_bias', core_attention_bias=None, fast_zero_fill=True, {GROUP}, "
    "fp8=False, fp8_meta=None, quantizers=None, pad_between_seqs=False, inference_params=None, "
    "softmax_offset=None, fp8_output=False",
    f"{DPA}.backends.FusedAttnFunc.forward": "ctx, is_training, max_seqlen_q, max_seqlen_kv, "
    "cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, "
    "page_table_v, q, k, v, attn_bias, attn_scale, dropout_p, fast_zero_fill, qkv_layout, "
    "attn_bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal, rng_gen, "
    "fused_attention_backend, use_FAv2_bwd, fp8, fp8_meta, quantizers, deterministic, "
    "softmax_offset, fp8_output, layer_number, return_max_logit",
    f"{DPA}.context_parallel.attn_forward_func_with_cp": "is_training, q, k, v, cu_seqlens_q, "
    "cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, "
    "dropout_p, cp_group, cp_global_ranks, cp_stream, cp_comm_type, softmax_scale=None, "
    "qkv_format='bshd', attn_mask_type='causal', attn_bias_type='no_bias', attn_bias=None, "
    "deterministic=False, use_fused_attention=False, window_size=None, fp8=False, fp8_meta=None, "
    "quantizers=None, pad_between_seqs=False, use_flash_attn_3=False, softmax_type='vanilla', "
    "softmax_offset=None, fp8_output=False, layer_number=1, return_max_logit=False",
    f"{DPA}.softmax.FusedScaleMaskSoftmax.__init__": "mask_func, softmax_in_fp32=True",
    f"{DPA}.softmax.FusedScaleMaskSoftmax.forward": "inp, mask, attn_mask_type, scale=None",
    f"{DPA}.utils.get_attention_backend": "attention_params=None",
    f"{DPA}.utils.get_qkv_format": "qkv_layout, inference_params=None",
    f"{DPA}.utils.get_qkv_layout": "q, k, v, qkv_format='sbhd', inference_params=None",
    f"{DPA}.utils.check_set_window_size": "attn_mask_type, window_size=None",
    f"{DPA}.utils.get_alibi": "_alibi_cache, num_heads, max_seqlen_q, max_seqlen_kv, "
    "actual_seqlens_q=None, actual_seqlens_kv=None, alibi_slopes=None, bias_dtype=None, "
    "bottom_right_alignment=True",
    f"{DPA}.utils.combine_and_quantize": "qkv_layout, q, k, v, qkv_quantizer",
    f"{DPA}.utils.combine_and_dequantize": "qkv_layout, q_fp8, k_fp8, v_fp8, "
    "src_nominal_dtype=None, des_nominal_dtype=None",
    f"{DPA}.utils.get_attention_quantizers": "fp8, quantizers",
    "pytorch.cpp_extensions.fused_attn.fused_attn_fwd": "is_training, max_seqlen_q, "
    "max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend, "
    f"attn_bias=None, {PADDED}, page_table_k=None, page_table_v=None, s_quantizer=None, "
    f"o_quantizer=None, {WORDS}, rng_gen=None, softmax_offset=None, return_max_logit=False, "
    "cuda_graph=False",
    "pytorch.cpp_extensions.fused_attn.fused_attn_bwd": "max_seqlen_q, max_seqlen_kv, "
    "cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors, "
    f"fused_attention_backend, {PADDED}, s_quantizer=None, dp_quantizer=None, "
    f"dqkv_quantizer=None, {WORDS}, deterministic=False, cuda_graph=False",
    "pytorch.attention.inference.InferenceParams.__init__": "max_batch_size, max_sequence_length, "
    "num_heads_kv=None, head_dim_k=None, dtype=None, head_dim_v=None, is_paged=False, "
    "total_num_pages=None, page_size=None, max_ctx_len=None, qkv_format='bshd', "
    "custom_cache_manager=None",
    "pytorch.attention.inference.InferenceParams.step": "layer_number, new_k, new_v, qkv_format",
    "pytorch.attention.inference.KVCacheManager.step": STEP,
    "pytorch.attention.inference.NonPagedKVCacheManager.step": STEP,
    "pytorch.attention.inference.PagedKVCacheManager.step": STEP,
    "pytorch.attention.inference.NonPagedKVCacheManager.__init__": "max_batch_size, max_seqlen, "
    "num_heads, head_dim_k, dtype, head_dim_v=None",
    "pytorch.attention.inference.PagedKVCacheManager.__init__": "total_num_pages, page_size, "
    "num_heads, head_dim_k, dtype, max_batch_size, max_seqlen, head_dim_v=None",
    "pytorch.utils.split_tensor_along_dim": "tensor, dim, num_partitions, "
    "contiguous_split_chunks=False",
    "pytorch.utils.combine_tensors": "tensors, dim",
    "pytorch.utils.SplitAlongDim.forward": "ctx, mixed_x_layer, split_dim, "
    "split_size_or_sections, squeeze=False",
    "pytorch.quantization.autocast": "enabled=True, calibrating=False, recipe=None, "
    "amax_reduction_group=None, _graph=False",
    "pytorch.quantization.fp8_autocast": "enabled=True, calibrating=False, fp8_recipe=None, "
    "fp8_group=None, _graph=False",
    "pytorch.quantization.is_fp8_available": "return_reason=False",
    "pytorch.cpu_offload.get_cpu_offload_context": "enabled=False, num_layers=1, model_layers=1, "
    "offload_activations=True, offload_weights=False",
    "pytorch.module.base.TransformerEngineBaseModule.prepare_forward_ctx": "inp, num_gemms=1, "
    "allow_non_contiguous=False, allow_different_data_and_param_types=False",
}


def found(path: str) -> object:
    """The object at a dotted path below transformer_engine."""
    parts, value = path.split("."), None
    for i, part in enumerate(parts):
        if value is None or (inspect.ismodule(value) and not hasattr(value, part)):
            value = import_module("transformer_engine." + ".".join(parts[: i + 1]))
        else:
            value = getattr(value, part)
    return value


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    for name in NAMES[module].split():
        assert hasattr(import_module(f"transformer_engine.{module}"), name), name


def test_names_of_the_extension_module() -> None:
    for name in TEX.split():
        assert name in tex.__all__
        assert hasattr(tex, name), name


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = inspect.signature(found(path)).parameters.values()
    texts = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.name != "self"
    ]
    text, wanted = ", ".join(texts), SIGNATURES[path]
    assert text == wanted or text.startswith(wanted + ", "), text


@pytest.mark.parametrize("name", ABSENT.split())
def test_what_other_layers_need_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute {name}: of TransformerEngine's names"):
        getattr(tex, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):  # Python's own text
        exec(f"from transformer_engine_torch import {name}")


@pytest.mark.parametrize("name", ["LayerNormal", "cross_entropy", "MultiTensorApply"])
def test_what_is_no_attention_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute {name}: of TransformerEngine's names"):
        getattr(te, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
        exec(f"from transformer_engine.pytorch import {name}")


def test_importing_the_package_is_enough() -> None:
    program = "import transformer_engine as te; te.pytorch.DotProductAttention(2, 32)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_quantize_nothing() -> None:
    tensors = [torch.randn(2, 3, 4, 8) for _ in range(3)]
    utils = import_module(f"transformer_engine.{DPA}.utils")
    assert utils.combine_and_quantize("bshd_bshd_bshd", *tensors, None) == tuple(tensors)
    out = utils.combine_and_dequantize("bshd_bshd_bshd", *tensors, des_nominal_dtype=torch.half)
    assert all(torch.equal(a, b.half()) for a, b in zip(out, tensors, strict=True))
    assert utils.get_attention_quantizers(False, {}) == (None,) * 6
    small = tensors[0].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k_fp8 is torch\.float8_e4m3fn; needs an FP8"):
        utils.combine_and_dequantize("bshd_bshd_bshd", tensors[0], small, small)
