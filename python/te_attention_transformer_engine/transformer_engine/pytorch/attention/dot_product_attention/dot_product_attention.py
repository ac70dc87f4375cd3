"""DotProductAttention: resolves the arguments of a call and caches the choice of its backend."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from te_attention import environment
from te_attention.torch import PreparedAttention, new_rng_state
from te_attention.torch.fp8 import FP8GlobalStateManager
from te_attention.torch.fp8.formats import is_fp8_tensor
from te_attention.torch.fp8.recompute import Recomputation
from transformer_engine.pytorch._refusal import check_dropout, refuse, require
from transformer_engine.pytorch.constants import AttnTypes, SoftmaxTypes
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.jit import no_torch_dynamo
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from ._call import Call, explained, head_dims
from ._cp_ranks import group_size
from ._engine import EngineCall, form_of
from ._flash import FlashAttention
from ._flash_package import module_of
from ._fp8 import Fp8State, asks_for_fp8, backward_in_fp8, saves_o_in_16_bits
from ._fp8_direct import DirectFp8
from ._fused import FusedAttention
from ._masks import check_set_window_size, normalised_mask
from ._selection import AttentionParams, Choice, cache_kind, get_attention_backend, refuse_all
from ._unfused import UnfusedDotProductAttention

# The latest choice. A change of the environment is noticed; TransformerEngine's programs also set
# backend_selection_requires_update.
_attention_backends: dict[str, object] = {
    "attention_params": None,
    "use_flash_attention": None,
    "flash_attention_backend": None,
    "use_fused_attention": None,
    "fused_attention_backend": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}
_dispatches: dict[tuple, "_Dispatch"] = {}
_latest: tuple[tuple, "_Dispatch | None"] = (
    (),
    None,
)  # comparing two keys is faster than hashing one
_MAX_DISPATCHES = 4096
# The variables that a choice depends on, apart from those of FP8 recipes.
_read_environment = environment.reader(
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_FUSED_ATTN_BACKEND"),
    *("NVTE_UnfusedDPA_Emulate_FP8", "NVTE_FP8_DPA_BWD", "NVTE_DPA_FP8CS_O_in_F16"),
)
# Those of FP8 recipes.
_read_recipes = environment.reader(
    *("NVTE_DPA_FP8_RECIPE", "NVTE_DPA_FP8_FORMAT", "NVTE_DPA_FP8DS_AMAX_ALGO"),
    *("NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_DPA_FP8DS_REDUCE_AMAX"),
)
_NO_CONTEXT = nullcontext()
# The settings of the module that a choice depends on. They are read from its __dict__, because
# access to an attribute of a torch.nn.Module takes five times as long.
_SETTINGS = itemgetter(
    *("training", "deterministic", "softmax_type", "return_max_logit", "attention_dropout"),
    *("heads", "num_gqa_groups_per_partition"),
    *("hidden_size_per_attention_head_k", "hidden_size_per_attention_head_v"),
)
# The settings that a direct call of the engine takes from a backend's module, and the forward() of
# the backends that it can replace.
_OF_FLASH = itemgetter("training", "softmax_scale", "attention_dropout", "deterministic")
_OF_FUSED = itemgetter(
    *("training", "softmax_scale", "attention_dropout", "deterministic"),
    *("softmax_type", "return_max_logit"),
)
_FORWARDS = {cls: cls.forward for cls in (FlashAttention, FusedAttention)}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "page_table")
_alibi_cache: dict = {}


class _Dispatch(NamedTuple):
    """The cached choice for calls with the same key. `direct`: an engine that suffices.

    `direct` takes q, k and v, then the first `lengths` of _LENGTHS, or, if `lengths` is None, the
    tensors of _engine_call().
    """

    params: AttentionParams
    choice: Choice
    direct: PreparedAttention | None = None
    lengths: int | None = None
    fp8: DirectFp8 | None = None


def _publish(dispatch: _Dispatch) -> None:
    """Publishes a choice in _attention_backends."""
    flash, version, fused, backend, unfused, _ = dispatch.choice
    _attention_backends.update(
        attention_params=dispatch.params,
        use_flash_attention=flash,
        flash_attention_backend=version,
        use_fused_attention=fused,
        fused_attention_backend=backend,
        use_unfused_attention=unfused,
        backend_selection_requires_update=False,
    )


def _is_unmodified(backend: torch.nn.Module | None) -> bool:
    """Whether forward() of the module is that of its class, and the class is a backend's."""
    cls = type(backend)
    return _FORWARDS.get(cls) is getattr(cls, "forward", cls) and (
        "forward" not in backend.__dict__
    )


