"""Sampled tokens that are chosen by their id: what looks at the id, and where it is stored."""

from __future__ import annotations

from typing import Final

import numpy as np

from inspect_lens.errors import SpecError
from inspect_lens.spec.asks._positions import Positions
from inspect_lens.spec.asks._token_match import TokenMatch
from inspect_lens.spec.engine._sites import SiteWidth

from ._instruction import Instruction, Kind

__all__ = ["check_token_ids", "sampled_match", "token_gate", "token_gate_key"]

_END: Final = 1 << 24
"""Ids are below: float32 holds these numbers, and no others, exactly."""


def sampled_match(positions: Positions) -> TokenMatch | None:
    """Find the token match of an edit that acts on sampled tokens.

    Args:
        positions: of an edit.

    Returns:
        The match; None for all other positions.

    Example:
        ```python
        from inspect_lens.spec import TokenMatch, sampled_match

        stops = TokenMatch(token_ids=[13], among="completion")
        assert sampled_match(stops) is stops
        assert sampled_match("completion") is None
        ```
    """
    if isinstance(positions, TokenMatch) and positions.among == "completion":
        return positions
    return None


def check_token_ids(match: TokenMatch, width: SiteWidth, vocab: int, field: str) -> None:
    """Refuse ids that the model does not have, or more than a row has room for.

    Args:
        match: of sampled tokens.
        width: of the site at which the edit acts.
        vocab: tokens of the model's vocabulary; 0 where it is not known.
        field: path of the edit, for error messages.

    Raises:
        SpecError: they do not fit.
    """
    ids, room = _ids(match), width.width // width.shards
    end = vocab or _END - 1
    wrong = [one for one in ids if not 0 <= one < end]
    if wrong:
        raise SpecError(
            f"{field}.positions.token_ids: {wrong[0]}; the model has tokens 0 to {end - 1}"
        )
    if len(ids) > room:
        raise SpecError(
            f"{field}.positions.token_ids: {len(ids)} ids; {room} at most at {width.site}, which "
            "has as many numbers on a rank"
        )


def token_gate_key(match: TokenMatch) -> tuple[object, ...]:
    """Key that is equal for edits that can share one gate.

    Args:
        match: of sampled tokens.

    Returns:
        Hashable; by the set of ids, and not by their order.

    Example:
        ```python
        from inspect_lens.spec import TokenMatch, token_gate_key

        one = TokenMatch(token_ids=[13, 5], among="completion")
        same = TokenMatch(token_ids=[5, 13], among="completion")
        assert token_gate_key(one) == token_gate_key(same)
        ```
    """
    return frozenset(match.token_ids or ()), match.exclude


def token_gate(match: TokenMatch, width: SiteWidth, register: int) -> Instruction:
    """Make the gate that opens for tokens with one of some ids.

    It needs nothing but the token, so each tap of an edit has one of its own, and so has each
    stage of a pipeline. Ranks that share a row each have all ids in their part of it.

    Args:
        match: of sampled tokens.
        width: of the site at which the edit acts.
        register: it goes to.

    Returns:
        The instruction.

    Example:
        ```python
        from inspect_lens.spec import SiteWidth, TokenMatch, token_gate

        stops = TokenMatch(token_ids=[13], among="completion")
        gate = token_gate(stops, SiteWidth("resid_post", 4), register=0)
        assert gate.read.tolist() == [14.0, 0.0, 0.0, 0.0]
        ```
    """
    ids = _ids(match)
    row = np.zeros((width.shards, width.width // width.shards), dtype=np.float32)
    row[:, : len(ids)] = np.asarray(ids) + 1
    whole = np.zeros(width.width, dtype=np.float32)
    whole[: row.size] = row.reshape(-1)
    params = (float(match.exclude), 0.0, 0.0, 0.0)
    return Instruction(Kind.TOKEN_GATE, whole, None, params, True, register)


def _ids(match: TokenMatch) -> list[int]:
    return sorted(set(match.token_ids or ()))
