"""Tokens of a logit lens that are given as texts become ids of the engine's tokenizer."""

from __future__ import annotations

from typing import Any

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import EngineFacts, LensRequest, check_lens, judging, shown

__all__ = ["with_token_ids"]


def with_token_ids(request: LensRequest, processor: Any, facts: EngineFacts) -> LensRequest:
    """Put ids in the place of texts.

    Args:
        request: judged.
        processor: vLLM's `InputProcessor` of the engine.
        facts: of the engine.

    Returns:
        The same request where no text is named.

    Raises:
        SpecError: a text is not one token, or two of them are the same one.
        UnsupportedError: the engine has no tokenizer.
    """
    lens = request.lens
    if lens is None or not lens.texts:
        return request
    tokenizer = processor.tokenizer
    if tokenizer is None:
        raise UnsupportedError(
            "lens.tokens: this engine was started without a tokenizer; give ids instead of texts"
        )
    with judging("lens.tokens"):
        ids = [_id_of(t, tokenizer) if isinstance(t, str) else t for t in lens.tokens]
    if len(set(ids)) != len(ids):
        raise SpecError(f"lens.tokens: {shown(lens.tokens)} are the ids {ids}; name each once")
    named = lens.model_copy(update={"tokens": tuple(ids)})
    check_lens(named, facts)
    return request.model_copy(update={"lens": named})


def _id_of(text: str, tokenizer: Any) -> int:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if len(ids) != 1:
        raise SpecError(
            f"lens.tokens: {shown(text)} is {len(ids)} tokens of this model, {shown(ids)}; give a "
            "text that is one token (most words need the space in front), or ids"
        )
    return int(ids[0])
