"""Attention patterns from captured queries and keys, and what reads them: numpy only.

Attention Tracker finds injected prompts by a few heads, and CoRe heads rank documents.
"""

from ._captured import Head, QueriesKeys
from ._facts import AttentionFacts
from ._pattern import (
    BLOCK_BYTES,
    PatternBlock,
    Span,
    attention_patterns,
    attention_to,
    iter_patterns,
    mean_attention,
)

__all__ = [
    "BLOCK_BYTES",
    "AttentionFacts",
    "Head",
    "PatternBlock",
    "QueriesKeys",
    "Span",
    "attention_patterns",
    "attention_to",
    "iter_patterns",
    "mean_attention",
]
