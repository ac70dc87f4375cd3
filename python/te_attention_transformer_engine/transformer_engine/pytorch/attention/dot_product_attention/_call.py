"""One call of DotProductAttention: its arguments, and the values derived from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import index

import torch
from torch import Tensor

from te_attention.torch.fp8.formats import is_fp8_tensor
from transformer_engine.pytorch._refusal import refuse, require
from transformer_engine.pytorch.constants import AttnBiasTypes

from ._engine import check_bias_and_offset
from ._layouts import first, get_qkv_layout, pages_of
from ._lengths import get_cu_seqlens, get_full_cu_seqlens
from ._masks import normalised_options, two_integers
from ._selection import FP8, HALF


class _Cached(torch.autograd.Function):
    """Identity for queries whose keys and values are in a cache, which has no gradient."""

    @staticmethod
    def forward(_ctx, query_layer: Tensor, *_keys_and_values: Tensor) -> Tensor:
        return query_layer.view_as(query_layer)

    @staticmethod
    def backward(_ctx, *_: Tensor) -> None:
        raise RuntimeError(
            "inference_params is given, and a gradient is asked for; needs None: a KV cache keeps "
            "no gradient of keys and values"
        )


RAGGED = 3  # dimensions of [tokens, heads, dim]
_RANKS = {"sbhd": 4, "bshd": 4, "thd": RAGGED}
_REQUIRED = ("query_layer", "key_layer", "value_layer")
_TENSORS = {  # arguments of DotProductAttention.forward(): fields of Call
    **dict(zip(_REQUIRED, "qkv", strict=True)),
    "attention_mask": "attention_mask",
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_kv",
    "cu_seqlens_q_padded": "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded": "cu_seqlens_kv_padded",
    "core_attention_bias": "bias",
    "alibi_slopes": "slopes",
}


@dataclass(slots=True)
class Call:
    """Tensors and options of a call. None: the module's own option, which fill() inserts."""

    q: Tensor
    k: Tensor
    v: Tensor
    attention_mask: Tensor | tuple[Tensor, Tensor] | None
    qkv_format: str | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    mask: str | None
    window: Sequence[int] | None
    bottom_right: bool | None
    bias_type: str
    bias: Tensor | None
    slopes: Tensor | None
    fast_zero_fill: bool
    inference_params: object
    pad_between_seqs: bool | None
    num_splits: int
    fp8: dict | None = None  # arguments of a backend in FP8
    lengths_from_masks: bool = False  # set by resolve()
    layout: str = ""
    q_format: str = ""
    kv_format: str = ""

    def fill(self, module: dict) -> None:
        """Replaces each option of None by that of the module.

        max_seqlen may be a tensor, and reading it waits for the device; and each value has a cache
        entry of its own. A max_seqlen that a shape or a cache determines is therefore dropped.
        """
        if self.mask is None:
            self.mask = module["attn_mask_type"]
        window = self.window
        self.window = module["window_size"] if window is None else two_integers(window)
        if self.bottom_right is None:
            self.bottom_right = module["bottom_right_diagonal"]
        if self.qkv_format is None:
            self.qkv_format = module["qkv_format"]
        ragged = self.qkv_format == "thd"
        most_q, most_kv = self.max_seqlen_q, self.max_seqlen_kv
        self.max_seqlen_q = _bound("max_seqlen_q", most_q) if ragged else None
        ragged = ragged and self.inference_params is None
        self.max_seqlen_kv = _bound("max_seqlen_kv", most_kv) if ragged else None

    def check_types(self) -> None:
        """Refuses arguments that are no tensors."""
        for argument, name in _TENSORS.items():
            value = getattr(self, name)
            optional = argument not in _REQUIRED
            pair = name == "attention_mask" and isinstance(value, tuple)
            if (value is None and optional) or (pair and all(isinstance(t, Tensor) for t in value)):
                continue
            if not (isinstance(value, Tensor) or is_fp8_tensor(value)):
                seen = repr(value) if value is None else f"of type {type(value).__name__}"
                refuse(argument, seen, "a tensor or None" if optional else "a tensor")

    def use_cache(self, layer_number: int) -> None:
        """Appends the new keys and values to the KV cache, and replaces k and v by the cache."""
        self._normalise_options()
        if "padding" not in self.mask:
            refuse("attn_mask_type", self.mask, "a padding mask with a KV cache")
        if self.mask == "padding_causal":
            self.mask = "padding_causal_bottom_right"
        self.bottom_right = "causal" in self.mask or self.bottom_right
        k, v = self.k.contiguous(), self.v.contiguous()
        self.cu_seqlens_q_padded = self.cu_seqlens_kv_padded = None
        (
            self.k,
            self.v,
            self.cu_seqlens_q,
            self.cu_seqlens_kv,
            self.max_seqlen_kv,
            self.qkv_format,
        ) = self.inference_params.step(layer_number, k, v, self.qkv_format)
        self.q = q = self.q.contiguous()
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            self.q = q = _Cached.apply(q, k, v)
        if self.qkv_format[0] != "t":  # the buffer of lengths may have more sequences
            entries = q.shape[self.qkv_format.index("b")] + 1
            self.cu_seqlens_q = first(self.cu_seqlens_q, entries)
            self.cu_seqlens_kv = first(self.cu_seqlens_kv, entries)

    def _normalise_options(self) -> None:
        window = tuple(self.window)
        self.mask, self.window, self.bottom_right = normalised_options(
            self.mask, window, self.bottom_right
        )

    def resolve(self) -> None:
        """Normalises the options; determines the layout, the lengths and max_seqlen."""
        self._normalise_options()
        self.layout, q, k, v, self.q_format, self.kv_format = get_qkv_layout(
            *self._memory(), self.qkv_format, self.inference_params
        )
        if not is_fp8_tensor(self.q):
            self.q, self.k, self.v = q, k, v
        if self.q.dim() != _RANKS[self.q_format] or self.k.dim() != _RANKS[self.kv_format]:
            self._refuse_rank()
        if self.q_format == "thd" or self.inference_params is not None:
            self._resolve_ragged_lengths()
        else:
            self._resolve_dense_lengths()
        if self.pad_between_seqs is None:
            self.pad_between_seqs = self.q_format == "thd" and self._has_gaps()

    def _memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, or the data of FP8 tensors, whose strides are those in memory."""
        q, k, v = self.q, self.k, self.v
        if not is_fp8_tensor(q):
            return q, k, v
        for name, tensor in (("key_layer", k), ("value_layer", v)):
            require(is_fp8_tensor(tensor), name, f"a {type(tensor).__name__}", "FP8 as query_layer")
        return q._data, k._data, v._data

    def _refuse_rank(self) -> None:
        wrong_q = self.q.dim() != _RANKS[self.q_format]
        name, tensor = ("query_layer", self.q) if wrong_q else ("key_layer", self.k)
        form = self.q_format if wrong_q else self.kv_format
        refuse(name, f"of {tensor.dim()} dimensions", f"{_RANKS[form]} for {form}")

    def _has_gaps(self) -> bool:
        """Whether the padded lengths are other tensors, without reading the device."""
        q, kv = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        return (q is not None and q is not self.cu_seqlens_q) or (
            kv is not None and kv is not self.cu_seqlens_kv
        )

    def _resolve_ragged_lengths(self) -> None:
        q, kv = self.cu_seqlens_q, self.cu_seqlens_kv
        if not _are_lengths(q) or (kv is not q and not (_are_lengths(kv) and kv.shape == q.shape)):
            self._refuse_lengths()
        if "padding" not in self.mask:
            refuse("attn_mask_type", self.mask, f"a padding mask with {self.qkv_format}")
        if self.q_format != "thd":
            self.max_seqlen_q = self.q.shape[self.q_format.index("s")]
        elif self.max_seqlen_q is None:
            self.max_seqlen_q = _longest(q, self.cu_seqlens_q_padded)
        if self.max_seqlen_kv is None and self.kv_format == "thd":
            self.max_seqlen_kv = _longest(kv, self.cu_seqlens_kv_padded)

    def _refuse_lengths(self) -> None:
        q, kv = self.cu_seqlens_q, self.cu_seqlens_kv
        for name, lengths in (("cu_seqlens_q", q), ("cu_seqlens_kv", kv)):
            if not _are_lengths(lengths):
                refuse(name, _seen(lengths), f"int32 [batch + 1] with {self.qkv_format}")
        refuse("cu_seqlens_kv", _seen(kv), "the shape of cu_seqlens_q")

    def _resolve_dense_lengths(self) -> None:
        row = self.q_format.index("s")
        self.max_seqlen_q, self.max_seqlen_kv = self.q.shape[row], self.k.shape[row]
        batch, device = self.q.shape[1 - row], self.q.device
        if "padding" not in self.mask:
            full = get_full_cu_seqlens(batch, self.max_seqlen_q, device)
            self.cu_seqlens_q = self.cu_seqlens_kv = full
            if self.max_seqlen_kv != self.max_seqlen_q:
                self.cu_seqlens_kv = get_full_cu_seqlens(batch, self.max_seqlen_kv, device)
        elif self.cu_seqlens_q is None or self.cu_seqlens_kv is None:
            masks = self.attention_mask
            if masks is None:
                name = "cu_seqlens_q" if self.cu_seqlens_q is None else "cu_seqlens_kv"
                refuse(f"{name} and attention_mask", "None", f"one of them for {self.mask}")
            q, kv = masks if isinstance(masks, tuple) else (masks, masks)
            _check_padding(q, "q", batch, self.max_seqlen_q)
            _check_padding(kv, "k", batch, self.max_seqlen_kv)
            self.lengths_from_masks = True
            self.cu_seqlens_q = get_cu_seqlens(q)
            self.cu_seqlens_kv = self.cu_seqlens_q if kv is q else get_cu_seqlens(kv)

    def check_padding_is_last(self) -> None:
        """On the host, refuses padding before a token, which lengths cannot express.

        A GPU is not checked, because reading its mask would synchronise.
        """
        masks = self.attention_mask if isinstance(self.attention_mask, tuple) else ()
        for mask in masks or (self.attention_mask,):
            if type(mask) is not Tensor or mask.device.type != "cpu":
                continue
            rows = mask.flatten(1)
            if (rows[:, 1:] < rows[:, :-1]).any():
                needed = "padding after all tokens of a sequence; mask arbitrary takes any"
                refuse("attention_mask", "True before a False", needed)

    def reads_bounds(self) -> bool:
        """Whether resolve() has to read max_seqlen from the device before key()."""
        form = self.qkv_format
        return (self.max_seqlen_q is None and form[:3] == "thd") or (
            self.max_seqlen_kv is None and form == "thd"
        )

    def key(self) -> tuple:
        """The key of the cached choice. It does not contain the number of ragged tokens."""
        q, k, v, bias, slopes = *self._memory(), self.bias, self.slopes
        of_q, of_k, of_v, cache = q.shape, k.shape, v.shape, self.inference_params
        if len(of_q) == RAGGED:
            of_q = of_q[1], of_q[2]
        if len(of_k) == len(of_v) == RAGGED:
            of_k, of_v = (of_k[1], of_k[2]), (of_v[1], of_v[2], of_v[0] == of_k[0])
        cu_q, cu_kv, strides, lengths = self.cu_seqlens_q, self.cu_seqlens_kv, None, None
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            strides = q.stride(), k.stride(), v.stride(), _interleaved(q, k), _interleaved(k, v)
        if cu_q is not None and cu_kv is not None:
            same = cu_kv is cu_q or (cu_kv.shape, cu_kv.dtype)
            lengths = cu_q.shape, cu_q.dtype, same
        # fmt: off
        return (
            of_q, of_k, of_v, strides, q.dtype, k.dtype, v.dtype, type(self.q), q.device, k.device,
            v.device, lengths, self._has_gaps(), self.qkv_format, self.mask, tuple(self.window),
            self.bottom_right, self.max_seqlen_q, self.max_seqlen_kv, self.bias_type,
            None if bias is None else (bias.shape, bias.requires_grad),
            None if slopes is None else slopes.shape, self.pad_between_seqs, self.num_splits,
            _mask_signature(self.attention_mask), None if cache is None else cache.is_paged,
        )
        # fmt: on

    def pages(self) -> Tensor | None:
        """The rows of the page table for the sequences of this call, or None."""
        cache = self.inference_params
        return None if cache is None else pages_of(cache, self.cu_seqlens_q)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def bias_shape(self) -> str | None:
        """TransformerEngine's name for the dimensions of the bias."""
        if self.bias is None:
            return None
        b, h = self.bias.shape[:2]
        full = (self.batch, self.q.shape[-2])
        names = {full: "bhss", (1, full[1]): "1hss", (full[0], 1): "b1ss", (1, 1): "11ss"}
        if self.bias.dim() != 4 or (b, h) not in names:
            refuse(
                "core_attention_bias",
                _seen(self.bias),
                f"[1 or {full[0]}, 1 or {full[1]}, sq, skv]",
            )
        return next(names[at] for at in names if at == (b, h))

    def check(self, heads: int, groups: int, dims: tuple[int, int]) -> None:
        """Refuses tensors and options that do not match each other or the module."""
        known = ", ".join(AttnBiasTypes)
        require(self.bias_type in AttnBiasTypes, "core_attention_bias_type", self.bias_type, known)
        q, k, v = self.q, self.k, self.v
        require(q.dtype.is_floating_point, "query_layer", q.dtype, "a floating-point type")
        cached = self.inference_params is not None and q.dtype in HALF
        for name, tensor in (("key_layer", k), ("value_layer", v)):
            is_cache = cached and tensor.dtype in FP8
            if (not is_cache and tensor.dtype != q.dtype) or tensor.device != q.device:
                refuse(name, f"{tensor.dtype} on {tensor.device}", f"{q.dtype} on {q.device}")
        if k.shape[:-1] != v.shape[:-1]:
            refuse("value_layer", _seen(v), f"all but the last dimension of key_layer, {_seen(k)}")
        for name, tensor, heads_needed, dim in (
            ("query_layer", q, heads, dims[0]),
            ("key_layer", k, groups, dims[0]),
            ("value_layer", v, groups, dims[1]),
        ):
            if tuple(tensor.shape[-2:]) != (heads_needed, dim):
                refuse(name, _seen(tensor), f"{heads_needed} heads of {dim} as the module")
        check_bias_and_offset(self.bias_type, self.bias, "vanilla", None)
        if self.slopes is not None and self.bias_type != "alibi":
            refuse("alibi_slopes", _seen(self.slopes), f"None with bias type {self.bias_type}")
        if self.mask == "arbitrary":
            self._check_arbitrary(heads)

    def _check_arbitrary(self, heads: int) -> None:
        mask = self.attention_mask
        if mask is None:
            refuse("attention_mask", "None", "a tensor with an arbitrary mask")
        full = (self.batch, heads, self.max_seqlen_q, self.max_seqlen_kv)
        fits = mask.dtype == torch.bool and mask.dim() == len(full)
        if not fits or any(n not in (1, most) for n, most in zip(mask.shape, full, strict=True)):
            refuse("attention_mask", _seen(mask), f"torch.bool {list(full)}, each of them or 1")


