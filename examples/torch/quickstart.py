"""The code of README.md and docs/pytorch.md, as a program."""

import torch

from te_attention.torch import attention, explain

q, k, v = (torch.randn(2, 8, 128, 64, requires_grad=True) for _ in range(3))  # [b, h, s, d]
o = attention(q, k, v, mask="causal", window=(63, None), softcap=30.0)
o.sum().backward()

# Ragged sequences: 100 and 28 tokens, one after the other, without padding.
tokens = torch.randn(128, 8, 64)
cu = torch.tensor([0, 100, 128], dtype=torch.int32)
lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 100, "max_seqlen_kv": 100}
o, lse = attention(tokens, tokens, tokens, format="thd", mask="causal", return_lse=True, **lengths)

print(explain(q, k, v, mask="causal", window=(63, None)))
