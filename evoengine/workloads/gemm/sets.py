"""The products of models' linear layers, as sets of problems that are tuned together.

Shapes are those of the models' configuration files: hidden and intermediate size, heads and heads of keys and values of
128. Queries, keys and values are one product, gate and up another, as inference engines have them.
"""

from __future__ import annotations

from collections.abc import Mapping

TOKENS = (16, 512, 8192)
"""rows of the products: decoding, a chunk of a prompt, a whole one"""
_MODELS = {"llama3-8b": (4096, 14336, 32, 8), "llama3-70b": (8192, 28672, 64, 8)}
"""name → hidden, intermediate, heads, heads of keys and values"""


def problem_sets() -> Mapping[str, tuple[str, ...]]:
    """Return name → problems."""
    return {name: tuple(_problems(*sizes)) for name, sizes in _MODELS.items()}


def _problems(hidden: int, intermediate: int, heads: int, kv_heads: int) -> list[str]:
    layers = (
        (128 * (heads + 2 * kv_heads), hidden),
        (hidden, 128 * heads),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    )
    return [f"gemm:m{m},n{n},k{k},bf16,b_nk" for m in TOKENS for n, k in layers]
