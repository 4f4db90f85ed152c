"""Compute attention patterns from captured queries and keys, and score heads by them.

Attention Tracker finds injected prompts by a few heads, and CoRe heads rank documents.
"""

from ._captured import Head, QueriesKeys
from ._core import contrastive_scores, document_scores, find_core_heads
from ._heads import AttentionHeads, HeadMethod, HeadsFound, import_heads, load_heads
from ._pattern import (
    AttentionFacts,
    Span,
    attention_patterns,
)
from ._tracker import find_tracker_heads, instruction_shares

__all__ = [
    "AttentionFacts",
    "AttentionHeads",
    "Head",
    "HeadMethod",
    "HeadsFound",
    "QueriesKeys",
    "Span",
    "attention_patterns",
    "contrastive_scores",
    "document_scores",
    "find_core_heads",
    "find_tracker_heads",
    "import_heads",
    "instruction_shares",
    "load_heads",
]
