"""Division of attention among context-parallel ranks: by heads as far as they divide, then by slices of the queries."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ContextDivision:
    """The division of attention among the context-parallel ranks of a tensor-parallel rank's heads."""

    exchanging: int
    """Ranks that exchange tokens for heads, so that each has some query heads of all their tokens."""
    gathering: int
    """Such groups. Each attends from its own tokens, with keys and values gathered from all groups."""
    copies: int
    """Exchanging ranks that have the same key-value head."""


def context_division(ranks: int, heads: int, kv_heads: int) -> ContextDivision:
    """Let as many ranks exchange heads as the heads allow.

    Each then has either whole key-value heads, or an equal part of one's query heads.

    Args:
        ranks: context-parallel ranks.
        heads: query heads of a tensor-parallel rank.
        kv_heads: its key-value heads, which divide `heads`.
    """
    exchanging = max(
        size
        for size in range(1, ranks + 1)
        if ranks % size == 0 and (kv_heads % size == 0 or (size % kv_heads == 0 and heads % size == 0))
    )
    return ContextDivision(exchanging, ranks // exchanging, max(exchanging // kv_heads, 1))
