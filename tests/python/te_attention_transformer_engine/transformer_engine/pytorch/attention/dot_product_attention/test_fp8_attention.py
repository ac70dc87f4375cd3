"""DotProductAttention in FP8: both recipes, all backends, what is saved, what is refused."""

import copy
import itertools
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from dpa import laid_out, only
from fp8_reference import BOUNDS, check, errors, reference
from te_attention.torch import fp8
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention._fp8 import begin_scale_of_dp
from transformer_engine.pytorch.attention.dot_product_attention.backends import FlashAttention
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    combine_and_dequantize,
    combine_and_quantize,
    get_attention_backend,
    get_attention_quantizers,
)
from transformer_engine.pytorch.cpp_extensions.fused_attn import META_DP, META_S, FusedAttnBackend
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
NAMES = ("o", "dq", "dk", "dv")
B, S, H, D = 2, 96, 4, 32


@pytest.fixture(autouse=True)
def _reset() -> None:
    FP8GlobalStateManager.reset()
    with only("FLASH", "FUSED", "UNFUSED"):
        yield
    FP8GlobalStateManager.reset()


def recipe_of(kind: str, **options: object) -> DelayedScaling | Float8CurrentScaling:
    history = {"amax_history_len": 4} if kind == "delayed" else {}
    return RECIPES[kind](fp8_dpa=True, **history, **options)


