"""Attention for Hugging Face Transformers: attn_implementation="te_attention".

    import te_attention.torch.huggingface
    model = AutoModel.from_pretrained(..., attn_implementation="te_attention")

A causal, sliding-window or bidirectional mask is passed as an option, and padding takes one value
per key. Only other masks (packed, chunked, user-defined) become the four-dimensional mask that
Transformers builds for PyTorch's SDPA. For a model that does not declare support for other
implementations of attention, every mask becomes the one that the model's own code reads.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from te_attention.torch.functional import attention

NAME = "te_attention"


def _parts(mask_function: Callable) -> tuple:
    """The two functions that Transformers' and_masks() joined, or none.

    A compiler cannot inspect the closure of a traced function: the mask is a tensor there.
    """
    if torch.compiler.is_compiling():
        return ()
    cells = getattr(mask_function, "__closure__", None) or ()
    parts = next((c.cell_contents for c in cells if isinstance(c.cell_contents, tuple)), ())
    return parts if len(parts) == 2 else ()


def _made_by(function: Callable, maker: str) -> bool:
    return getattr(function, "__qualname__", "").startswith(f"{maker}.")


def _is_sliding(mask_function: Callable) -> bool:
    """Whether this is Transformers' causal sliding window, whose size the layer also passes."""
    parts = _parts(mask_function)
    return bool(parts) and (
        _made_by(parts[0], "sliding_window_overlay") and parts[1] is causal_mask_function
    )


def _packed_ids(mask_function: Callable) -> Tensor | None:
    """[b, s] numbers of the sequences, if this is the causal mask of sequences in one row."""
    parts = _parts(mask_function)
    if not parts or not _made_by(parts[0], "packed_sequence_mask_function"):
        return None
    inside = dict(zip(parts[1].__code__.co_freevars, parts[1].__closure__ or (), strict=True))
    inner = inside["mask_function"].cell_contents if "mask_function" in inside else None
    if inner is not causal_mask_function and not (inner and _is_sliding(inner)):
        return None
    return parts[0].__closure__[0].cell_contents


def _modules_of(config: type) -> list[ModuleType]:
    """The modules that define the models of a configuration, as far as they are loaded."""
    own, modeling = config.__module__, config.__module__.rpartition(".")[0] + ".modeling_"
    return [m for n, m in [*sys.modules.items()] if n == own or n.startswith(modeling)]


@functools.cache
def _reads_masks(config: type) -> bool:
    """Whether models of the configuration use the mask in code of their own.

    They ask create_causal_mask() for a mask that has every element.
    """
    return any("allow_is_causal_skip" in inspect.getsource(m) for m in _modules_of(config))


def _tables(module: ModuleType) -> list[dict]:
    """Tables from an implementation's name to the class of a layer, which some models have."""
    return [
        x
        for name, x in vars(module).items()
        if name.endswith("ATTENTION_CLASSES") and isinstance(x, dict) and "eager" in x
    ]


@functools.cache
def _supports_attention(config: type) -> bool:
    """Whether the models of a configuration declare support for other implementations.

    Other models may compute attention with their own code, which interprets None and a mask of keys
    differently: BLOOM would attend to future tokens. A model is defined in the package of its
    configuration, and is loaded before it requests a mask.
    """
    modules = _modules_of(config)
    models = [
        x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x is not PreTrainedModel
    ]
    declared = any(x._supports_sdpa or x._supports_attention_backend for x in models)
    if declared and not any(map(_tables, modules)):
        return True
    warnings.warn(
        f"attn_implementation is {NAME!r}, and the models of {config.__name__} declare no support "
        "for other implementations than their own (_supports_sdpa, _supports_attention_backend), "
        "or choose them from a table of classes; "
        "layers that do not ask AttentionInterface compute attention without te_attention",
        stacklevel=3,
    )
    return False


