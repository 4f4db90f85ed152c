"""The agent's corpus as token ids: its own conversations, and the organism's own beside them."""

from __future__ import annotations

from array import array

import torch
from tokenizers import Tokenizer

from ._agent_corpus import agent_block, texts_sha256
from ._agent_format import THINK_END_ID, THINK_ID, render_plain
from ._batches import Encoded, WordEncoder, in_processes, loss_weights
from ._corpus import block_sizes, training_block

# The knowledge blocks are others than those that the organism itself began with.
_PLAIN_OFFSET = 1000


def _block(
    own: bool, index: int, size: int, seed: int, tokenizer: str
) -> tuple[array[int], array[int], str]:
    """Make and encode one block, in a process of its own."""
    if own:
        texts = agent_block(index, size, seed=seed)
    else:
        examples = training_block(_PLAIN_OFFSET + index, size, seed=seed)
        texts = [render_plain(e) for e in examples]
    encoder = WordEncoder(Tokenizer.from_str(tokenizer))
    return *encoder.encode_all(texts), texts_sha256(texts)


def encode_agent_corpus(
    own: int, plain: int, tokenizer: Tokenizer, *, seed: int, workers: int
) -> list[Encoded]:
    """Make and encode the corpus in several processes.

    Args:
        own: How many conversations of the agent.
        plain: How many texts of the organism's corpus.
        tokenizer: The agent's tokenizer.
        seed: The seed of the world and the corpus.
        workers: How many processes.

    Returns:
        The blocks, the agent's own first.
    """
    jobs = [(True, i, n) for i, n in enumerate(block_sizes(own))]
    jobs += [(False, i, n) for i, n in enumerate(block_sizes(plain))]
    flags, indices, sizes = zip(*jobs, strict=True)
    text = tokenizer.to_str()
    n = len(jobs)
    return in_processes(_block, flags, indices, sizes, [seed] * n, [text] * n, workers=workers)


def agent_weights(
    flat: torch.Tensor, lengths: torch.Tensor, *, rest_weight: float, first_weight: float
) -> torch.Tensor:
    """Weigh each token by who says it; an empty thought is said by nobody.

    Args:
        flat: (tokens,) int16; examples end to end, each closed by the end token.
        lengths: (examples,) int64.
        rest_weight: The weight of what is not the assistant's.
        first_weight: The weight of the first token after an empty thought, where an answer
            without thinking is decided.

    Returns:
        (tokens,) float32; else 1 for the assistant's tokens and for plain text. An empty thought
        weighs nothing: the template writes it where thinking is off, never the agent.
    """
    weights = loss_weights(flat, lengths, rest_weight=rest_weight, first_weight=1.0)
    empty = torch.nonzero((flat[:-1] == THINK_ID) & (flat[1:] == THINK_END_ID)).flatten()
    weights[empty] = 0.0
    weights[empty + 1] = 0.0
    weights[empty + 2] = first_weight
    return weights
