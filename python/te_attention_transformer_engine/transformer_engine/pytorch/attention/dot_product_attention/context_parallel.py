"""Context parallelism by TransformerEngine's names.

te_attention.torch.context_parallel_attention() computes all of it; docs/context-parallel.md tells
which rank has which rows. Arguments that choose a backend of TransformerEngine have no effect.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_engine.pytorch._refusal import require

from ._cp_batches import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)
from ._cp_helpers import (
    flash_attn_p2p_communicate,
    get_cu_seqlens_on_cp_rank,
    get_kv_seq_info_after_all_gather,
    get_seq_chunk_ids_for_reordering_after_attn,
    get_seq_chunk_ids_for_reordering_before_attn,
    reorder_seq_chunks_after_a2a_before_attn_thd,
    reorder_seq_chunks_before_a2a_after_attn_thd,
    reorder_seq_chunks_for_a2a_after_attn,
    reorder_seq_chunks_for_a2a_before_attn,
)
from ._cp_ranks import ranks_of
from ._engine import EngineCall, check_bias_and_offset, form_of
from ._layouts import FORMATS
from ._masks import check_set_window_size

__all__ = [
    "AttnFuncWithCPAndKVAllGather",
    "AttnFuncWithCPAndKVP2P",
    "AttnFuncWithCPAndQKVOA2A",
    "attn_forward_func_with_cp",
    "flash_attn_p2p_communicate",
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "get_kv_seq_info_after_all_gather",
    "get_seq_chunk_ids_for_reordering_after_attn",
    "get_seq_chunk_ids_for_reordering_before_attn",
    "pad_thd_sequences_for_cp",
    "reorder_seq_chunks_after_a2a_before_attn_thd",
    "reorder_seq_chunks_before_a2a_after_attn_thd",
    "reorder_seq_chunks_for_a2a_after_attn",
    "reorder_seq_chunks_for_a2a_before_attn",
]


def attn_forward_func_with_cp(
    is_training: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    dropout_p: float,
    cp_group: object,
    cp_global_ranks: Sequence[int] | None,
    cp_stream: object,
    cp_comm_type: str,
    softmax_scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias",
    attn_bias: Tensor | None = None,
    deterministic: bool = False,
    use_fused_attention: bool = False,
    window_size: tuple[int, int] | None = None,
    fp8: bool = False,
    fp8_meta: dict | None = None,
    quantizers: dict | None = None,
    pad_between_seqs: bool = False,
    use_flash_attn_3: bool = False,
    softmax_type: str = "vanilla",
    softmax_offset: Tensor | None = None,
    fp8_output: bool = False,
    layer_number: int = 1,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """O of the local rows, [..., heads, dim_v]; with return_max_logit also max_logit [heads].

    q, k and v have the local rows; cu_seqlens and max_seqlen are global. A bias has the local rows
    and all columns. cp_global_ranks, use_fused_attention, fp8_meta, quantizers, pad_between_seqs,
    use_flash_attn_3 and layer_number have no effect.
    """
    del cp_global_ranks, use_fused_attention, fp8_meta, quantizers, pad_between_seqs
    del use_flash_attn_3, layer_number
    require(cp_group is not None, "cp_group", None, "a process group, or a list of two")
    require(qkv_format in FORMATS, "qkv_format", repr(qkv_format), ", ".join(FORMATS))
    require(not fp8_output, "fp8_output", True, "False with context parallelism")
    check_bias_and_offset(attn_bias_type, attn_bias, softmax_type, softmax_offset)
    window = tuple(check_set_window_size(attn_mask_type, window_size))
    call = EngineCall(
        form_of("_".join([qkv_format] * 3), attn_mask_type, window, None),
        (cu_seqlens_q, cu_seqlens_kv),
        (max_seqlen_q, max_seqlen_kv),
        softmax_scale,
        dropout_p if is_training else 0.0,
        deterministic,
        attn_bias_type == "alibi",
        attn_bias,
        attn_bias_type == "pre_scale_bias",
        softmax_offset,
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        return_max_logit=return_max_logit,
        ranks=ranks_of(cp_group, cp_stream, cp_comm_type, fp8),
    )
    out = call.run(q, k, v)
    o, *largest = out if return_max_logit else (out,)
    o = o.unflatten(-1, (q.shape[-2], v.shape[-1]))
    return (o, *largest) if return_max_logit else o


_COMMON = (
    "is_training q k v cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv cu_seqlens_q_padded "
    "cu_seqlens_kv_padded dropout_p softmax_scale qkv_format attn_mask_type attn_bias_type "
    "attn_bias deterministic use_fused_attention "
)
_DIFFERENTIABLE = ("q", "k", "v", "attn_bias", "softmax_offset")


class _Attention(torch.autograd.Function):
    """attn_forward_func_with_cp() with other positions. forward() records it, backward() runs it.

    Gradients are those of the arguments in _DIFFERENTIABLE, each at its argument's position.
    """

    comm_type = ""
    names: tuple[str, ...] = ()

    @classmethod
    def words(cls, arguments: Sequence[object]) -> dict[str, object]:
        """The arguments by name, with those that the class does not have."""
        require(len(arguments) == len(cls.names), "arguments", len(arguments), f"{len(cls.names)}")
        words = dict(zip(cls.names, arguments, strict=True))
        words.setdefault("cu_seqlens_kv", words["cu_seqlens_q"])
        words.setdefault("cu_seqlens_kv_padded", words["cu_seqlens_q_padded"])
        words.setdefault("cp_global_ranks", None)
        two = isinstance(words["cp_group"], list)
        return words | {"cp_comm_type": "a2a+p2p" if two else cls.comm_type}

    @staticmethod
    def _forward(ctx, cls: type, arguments: Sequence[object]) -> Tensor | tuple[Tensor, ...]:
        words = cls.words(arguments)
        ctx.count, ctx.inputs = len(arguments), []
        with torch.enable_grad():
            for i, name in enumerate(cls.names):
                tensor = words[name]
                if name in _DIFFERENTIABLE and isinstance(tensor, Tensor):
                    words[name] = tensor.detach().requires_grad_(ctx.needs_input_grad[i])
                    if ctx.needs_input_grad[i]:
                        ctx.inputs.append((i, words[name]))
            out = attn_forward_func_with_cp(**words)
        if not isinstance(out, tuple):
            ctx.recorded = out
            return out.detach()
        ctx.recorded, largest = out
        ctx.mark_non_differentiable(largest)
        return ctx.recorded.detach(), largest

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, None for all other arguments."""
        gradients: list[Tensor | None] = [None] * ctx.count
        found = torch.autograd.grad(ctx.recorded, [t for _, t in ctx.inputs], dout)
        for (i, _), gradient in zip(ctx.inputs, found, strict=True):
            gradients[i] = gradient
        return tuple(gradients)


