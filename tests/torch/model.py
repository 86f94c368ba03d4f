"""A small transformer with random weights, of the layers that `patch` replaces and others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ends = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(functional.gelu(self.up(self.ends(x))))


class Transformer(nn.Module):
    """[batch, seq] of tokens → [batch, seq, 50] of logits"""

    def __init__(self, width: int = 64, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.logits = nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.blocks(self.tokens(tokens)))