@torch.compiler.assume_constant_result
def _supports_attention_constant(config: type) -> bool:
    """_supports_attention() as a constant of the compiled graph."""
    return _supports_attention(config)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    config: object = None,
    **kwargs,
) -> Tensor | None:
    """The mask in the form that attention_forward() takes.

    Returns None if the layer's options define the mask; a boolean [b, kv_length] that is False for
    padding, if the options define the rest; the same as [b, 1, 1, kv_length] for bidirectional
    attention; otherwise the complete mask [b, 1, q_length, kv_length]: boolean, or, for models
    without support for other implementations, 0 and the lowest number of the dtype.
    """
    bidirectional = mask_function is bidirectional_mask_function
    # A model that does not allow a skip reads the mask itself.
    words = allow_is_bidirectional_skip if bidirectional else allow_is_causal_skip
    named = bidirectional or mask_function is causal_mask_function or _is_sliding(mask_function)
    # The last query must be aligned with the last key; with a static cache it is not.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    own = config is not None and not _supports_attention_constant(type(config))
    ids = None if own or batch_size != 1 else _packed_ids(mask_function)
    if ids is not None and config is not None and not _reads_masks(type(config)):
        return ids
    if words and named and (aligned or bidirectional) and not own:
        if attention_mask is None:
            return None
        keys = attention_mask[:, -kv_length:]
        if keys.shape[1] == kv_length:
            return keys.bool()[:, None, None] if bidirectional else keys.bool()
    kwargs.update(allow_is_bidirectional_skip=False)
    if not own:
        kwargs.update(allow_is_causal_skip=False)
    return (eager_mask if own else sdpa_mask)(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for visible keys and -inf for masked ones, with as many dimensions of 1 as possible."""
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


# Arguments that models pass on although the mask or the position embedding has already used them.
USED_ELSEWHERE = {
    *("position_ids", "cache_position", "use_cache", "seq_idx", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "position_embeddings", "return_dict"),
}
BOOL = torch.bool
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def _refuse_unknown(others: dict, known: set[str]) -> None:
    for name, value in others.items():
        if value is not None and value is not False and name not in known:
            raise TypeError(f"{name} is given; needs None: te_attention does not use it")


def _lengths(others: dict, mask: Tensor | None, batch: int, rows: int) -> dict | None:
    """The arguments of attention() for packed lengths, or None if there are none to apply.

    A mask with a row for each query already contains the lengths. With a mask of keys, packed
    lengths are refused.
    """
    whole = mask is not None and mask.dim() == 4 and mask.shape[2] == rows
    given = {name: others.get(name) for name in sorted(PACKED)}
    plain = mask is None and batch == 1 and None not in given.values()
    _refuse_unknown(others, USED_ELSEWHERE | PACKED if whole or plain else USED_ELSEWHERE)
    if not plain:
        return None
    names = ("cu_seqlens_kv", "cu_seqlens_q", "max_seqlen_kv", "max_seqlen_q")
    return dict(zip(names, given.values(), strict=True))


def _lengths_of(ids: Tensor) -> dict:
    """The arguments of attention() for sequences that only position ids tell apart.

    Their number is read from the device once for each mask, as Transformers' FlashAttention does.
    """
    if not hasattr(ids, "te_attention_lengths"):
        ends = torch.bincount(ids[0]).cumsum(0).to(torch.int32)
        cu = torch.nn.functional.pad(ends, (1, 0))
        ids.te_attention_lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    return ids.te_attention_lengths


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """The attention of a layer: q, k, v [b, heads, s, d]; returns O as [b, s, heads, d].

    Key and value keep their own heads (no expansion). `s_aux`: the learnable sinks of GPT-OSS;
    `position_bias`: the bias that T5 adds to the scores. Key and value may be those of a cache in
    FP8, and k_descale and v_descale are then their scales. Packed lengths (cu_seq_lens_q,
    max_length_q, ...) make a batch of one row a ragged batch, unless the mask contains them.
    Raises TypeError if a model passes an unknown argument that would change the result.
    """
    ids = attention_mask
    if ids is not None and ids.dim() == 2 and not ids.is_floating_point() and ids.dtype != BOOL:
        attention_mask = None
    lengths = _lengths(others, attention_mask, *query.shape[:3:2])
    if lengths is None and attention_mask is not ids:
        lengths = _lengths_of(ids)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    structured = attention_mask is None or attention_mask.dim() == 2
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = _bias(bias, query.dtype)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if lengths is not None and position_bias is not None:
        raise TypeError("position_bias is given; needs None with cu_seq_lens_q")
    tensors = [query, key, value]
    if lengths is not None:  # the concatenated tokens of all sequences
        tensors = [t[0].transpose(0, 1) for t in tensors]
    o = attention(
        *tensors,
        mask="causal_bottom_right" if structured and causal else None,
        window=(sliding_window - 1, None) if structured and causal and sliding_window else None,
        bias=bias,
        softcap=softcap or 0.0,
        sink=None if s_aux is None else s_aux.float(),
        dropout=dropout,
        scale=scaling,
        k_descale=k_descale,
        v_descale=v_descale,
        **({} if lengths is None else {"format": "thd"} | lengths),
    )
    return o.transpose(1, 2) if lengths is None else o[None], None


_original_init = PreTrainedModel.__init__


@functools.wraps(_original_init)
def _init(self, config, *inputs, **kwargs) -> None:
    """PreTrainedModel's, which runs before a model makes its layers.

    Models that choose a class for their layers by the implementation's name get their eager class
    for ours, and a warning; so do those that ignore the name.
    """
    for table in _tables(sys.modules[type(self).__module__]):
        table.setdefault(NAME, table["eager"])
    _original_init(self, config, *inputs, **kwargs)
    if getattr(self.config, "_attn_implementation", None) == NAME:
        _supports_attention(type(self.config))


PreTrainedModel.__init__ = _init
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
