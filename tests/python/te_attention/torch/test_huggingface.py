"""Small models of Transformers, made from a config: logits and gradients equal to eager's."""

import pytest
import torch
import transformers
from transformers.masking_utils import bidirectional_mask_function

from te_attention.torch import huggingface

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5),
    "odd head dim": lambda: transformers.LlamaConfig(**SMALL, head_dim=10),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=5, attn_logit_softcapping=5.0
    ),
    # Its own code computes attention, and adds the mask.
    "bloom": lambda: transformers.BloomConfig(**SMALL, n_head=4, n_layer=2),
    # Reads the mask itself before attention does.
    "doge": lambda: transformers.DogeConfig(**SMALL),
}


CAUSAL = tuple(CONFIGS)
MODELS = {"t5": transformers.AutoModelForSeq2SeqLM, "splinter": transformers.AutoModel}
SMALL_T5 = {
    **{"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "decoder_start_token_id": 0,
}
CONFIGS["t5"] = lambda: transformers.T5Config(**SMALL_T5, dropout_rate=0.0)
CONFIGS["splinter"] = lambda: transformers.SplinterConfig(**SMALL)


def pair(name: str) -> list[torch.nn.Module]:
    """The same weights with eager attention and with ours."""
    models = []
    for implementation in ("eager", huggingface.NAME):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config._attn_implementation = implementation
        models.append(MODELS.get(name, transformers.AutoModelForCausalLM).from_config(config))
    return models


@pytest.mark.parametrize("padded", [False, True])
def test_the_position_bias_of_t5(padded: bool) -> None:
    eager, ours = pair("t5")
    ids = tokens()
    keep = torch.ones_like(ids)
    keep[0, 9:] = 0 if padded else 1
    losses = [m(input_ids=ids, attention_mask=keep, labels=ids).loss for m in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-3, msg=label)


def tokens() -> torch.Tensor:
    return torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CAUSAL)
