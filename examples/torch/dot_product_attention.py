"""The code of docs/transformer-engine.md, as a program."""

import torch

from transformer_engine.pytorch import DotProductAttention

# [batch, seqlen, heads, dim]; 8 query heads share 2 key heads.
q = torch.randn(2, 128, 8, 64, dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(2, 128, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
core = DotProductAttention(
    8, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="causal", window_size=(63, 0)
)
o = core(q, k, v)  # [2, 128, 512]
o.sum().backward()

# The same module on ragged sequences, of 100 and 28 tokens.
cu = torch.tensor([0, 100, 128], dtype=torch.int32)
lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 100, "max_seqlen_kv": 100}
o = core(q[0], k[0], v[0], qkv_format="thd", attn_mask_type="padding_causal", **lengths)
print(o.shape)
