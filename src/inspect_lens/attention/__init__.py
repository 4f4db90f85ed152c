"""Compute attention patterns from captured queries and keys, and score heads by them.

Attention Tracker finds injected prompts by a few heads, and CoRe heads rank documents.
"""

from ._heads import (
    AttentionHeads,
    HeadMethod,
    HeadsFound,
    contrastive_scores,
    document_scores,
    find_core_heads,
    find_tracker_heads,
    import_heads,
    instruction_shares,
    load_heads,
)
from ._pattern import AttentionFacts, Head, QueriesKeys, Span, attention_patterns

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
