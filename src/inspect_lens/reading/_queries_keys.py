"""Queries and keys of a call of Inspect, and where texts stand in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from inspect_ai.model import ModelOutput

from inspect_lens.attention import QueriesKeys, Span
from inspect_lens.errors import ArtifactError
from inspect_lens.model import activations

__all__ = ["find_texts", "read_queries_keys"]


def read_queries_keys(output: ModelOutput) -> QueriesKeys:
    """Queries and keys that a call captured, live or from a log.

    Args:
        output: of the call, whose config was `lens_config(qk=[…])`.

    Returns:
        The queries and keys of its layers.

    Raises:
        ArtifactError: the call captured none, or its file cannot be found.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import lens_config
        from inspect_lens.reading import read_queries_keys


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            config = lens_config(qk=[0, 4], max_tokens=1)
            output = await model.generate("Who is the founder of the town Velosh?", config=config)
            captured = read_queries_keys(output)
            last = captured.patterns(4, queries=[-1])
            assert last.shape == (4, 1, captured.n_tokens)  # heads, queries, keys


        anyio.run(main)
        ```
    """
    handle = activations(output)
    captured = dict(output.metadata or {})
    if handle is not None:
        captured |= {name: handle.data(name) for name in ("attn_q", "attn_k") if name in handle}
    return QueriesKeys.of(captured)


def find_texts(pieces: Sequence[str], texts: Sequence[str]) -> list[Span | None]:
    """Token ranges of texts that follow each other.

    Args:
        pieces: text of each token; joined they are the prompt.
        texts: to find, in the order in which they stand; what surrounds them counts for nothing.

    Returns:
        (first, behind the last) token that holds a part of each; None for an empty text, and for
        one that is not there.
    """
    whole = "".join(pieces)
    stops = list(accumulate(len(piece) for piece in pieces))
    found: list[Span | None] = []
    start = 0
    for text in texts:
        wanted = text.strip()
        at = whole.find(wanted, start) if wanted else -1
        if at < 0:
            found.append(None)
            continue
        start = at + len(wanted)
        first = next(i for i, stop in enumerate(stops) if stop > at)
        last = next(i for i, stop in enumerate(stops) if stop >= start)
        found.append((first, last + 1))
    return found


def require_span(span: Span | None, what: str) -> Span:
    """A range that has to be there."""
    if span is None:
        raise ArtifactError(
            f"{what}: its text does not stand in the prompt as the model saw it; the chat template "
            "may change it, or tokenizer= names that of another model"
        )
    return span
