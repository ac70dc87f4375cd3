"""Decoding with KVCache: the result equals attention over all tokens so far."""

import torch

from te_attention.torch import KVCache, attention

torch.manual_seed(0)
projection = torch.nn.Linear(512, (8 + 2 + 2) * 64)
tokens: list[tuple[torch.Tensor, ...]] = []


@torch.no_grad()
def layer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Projects to 8 query heads and 2 heads of keys and values; remembers them for the check."""
    tokens.append(projection(x).unflatten(-1, (12, 64)).split((8, 2, 2), dim=2))
    return tokens[-1]


cache = KVCache(batch=2, max_seqlen=256, heads_kv=2, dim=64)
prompt = layer(torch.randn(2, 100, 512))  # q, k, v: [batch, tokens, heads, dim]
o = cache.prefill(*prompt)
for _ in range(20):
    o = cache.decode(*layer(torch.randn(2, 1, 512)))

keys, values = (torch.cat([step[i] for step in tokens], dim=1) for i in (1, 2))
want = attention(tokens[-1][0], keys, values, format="bshd", mask="causal_bottom_right")
torch.testing.assert_close(o, want)
print(f"{cache.lengths.tolist()} tokens in the cache; the last step equals attention over all")
