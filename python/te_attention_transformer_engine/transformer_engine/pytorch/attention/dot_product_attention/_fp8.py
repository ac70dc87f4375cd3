"""FP8 in DotProductAttention: which recipes count, its quantizers, its state in checkpoints."""

import io
import pickle
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention import environment
from te_attention.torch.fp8 import (
    DelayedScaling,
    DelayedScalingRecipeState,
    Float8CurrentScaling,
    Format,
    FP8GlobalStateManager,
    Recipe,
    RecipeState,
)
from te_attention.torch.fp8.formats import format_of
from transformer_engine.pytorch._refusal import refuse
from transformer_engine.pytorch.cpp_extensions.fused_attn import META_DP, META_S

SIDES = (("scaling_fwd", "forward"), ("scaling_bwd", "backward"))
# Quantizers of both directions, and how many of them are of the first of two recipes.
COUNTS = {"scaling_fwd": (9, 6), "scaling_bwd": (6, 4)}
_FORMATS = {"HYBRID": Format.HYBRID, "E4M3": Format.E4M3}


def _option(name: str, allowed: tuple[str, ...] = ()) -> str:
    value = environment.read(name)
    if allowed and value not in allowed:
        refuse(name, repr(value), " or ".join(map(repr, allowed)))
    return value


def backward_in_fp8() -> bool:
    """NVTE_FP8_DPA_BWD: whether the backward pass runs in FP8 too."""
    return environment.switch("NVTE_FP8_DPA_BWD")


def saves_o_in_16_bits() -> bool:
    """NVTE_DPA_FP8CS_O_in_F16: whether current scaling saves O for backward as it is."""
    return environment.switch("NVTE_DPA_FP8CS_O_in_F16")


def emulates() -> bool:
    """NVTE_UnfusedDPA_Emulate_FP8: whether Unfused rounds to FP8 where the others compute in it."""
    return environment.switch("NVTE_UnfusedDPA_Emulate_FP8")


class Settings(NamedTuple):
    """The variables that choose recipes: their values, to notice a change."""

    recipe: str
    format: str
    algorithm: str
    history: int
    reduce: bool


def _settings() -> Settings:
    kinds = ("", "F16", "DelayedScaling", "Float8CurrentScaling")
    return Settings(
        _option("NVTE_DPA_FP8_RECIPE", kinds),
        _option("NVTE_DPA_FP8_FORMAT", tuple(_FORMATS)),
        _option("NVTE_DPA_FP8DS_AMAX_ALGO", ("max", "most_recent")),
        environment.number("NVTE_DPA_FP8DS_AMAX_HISTLEN"),
        environment.switch("NVTE_DPA_FP8DS_REDUCE_AMAX"),
    )


def _delayed(like: Recipe, settings: Settings) -> DelayedScaling:
    """The recipe that the environment describes, for what another recipe does not cover."""
    is_same = like.float8_per_tensor_scaling()
    return DelayedScaling(
        fp8_format=like.fp8_format if is_same else _FORMATS[settings.format],
        amax_history_len=settings.history,
        amax_compute_algo=settings.algorithm,
        reduce_amax=settings.reduce,
        fp8_dpa=True,
        fp8_mha=like.fp8_mha,
    )


def _local_recipes(recipe: Recipe, settings: Settings) -> list[Recipe]:
    """The recipes of attention under autocast(recipe=recipe): current scaling comes first."""
    wanted = settings.recipe
    if not (recipe.float8_per_tensor_scaling() or (recipe.nvfp4() and wanted)):
        seen = type(recipe).__name__
        needed = "DelayedScaling or Float8CurrentScaling: attention has one scale for each tensor"
        refuse("recipe", f"a {seen} with fp8_dpa or fp8_mha", needed)
    current = wanted == "Float8CurrentScaling" or (not wanted and recipe.float8_current_scaling())
    delayed = recipe if recipe.delayed() else _delayed(recipe, settings)
    if not current:
        return [delayed]
    if not recipe.float8_current_scaling():
        fp8_format = recipe.fp8_format if recipe.delayed() else _FORMATS[settings.format]
        recipe = Float8CurrentScaling(fp8_format=fp8_format, fp8_dpa=True, fp8_mha=recipe.fp8_mha)
    return [recipe, delayed]


def asks_for_fp8(recipe: Recipe) -> bool:
    """Whether attention runs in FP8 under this recipe."""
    if not (getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)):
        return False
    if recipe.fp8_mha and not recipe.fp8_dpa:
        warnings.warn("recipe.fp8_mha is True without fp8_dpa: attention runs in FP8", stacklevel=4)
    return _option("NVTE_DPA_FP8_RECIPE") != "F16"


class _Unpickler(pickle.Unpickler):
    """Loads recipes, tensors and numbers, and nothing that could run code."""

    ALLOWED = (
        *("te_attention.torch.fp8.", "transformer_engine.common.recipe"),
        *("torch._utils._rebuild", "torch.device", "collections.OrderedDict", "builtins.set"),
    )

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        path = f"{module}.{name}"
        if not path.startswith(self.ALLOWED):
            raise pickle.UnpicklingError(f"_extra_state holds {path}; needs a recipe or a tensor")
        return super().find_class(module, name)


