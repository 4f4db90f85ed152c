"""Compute attention patterns from captured queries and keys, and score heads by them.

Attention Tracker finds injected prompts by a few heads, and CoRe heads rank documents.
"""

from ._captured import Head, QueriesKeys
from ._core import contrastive_scores, document_scores, find_core_heads
from ._heads import AttentionHeads, HeadMethod, HeadsFound, import_heads, load_heads
from ._pattern import (
    BLOCK_BYTES,
    AttentionFacts,
    PatternBlock,
    Span,
    attention_patterns,
    attention_to,
    iter_patterns,
    mean_attention,
)
from ._tracker import find_tracker_heads, focus_score, instruction_shares

__all__ = [
    "BLOCK_BYTES",
    "AttentionFacts",
    "AttentionHeads",
    "Head",
    "HeadMethod",
    "HeadsFound",
    "PatternBlock",
    "QueriesKeys",
    "Span",
    "attention_patterns",
    "attention_to",
    "contrastive_scores",
    "document_scores",
    "find_core_heads",
    "find_tracker_heads",
    "focus_score",
    "import_heads",
    "instruction_shares",
    "iter_patterns",
    "load_heads",
    "mean_attention",
]
