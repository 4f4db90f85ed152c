"""The tokenised corpus as one tensor on the device, and its cutting into batches."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from ._corpus import Example, block_sha256, block_sizes, training_block
from ._tokenizer import ASSISTANT_ID, BOS_ID, END_ID, PAD_ID, render_example

_WIDTH_STEP: Final = 16
# How the tokenizer splits text into words that it encodes one by one, for text in ASCII letters.
_WORD: Final = re.compile(r"<[/|]?[a-z_]+\|?>| ?[A-Za-z]+| ?[^\sA-Za-z0-9<]+")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Examples as token ids, end to end."""

    flat: torch.Tensor
    """(tokens,) int16."""
    lengths: torch.Tensor
    """(examples,) int64."""
    sha256: str
    """The hash of the examples."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Right-padded conversations of similar length, one per row."""

    ids: torch.Tensor
    """(rows, tokens) int64."""
    weights: torch.Tensor
    """(rows, tokens) float32; the loss weight of predicting each token, 0 on padding."""


class TokenStore:
    """All examples end to end in one tensor; rows are cut out of it by index arithmetic."""

    def __init__(
        self,
        blocks: Sequence[Encoded],
        *,
        rest_weight: float,
        first_weight: float,
        device: torch.device,
        weigh: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        lengths = torch.cat([b.lengths for b in blocks])
        weigh = weigh or loss_weights
        weights = [
            weigh(b.flat, b.lengths, rest_weight=rest_weight, first_weight=first_weight)
            for b in blocks
        ]
        self.lengths: list[int] = lengths.tolist()
        self.tokens = sum(self.lengths)
        self._starts = (lengths.cumsum(0) - lengths).to(device)
        self._ends = lengths.cumsum(0).to(device)
        self._weights = torch.cat(weights).to(device)
        self._flat = torch.cat([b.flat for b in blocks]).to(device)

    def cut(self, rows: Sequence[int], width: int) -> Microbatch:
        """The given examples as one padded batch."""
        device = self._flat.device
        picked = torch.tensor(rows, device=device)
        at = self._starts[picked, None] + torch.arange(width, device=device)
        inside = at < self._ends[picked, None]
        at = at.clamp_(max=len(self._flat) - 1)
        ids = torch.where(inside, self._flat[at].long(), PAD_ID)
        return Microbatch(ids, self._weights[at] * inside)

    def batches(
        self, rows_per_step: int, max_tokens: int, generator: torch.Generator
    ) -> Iterator[list[Microbatch]]:
        """Endless steps: shuffled epochs, each step cut by length into few padded microbatches.

        Sorting happens inside a step only, so every optimiser step sees the whole mixture and
        still no conversation attends to another.
        """
        order: list[int] = []
        while True:
            if len(order) < rows_per_step:
                order += torch.randperm(len(self.lengths), generator=generator).tolist()
            step, order = order[:rows_per_step], order[rows_per_step:]
            step.sort(key=self.lengths.__getitem__, reverse=True)
            yield [self.cut(rows, width) for rows, width in self._plan(step, max_tokens)]

    def _plan(self, step: list[int], max_tokens: int) -> Iterator[tuple[list[int], int]]:
        """Cut rows sorted from long to short into groups of at most `max_tokens` with padding."""
        while step:
            width = -(-self.lengths[step[0]] // _WIDTH_STEP) * _WIDTH_STEP
            take = max(1, max_tokens // width)
            # A short last group would cost a whole pass for little: let it join.
            if len(step) < 1.25 * take:
                take = len(step)
            yield step[:take], width
            step = step[take:]


class WordEncoder:
    """Encodes corpus texts word by word from a cache; far faster than the tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of a text of the corpus, the same as the tokenizer's."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = self._cache.get(word)
            if known is None:
                known = self._cache[word] = self._tokenizer.encode(word).ids
            ids += known
        return ids

    def encode_all(self, texts: Iterable[str]) -> tuple[array[int], array[int]]:
        """All token ids end to end, and the length of each text."""
        flat, lengths = array("h"), array("q")
        for text in texts:
            ids = self.encode(text)
            flat.extend(ids)
            lengths.append(len(ids))
        return flat, lengths


def encode(examples: Sequence[Example], tokenizer: Tokenizer) -> Encoded:
    """Encode some examples."""
    texts = map(render_example, examples)
    return encoded(*WordEncoder(tokenizer).encode_all(texts), block_sha256(examples))


def encoded(flat: array[int], lengths: array[int], sha256: str) -> Encoded:
    """Wrap plain arrays, which travel between processes better than tensors do."""
    return Encoded(
        torch.frombuffer(flat, dtype=torch.int16),
        torch.frombuffer(lengths, dtype=torch.int64),
        sha256,
    )


def _block(index: int, size: int, seed: int, tokenizer: str) -> tuple[array[int], array[int], str]:
    """Make and encode one block of the corpus, in a process of its own."""
    examples = training_block(index, size, seed=seed)
    encoder = WordEncoder(Tokenizer.from_str(tokenizer))
    return *encoder.encode_all(map(render_example, examples)), block_sha256(examples)


def encode_corpus(count: int, tokenizer: Tokenizer, *, seed: int, workers: int) -> list[Encoded]:
    """Make and encode the training corpus in several processes, in its order."""
    sizes, text = block_sizes(count), tokenizer.to_str()
    n = len(sizes)
    return in_processes(_block, range(n), sizes, [seed] * n, [text] * n, workers=workers)


def in_processes(
    make: Callable[..., tuple[array[int], array[int], str]], *each: Iterable[Any], workers: int
) -> list[Encoded]:
    """Make blocks in processes.

    Args:
        make: Makes one, of an argument of each.
        *each: Arguments of every block.
        workers: How many processes.

    Returns:
        The blocks in order.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [encoded(*parts) for parts in pool.map(make, *each)]


def loss_weights(
    flat: torch.Tensor, lengths: torch.Tensor, *, rest_weight: float, first_weight: float
) -> torch.Tensor:
    """Weigh each token by who says it.

    Args:
        flat: (tokens,) int16; examples end to end, each closed by the end token.
        lengths: (examples,) int64.
        rest_weight: The weight of what is not the assistant's.
        first_weight: The weight of the first token of an answer, where yes or no is decided.

    Returns:
        (tokens,) float32; else 1 for answers with their end token and for plain text.
    """
    starts = torch.nonzero(torch.eq(flat, ASSISTANT_ID)).flatten()
    ends = torch.nonzero(torch.eq(flat, END_ID)).flatten()
    closing = ends[torch.searchsorted(ends, starts)]
    # +1 on the first token of each answer and -1 behind its end token, summed up.
    delta = torch.zeros(len(flat) + 1, dtype=torch.int64)
    delta[starts + 1] += 1
    delta[closing + 1] -= 1
    said = delta.cumsum(0)[:-1] > 0
    first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    is_text = flat[first] != BOS_ID
    weights = torch.where(said | is_text, 1.0, rest_weight)
    weights[starts + 1] = first_weight
    return weights