class Fp8State:
    """The additions of DotProductAttention to the FP8 state of its base class."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Makes quantizers and states of scales when the recipe, or the device, is a new one."""
        del num_gemms  # attention has 9 and 6 quantizers
        recipe, group = (
            FP8GlobalStateManager.get_fp8_recipe(),
            FP8GlobalStateManager.get_fp8_group(),
        )
        settings, meta = _settings(), self.fp8_meta
        algorithm, device = getattr(recipe, "amax_compute_algo", None), self._fp8_device
        found = (repr(recipe), algorithm, settings, group, device)
        if self.fp8_initialized and meta.get("found") == found:
            return
        local = _local_recipes(recipe, settings)
        before, texts = meta.get("local_recipes"), list(map(repr, local))
        meta |= {"global_recipe": recipe, "local_recipes": local, "recipe": local[-1]}
        meta |= {"fp8_group": group, "found": found, "fp8_checkpoint": True}
        FP8GlobalStateManager.register(local[-1], group)
        moved = before is not None and self.fp8_meta["scaling_fwd"].device != device
        # Texts, because a caller may change a recipe in place.
        if before is None or moved or meta["texts"] != texts:
            if before is not None and type(before[0]) is not type(local[0]):
                warnings.warn(
                    f"the recipe changes from {type(before[0]).__name__} to "
                    f"{type(local[0]).__name__}: scales begin anew",
                    stacklevel=4,
                )
            self.set_meta_tensor(True, local)
            self.set_meta_tensor(False, local)
            self._begin_scales()
        meta["texts"] = texts
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        self.fp8_initialized = self.fp8_meta_tensors_initialized = True

    def set_meta_tensor(self, fwd: bool, recipe: Recipe | list[Recipe]) -> None:
        """Makes the quantizers of a direction. With two recipes the state is that of the second."""
        (name, mode), recipes = SIDES[not fwd], recipe if isinstance(recipe, list) else [recipe]
        total, first = COUNTS[name]
        counts = [total] if len(recipes) == 1 else [first, total - first]
        device = self._fp8_device
        states = [
            RecipeState.create(r, mode=mode, num_quantizers=n, device=device)
            for r, n in zip(recipes, counts, strict=True)
        ]
        self.fp8_meta[name] = states[-1]
        self.quantizers[name] = [q for state in states for q in state.make_quantizers()]

    def _begin_scales(self) -> None:
        """The first scale of S is the largest that fits, since its amax is known; or as loaded."""
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            for name, side in (("fwd", "scaling_fwd"), ("bwd", "scaling_bwd")):
                self._load_side(loaded, name, self.fp8_meta[side])
        s = self.quantizers["scaling_fwd"][META_S]
        largest = format_of(s.dtype).largest * (1 - self.attention_dropout)
        if self.fp8_meta["scaling_fwd"].updated:  # a history of another library may be too large
            s.scale.clamp_(max=largest)
        else:
            s.scale.fill_(largest)

    def _load_side(self, loaded: dict, name: str, state: DelayedScalingRecipeState) -> None:
        scale, history = loaded.get(f"scale_{name}"), loaded.get(f"amax_history_{name}")
        if scale is None or history is None:
            return
        if scale.numel() != state.num_quantizers:
            refuse(f"scale_{name} of _extra_state", f"{scale.numel()} scales",
                   f"{state.num_quantizers} for this recipe")  # fmt: skip
        rows = min(len(history), len(state.amax_history))
        state.scale.copy_(scale)
        state.amax_history[:rows].copy_(history[:rows])
        state.mark_updated()

    def get_extra_state(self) -> Tensor:
        """Recipe, scales and histories of amaxes, pickled into bytes; empty before FP8 was used."""
        if not self.fp8_meta_tensors_initialized:
            return self._extra
        state = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {}}
        for name, side in (("fwd", "scaling_fwd"), ("bwd", "scaling_bwd")):
            state[f"scale_{name}"] = self.fp8_meta[side].scale.cpu()
            state[f"amax_history_{name}"] = self.fp8_meta[side].amax_history.cpu()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes what get_extra_state() returned; the first forward pass in FP8 uses it."""
        self._extra = state
        if state is None or not state.numel():
            return
        data = io.BytesIO(state.detach().cpu().numpy().tobytes())
        self._loaded = _Unpickler(data).load()
        if self.fp8_meta_tensors_initialized:
            self._begin_scales()

    @property
    def _is_current(self) -> bool:
        return self.fp8_meta["local_recipes"][0].float8_current_scaling()


def bound_of_dp(
    scale_invs: tuple[Tensor, Tensor], dtypes: tuple, dim: int, scale: float, dropout: float = 0.0
) -> Tensor:
    """A bound of |dP|: 2 * scale * |dO_i| |V_j| / (1 - dropout), each norm at most sqrt(d) amax.

    scale_invs, dtypes: of V and dO.
    """
    largest_v, largest_do = (
        s * format_of(d).largest for s, d in zip(scale_invs, dtypes, strict=True)
    )
    return largest_v * largest_do * (2 * abs(scale) * dim / (1 - dropout))


def begin_scale_of_dp(meta: dict, quantizers: dict, bound: Tensor) -> None:
    """The first scale of dP, whose history is empty, from a bound of the largest |dP|.

    In a CUDA graph that is captured before the first update, replays after it change nothing.
    """
    state = meta["scaling_bwd"]
    if not state.updated:
        dp = quantizers["scaling_bwd"][META_DP]
        first = (format_of(dp.dtype).largest / bound).view(dp.scale.shape)
        dp.scale.copy_(torch.where(state.updated_on_device.view(first.shape), dp.scale, first))
