"""A small GPT: trained with our attention and with PyTorch's, then writing from a paged KV cache.

usage: gpt.py [--device cuda] [--steps 40] [--text FILE]

Both models begin with the same weights and see the same batches. Each step prints both losses; they
must stay together. Then the model writes text twice: with a paged cache that holds every key once,
and by running the whole text again for every letter. Both must write the same.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from te_attention.torch import attention

TEXT = Path(__file__).parents[1] / "gpt" / "data" / "paradise_lost.txt"
HEADS, DIM, LAYERS, CONTEXT, PAGE = 4, 32, 2, 64, 16


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [b, heads, s, d]."""
    return attention(q, k, v, mask="causal")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by PyTorch."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


class PagedCache:
    """Keys and values of one layer in pages that lie anywhere in a pool."""

    def __init__(self, device: torch.device, pages: int) -> None:
        """A pool of twice as many pages as needed, handed out in random order."""
        shape = (2 * pages, PAGE, HEADS, DIM)
        self.k, self.v = (torch.empty(shape, device=device) for _ in range(2))
        order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(0))
        self.table = order[:pages].int().reshape(1, pages).to(device)
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the keys of new tokens, then attends to all of them: [1, heads, new, d]."""
        new = q.shape[2]
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))  # to thd: [new, heads, d]
        self.length += new
        fresh = torch.tensor([0, new], dtype=torch.int32, device=q.device)
        everything = torch.tensor([0, self.length], dtype=torch.int32, device=q.device)
        append = torch.ops.te_attention.kv_cache_append
        append(k, v, self.k, self.v, self.table, fresh, everything)
        o = attention(
            q,
            self.k,
            self.v,
            format="thd",
            mask="causal_bottom_right",
            cu_seqlens_q=fresh,
            cu_seqlens_kv=everything,
            page_table=self.table,
        )
        return o.transpose(0, 1)[None]


class Layer(nn.Module):
    """One transformer layer; what computes its attention is passed in."""

    def __init__(self) -> None:
        """Pre-norm, fused qkv, MLP of four times the width."""
        super().__init__()
        width = HEADS * DIM
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor, attend) -> Tensor:
        """[b, s, width] to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        o = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Letters in, logits of the next letter out."""

    def __init__(self, letters: int) -> None:
        """Learned positions."""
        super().__init__()
        width = HEADS * DIM
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, ids: Tensor, attends: list, start: int = 0) -> Tensor:
        """`attends`: one function of q, k, v for each layer."""
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.letter(ids) + self.place(places)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return self.head(x)


def train(model: GPT, attend, data: Tensor, steps: int) -> list[float]:
    """The loss of every step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (8,), generator=source)
        batch = torch.stack([data[i : i + CONTEXT + 1] for i in starts])
        logits = model(batch[:, :-1], [attend] * LAYERS)
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def write(model: GPT, prompt: Tensor, count: int, paged: bool) -> list[int]:
    """The prompt and the likeliest letters after it."""
    caches = [PagedCache(prompt.device, CONTEXT // PAGE) for _ in range(LAYERS)]
    attends = [c.attend for c in caches] if paged else [ours] * LAYERS
    ids, start = prompt.tolist(), 0
    for _ in range(count):
        new = torch.tensor([ids[start:]], device=prompt.device)
        ids.append(int(model(new, attends, start)[0, -1].argmax()))
        start = len(ids) - 1 if paged else 0
    return ids


def main(arguments: list[str] | None = None) -> int:
    """0 if both models and both ways of writing agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text[:100_000]], device=options.device)
    models, losses = [], []
    for attend in (ours, sdpa):
        torch.manual_seed(0)
        models.append(GPT(len(letters)).to(options.device))
        losses.append(train(models[-1], attend, data, options.steps))
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        print(f"step {step:3}  loss {a:.6f}  with SDPA {b:.6f}")
    furthest = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"the losses differ by at most {furthest:.2e}")
    texts = [write(models[0], data[:20], CONTEXT - 20, paged) for paged in (True, False)]
    print("".join(letters[i] for i in texts[0]))
    same = texts[0] == texts[1]
    print("the paged cache writes", "the same" if same else "SOMETHING ELSE")
    return int(furthest > 1e-3 or not same)


if __name__ == "__main__":
    raise SystemExit(main())
