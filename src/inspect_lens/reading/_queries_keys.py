"""Queries and keys of a call of Inspect, and where texts stand in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from inspect_ai.model import ChatMessage, ModelOutput

from inspect_lens._base.shipped import model_path
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.attention import AttentionHeads, QueriesKeys, Span
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
    """Token ranges of texts that follow each other."""
    whole = "".join(pieces)
    found: list[Span | None] = []
    start = 0
    for text in texts:
        wanted = text.strip()
        at = whole.find(wanted, start) if wanted else -1
        if at < 0:
            found.append(None)
            continue
        start = at + len(wanted)
        found.append(tokens_of(pieces, at, start))
    return found


def tokens_of(pieces: Sequence[str], start: int, stop: int) -> Span:
    """(first, behind the last) token that holds a part of the characters from start to stop."""
    ends = list(accumulate(len(piece) for piece in pieces))
    first = next(i for i, end in enumerate(ends) if end > start)
    last = next(i for i, end in enumerate(ends) if end >= stop)
    return first, last + 1


def require_span(span: Span | None, what: str) -> Span:
    """A range that has to be there."""
    if span is None:
        raise ArtifactError(
            f"{what}: its text does not stand in the prompt as the model saw it; the chat template "
            "may change it, or tokenizer= names that of another model"
        )
    return span


def prompt_pieces(
    output: ModelOutput, model_name: str | None, tokenizer: str | None, what: str
) -> list[str]:
    """Text of each token of a call's prompt."""
    handle = activations(output)
    if handle is None:
        raise ArtifactError(f"{what}: this call captured nothing; use lens_config(qk=[…])")
    texts = TokenTexts.of(model_name or "", tokenizer=tokenizer)
    if not texts.is_known:
        raise ArtifactError(
            f"{what}: told by the texts of tokens. {texts.note} Allowed is "
            "tokenizer= with the folder of a checkpoint"
        )
    return texts.texts(handle.prompt_token_ids)


def messages_before(output: ModelOutput, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages before the answer; all of them where the answer is not among them."""
    answer = output.message.id if output.choices else None
    at = next((i for i, m in enumerate(messages) if answer is not None and m.id == answer), None)
    return list(messages[:at])


def bare_name(model: str) -> str:
    """A model's name without its provider and its adapter."""
    return model.partition("/")[2].partition(":")[0]


def check_model_of(heads: AttentionHeads, model: str) -> None:
    """Refuse heads of another model than the one that made a call."""
    listed, name = heads.model, bare_name(model)

    def place(of: str) -> str:
        # A folder may be written in several ways, and the shipped model has a name, too.
        path = Path(model_path(of)).expanduser()
        return str(path.resolve()) if path.is_dir() else of

    if listed and place(listed) != place(name):
        raise ArtifactError(
            f"heads: the list is of the model {listed!r}, and this is {name!r}; heads of one model "
            "say nothing of another. Find its own with calibrate_tracker or find_core_heads, or "
            "pass check_model=False where both names are of the same model"
        )
