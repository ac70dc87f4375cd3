"""The choice of the backend of a call: TransformerEngine's rules as a table, with reasons.

Rules that exist because of flash-attn also apply here: programs query the backends and act on the
answer, and an installed flash-attn may run. Rules that exist because of cuDNN are omitted: our
engines implement Fused, which supports what tex.get_fused_attn_backend accepts.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from packaging.version import Version

import transformer_engine_torch as tex
from te_attention import environment
from te_attention.torch.fp8 import Float8Tensor, get_fp8_te_dtype
from transformer_engine.pytorch._refusal import refuse
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    AttnBiasType,
    AttnMaskType,
    FusedAttnBackend,
    QKVLayout,
    SoftmaxType,
)
from transformer_engine.pytorch.utils import get_device_compute_capability

from ._flash_package import FlashAttentionUtils
from ._fp8 import asks_for_fp8, emulates
from ._layouts import formats_of, is_packed
from ._masks import check_set_window_size, is_window

HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class AttentionLogging:
    """The logger. NVTE_DEBUG * NVTE_DEBUG_LEVEL: 0 logs warnings, 1 choices, 2 reasons."""

    _log_level = environment.number("NVTE_DEBUG") * environment.number("NVTE_DEBUG_LEVEL")
    _formatter = logging.Formatter("[%(levelname)-8s | %(name)-19s]: %(message)s")
    _stream_handler = logging.StreamHandler()
    fa_logger = logging.getLogger(__name__)
    _is_logging_setup = False

    @staticmethod
    def setup_logging() -> None:
        """Sets the level of the loggers. The first selection calls it."""
        cls = AttentionLogging
        level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(max(cls._log_level, 0), 2)]
        cls._stream_handler.setFormatter(cls._formatter)
        for logger in (cls.fa_logger, logging.getLogger("DotProductAttention")):
            logger.setLevel(level)
            if not logger.hasHandlers():
                logger.addHandler(cls._stream_handler)
        cls._is_logging_setup = True


@dataclass(eq=True)
class AttentionParams:
    """The inputs of the choice of a backend, except the device and the environment."""

    qkv_type: type = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    alibi_slopes_shape: torch.Size | None = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: str = "1hss"
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: dict | None = None
    inference_params: object = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1


class CacheKind(NamedTuple):
    """The properties of a KV cache that rules read. A cached choice must not hold its memory."""

    is_paged: bool
    page_size: int | None
    is_fp8: bool = False  # K and V alone: queries have 16 bits


def cache_kind(inference_params: object) -> CacheKind | None:
    """The CacheKind of inference_params, or None without a cache."""
    if inference_params is None:
        return None
    paged = getattr(inference_params, "is_paged", False)
    size = inference_params.page_size if paged else None
    return CacheKind(paged, size, getattr(inference_params, "dtype", None) in FP8)


class _Case:
    """AttentionParams and values derived from them. Other attributes are those of params."""

    def __init__(self, params: AttentionParams) -> None:
        self.params = params
        self.window = check_set_window_size(params.attn_mask_type, params.window_size)
        self.q_format, _ = formats_of(params.qkv_layout)
        major, minor = get_device_compute_capability()
        self.sm = (
            major * 10 + minor if major else None
        )  # None: the host, to which no such rule applies
        self.flash2 = FlashAttentionUtils.version
        self.cross = params.max_seqlen_q != params.max_seqlen_kv
        self.windowed = is_window(self.window)
        self.paged = params.qkv_layout.startswith("paged_kv_")
        self.top_left = not params.bottom_right_diagonal
        alibi = params.core_attention_bias_type == "alibi"
        self.alibi, self.own_slopes = alibi, alibi and params.alibi_slopes_shape is not None
        self.fused: tex.NVTE_Fused_Attn_Backend | None = None
        recipe = (params.fp8_meta or {}).get("recipe") if params.fp8 else None
        self.in_fp8 = recipe if recipe is not None and asks_for_fp8(recipe) else None

    def __getattr__(self, name: str) -> object:
        return getattr(self.params, name)

    def fused_backend(self) -> tex.NVTE_Fused_Attn_Backend:
        """The answer of tex.get_fused_attn_backend for this case."""
        dtype = TE_DType[self.qkv_dtype]
        if self.in_fp8:
            dtype = get_fp8_te_dtype(self.in_fp8)
        # fmt: off
        self.fused = tex.get_fused_attn_backend(
            self.is_training, dtype, dtype,
            QKVLayout[self.qkv_layout], AttnBiasType[self.core_attention_bias_type],
            AttnMaskType[self.attn_mask_type], SoftmaxType[self.softmax_type],
            self.attention_dropout, self.num_heads, self.num_gqa_groups, self.max_seqlen_q,
            self.max_seqlen_kv, self.head_dim_qk, self.head_dim_v, *self.window,
            self.return_max_logit, self.cuda_graph, self.deterministic,
        )
        # fmt: on
        return self.fused


F2, F3, FU, UN = (
    "FlashAttention 2",
    "FlashAttention 3",
    "FusedAttention",
    "UnfusedDotProductAttention",
)
FL, ALL = (F2, F3), (F2, F3, FU, UN)


class _Rule(NamedTuple):
    backends: tuple[str, ...]
    refuses: Callable[[_Case], object]
    reason: str  # a format string that may use the case's attributes


def _off(backends: tuple[str, ...], name: str) -> _Rule:
    return _Rule(backends, lambda _: not environment.switch(name), f"{name} is 0")


def _needs(backends: tuple[str, ...], name: str, allowed: object, words: str = "") -> _Rule:
    """A rule that a parameter is `allowed`, or one of a tuple."""
    values = allowed if isinstance(allowed, tuple) else (allowed,)
    reason = f"{name} is {{{name}}}; needs {words or allowed}"
    return _Rule(backends, lambda c: getattr(c, name) not in values, reason)


def _fa3_dims(c: _Case) -> bool:
    d, dv = c.head_dim_qk, c.head_dim_v
    mla = (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512)
    wide = dv > 256 and c.qkv_dtype not in HALF
    return d > 256 or c.num_heads % c.num_gqa_groups or (d != dv and not mla) or wide


def _fa2_dims(c: _Case) -> bool:
    d = c.head_dim_qk
    return d > 256 or d % 8 or (d > 192 and c.sm not in (None, 80, 90, 100, 120))


RULES = (
    _off(FL, "NVTE_FLASH_ATTN"),
    _off((FU,), "NVTE_FUSED_ATTN"),
    _off((UN,), "NVTE_UNFUSED_ATTN"),
    _Rule(
        (F3,), lambda _: not FlashAttentionUtils.v3_is_installed, "flash-attn-3 is not installed"
    ),
    _Rule((F2, FU), lambda c: c.sm and c.sm < 80, "the device is sm_{sm}; needs sm_80 or later"),
    _Rule(
        (F2,),
        lambda c: (
            c.sm and c.sm >= 100 and c.flash2 < FlashAttentionUtils.version_required_blackwell
        ),
        "flash-attn is {flash2} on sm_{sm}; needs 2.7.3",
    ),
    _Rule((F3,), lambda c: c.sm != 90, "the device is sm_{sm}; needs sm_90"),
    _needs((F2,), "qkv_dtype", HALF, "16 bits"),
    _needs((F3,), "qkv_dtype", (*HALF, torch.float8_e4m3fn), "16 bits or float8_e4m3fn"),
    _needs((FU,), "qkv_dtype", tuple(TE_DType), "a type of tex"),
    _needs((F3, FU), "qkv_type", (torch.Tensor, Float8Tensor), "torch.Tensor or Float8Tensor"),
    _Rule((F2,), lambda c: c.in_fp8, "attention in FP8"),
    _Rule((F3,), lambda c: c.in_fp8 and c.is_training, "training in FP8"),
    _Rule(
        (UN,),
        lambda c: c.in_fp8 and not emulates(),
        "attention in FP8; needs NVTE_UnfusedDPA_Emulate_FP8=1",
    ),
    _Rule(ALL, lambda c: c.in_fp8 and c.return_max_logit, "return_max_logit in FP8"),
    _Rule(
        ALL,
        lambda c: c.in_fp8 and c.inference_params is not None and c.in_fp8.fp8_mha,
        "a KV cache with recipe.fp8_mha",
    ),
    _Rule((FU,), lambda c: c.in_fp8 and c.inference_params is not None, "a KV cache in FP8"),
    _Rule(
        (F3,),
        lambda c: c.in_fp8 and c.inference_params is not None and c.q_format != "thd",
        "a KV cache in FP8 with q in {q_format}; needs thd",
    ),
    _Rule(
        (F2, F3, UN),
        lambda c: getattr(c.inference_params, "is_fp8", False),
        "a KV cache of FP8 with queries of {qkv_dtype}",
    ),
    _needs((F2, FU, UN), "num_splits", 1),
    _needs(FL, "return_max_logit", False),
    _Rule(
        ALL,
        lambda c: c.inference_params is not None and c.context_parallel,
        "a KV cache with context parallelism; needs one of them",
    ),
    _Rule(
        ALL,
        lambda c: c.inference_params is not None and c.q_format == "thd" and c.pad_between_seqs,
        "pad_between_seqs is True with a KV cache; needs False",
    ),
    _Rule(
        (F2,),
        lambda c: c.paged and getattr(c.inference_params, "page_size", 256) < 256,
        "page_size is below 256; needs 256 or more",
    ),
    _Rule((F2,), lambda c: c.paged and c.flash2 < Version("2.5"), "pages need flash-attn 2.5"),
    _Rule(
        (F2,),
        lambda c: c.head_dim_qk != c.head_dim_v,
        "head_dim_v is {head_dim_v}; needs head_dim_qk, {head_dim_qk}",
    ),
    _Rule(
        (FU,),
        lambda c: c.head_dim_qk != c.head_dim_v and is_packed(c.qkv_layout),
        "head dims differ with layout {qkv_layout}; needs three separate tensors",
    ),
    _Rule((F2,), _fa2_dims, "head_dim_qk is {head_dim_qk}; needs a multiple of 8 up to 256"),
    _Rule((F3,), _fa3_dims, "head dims are {head_dim_qk} and {head_dim_v}, which FA3 has not"),
    _Rule(FL, lambda c: c.q_format == "thd" and c.pad_between_seqs, "pad_between_seqs is True"),
    _needs((F3,), "attention_dropout", 0),
    _needs(FL, "softmax_type", "vanilla"),
    _needs((UN,), "context_parallel", False, "False: Unfused has the scores of one rank"),
    _Rule(
        ALL, lambda c: c.in_fp8 and c.context_parallel, "context parallelism in FP8; needs 16 bits"
    ),
    _Rule((*FL, FU), lambda c: c.attn_mask_type == "arbitrary", "an arbitrary mask"),
    _Rule(
        FL,
        lambda c: c.attn_mask_type in ("causal", "padding_causal") and c.cross,
        "mask {attn_mask_type} with lengths {max_seqlen_q} and {max_seqlen_kv}; needs equal ones",
    ),
    _Rule((F2,), lambda c: c.windowed and c.flash2 < Version("2.3"), "a window; needs 2.3"),
    _Rule(
        FL,
        lambda c: (c.windowed or c.alibi) and c.top_left and c.cross,
        "a window or ALiBi from the top left with unequal lengths; needs bottom_right_diagonal",
    ),
    _Rule((F3,), lambda c: c.alibi, "ALiBi"),
    _Rule((F2,), lambda c: c.alibi and c.flash2 < Version("2.4"), "ALiBi needs flash-attn 2.4"),
    _needs(FL, "core_attention_bias_type", ("no_bias", "alibi"), "no_bias or alibi"),
    _Rule(
        (FU,),
        lambda c: c.fused_backend() == FusedAttnBackend["No_Backend"],
        "tex.get_fused_attn_backend has none",
    ),
    _Rule(
        (F2,),
        lambda c: c.deterministic and c.flash2 < Version("2.4.1"),
        "deterministic needs flash-attn 2.4.1",
    ),
)


def refusals(params: AttentionParams) -> tuple[dict[str, str], _Case]:
    """The first reason against each backend that does not run the call, and the case."""
    case = _Case(params)
    reasons: dict[str, str] = {}
    for rule in RULES:
        left = [b for b in rule.backends if b not in reasons]
        if left and rule.refuses(case):
            reason = rule.reason.format_map(_Fields(case))
            reasons.update(dict.fromkeys(left, reason))
    return reasons, case


class _Fields(dict):
    """The fields that the text of a reason may use."""

    def __init__(self, case: _Case) -> None:
        super().__init__()
        self.case = case

    def __missing__(self, name: str) -> object:
        return getattr(self.case, name)


Choice = tuple[bool, Version | None, bool, tex.NVTE_Fused_Attn_Backend | None, bool, list[bool]]


def get_attention_backend(attention_params: AttentionParams | None = None) -> Choice:
    """(flash, its version, fused, its backend, unfused, [which of the three could run it]).

    At most one of the three is True. The order is Flash, Fused, Unfused; from sm_90 on and on the
    host it is Fused, Flash, Unfused. refusals() returns the reasons against the others.
    """
    if not AttentionLogging._is_logging_setup:
        AttentionLogging.setup_logging()
    params = AttentionParams() if attention_params is None else attention_params
    reasons, case = refusals(params)
    logger = logging.getLogger("DotProductAttention")
    for backend, reason in reasons.items():
        logger.debug("Disabling %s: %s", backend, reason)
    use_v3 = F3 not in reasons
    available = [use_v3 or F2 not in reasons, FU not in reasons, UN not in reasons]
    flash, fused, unfused = available
    # fused_attn_fwd has no argument for the caller's own slopes, so Fused is the second choice.
    if fused and (case.sm is None or case.sm >= 90) and not case.own_slopes:
        flash = False
    fused = fused and not flash
    unfused = unfused and not (flash or fused)
    version = FlashAttentionUtils.fa3_version if use_v3 else FlashAttentionUtils.version
    name = (F3 if use_v3 else F2) if flash else FU if fused else UN if unfused else "none"
    logger.info("Running with %s", name)
    return flash, version if available[0] else None, fused, case.fused, unfused, available


def refuse_all(params: AttentionParams) -> None:
    """Raises an error with the reason of every backend."""
    reasons, _ = refusals(params)
    why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    refuse("the backend", "none", f"one that runs this call ({why})")
