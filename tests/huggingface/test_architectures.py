"""Architectures of Transformers: logits and gradients equal those of eager attention.

Not part of `make test`, because it takes a minute and follows the releases of Transformers:

    PYTHONPATH=build/release/python $(tools/python_env) -m pytest tests/huggingface

A model that computes attention with code of its own must be built, named by a warning, and right.
"""

import warnings

import pytest
import torch
import transformers

from te_attention.torch import huggingface

COMMON = {
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
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
HEAD_DIM = COMMON | {"head_dim": 16}
CONFIGS = {
    **dict.fromkeys(
        (
            *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Phi", "Phi3", "GPTNeoX"),
            *("OPT", "Falcon", "Starcoder2", "StableLm", "Olmo", "Olmo2", "Olmoe", "Cohere"),
            *("Cohere2", "Granite", "GraniteMoe", "Nemotron", "Persimmon", "SmolLM3", "Exaone4"),
            *("Arcee", "BitNet", "Apertus", "Lfm2", "MiniMax", "Doge", "Bert", "Roberta"),
            *("Electra", "DebertaV2", "Albert", "ModernBert"),
        ),
        COMMON,
    ),
    **dict.fromkeys(
        (
            *("Gemma", "Gemma2", "Gemma3Text", "Qwen3", "Qwen3Moe", "Helium", "Glm", "Glm4"),
            *("GptOss", "Ernie4_5"),
        ),
        HEAD_DIM,
    ),
    **dict.fromkeys(("GPT2", "GPTBigCode"), GPT),
    **dict.fromkeys(("GPTJ", "CodeGen"), GPT | {"rotary_dim": 16}),
    **dict.fromkeys(("DeepseekV2", "DeepseekV3"), COMMON | LATENT),
    "GPTNeo": {
        **{"vocab_size": 97, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
        "attention_types": [[["global", "local"], 1]],
    },
    "Bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Mpt": {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "DistilBert": {"vocab_size": 97, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
}


def outputs(name: str, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the model for the tokens that are no padding, and all gradients."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    config._attn_implementation = implementation
    causal = transformers.AutoModelForCausalLM
    loader = causal if type(config) in causal._model_mapping else transformers.AutoModel
    model = loader.from_config(config).eval()
    ids = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    keep[0, :4] = 0
    result = model(input_ids=ids, attention_mask=keep)
    rows = result.logits if hasattr(result, "logits") else result.last_hidden_state
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = rows[keep.bool()].square().mean()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return rows[keep.bool()], torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_eager(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, got = outputs(name, "eager"), outputs(name, huggingface.NAME)
    for a, b, bound in zip(got, want, (1e-4, 1e-3), strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max()