def test_logits_and_gradients(name: str) -> None:
    eager, ours = pair(name)
    ids = tokens()
    losses = [m(input_ids=ids, labels=ids).loss for m in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-3, msg=label)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    eager, ours = (m.eval() for m in pair(name))
    keep = torch.ones(2, 13, dtype=torch.long)
    keep[0, : 4 if side == "left" else None] = 0
    if side == "right":
        keep[0] = torch.cat([torch.ones(9), torch.zeros(4)])
    with torch.no_grad():
        want, got = (m(input_ids=tokens(), attention_mask=keep).logits for m in (eager, ours))
    torch.testing.assert_close(got[keep.bool()], want[keep.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compile_without_a_graph_break(name: str, padded: bool) -> None:
    torch._dynamo.reset()
    _, model = pair(name)
    keep = torch.ones(2, 13, dtype=torch.long)
    keep[0, :4] = 0
    options = {"attention_mask": keep} if padded else {}
    compiled = torch.compile(model.eval(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(input_ids=tokens(), use_cache=False, **options).logits
        want = model(input_ids=tokens(), use_cache=False, **options).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_that_does_not_say_that_it_is_one(padded: bool) -> None:
    eager, ours = (m.eval() for m in pair("splinter"))
    keep = torch.ones(2, 13, dtype=torch.long)
    keep[0, 9:] = 0 if padded else 1
    with torch.no_grad():
        want, got = (
            m(input_ids=tokens(), attention_mask=keep).last_hidden_state for m in (eager, ours)
        )
    torch.testing.assert_close(got[keep.bool()], want[keep.bool()])


def test_a_model_that_declares_no_other_implementation_is_named() -> None:
    huggingface._supports_attention.cache_clear()
    with pytest.warns(UserWarning, match="models of BloomConfig declare no support"):
        pair("bloom")


TABLES = {
    "falcon": lambda: transformers.FalconConfig(**SMALL, num_kv_heads=4, alibi=False),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, rotary_dim=16, n_positions=64
    ),
    "gptneo": lambda: transformers.GPTNeoConfig(
        **{"vocab_size": 97, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
        attention_types=[[["global", "local"], 1]],
    ),
}
CONFIGS |= TABLES


@pytest.mark.parametrize("name", TABLES)
def test_models_that_choose_classes_from_a_table_are_built_and_named(name: str) -> None:
    huggingface._supports_attention.cache_clear()
    with pytest.warns(UserWarning, match="from a table of classes"):
        eager, ours = pair(name)
    keep = torch.ones(2, 13, dtype=torch.long)
    keep[0, :4] = 0
    eager, ours = eager.eval(), ours.eval()
    with torch.no_grad():
        want, got = (m(input_ids=tokens(), attention_mask=keep).logits for m in (eager, ours))
    assert torch.equal(got[keep.bool()], want[keep.bool()])


def test_a_model_that_ignores_the_name_is_named_when_it_is_built() -> None:
    huggingface._supports_attention.cache_clear()
    config = transformers.DebertaV2Config(**{**SMALL, "num_key_value_heads": 4})
    config._attn_implementation = huggingface.NAME
    with pytest.warns(UserWarning, match="models of DebertaV2Config declare no support"):
        transformers.AutoModel.from_config(config)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_training_makes_no_dense_mask(
    name: str, flash: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = pair(name)
    if checkpointing:
        ours.gradient_checkpointing_enable()
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    rows = [{"input_ids": row.tolist()} for row in (tokens()[0], tokens()[1, :9])]
    batch = collate(rows, return_tensors="pt")
    seen = []
    attend = huggingface.attention
    monkeypatch.setattr(
        huggingface,
        "attention",
        lambda *t, **o: (seen.append((o["bias"], o.get("format"))), attend(*t, **o))[1],
    )
    loss = ours.train()(**batch, use_cache=False).loss
    loss.backward()
    assert set(seen) == {(None, "thd")}
    losses = [
        ours(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]]))
        for row in rows
    ]
    counts = [len(row["input_ids"]) - 1 for row in rows]
    mean = sum(x.loss * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(loss, mean)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str) -> None:
    eager, ours = (m.eval() for m in pair("llama"))
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    want, got = (m.generate(tokens(), disable_compile=True, **options) for m in (eager, ours))
    assert torch.equal(got, want)


class CastingCache(transformers.DynamicCache):
    """Stores keys and values in `dtype`, and returns them in that type, or widened again."""

    def __init__(self, dtype: torch.dtype, *, widens: bool) -> None:
        super().__init__()
        self.dtype, self.widens = dtype, widens

    def update(self, key_states, value_states, *arguments, **options):
        """Appends the tokens of a layer."""
        cast = [t.to(self.dtype) for t in (key_states, value_states)]
        if self.widens:
            cast = [t.to(key_states.dtype) for t in cast]
        return super().update(*cast, *arguments, **options)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_generation_with_a_cache_of_fp8(fp8: torch.dtype) -> None:
    ours = pair("llama")[1].eval().bfloat16()
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    want, got = (
        ours.generate(tokens(), past_key_values=CastingCache(fp8, widens=w), **options)
        for w in (True, False)
    )
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logits, want.logits, atol=0.02, rtol=0.02)
    assert got.past_key_values.layers[0].keys.dtype == fp8


@pytest.mark.parametrize("name", ["llama", "mistral", "odd head dim"])
def test_packed_lengths_are_sequences_of_their_own(name: str) -> None:
    _, ours = pair(name)
    ids = tokens()
    cu = torch.tensor([0, 13, 22], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 13, "max_length_k": 13}
    places = torch.cat([torch.arange(13), torch.arange(9)])[None]
    joined = torch.cat([ids[0], ids[1, :9]])[None]
    got = ours(input_ids=joined, position_ids=places, **packed).logits[0]
    for rows, alone in ((slice(13), ids[:1]), (slice(13, None), ids[1:, :9])):
        torch.testing.assert_close(got[rows], ours(input_ids=alone).logits[0])
    got.sum().backward()


def test_the_mask_stays_a_word_where_it_can() -> None:
    assert huggingface.attention_mask(2, 13, 13) is None
    assert huggingface.attention_mask(2, 1, 13, q_offset=12) is None
    padded = torch.ones(2, 13, dtype=torch.bool)
    assert huggingface.attention_mask(2, 13, 13, attention_mask=padded).shape == (2, 13)
    custom = huggingface.attention_mask(2, 5, 5, mask_function=lambda _b, _h, q, k: q == k)
    assert custom.shape == (2, 1, 5, 5)
    encoder = {"mask_function": bidirectional_mask_function, "attention_mask": padded}
    assert huggingface.attention_mask(2, 5, 13, **encoder).shape == (2, 1, 1, 13)
    read = huggingface.attention_mask(2, 13, 13, allow_is_causal_skip=False)
    assert read.shape == (2, 1, 13, 13)


def test_what_is_not_used_is_refused_by_name() -> None:
    module, (q, k, v) = torch.nn.Module(), torch.randn(3, 1, 2, 5, 16)
    huggingface.attention_forward(module, q, k, v, None, return_dict=True, odd=None)
    huggingface.attention_forward(module, q, k, v, None, position_ids=torch.arange(5))
    for name, value in (("head_mask", q), ("output_attentions", True), ("cu_seq_lens_q", q)):
        with pytest.raises(TypeError, match=f"{name} is given; needs None"):
            huggingface.attention_forward(module, q, k, v, None, **{name: value})
    keys = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match="cu_seq_lens_q is given; needs None"):
        huggingface.attention_forward(module, q, k, v, keys, cu_seq_lens_q=q)
    everything = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    huggingface.attention_forward(module, q, k, v, everything, cu_seq_lens_q=q)
