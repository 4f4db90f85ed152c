"""The oracle's prompt, and where in its tokens the vectors go: found, never assumed."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_lens.errors import ArtifactError, SpecError

from ._config import OracleConfig

__all__ = ["find_placeholders", "oracle_message", "placeholder_id"]


def oracle_message(
    config: OracleConfig, question: str, *, layers: tuple[int, ...], count: int
) -> str:
    r"""The user message of the published format, `"Layer: 18\n ? ? ? \nIs it a lie?"`.

    Args:
        config: format of the oracle.
        question: what is asked.
        layers: whose activations are shown.
        count: vectors per layer; positive.

    Returns:
        The text; with several layers there is a block of placeholders for each.

    Raises:
        SpecError: there is no vector or no question, or the question has the placeholder in it.

    Example:
        ```python
        from inspect_lens.oracle import oracle_message, read_config

        config = read_config("oracles/organism")
        text = oracle_message(config, "Is it a lie?", layers=(4,), count=3)
        assert text.splitlines() == ["Layer: 4", " ? ? ? ", "Is it a lie?"]
        ```
    """
    if count < 1 or not layers:
        raise SpecError(f"oracle: {count} vectors of layers {list(layers)}; at least one is needed")
    if not question.strip():
        raise SpecError("oracle: the question is empty; ask something")
    if config.special_token in question:
        raise SpecError(
            f"oracle: the question {question!r} holds the placeholder {config.special_token!r}, "
            "which marks where activations go; leave it out"
        )
    return config.prefix(layers, count) + question


def placeholder_id(token_ids: Sequence[int], placeholder: str) -> int:
    """The token of the placeholder.

    Args:
        token_ids: what the tokenizer makes of the placeholder alone, without special tokens.
        placeholder: its text.

    Raises:
        ArtifactError: it is not exactly one token.
    """
    if len(token_ids) != 1:
        raise ArtifactError(
            f"the placeholder {placeholder!r} is {len(token_ids)} tokens {list(token_ids)} of this "
            "model, and has to be one; an oracle with this special_token belongs to another model"
        )
    return token_ids[0]


def find_placeholders(
    prompt_token_ids: Sequence[int], placeholder: int, *, n_layers: int, count: int
) -> tuple[int, ...]:
    """Find the placeholders in the tokens of a rendered prompt.

    Args:
        prompt_token_ids: of the whole prompt, chat template included.
        placeholder: their token.
        n_layers: blocks of placeholders.
        count: placeholders in each block.

    Returns:
        Their positions, ascending: block by block.

    Raises:
        ArtifactError: there are more or fewer than were written, or those of a block are not
            consecutive; the tokenizer merges them with their neighbours.

    Example:
        ```python
        from inspect_lens.oracle import find_placeholders

        prompt = [1, 52, 9, 9, 9, 13, 77, 2]  # 9 is the placeholder
        assert find_placeholders(prompt, 9, n_layers=1, count=3) == (2, 3, 4)
        ```
    """
    found = [i for i, token in enumerate(prompt_token_ids) if token == placeholder]
    wanted = n_layers * count
    if len(found) != wanted:
        raise ArtifactError(
            f"oracle: the rendered prompt has {len(found)} placeholder tokens (id {placeholder}) "
            f"and {wanted} were written; the chat template or the tokenizer changes them, so "
            "this oracle cannot be asked through this model"
        )
    for begin in range(0, wanted, count):
        block = found[begin : begin + count]
        if block[-1] - block[0] != count - 1:
            raise ArtifactError(
                f"oracle: the placeholders at {block} are not consecutive; the chat template or "
                "the tokenizer puts something between them"
            )
    return tuple(found)