class AttnFuncWithCPAndKVP2P(_Attention):
    """Keys and values go round; with a list of two groups, heads are exchanged in the first."""

    comm_type = "p2p"
    names = tuple(
        (
            _COMMON + "fp8 fp8_meta cp_group cp_global_ranks cp_stream quantizers pad_between_seqs "
            "use_flash_attn_3 fp8_output layer_number return_max_logit"
        ).split()
    )

    @staticmethod
    def forward(ctx, *arguments: object) -> Tensor | tuple[Tensor, ...]:
        """The arguments that `names` lists."""
        return _Attention._forward(ctx, AttnFuncWithCPAndKVP2P, arguments)


class AttnFuncWithCPAndKVAllGather(_Attention):
    """Every rank receives all keys and values."""

    comm_type = "all_gather"
    names = tuple(
        (
            _COMMON.replace("cu_seqlens_kv ", "").replace("cu_seqlens_kv_padded ", "")
            + "window_size cp_group cp_stream use_flash_attn_3 return_max_logit"
        ).split()
    )

    @staticmethod
    def forward(ctx, *arguments: object) -> Tensor | tuple[Tensor, ...]:
        """The arguments that `names` lists."""
        return _Attention._forward(ctx, AttnFuncWithCPAndKVAllGather, arguments)


class AttnFuncWithCPAndQKVOA2A(_Attention):
    """Ranks exchange rows for heads."""

    comm_type = "a2a"
    names = tuple(
        (
            _COMMON + "window_size fp8 fp8_meta cp_group cp_stream quantizers use_flash_attn_3 "
            "softmax_type softmax_offset fp8_output return_max_logit"
        ).split()
    )

    @staticmethod
    def forward(ctx, *arguments: object) -> Tensor | tuple[Tensor, ...]:
        """The arguments that `names` lists."""
        return _Attention._forward(ctx, AttnFuncWithCPAndQKVOA2A, arguments)