def head_dims(kv_channels: int | tuple[int, int]) -> tuple[int, int]:
    """The head dims of q and k, and of v."""
    dims = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
    needed = "an integer above 0, or a pair of them"
    try:
        dim, dim_v = map(int, dims)
    except (TypeError, ValueError):
        return refuse("kv_channels", repr(kv_channels), needed)
    whole = (dim, dim_v) == dims and min(dim, dim_v) > 0
    require(whole, "kv_channels", repr(kv_channels), needed)
    return dim, dim_v


def explained(run: Callable) -> Callable:
    """The method, whose errors name the argument if one of the call is of a wrong type."""

    @wraps(run)
    def checked(self: torch.nn.Module, call: Call, *options: bool) -> object:
        try:
            return run(self, call, *options)
        except (AttributeError, TypeError):
            call.check_types()
            raise

    return checked


def _bound(name: str, most: int | Tensor | None) -> int | None:
    """An upper bound of lengths, which may be a tensor."""
    if most is None:
        return None
    try:
        number = index(most)
    except TypeError:
        return refuse(name, repr(most), "an integer or None")
    require(number >= 0, name, number, "0 or more")
    return number


def _interleaved(a: Tensor, b: Tensor) -> int | None:
    """The elements from the start of a to the start of b, if a packed layout has that distance.

    Any other distance is irrelevant, and would give each call a cache entry of its own.
    """
    step, sizes = b.storage_offset() - a.storage_offset(), a.shape[-2:]
    if step not in (*sizes[-1:], sizes.numel()):
        return None
    shared = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return step if shared else None


def _mask_signature(mask: Tensor | tuple[Tensor, Tensor] | None) -> tuple | None:
    return (mask.dtype, mask.shape) if isinstance(mask, Tensor) else mask and (None,)


def _check_padding(mask: Tensor, side: str, batch: int, rows: int) -> None:
    """Refuses a padding mask that does not have one element for each row of its side."""
    fits = mask.dim() > 1 and (mask.shape[0], mask.shape[-1]) == (batch, rows)
    if mask.dtype != torch.bool or not fits or mask.numel() != batch * rows:
        refuse("attention_mask", _seen(mask), f"torch.bool {[batch, 1, 1, rows]} for {side}")


def _longest(lengths: Tensor, starts: Tensor | None) -> int:
    """The longest sequence with the gap after it, rounded up. This reads the device."""
    places = lengths if starts is None else starts
    most = int(places.diff().amax()) if places.numel() > 1 else 0
    return (most + 63) // 64 * 64


def _are_lengths(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype is torch.int32 and tensor.dim() == 1


def _seen(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