def _is_observed(backend: torch.nn.Module | None) -> bool:
    """Whether hooks or an overridden forward() require a call of the module itself."""
    if not _is_unmodified(backend):
        return True
    own = backend.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
        or is_cpu_offload_enabled()
    )


def _settings(flash: torch.nn.Module | None, fused: torch.nn.Module | None) -> tuple:
    """The settings that a direct call would take from the backends, None for other classes."""
    return (
        _OF_FLASH(flash.__dict__) if type(flash) is FlashAttention else None,
        _OF_FUSED(fused.__dict__) if type(fused) is FusedAttention else None,
    )


def _check_masks(dispatch: _Dispatch, call: Call) -> None:
    if dispatch.params.context_parallel:
        refuse("attention_mask", "given", "None with cp_group: cu_seqlens of all rows")
    call.check_padding_is_last()


class DotProductAttention(Fp8State, TransformerEngineBaseModule):
    """softmax(scale * q k^T + ...) v, with the interface of TransformerEngine's module.

    It also runs on the host. The environment variables NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and
    NVTE_UNFUSED_ATTN switch backends off. A choice is cached for calls with the same parameters and
    environment, until _attention_backends["backend_selection_requires_update"] is set.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: object = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: object = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        """kv_channels: the head dim, or the pair (head dim of q and k, head dim of v)."""
        super().__init__()
        require(
            attention_type in AttnTypes, "attention_type", repr(attention_type), "self or cross"
        )
        require(softmax_type in SoftmaxTypes, "softmax_type", repr(softmax_type),
                "vanilla, off-by-one or learnable")  # fmt: skip
        check_dropout("attention_dropout", attention_dropout)
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        self.tp_size = tp_size if tp_group is None else group_size(tp_group)
        require(num_attention_heads > 0, "num_attention_heads", num_attention_heads, "1 or more")
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        require(groups > 0 and num_attention_heads % groups == 0, "num_gqa_groups", groups,
                f"a divisor of the {num_attention_heads} heads")  # fmt: skip
        require(groups % self.tp_size == 0, "tp_size", self.tp_size,
                f"a divisor of the {groups} key heads")  # fmt: skip
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.heads, self.num_gqa_groups_per_partition = (
            num_attention_heads // self.tp_size,
            groups // self.tp_size,
        )
        dims = head_dims(kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = dims
        self.qkv_format, self.attn_mask_type = qkv_format, normalised_mask(attn_mask_type)
        self.window_size = check_set_window_size(self.attn_mask_type, window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type, self.attention_dropout = attention_type, attention_dropout
        self.layer_number = 1 if layer_number is None else layer_number
        self.softmax_type, self.return_max_logit = softmax_type, return_max_logit
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.deterministic = (
            not environment.switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
            or torch.are_deterministic_algorithms_enabled()
        )
        forked = get_rng_state_tracker is not None and attention_dropout and not sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker if forked else None
        self._make_sink()
        self._make_backends(softmax_scale, layer_number)
        self._extra = torch.empty(0, dtype=torch.uint8)
        self._loaded: dict | None = None
        self._register_load_state_dict_pre_hook(self._complete_state)

    def _make_sink(self) -> None:
        self.softmax_offset: Tensor | None = None
        if self.softmax_type == "off-by-one":  # no parameter: stays float32, follows q's device
            self.softmax_offset = torch.zeros(self.heads, dtype=torch.float32)
        elif self.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(self.heads))

    def _make_backends(self, softmax_scale: float | None, layer_number: int | None) -> None:
        if softmax_scale is None:  # 0 is a scale
            softmax_scale = self.hidden_size_per_attention_head_k**-0.5
        options = {
            "softmax_scale": softmax_scale,
            "attention_dropout": self.attention_dropout,
            "attention_type": self.attention_type,
            "layer_number": layer_number,
            "attention_dropout_ctx": self._forked,
        }
        softmax = {"softmax_type": self.softmax_type, "return_max_logit": self.return_max_logit}
        self.flash_attention = FlashAttention(deterministic=self.deterministic, **options)
        self.fused_attention = FusedAttention(
            deterministic=self.deterministic, **options, **softmax
        )
        self.unfused_attention = UnfusedDotProductAttention(**options, **softmax)

    def _forked(self) -> object:
        """The context in which dropout draws its random state."""
        tracker = self.get_rng_state_tracker
        return _NO_CONTEXT if tracker is None else tracker().fork()

    def set_context_parallel_group(
        self,
        cp_group: object,
        cp_global_ranks: list[int] | None,
        cp_stream: object,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Sets the group whose ranks share each sequence, and how: docs/context-parallel.md.

        Args:
            cp_group: a process group; with "a2a+p2p" a list of two, of consecutive ranks and of
                ranks with the same place in the first. None: each rank has whole sequences.
            cp_global_ranks: without effect.
            cp_stream: the stream that orders NCCL's transfers, or None.
            cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p".
        """
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def _complete_state(self, state_dict: dict, prefix: str, *_: object) -> None:
        """Adds the extra state to a checkpoint that lacks it or has it under its older name."""
        name = prefix + "_extra_state"
        older = state_dict.pop(prefix + "fused_attention._extra_state", None)
        if name not in state_dict:
            state_dict[name] = torch.empty(0, dtype=torch.uint8) if older is None else older

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        num_splits: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """O with heads merged, in the format of q; with return_max_logit also max_logit [heads].

        For thd pass max_seqlen_q and max_seqlen_kv; otherwise they are read from the device.
        """
        # fmt: off
        call = Call(
            query_layer, key_layer, value_layer, attention_mask, qkv_format, cu_seqlens_q,
            cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
            attn_mask_type, window_size, bottom_right_diagonal, core_attention_bias_type,
            core_attention_bias, alibi_slopes, fast_zero_fill, inference_params, pad_between_seqs,
            num_splits,
        )
        # fmt: on
        run = self._run_uncompiled if torch.compiler.is_compiling() else self._run
        return run(call, checkpoint_core_attention, fp8_output)

    @explained
    def _run(
        self, call: Call, checkpoint_core_attention: bool, fp8_output: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        call.fill(self.__dict__)
        if FP8GlobalStateManager.FP8_ENABLED or self.__dict__["fp8"] or is_fp8_tensor(call.q):
            call.fp8 = self._prepare_fp8(call, fp8_output)
        if call.inference_params is not None:
            self._use_cache(call)
        dispatch, own = self._find_dispatch(call), self.__dict__
        direct, flash, recomputed = dispatch.direct, dispatch.choice[0], checkpoint_core_attention
        chosen = self._modules.get("flash_attention" if flash else "fused_attention")
        direct_fp8 = None if recomputed or Recomputation.is_active() else dispatch.fp8
        if direct_fp8 is not None and not _is_observed(chosen):
            quantizers = own["quantizers"]
            if direct_fp8.accepts(quantizers):
                return direct_fp8(call.q, call.k, call.v, own["fp8_meta"], quantizers)
        if direct is None or _is_observed(chosen):
            call.resolve()
            run = partial(self._by_backend, dispatch, call)
        elif dispatch.lengths is None:
            call.resolve()
            run = partial(self._by_engine, direct, self._engine_call(call, chosen), chosen)
        else:
            tensors = (call.cu_seqlens_q, call.cu_seqlens_kv, call.pages())[: dispatch.lengths]
            if not recomputed:
                return direct(call.q, call.k, call.v, *tensors).flatten(-2)
            run = lambda q, k, v: direct(q, k, v, *tensors).flatten(-2)  # noqa: E731
        if call.lengths_from_masks and not dispatch.choice[4]:  # Unfused reads the masks themselves
            _check_masks(dispatch, call)
        if flash or not recomputed:
            return run(call.q, call.k, call.v)
        return checkpoint(
            run,
            *(call.q, call.k, call.v),
            use_reentrant=False,
            get_rng_state_tracker=self.get_rng_state_tracker,
        )

    def _use_cache(self, call: Call) -> None:
        if self.attention_type != "cross":
            self.attention_type = self.unfused_attention.attention_type = "cross"
        call.use_cache(self.layer_number)

    def _prepare_fp8(self, call: Call, fp8_output: bool) -> dict | None:
        """The arguments of a backend in FP8, or None: then FP8 tensors are dequantized."""
        own = self.__dict__
        own["fp8"] = FP8GlobalStateManager.FP8_ENABLED
        recipe, meta = FP8GlobalStateManager.FP8_RECIPE, own["fp8_meta"]
        if (
            own["fp8"]
            and recipe is not None
            and meta.get("prepared")
            == (
                prepared := (
                    *(type(recipe), tuple(recipe.__dict__.values()), _read_recipes()),
                    *(FP8GlobalStateManager.FP8_DISTRIBUTED_GROUP, call.q.device),
                    *(FP8GlobalStateManager.resets, own["attention_dropout"]),
                )
            )
        ):
            return own["_fp8_words"][fp8_output]
        if own["fp8"] and asks_for_fp8(FP8GlobalStateManager.get_fp8_recipe()):
            own["_fp8_device"] = call.q.device
            self.init_fp8_metadata()
            if recipe is not None:
                meta["prepared"] = prepared
            state = {"fp8": True, "fp8_meta": self.fp8_meta, "quantizers": self.quantizers}
            own["_fp8_words"] = [state | {"fp8_output": wanted} for wanted in (False, True)]
            return own["_fp8_words"][fp8_output]
        if is_fp8_tensor(call.q):
            call.q, call.k, call.v = (t.dequantize() for t in (call.q, call.k, call.v))
        return None

    # torch.compile cannot trace the choice of a backend, which reads addresses.
    _run_uncompiled = no_torch_dynamo()(_run)

    def _find_dispatch(self, call: Call) -> _Dispatch:
        """The cached choice for a call, made at the first call with its key."""
        global _latest  # noqa: PLW0603
        if call.reads_bounds():  # they are part of the key
            call.resolve()
        if _attention_backends["backend_selection_requires_update"]:
            _dispatches.clear()
            _latest = ((), None)
        own = self.__dict__
        ranks = group_size(own["cp_group"])
        backends = own["_modules"]
        of_backends = _settings(backends.get("flash_attention"), backends.get("fused_attention"))
        fp8 = call.fp8 and (own["fp8_meta"]["found"], call.fp8["fp8_output"])
        settings = ranks, own["cp_comm_type"], _SETTINGS(own), of_backends, _read_environment()
        key = (call.key(), settings, fp8)
        latest, dispatch = _latest
        if latest != key:
            dispatch = _dispatches.get(key)
            if dispatch is None:
                if len(_dispatches) >= _MAX_DISPATCHES:
                    _dispatches.clear()
                dispatch = _dispatches[key] = self._new_dispatch(call)
            _latest = (key, dispatch)
        if _attention_backends["attention_params"] is not dispatch.params:
            _publish(dispatch)
        return dispatch

    def _new_dispatch(self, call: Call) -> _Dispatch:
        given = (call.q, call.k, call.v)
        call.resolve()
        params = self._params(call)
        choice = get_attention_backend(params)
        flash, version, fused, _, unfused, _ = choice
        if not (flash or fused or unfused):
            refuse_all(params)
        if call.fp8 is not None and fused:
            return _Dispatch(params, choice, fp8=self._direct_fp8(call))
        ours = call.fp8 is None and (fused or (flash and module_of(version) is None))
        ours = ours and not params.context_parallel
        as_given = all(a is b for a, b in zip(given, (call.q, call.k, call.v), strict=True))
        chosen = self._modules.get("flash_attention" if flash else "fused_attention")
        if not (ours and as_given and self._has_direct_path(chosen)):
            return _Dispatch(params, choice)
        direct, names = self._engine_call(call, chosen).prepared(*given)
        known = names == list(_LENGTHS[: len(names)]) and call.attention_mask is None
        return _Dispatch(params, choice, direct, len(names) if known else None)

    def _direct_fp8(self, call: Call) -> DirectFp8 | None:
        """The shorter way into FP8 for calls like this one, or None."""
        backend, given = self._modules.get("fused_attention"), (call.q, call.k, call.v)
        if type(backend) is not FusedAttention or not self._has_direct_path(backend):
            return None
        if call.fp8["fp8_output"] or call.lengths_from_masks or any(map(is_fp8_tensor, given)):
            return None
        if not (backward_in_fp8() and saves_o_in_16_bits()):
            return None
        engine = self._engine_call(call, backend)
        found = DirectFp8.serves(engine, *given)
        if not found:
            return None
        return DirectFp8(*given, engine, backend.training, self.quantizers)

    def _has_direct_path(self, backend: torch.nn.Module | None) -> bool:
        """Whether it is a backend of this package that returns only O, with this softmax type."""
        if self.return_max_logit or type(backend) not in _FORWARDS:
            return False
        if type(backend) is FlashAttention:
            return True
        return backend.softmax_type == self.softmax_type and not backend.return_max_logit

    def _engine_call(self, call: Call, backend: torch.nn.Module) -> EngineCall:
        """The EngineCall of a backend, with the backend's own settings."""
        alibi = call.bias_type == "alibi"
        return EngineCall(
            form_of(call.layout, call.mask, call.window, call.bottom_right),
            (call.cu_seqlens_q, call.cu_seqlens_kv),
            (call.max_seqlen_q, call.max_seqlen_kv),
            backend.softmax_scale,
            backend.attention_dropout if backend.training else 0.0,
            backend.deterministic,
            alibi if call.slopes is None else call.slopes,
            call.bias,
            call.bias_type == "pre_scale_bias",
            self._sink(call),
            (call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded),
            call.pages(),
        )

    @staticmethod
    def _by_engine(
        direct: PreparedAttention,
        engine: EngineCall,
        backend: torch.nn.Module,
        *qkv: Tensor,
    ) -> Tensor:
        tensors = [*engine.tensors().values()]
        if engine.dropout:
            with backend.attention_dropout_ctx():
                tensors.append(new_rng_state(qkv[0].device))
        return direct(*qkv, *tensors).flatten(-2)

    def _params(self, call: Call) -> AttentionParams:
        dims = (self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v)
        call.check(self.heads, self.num_gqa_groups_per_partition, dims)
        bias_shape = call.bias_shape()
        return AttentionParams(
            qkv_type=type(call.q),
            qkv_dtype=call.q.dtype,
            qkv_layout=call.layout,
            batch_size=call.batch,
            num_heads=self.heads,
            num_gqa_groups=self.num_gqa_groups_per_partition,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_kv=call.max_seqlen_kv,
            head_dim_qk=dims[0],
            head_dim_v=dims[1],
            attn_mask_type=call.mask,
            window_size=call.window,
            bottom_right_diagonal=call.bottom_right,
            alibi_slopes_shape=None if call.slopes is None else call.slopes.shape,
            core_attention_bias_type=call.bias_type,
            core_attention_bias_shape=bias_shape,
            core_attention_bias_requires_grad=call.bias is not None and call.bias.requires_grad,
            pad_between_seqs=call.pad_between_seqs,
            attention_dropout=self.attention_dropout,
            context_parallel=group_size(self.cp_group) > 1,
            cp_comm_type=self.cp_comm_type,
            deterministic=self.deterministic,
            is_training=self.training,
            inference_params=cache_kind(call.inference_params),
            softmax_type=self.softmax_type,
            return_max_logit=self.return_max_logit,
            num_splits=call.num_splits,
            fp8=call.fp8 is not None,
            fp8_meta=call.fp8 and {n: self.fp8_meta[n] for n in ("recipe", "local_recipes")},
        )

    def _sink(self, call: Call) -> Tensor | None:
        if self.softmax_offset is None:
            return None
        return self.softmax_offset.to(call.q.device, torch.float32).view(1, -1, 1, 1)

    def _by_backend(
        self, dispatch: _Dispatch, call: Call, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        flash, version, fused, backend, _, _ = dispatch.choice
        words = {
            "qkv_layout": call.layout,
            "attention_mask": call.attention_mask,
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_kv": call.cu_seqlens_kv,
            "max_seqlen_q": call.max_seqlen_q,
            "max_seqlen_kv": call.max_seqlen_kv,
            "attn_mask_type": call.mask,
            "window_size": call.window,
            "bottom_right_diagonal": call.bottom_right,
            "alibi_slopes": call.slopes,
            "inference_params": call.inference_params,
            **(call.fp8 or {}),
        }
        if dispatch.params.context_parallel:
            words |= {
                name: self.__dict__[name]
                for name in ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
            }
        if flash:
            words |= {"flash_attention_backend": version, "num_splits": call.num_splits}
            alibi = call.bias_type == "alibi" and call.slopes is None
            return self.flash_attention(q, k, v, **words, alibi=alibi)
        words |= {
            "cu_seqlens_q_padded": call.cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": call.cu_seqlens_kv_padded,
            "core_attention_bias_type": call.bias_type,
            "core_attention_bias": call.bias,
            "softmax_offset": self._sink(call),
        }
        if fused:
            words |= {"fused_attention_backend": backend, "fast_zero_fill": call.fast_zero_fill}
            return self.fused_attention(q, k, v, **words)
        return self.unfused_attention(_alibi_cache, q, k, v, **words)
