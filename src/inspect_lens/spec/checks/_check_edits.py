"""Judging edits, and the layers of anything, against the engine that is to do them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.edits import (
    MOST_INSTRUCTIONS,
    N_LATCHES,
    N_REGISTERS,
    Chosen,
    EditBase,
    Instruction,
    Kind,
    check_token_ids,
    chosen_numbers,
    sampled_match,
    token_gate_key,
)
from inspect_lens.spec.engine._facts import EngineFacts, rows_for
from inspect_lens.spec.engine._sites import (
    SITE_TABLE,
    Site,
    SiteWidth,
    TapPoint,
    tap_order,
    tap_point,
)

__all__ = ["check_edits", "check_layers", "check_writable"]


def check_edits(edits: Sequence[EditBase], facts: EngineFacts) -> int:
    """Check edits against the engine that will run them.

    Args:
        edits: of a request.
        facts: of the engine.

    Returns:
        Rows of the steering table that they need at most.

    Raises:
        SpecError: a layer or a width that the model does not have, or too many edits.
        UnsupportedError: a site of a layer without a tap.

    Example:
        ```python
        from inspect_lens.spec import EngineFacts, Zero, check_edits, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes)
        assert check_edits([Zero(layers=[1])], facts) == 1
        ```
    """
    rows, at_tap = 0, Counter[TapPoint]()
    gates: set[tuple[object, ...]] = set()
    latches = set()
    for i, edit in enumerate(edits):
        field = f"edits[{i}]"
        check_layers(edit.layers, edit.site, facts, f"{field}.layers")
        width = facts.width_of(edit.site)
        chosen = chosen_numbers(edit.choice, width, field)
        _check_width(edit, chosen, facts, field)
        if (match := sampled_match(edit.positions)) is not None:
            check_token_ids(match, width, facts.vocab, field)
            gates.add(token_gate_key(match))
            at_tap.update(tap_point(edit.site, layer) for layer in edit.layers)
            rows += len(edit.layers) * rows_for(width, facts.hidden)
        if edit.when is not None:
            check_writable(edit.when.site, f"{field}.when.site")
            check_layers((edit.when.layer,), edit.when.site, facts, f"{field}.when.layer")
            gate, at = tap_point(edit.when.site, edit.when.layer), min(edit.layers)
            is_late = tap_order(gate) > tap_order(tap_point(edit.site, at))
            if edit.when.is_lasting and facts.is_speculative:
                raise UnsupportedError(
                    f"{field}.when: {edit.when.lasts_by} beside speculative decoding, whose "
                    "rejected drafts would open the gate; use scope='token' without ema and "
                    "closes_below, or an engine without it"
                )
            if is_late and edit.when.scope == "token":
                raise SpecError(
                    f"{field}.when: {edit.when.site} of layer {edit.when.layer} comes after "
                    f"{edit.site} of layer {at}; a gate is read at or before its edit"
                )
            if edit.when.is_lasting:
                latches.add(edit.when.content)
            else:
                gates.add((edit.when.content, edit.positions, edit.phase))
            if edit.when.direction.shape[0] != facts.hidden:
                raise SpecError(
                    f"{field}.when.direction: {edit.when.direction.shape[0]} wide; the residual "
                    f"stream of {facts.model} is {facts.hidden} wide"
                )
            at_tap[gate] += 1
            rows += 1
        for index, layer in enumerate(edit.layers):
            program = edit.program(index, None if edit.n_listed is None else 0, chosen)
            check_shares(program, width, field)
            at_tap[tap_point(edit.site, layer)] += len(program)
            rows += (edit.n_listed or 1) * _rows_of(program, rows_for(width, facts.hidden))
    if len(gates) > N_REGISTERS:
        raise SpecError(f"edits: {len(gates)} different gates; {N_REGISTERS} at most")
    if len(latches) > N_LATCHES:
        raise SpecError(
            f"edits: {len(latches)} different gates of scope='next' or 'rest', or with ema or "
            f"closes_below; {N_LATCHES} at most"
        )
    tap, most = max(at_tap.items(), key=lambda item: item[1], default=(None, 0))
    if tap is not None and most > MOST_INSTRUCTIONS:
        raise SpecError(
            f"edits: {most} instructions at {tap.site} of layer {tap.layer}; "
            f"{MOST_INSTRUCTIONS} at most (a subspace has one for each direction)"
        )
    return rows


def _rows_of(program: Sequence[Instruction], n: int) -> int:
    """Rows of the table for one program: an entry for each instruction, and its directions.

    Args:
        program: of one token at one tap.
        n: rows that a direction takes.
    """
    directions = sum((one.read is not None) + (one.write is not None) for one in program)
    return max(len(program), n * directions)


def _check_width(edit: EditBase, chosen: Chosen | None, facts: EngineFacts, field: str) -> None:
    """Refuse tensors that are not as wide as what they are for."""
    site = edit.site
    wanted = facts.width_of(site).width if chosen is None else len(chosen.numbers)
    if edit.width in (None, wanted):
        return
    what = f"the residual stream of {facts.model} is"
    if chosen is not None:
        ((name, parts),) = edit.choice.items()
        what = f"{len(parts)} {name} at {site} of {facts.model} are together"
    elif not SITE_TABLE[site].is_wide:
        what = f"{site} of {facts.model} is"
    raise SpecError(f"{field}: its tensors are {edit.width} wide; {what} {wanted} wide")


def check_shares(program: Sequence[Instruction], width: SiteWidth, field: str) -> None:
    """Refuse what needs numbers that another tensor-parallel rank has.

    Each rank edits its own part of the row. So a projection has to be read and written within one
    of these parts, and the norm of the row is not known. Rows and vectors that are written, and
    numbers that are blended one by one, may be anywhere.

    Args:
        program: of one token at one tap.
        width: of the site.
        field: path of the edit, for error messages.

    Raises:
        UnsupportedError: the program needs a sum over ranks.
    """
    if width.shards == 1:
        return
    own = width.width // width.shards
    for one in program:
        needs_norm = one.kind in (Kind.NORM, Kind.RENORM)
        is_local = one.kind in (Kind.BLEND, Kind.PART) or one.read is None
        parts = [np.flatnonzero(row) // own for row in (one.read, one.write) if row is not None]
        if needs_norm or not (is_local or len(np.unique(np.concatenate(parts))) < 2):
            what = f"{width.width // width.heads if width.heads else 1} numbers a head"
            where = f"{own} numbers" if not width.heads else f"{own} numbers ({what})"
            raise UnsupportedError(
                f"{field}: {width.site} is split over {width.shards} tensor-parallel ranks, in "
                f"parts of {where}, and this edit reads across them; read and write within one "
                "part, such as one head, or use Add, Replace, Zero or Scale of whole heads"
            )


def check_writable(site: Site, field: str) -> None:
    """Refuse a site for what is as wide as the stream: steering vectors, probes and gates.

    Args:
        site: that was asked for.
        field: path of the field, for error messages.

    Raises:
        UnsupportedError: it is one of these.
    """
    if not SITE_TABLE[site].is_wide:
        others = ", ".join(name for name, info in SITE_TABLE.items() if info.is_wide)
        raise UnsupportedError(
            f"{field}: {site} is not as wide as the residual stream: it can be captured and edited "
            "(Add, Replace and other edits), and not steered by vectors or read by probes and "
            f"gates; that can be {others}"
        )


def check_layers(
    layers: tuple[int, ...], site: Site, facts: EngineFacts, field: str, what: str = "layer"
) -> None:
    """Refuse layers that a model does not have, or that have no tap for a site.

    Args:
        layers: 0-based numbers.
        site: at which they are read or written.
        facts: of the engine.
        field: path of the field, for error messages.
        what: names a layer in the message.

    Raises:
        SpecError: the model has no such layer.
        UnsupportedError: the engine has no tap there.
    """
    for layer in layers:
        if not 0 <= layer < facts.n_layers:
            raise SpecError(
                f"{field}: layer {layer}; {facts.model} has layers 0 to {facts.n_layers - 1}"
            )
        if not facts.has_tap(tap_point(site, layer)):
            raise UnsupportedError(
                f"{field}: {what} {layer} has no tap for {site} in this engine, which serves "
                f"{', '.join(facts.sites)} (INSPECT_LENS_SITES) at layers {list(facts.layers)} "
                f"(INSPECT_LENS_LAYERS); {_how_to_serve(site, layer, facts)}"
            )


def _how_to_serve(site: Site, layer: int, facts: EngineFacts) -> str:
    """What to set at the engine's start, so that a site has a tap at a layer."""
    if site not in facts.sites:
        return f"start it with INSPECT_LENS_SITES={','.join((*facts.sites, site))}"
    layers = sorted({*facts.layers, layer})
    return f"start it with INSPECT_LENS_LAYERS={','.join(map(str, layers))}"
