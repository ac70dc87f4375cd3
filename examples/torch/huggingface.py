"""A model of Hugging Face Transformers on our attention, compared with its own attention.

usage: huggingface.py [--device cuda]
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import te_attention.torch.huggingface  # noqa: F401  (registers "te_attention")

CONFIG = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def model(implementation: str, device: str) -> PreTrainedModel:
    """Small, with weights that depend on nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return made.to(device)


def main() -> int:
    """0 if losses, gradients and texts agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    eager, ours = model("eager", device), model("te_attention", device)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    for each in (eager, ours):
        each(input_ids=ids, labels=ids).loss.backward()
    pairs = zip(ours.parameters(), eager.parameters(), strict=True)
    furthest = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    print(f"the gradients differ by at most {furthest:.1e}")
    options = {"max_new_tokens": 16, "do_sample": False}
    texts = [each.eval().generate(ids[:1, :8], **options) for each in (eager, ours)]
    same = torch.equal(*texts)
    print("both write", "the same" if same else "SOMETHING ELSE")
    return int(furthest > 1e-3 or not same)


if __name__ == "__main__":
    raise SystemExit(main())