def tensors(heads: tuple[int, int] = (H, H), shape: tuple[int, int, int] = (B, S, D),
            dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v and dO as [b, s, h, d]."""
    torch.manual_seed(0)
    b, s, d = shape
    return [torch.randn(b, s, heads[i in (1, 2)], d).to(dtype) for i in range(4)]


class Run:
    """Steps of one module on the same tensors: `found` are O and gradients as [b, s, h, d]."""

    def __init__(self, layout: str = "bshd_bshd_bshd", heads: tuple[int, int] = (H, H),
                 lens: list[int] | None = None, shape: tuple[int, int, int] = (B, S, D),
                 dtype: torch.dtype = torch.bfloat16, **module: object) -> None:  # fmt: skip
        self.given, self.layout, self.lens = tensors(heads, shape, dtype), layout, lens
        self.form = "sbhd" if layout[0] == "s" else "bshd"
        mask = module.pop("attn_mask_type", "no_mask")
        self.causal, options = "causal" in mask, {"qkv_format": self.form, "attn_mask_type": mask}
        self.module = DotProductAttention(heads[0], shape[2], heads[1], **options, **module)
        self.mask = None
        if lens is not None:
            self.mask = torch.arange(shape[1]) >= torch.tensor(lens)[:, None]
            self.mask = self.mask[:, None, None]

    def moved(self, t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1) if self.form == "sbhd" else t

    def step(self, recipe: object, training: bool = True, **options: object) -> dict:
        q, k, v = laid_out(self.layout, *self.given[:3])
        dout = self.moved(self.given[3])
        self.module.train(training)
        with torch.set_grad_enabled(training), te.autocast(recipe=recipe):
            out = self.module(q, k, v, attention_mask=self.mask, **options)
        self.out, plain = out, out.view(dout.shape)
        found = {"o": plain.detach()}
        if training:
            out.backward(dout.reshape(out.shape))
            found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
        self.found = {n: self.moved(t).float() for n, t in found.items()}
        return self.found

    def wanted(self) -> dict:
        return reference(*self.given, causal=self.causal, lens=self.lens)


MODELS = {  # of TransformerEngine's test of FP8 attention, with shorter sequences
    "mha": ((4, 4), (2, 96, 32)),
    "gqa": ((6, 3), (2, 96, 32)),
    "mqa_long": ((4, 1), (1, 160, 32)),
}
MASKS = ("no_mask", "causal", "padding", "padding_causal")
LAYOUTS = ("sbh3d", "bshd_bshd_bshd", "sbhd_sbhd_sbhd")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model", MODELS)
def test_configurations(model: str, mask: str, kind: str, monkeypatch) -> None:
    heads, shape = MODELS[model]
    lens = [shape[1] - 37] * shape[0] if "padding" in mask else None
    for i, (layout, training, backward) in enumerate(
        itertools.product(LAYOUTS, (True, False), ("1", "0"))
    ):
        dtype = (torch.bfloat16, torch.float16)[i // 3 % 2]
        if ("3" in layout and heads[0] != heads[1]) or (backward == "0" and not training):
            continue
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
        run = Run(layout, heads, lens, shape, dtype, attn_mask_type=mask)
        run.step(recipe_of(kind), training)
        found = run.step(recipe_of(kind), training)  # with scales of a history
        check(found, run.wanted(), slack=1.15)
        for b, n in enumerate(lens or []):
            assert not any(t[b, n:].any() for t in found.values())


@pytest.mark.parametrize("kind", RECIPES)
def test_fp8_is_what_runs(kind: str) -> None:
    run = Run()
    first = run.step(recipe_of(kind))
    plain = run.step(DelayedScaling())
    assert te.attention._attention_backends["use_fused_attention"]
    assert errors(plain, run.wanted())["o"] < 0.005
    assert not torch.equal(first["o"], plain["o"])
    params = AttentionParams(
        qkv_layout="bshd_bshd_bshd", fp8=True, fp8_meta={"recipe": recipe_of(kind)}
    )
    assert get_attention_backend(params)[3] == FusedAttnBackend["FP8"]


def test_scales_follow_the_history() -> None:
    run, recipe = Run(), DelayedScaling(fp8_dpa=True, amax_history_len=1)
    run.step(recipe)
    forward, backward = (run.module.fp8_meta[n] for n in ("scaling_fwd", "scaling_bwd"))
    largest = max(t.abs().max().item() for t in run.given[:3])
    assert forward.scale[2].item() == pytest.approx(448 / largest)
    assert forward.scale[META_S] == 448
    assert backward.scale.tolist() == [1] * 6  # the end of the next autocast updates them
    run.step(recipe)
    scale = backward.scale.clone()
    assert scale[3].item() == pytest.approx(57344 / run.given[3].abs().max().item())
    assert scale[META_DP] > 1
    assert scale[0] > 1


def test_the_scale_of_s_fits_dropout_from_the_start() -> None:
    run = Run(attention_dropout=0.25)
    run.step(recipe_of("delayed"))
    assert run.module.quantizers["scaling_fwd"][META_S].scale.item() == pytest.approx(336)
    assert run.module.fp8_meta["scaling_fwd"].amax_history[-1, META_S] == pytest.approx(4 / 3)


@pytest.mark.parametrize("kind", RECIPES)
def test_fp8_tensors_in_and_out(kind: str) -> None:
    run, recipe = Run("bs3hd", attn_mask_type="causal"), recipe_of(kind, fp8_mha=True)
    run.step(recipe, fp8_output=True)
    assert isinstance(run.out, te.Float8Tensor)
    check(run.step(recipe, fp8_output=True), run.wanted(), slack=1.2)
    with te.autocast(recipe=recipe):
        run.module.init_fp8_metadata()
        of_qkv = get_attention_quantizers(True, run.module.quantizers)[0]
        of_qkv.internal = False
        inputs = laid_out("bs3hd", *run.given[:3])
        q8, k8, v8 = combine_and_quantize("bs3hd", *(t.detach() for t in inputs), of_qkv)
        assert len({t._data.untyped_storage().data_ptr() for t in (q8, k8, v8)}) == 1
        leaves = [t.requires_grad_() for t in (q8, k8, v8)]
        out = run.module(*leaves, fp8_output=True)
    gradients = torch.autograd.grad(out, leaves, run.given[3].reshape(out.shape))
    assert all(isinstance(g, te.Float8Tensor) for g in (out, *gradients))
    plain = combine_and_dequantize("bs3hd", *gradients, des_nominal_dtype=torch.float32)
    values = (out.dequantize().view(run.given[3].shape), *plain)
    check(dict(zip(NAMES, values, strict=True)), run.wanted(), slack=1.2)


def test_fp8_tensors_without_autocast_are_dequantized() -> None:
    run = Run()
    quantizer = fp8.Float8Quantizer(torch.tensor([100.0]), torch.zeros(1), fp8.DType.kFloat8E4M3)
    q8, k8, v8 = (quantizer(t) for t in run.given[:3])
    out = run.module(q8, k8, v8)
    plain = run.module(q8.dequantize(), k8.dequantize(), v8.dequantize())
    assert torch.equal(out, plain)


def _checkpointed(module: DotProductAttention, reentrant: bool) -> object:
    def call(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        def inner(*t: torch.Tensor) -> torch.Tensor:
            return module(*t, **options)

        return te.checkpoint(inner, *tensors, use_reentrant=reentrant)

    call.train = module.train
    return call


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("way", ["core", "function", "function, reentrant"])
def test_a_checkpoint_changes_nothing(kind: str, way: str) -> None:
    found = []
    for checkpointed in (False, True):
        FP8GlobalStateManager.reset()
        run, recipe = Run(attn_mask_type="causal"), recipe_of(kind)
        run.step(recipe)
        if way == "core":
            found.append(run.step(recipe, checkpoint_core_attention=checkpointed))
        else:
            module = run.module
            if checkpointed:
                run.module = _checkpointed(module, "reentrant" in way)
            found.append(run.step(recipe))
            run.module = module
        histories = run.module.fp8_meta["scaling_fwd"]
        if kind == "delayed":
            found[-1]["history"] = histories.amax_history.clone()
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("kind", RECIPES)
def test_state_is_saved_and_loaded(kind: str) -> None:
    run, recipe = Run(), recipe_of(kind)
    for _ in range(3):
        run.step(recipe)
    state = copy.deepcopy(run.module.state_dict())
    assert state["_extra_state"].dtype == torch.uint8
    wanted = run.step(recipe)
    for name in ("_extra_state", "fused_attention._extra_state"):
        other = Run()
        other.module.load_state_dict({name: state["_extra_state"]})
        again = other.module.state_dict()["_extra_state"]
        assert torch.equal(again, state["_extra_state"])  # untouched before it is used
        found = other.step(recipe)
        for n, value in wanted.items():
            assert torch.equal(found[n], value), n


def test_a_loaded_scale_of_s_is_made_to_fit() -> None:
    run, recipe = Run(), recipe_of("delayed")
    run.step(recipe)
    run.module.fp8_meta["scaling_fwd"].scale[META_S] = 448 / 0.02
    other = Run()
    other.module.load_state_dict(run.module.state_dict())
    check(other.step(recipe, training=False), other.wanted(), slack=1.2)
    assert other.module.quantizers["scaling_fwd"][META_S].scale == 448


def test_a_state_of_something_else_is_refused() -> None:
    import pickle

    run = Run()
    for content, text in ((print, "builtins.print; needs a recipe"), (torch.load, "torch")):
        state = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        with pytest.raises(pickle.UnpicklingError, match=text):
            run.module.set_extra_state(state)


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("mask", ["no_mask", "padding_causal"])
def test_emulation(kind: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [S, 51] if "padding" in mask else None
    run = Run(attn_mask_type=mask, lens=lens)
    with only("UNFUSED"), pytest.raises(ValueError, match="NVTE_UnfusedDPA_Emulate_FP8=1"):
        run.step(recipe_of(kind))
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    with only("UNFUSED"):
        run.step(recipe_of(kind))
        check(run.step(recipe_of(kind)), run.wanted(), slack=1.25)
        run.step(recipe_of(kind), fp8_output=True)
        assert isinstance(run.out, te.Float8Tensor)


@pytest.mark.parametrize("kind", RECIPES)
def test_flash_runs_inference(kind: str) -> None:
    run, recipe = Run(attn_mask_type="causal"), recipe_of(kind)
    run.step(recipe)
    flash = FlashAttention(D**-0.5)
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal", "fp8": True}
    options |= {"fp8_meta": run.module.fp8_meta, "quantizers": run.module.quantizers}
    out = flash(*run.given[:3], **options)
    check({"o": out.view(run.given[3].shape)}, run.wanted())
    assert isinstance(flash(*run.given[:3], **options, fp8_output=True), te.Float8Tensor)
    with pytest.raises(ValueError, match="fp8 is True; needs False with gradients"):
        flash(*(t.clone().requires_grad_() for t in run.given[:3]), **options)
    with pytest.raises(ValueError, match="quantizers is None; needs those of a module"):
        flash(*run.given[:3], **(options | {"quantizers": None}))


@pytest.mark.parametrize(
    ("recipe", "variables", "kinds"),
    [
        ("delayed", "", "DD"),
        ("delayed", "DelayedScaling", "DD"),
        ("current", "", "CD"),
        ("current", "Float8CurrentScaling", "CD"),
        ("current", "DelayedScaling", "DD"),
        ("delayed", "Float8CurrentScaling", "CD"),
        ("nvfp4", "DelayedScaling", "DD"),
        ("nvfp4", "Float8CurrentScaling", "CD"),
        ("delayed", "F16", ""),
        ("current", "F16", ""),
    ],
)
def test_recipes_of_the_environment(recipe: str, variables: str, kinds: str, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", variables)
    monkeypatch.setenv("NVTE_DPA_FP8DS_AMAX_HISTLEN", "3")
    given = NVFP4BlockScaling(fp8_dpa=True) if recipe == "nvfp4" else recipe_of(recipe)
    before, run = copy.deepcopy(given), Run()
    found = run.step(given)
    assert given == before  # the caller's recipe is never changed
    if not kinds:
        assert errors(found, run.wanted())["o"] < 0.005
        return
    local = run.module.fp8_meta["local_recipes"]
    assert type(local[0]) is (Float8CurrentScaling if kinds[0] == "C" else DelayedScaling)
    assert type(run.module.fp8_meta["recipe"]) is DelayedScaling
    of_qkv, _, of_s, _, of_do, of_dp = get_attention_quantizers(True, run.module.quantizers)
    current = [
        isinstance(q, te.Float8CurrentScalingQuantizer) for q in (of_qkv, of_s, of_do, of_dp)
    ]
    assert current == [kinds[0] == "C", False, kinds[0] == "C", False]
    assert [q.internal for q in (of_qkv, of_s, of_do, of_dp)] == [True] * 4
    if recipe != "delayed":
        assert run.module.fp8_meta["recipe"].amax_history_len == 3


def test_the_fields_of_a_recipe_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"FP8_RECIPE": "DelayedScaling", "FP8_FORMAT": "E4M3", "FP8DS_AMAX_ALGO": "max"}
    values |= {"FP8DS_AMAX_HISTLEN": "5", "FP8DS_REDUCE_AMAX": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"NVTE_DPA_{name}", value)
    run = Run()
    run.step(NVFP4BlockScaling(fp8_dpa=True))
    recipe = run.module.fp8_meta["recipe"]
    assert type(recipe) is DelayedScaling
    assert recipe.fp8_format is Format.E4M3
    assert (recipe.amax_compute_algo, recipe.amax_history_len) == ("max", 5)
    assert recipe.reduce_amax is False
    assert recipe.fp8_dpa
    assert get_attention_quantizers(True, run.module.quantizers)[4].dtype == fp8.DType.kFloat8E4M3


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("FP8_FORMAT", "'HYBRID' or 'E4M3'"),
        ("FP8DS_AMAX_ALGO", "'max' or 'most_recent'"),
        ("FP8DS_REDUCE_AMAX", "0 or 1"),
        ("FP8DS_AMAX_HISTLEN", "a number"),
    ],
)
def test_a_wrong_field_of_the_environment_is_named(name: str, needed: str, monkeypatch) -> None:
    monkeypatch.setenv(f"NVTE_DPA_{name}", "E5M2")
    with pytest.raises(ValueError, match=f"NVTE_DPA_{name} is 'E5M2'; needs {needed}"):
        Run().step(recipe_of("delayed"))


def test_e4m3_gradients() -> None:
    run = Run()
    run.step(recipe_of("current", fp8_format=Format.E4M3))
    of_do = get_attention_quantizers(True, run.module.quantizers)[4]
    assert of_do.dtype == fp8.DType.kFloat8E4M3
    check(run.found, run.wanted())


def test_o_may_be_saved_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("1", "0"):
        monkeypatch.setenv("NVTE_DPA_FP8CS_O_in_F16", value)
        run = Run()
        found.append(run.step(recipe_of("current")))
        check(found[-1], run.wanted(), slack=1.2)
    assert torch.equal(found[0]["o"], found[1]["o"])
    assert not torch.equal(found[0]["dq"], found[1]["dq"])


@pytest.mark.parametrize(
    "kind", [MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling, CustomRecipe]
)
def test_recipes_that_are_refused(kind: type) -> None:
    run = Run()
    run.step(kind())  # attention stays in 16 bits
    with pytest.raises(AssertionError, match=f"recipe is a {kind.__name__} with fp8_dpa or"):
        run.step(kind(fp8_dpa=True))


def test_fp8_mha_alone_warns() -> None:
    run = Run()
    with pytest.warns(UserWarning, match="fp8_mha is True without fp8_dpa"):
        found = run.step(DelayedScaling(fp8_mha=True))
    assert errors(found, run.wanted())["o"] > 0.01


def test_a_change_of_the_recipe() -> None:
    run = Run()
    run.step(recipe_of("delayed"))
    with pytest.warns(UserWarning, match="changes from DelayedScaling to Float8CurrentScaling"):
        run.step(recipe_of("current"))
    check(run.found, run.wanted())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run.step(recipe_of("current"))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (20, 0), "attn_mask_type": "causal"},
        {"attn_mask_type": "causal_bottom_right"},
        {"softmax_type": "learnable"},
        {"attention_dropout": 0.5},
    ],
)
@pytest.mark.parametrize("kind", RECIPES)
def test_what_cudnn_does_not_take(options: dict, kind: str) -> None:
    found = []
    for recipe in (recipe_of(kind), DelayedScaling()):
        torch.manual_seed(5)
        run = Run(**options)
        run.step(recipe)
        torch.manual_seed(6)
        found.append(run.step(recipe))
    for name, error in errors(found[0], {n: t.double() for n, t in found[1].items()}).items():
        assert 0.005 < error < 1.3 * BOUNDS[name], name


def test_bias_and_ragged_sequences() -> None:
    run, recipe = Run(), recipe_of("current")
    bias = torch.randn(1, H, S, S).bfloat16().requires_grad_()
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    found = run.step(recipe, **options)
    check(found, reference(*run.given, bias=bias.detach()))
    assert bias.grad.isfinite().all()
    assert bias.grad.any()
    cu = torch.tensor([0, S, S + 40], dtype=torch.int32)
    packed = [torch.cat((t[0], t[1, :40])).requires_grad_() for t in run.given[:3]]
    module = DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding_causal")
    with te.autocast(recipe=recipe):
        out = module(*packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=S, max_seqlen_kv=S)
    wanted = reference(*run.given[:3], causal=True, lens=[S, 40])["o"]
    check({"o": out.view(-1, H, D)}, {"o": torch.cat((wanted[0], wanted[1, :40]))})


def test_what_is_refused() -> None:
    run = Run(return_max_logit=True)
    with pytest.raises(ValueError, match="return_max_logit in FP8"):
        run.step(recipe_of("delayed"))
    q, k, v = Run().given[:3]
    quantizer = fp8.Float8Quantizer(torch.ones(1), torch.zeros(1), fp8.DType.kFloat8E4M3)
    with (
        pytest.raises(ValueError, match="key_layer is a Tensor; needs FP8 as query_layer"),
        te.autocast(recipe=recipe_of("delayed")),
    ):
        Run().module(quantizer(q), k, v)
    with (
        pytest.raises(ValueError, match="NVTE_FP8_DPA_BWD is 'yes'; needs 0 or 1"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("NVTE_FP8_DPA_BWD", "yes")
        Run().step(recipe_of("delayed"))


def test_a_backward_pass_of_another_module_leaves_the_first_scale_of_dp_alone() -> None:
    """The end of an autocast() updates all states of gradients, those without amaxes too."""
    for run in (Run(), Run()):
        q, k, v, dout = (t.clone().requires_grad_() for t in run.given)
        with te.autocast(recipe=recipe_of("current")):
            o = run.module(q, k, v)
        o.backward(dout.flatten(-2))
        assert run.module.quantizers["scaling_bwd"][META_DP].scale != 1


@pytest.mark.parametrize("updated", [False, True])
def test_a_replay_after_the_first_update_keeps_the_scale_of_dp(updated: bool) -> None:
    """A graph captured before the first update contains the step that begins the scale."""
    run = Run()
    run.step(recipe_of("current"))
    meta, quantizers = run.module.fp8_meta, run.module.quantizers
    state, scale = meta["scaling_bwd"], quantizers["scaling_bwd"][META_DP].scale
    assert not state.updated
    state.updated_on_device.fill_(updated)
    scale.fill_(3)
    begin_scale_of_dp(meta, quantizers, torch.full((1,), 2.0))
    largest = 57344 if quantizers["scaling_bwd"][META_DP].dtype == fp8.DType.kFloat8E5M2 else 448
    assert scale == (3 if updated else largest / 2)


def test_an_update_of_scales_from_a_history_is_noted_on_the_device() -> None:
    run = Run()
    for updated in (False, True):
        run.step(recipe_of("current"))
        state = run.module.fp8_meta["scaling_bwd"]
        assert (state.updated, bool(state.updated_on_device)) == (updated, updated)
