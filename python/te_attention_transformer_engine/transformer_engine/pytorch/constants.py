"""The constants of attention: dtypes, and the valid names of its options."""

import torch

import transformer_engine_torch as tex

TE_DType = {
    torch.uint8: tex.DType.kByte,
    torch.int32: tex.DType.kInt32,
    torch.float32: tex.DType.kFloat32,
    torch.float16: tex.DType.kFloat16,
    torch.bfloat16: tex.DType.kBFloat16,
    torch.float8_e4m3fn: tex.DType.kFloat8E4M3,
    torch.float8_e5m2: tex.DType.kFloat8E5M2,
}
TE_DType_To_Torch = {dtype: torch_dtype for torch_dtype, dtype in TE_DType.items()}

QKVLayouts = tuple(layout.name.removeprefix("NVTE_").lower() for layout in tex.NVTE_QKV_Layout)
AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
SoftmaxTypes = ("vanilla", "off-by-one", "learnable")

dist_group_type = torch.distributed.ProcessGroup
