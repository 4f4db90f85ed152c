"""Judging edits, and the layers of anything, against the engine that is to do them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.edits import MOST_INSTRUCTIONS, N_REGISTERS, EditBase, Instruction
from inspect_lens.spec.engine._facts import EngineFacts
from inspect_lens.spec.engine._sites import SITE_TABLE, Site, TapPoint, tap_order, tap_point

__all__ = ["check_edits", "check_layers", "check_writable"]


def check_edits(edits: Sequence[EditBase], facts: EngineFacts) -> int:
    """Judge edits against the engine that is to carry them out.

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
    gates = set()
    for i, edit in enumerate(edits):
        field = f"edits[{i}]"
        check_writable(edit.site, f"{field}.site")
        check_layers(edit.layers, edit.site, facts, f"{field}.layers")
        if edit.width not in (None, facts.hidden):
            raise SpecError(
                f"{field}: its tensors are {edit.width} wide; the residual stream of "
                f"{facts.model} is {facts.hidden} wide"
            )
        if edit.when is not None:
            check_writable(edit.when.site, f"{field}.when.site")
            check_layers((edit.when.layer,), edit.when.site, facts, f"{field}.when.layer")
            gate, at = tap_point(edit.when.site, edit.when.layer), min(edit.layers)
            if tap_order(gate) > tap_order(tap_point(edit.site, at)):
                raise SpecError(
                    f"{field}.when: {edit.when.site} of layer {edit.when.layer} comes after "
                    f"{edit.site} of layer {at}; a gate is read at or before its edit"
                )
            gates.add((edit.when.content, edit.positions, edit.phase))
            at_tap[gate] += 1
            rows += 1
        for index, layer in enumerate(edit.layers):
            program = edit.program(index, None if edit.n_listed is None else 0)
            at_tap[tap_point(edit.site, layer)] += len(program)
            rows += (edit.n_listed or 1) * _rows_of(program)
    if len(gates) > N_REGISTERS:
        raise SpecError(f"edits: {len(gates)} different gates; {N_REGISTERS} at most")
    tap, most = max(at_tap.items(), key=lambda item: item[1], default=(None, 0))
    if tap is not None and most > MOST_INSTRUCTIONS:
        raise SpecError(
            f"edits: {most} instructions at {tap.site} of layer {tap.layer}; "
            f"{MOST_INSTRUCTIONS} at most (a subspace has one for each direction)"
        )
    return rows


def _rows_of(program: Sequence[Instruction]) -> int:
    """Rows of the table for one program: an entry for each instruction, and its directions."""
    directions = sum((one.read is not None) + (one.write is not None) for one in program)
    return max(len(program), directions)


def check_writable(site: Site, field: str) -> None:
    """Refuse a site that is captured and not written, nor read by what is as wide as the stream.

    Args:
        site: that was asked for.
        field: path of the field, for error messages.

    Raises:
        UnsupportedError: it is one of these.
    """
    if not SITE_TABLE[site].is_writable:
        others = ", ".join(name for name, info in SITE_TABLE.items() if info.is_writable)
        raise UnsupportedError(
            f"{field}: {site} can be captured, and not steered, edited or read by probes and "
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
                "(INSPECT_LENS_LAYERS)"
            )
