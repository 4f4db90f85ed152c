"""Judging what is asked against the engine that is to do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from inspect_lens.errors import SpecError, UnsupportedError

from ._capture import QKSpec
from ._edit import EditBase
from ._engine import (
    RESID_POST,
    SITE_TABLE,
    EngineFacts,
    Site,
    SiteWidth,
    TapPoint,
    full_table,
    rows_for,
    tap_order,
    tap_point,
    tap_points,
)
from ._gate import Gate, Rule, placed
from ._hook import Hook, code_python
from ._instruction import (
    MOST_INSTRUCTIONS,
    N_LATCHES,
    N_REGISTERS,
    Chosen,
    Instruction,
    Kind,
    check_token_ids,
    chosen_numbers,
    sampled_match,
    token_gate_key,
)
from ._latents import Splice
from ._lens import LogitLens
from ._probe import EngineProbe
from ._request import LensRequest

__all__ = [
    "check_edits", "check_hooks", "check_layers_of", "check_lens", "check_probe", "check_request",
]  # fmt: skip


def check_edits(edits: Sequence[EditBase], facts: EngineFacts) -> int:
    """Check edits against the engine that will run them."""
    rows, at_tap = 0, Counter[TapPoint]()
    gates: set[tuple[object, ...]] = set()
    latches = set()
    for i, edit in enumerate(edits):
        field = f"edits[{i}]"
        check_layers(edit.layers, edit.site, facts, f"{field}.layers")
        width = facts.width_of(edit.site)
        chosen = chosen_numbers(edit.choice, width, field)
        _check_width(edit, chosen, facts, field)
        edit.check_strength(facts.dtype, field)
        if (match := sampled_match(edit.positions)) is not None:
            check_token_ids(match, width, facts.vocab, field)
            gates.add(token_gate_key(match))
            at_tap.update(tap_point(edit.site, layer) for layer in edit.layers)
            rows += len(edit.layers) * rows_for(width, facts.hidden)
        for at, gate in placed(edit.when, f"{field}.when"):
            read_at = _check_gate(gate, edit, facts, at)
            if gate.is_lasting:
                latches.add((gate.content, gate.conversation))
            else:
                gates.add((gate.content, edit.positions, edit.phase))
            if gate.reads_prompt:
                # The direction, and the sum so far.
                rows += 2
            else:
                at_tap[read_at] += 1
                rows += 1 + gate.is_latent
        joined = [("when", *of) for of in _joined(edit.when)]
        factors = (edit.when, match, edit.schedule)
        if sum(one is not None for one in factors) > 1:
            joined.append(("factors", i))
        gates.update((*one, edit.positions, edit.phase) for one in joined)
        if edit.schedule is not None:
            gates.add((edit.schedule,))
            rows += -(-len(edit.schedule.factors) // facts.hidden)
        n_more = 2 * len(joined) + len(edit.gates) if joined else 0
        n_more += edit.schedule is not None
        rows += n_more * len(edit.layers)
        at_tap.update({tap_point(edit.site, layer): n_more for layer in edit.layers})
        for index, layer in enumerate(edit.layers):
            program = edit.program(index, None if edit.n_listed is None else 0, chosen)
            check_shares(program, width, field)
            at_tap[tap_point(edit.site, layer)] += len(program)
            rows += (edit.n_listed or 1) * _rows_of(program, rows_for(width, facts.hidden))
    if len(gates) > N_REGISTERS:
        raise SpecError(
            f"edits: {len(gates)} different gates, rules and schedules; {N_REGISTERS} at most"
        )
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


def _check_spliced(edits: Sequence[EditBase]) -> None:
    """Refuse a second autoencoder where there is one: a tap runs its kernel before it and after."""
    found: set[TapPoint] = set()
    for i, edit in enumerate(edits):
        if not isinstance(edit, Splice):
            continue
        for layer in edit.layers:
            tap = tap_point(edit.site, layer)
            if tap in found:
                raise SpecError(
                    f"edits[{i}]: a second autoencoder at {edit.site} of layer {layer}; splice one "
                    "in at most, with all changes of latents in one edit"
                )
            found.add(tap)


def _check_gate(gate: Gate, edit: EditBase, facts: EngineFacts, field: str) -> TapPoint:
    """Refuse a gate that the engine cannot read, or not in time; returns where it is read."""
    check_wide(gate.site, f"{field}.site")
    check_layers((gate.layer,), gate.site, facts, f"{field}.layer")
    tap, at = tap_point(gate.site, gate.layer), min(edit.layers)
    if gate.is_lasting and not gate.reads_prompt and facts.is_speculative:
        raise UnsupportedError(
            f"{field}: {gate.lasts_by} beside speculative decoding, whose rejected drafts would "
            "open the gate; use scope='token' without ema and closes_below, a gate that reads the "
            "prompt, or an engine without it"
        )
    is_late = tap_order(tap) > tap_order(tap_point(edit.site, at))
    if is_late and gate.scope == "token":
        raise SpecError(
            f"{field}: {gate.site} of layer {gate.layer} comes after {edit.site} of layer {at}; a "
            "gate is read at or before its edit"
        )
    if gate.direction.shape[0] != facts.hidden:
        raise SpecError(
            f"{field}.direction: {gate.direction.shape[0]} wide; the residual stream of "
            f"{facts.model} is {facts.hidden} wide"
        )
    return tap


def _joined(when: Gate | Rule | None) -> Iterator[tuple[object, ...]]:
    """What needs a register of its own in a rule: each rule, and its alternatives."""
    if isinstance(when, Rule):
        yield "rule", when.content
        if len(when.any) > 1:
            yield "any", when.content
        for part in when.parts:
            yield from _joined(part)


def _rows_of(program: Sequence[Instruction], n: int) -> int:
    """Rows of the table for one program: an entry for each instruction, and its directions."""
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
    """Refuse what needs numbers that another tensor-parallel rank has."""
    # A projection has to be read and written within a rank's part of the row, and the norm of the
    # row is not known. What is only written, or blended one by one, may be anywhere.
    if width.shards == 1:
        return
    own = width.width // width.shards
    for one in program:
        if one.kind == Kind.SPLICE:
            raise UnsupportedError(
                f"{field}: {width.site} is split over {width.shards} tensor-parallel ranks, and an "
                "autoencoder reads whole rows; splice one that reads the stream, or the output of "
                "attention or of the feed-forward module"
            )
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


def check_wide(site: Site, field: str) -> None:
    """Refuse a site for what is as wide as the stream: probes and gates."""
    if not SITE_TABLE[site].is_wide:
        others = ", ".join(name for name, info in SITE_TABLE.items() if info.is_wide)
        raise UnsupportedError(
            f"{field}: {site} is not as wide as the residual stream: it can be captured and "
            f"edited, and not read by probes and gates; that can be {others}"
        )


def check_layers(
    layers: tuple[int, ...], site: Site, facts: EngineFacts, field: str, what: str = "layer"
) -> None:
    """Refuse layers that a model does not have, or that have no tap for a site."""
    for layer in layers:
        _check_layer(layer, facts.n_layers, facts.model, field)
        if not facts.has_tap(tap_point(site, layer)):
            way = f"INSPECT_LENS_LAYERS={','.join(map(str, sorted({*facts.layers, layer})))}"
            if site not in facts.sites:
                way = f"INSPECT_LENS_SITES={','.join((*facts.sites, site))}"
            raise UnsupportedError(
                f"{field}: {what} {layer} is not served at {site} by this engine, which serves "
                f"{', '.join(facts.sites)} (INSPECT_LENS_SITES) at layers {list(facts.layers)} "
                f"(INSPECT_LENS_LAYERS); start it with {way}"
            )


def check_lens(lens: LogitLens, facts: EngineFacts) -> tuple[TapPoint, ...]:
    """Check a logit lens against the engine that will run it."""
    is_all = lens.layers == "all"
    layers = tuple(range(facts.n_layers)) if lens.layers == "all" else lens.layers
    what = "'all' needs each layer, and layer" if is_all else "layer"
    check_layers(layers, RESID_POST, facts, "lens.layers", what)
    if facts.vocab:
        for token in lens.ids:
            if token >= facts.vocab:
                raise SpecError(
                    f"lens.tokens: id {token}; {facts.model} has ids 0 to {facts.vocab - 1}"
                )
        if lens.top_k > facts.vocab:
            raise SpecError(f"lens.top_k: {lens.top_k}; {facts.model} has {facts.vocab} tokens")
    return tap_points((RESID_POST,), layers)


def check_eager(hooks: tuple[Hook, ...], skip_cache: bool | None, facts: EngineFacts) -> None:
    """Judge the part of a request that makes its steps run eagerly."""
    if not hooks:
        return
    check_hooks(hooks, facts, "apply_hooks")
    if facts.is_speculative:
        raise UnsupportedError(
            "apply_hooks beside speculative decoding, whose rejected drafts would be seen as "
            "tokens; use an engine without speculative decoding"
        )
    if skip_cache is False:
        raise SpecError(
            "skip_reading_prefix_cache=false beside apply_hooks: cached tokens are not computed, "
            "so nothing could be seen of them; leave it out"
        )


def check_qk(qk: QKSpec, facts: EngineFacts) -> None:
    """Check a capture of queries and keys against the engine that will run it."""
    if facts.has_latent_attention:
        raise UnsupportedError(
            f"output_qk: {facts.model} has multi-head latent attention (MLA), which keeps no keys "
            "per head; capture the residual stream instead"
        )
    if not {"q", "k"} <= set(facts.sites):
        raise UnsupportedError(
            f"output_qk: this engine has no taps for q and k; it serves {', '.join(facts.sites)}. "
            "Start it with INSPECT_LENS_SITES=q,k and what else you need"
        )
    if qk.heads is not None:
        _check_served(qk.layers_of(()), facts, "qk.heads")
        check_heads(sorted({head for _, head in qk.heads}), "q", facts, "qk.heads")
    elif qk.layers != "all":
        _check_served(qk.layers, facts, "output_qk")


def check_heads(heads: Sequence[int], site: Site, facts: EngineFacts, field: str) -> None:
    """Refuse heads that a model does not have at a site."""
    chosen_numbers({"heads": tuple(heads)}, facts.width_of(site), field.removesuffix(".heads"))


def check_hooks(hooks: tuple[Hook, ...], facts: EngineFacts, field: str) -> None:
    """Check hooks against the engine that will run them."""
    if hooks and not facts.allows_code:
        raise UnsupportedError(
            f"{field}: hooks are functions of the client that run inside the server, and this "
            "engine was started without leave for it; start it with INSPECT_LENS_ALLOW_CODE=1, "
            "which lets everybody who can send it requests run any code there"
        )
    for i, hook in enumerate(hooks):
        _check_served(hook.layer_indices, facts, f"{field}[{i}].layer_indices")
        made = hook.fn.python
        if made is not None and made != code_python():
            raise UnsupportedError(
                f"{field}[{i}]: was made by Python {made}, and this engine runs {code_python()}, "
                "which cannot read its functions"
            )


def _check_served(layers: tuple[int, ...], facts: EngineFacts, field: str) -> None:
    """Refuse layers that a model does not have, or that are not served."""
    for layer in layers:
        _check_layer(layer, facts.n_layers, facts.model, field)
        if layer not in facts.layers:
            raise UnsupportedError(
                f"{field}: layer {layer} is not served by this engine, which serves "
                f"{list(facts.layers)} (INSPECT_LENS_LAYERS)"
            )


def _check_layer(layer: int, n_layers: int, model: str, field: str) -> None:
    if not 0 <= layer < n_layers:
        raise SpecError(f"{field}: layer {layer}; {model} has layers 0 to {n_layers - 1}")


def check_layers_of(request: LensRequest, n_layers: int, model: str) -> None:
    """Refuse layers that a model does not have, where no engine is there to ask yet."""
    named = [(f"edits[{i}].layers", edit.layers) for i, edit in enumerate(request.edits)]
    named += [
        (f"apply_hooks[{i}].layer_indices", hook.layer_indices)
        for i, hook in enumerate(request.hooks)
    ]
    if request.qk is not None:
        named.append(("output_qk", request.qk.layers_of(())))
    for field, one in (("capture.layers", request.capture), ("lens.layers", request.lens)):
        if one is not None and one.layers != "all":
            named.append((field, one.layers))
    for field, layers in named:
        for layer in layers:
            _check_layer(layer, n_layers, model, field)


def check_request(
    request: LensRequest, facts: EngineFacts, probes: Mapping[str, EngineProbe] | None = None
) -> None:
    """Check a request against the engine that will run it."""
    if facts.no_steering:
        for name, asked in (("edits", request.edits), ("hooks", request.hooks)):
            if asked:
                raise UnsupportedError(f"{name}: {facts.no_steering}")
    check_eager(request.hooks, request.skip_reading_prefix_cache, facts)
    if facts.is_speculative and any(use.alarm == "stop" for use in request.probes):
        raise UnsupportedError(
            "probes: alarm='stop' beside speculative decoding, whose drafts have scores before "
            "they are accepted; use alarm='flag', or an engine without speculative decoding"
        )
    taps: set[TapPoint] = set()
    for use in request.probes:
        probe = (probes or {})[use.name]
        check_probe(probe, facts, f"probe {use.name!r}")
        if use.alarm is not None:
            probe.alarm_threshold(use)
        taps.update(probe.taps)
    taps |= _captured(request, facts)
    taps |= {
        tap_point(gate.site, gate.layer)
        for edit in request.edits
        for gate in edit.gates
        if gate.reads_prompt
    }
    # Captures and probes share the buffer, and what does not fit would fail its neighbours.
    step_tokens = facts.least_step_tokens or facts.max_step_tokens
    if (rows_needed := facts.rows_of(taps) * step_tokens) > facts.ring_rows:
        enough = rows_needed * facts.ring_row_bytes
        fitting = facts.ring_rows // facts.rows_of(taps)
        smaller = f"max_num_batched_tokens of {fitting} or less, or with " if fitting else ""
        raise UnsupportedError(
            f"capture.layers, lens, probes and gates of the prompt: {len(taps)} taps times "
            f"{step_tokens} tokens a step need {rows_needed} rows and the capture buffer has "
            f"{facts.ring_rows}; ask for "
            f"fewer layers, sites or probes, or start the engine with {smaller}"
            "INSPECT_LENS_RING_BYTES" + (f"={enough}" if enough else " raised")
        )
    rows = check_edits(request.edits, facts)
    _check_spliced(request.edits)
    if rows > facts.bank_rows:
        raise UnsupportedError(f"edits: {full_table(rows, facts.bank_rows)}")


def _captured(request: LensRequest, facts: EngineFacts) -> set[TapPoint]:
    """Taps whose rows are captured, or read by a lens; see `check_request`."""
    taps: set[TapPoint] = set()
    if request.capture is not None:
        asked = request.capture.layers
        layers = tuple(range(facts.n_layers)) if asked == "all" else asked
        what = "'all' needs each layer, and layer" if asked == "all" else "layer"
        for site in request.capture.sites:
            check_layers(layers, site, facts, "capture.layers", what)
            if request.capture.heads is not None:
                check_heads(request.capture.heads, site, facts, "capture.heads")
        if request.capture.heads is not None:
            widths = [facts.width_of(site) for site in request.capture.sites]
            if len({width.width // width.heads for width in widths}) > 1:
                raise UnsupportedError(
                    f"capture.heads: heads at {', '.join(request.capture.sites)} of {facts.model} "
                    "are not equally wide; capture them one site at a time"
                )
        taps.update(tap_points(request.capture.sites, layers))
    if request.qk is not None:
        check_qk(request.qk, facts)
        taps.update(tap_points(("q", "k"), request.qk.layers_of(facts.layers)))
    if request.lens is not None:
        taps.update(check_lens(request.lens, facts))
    return taps


def check_probe(probe: EngineProbe, facts: EngineFacts, field: str = "probe") -> None:
    """Check a probe against the engine that will run it."""
    check_wide(probe.site, f"{field}.site")
    check_layers(probe.layers, probe.site, facts, f"{field}.layers")
    if probe.hidden != facts.hidden:
        raise SpecError(
            f"{field}: reads rows of width {probe.hidden}; the residual stream of {facts.model} is "
            f"{facts.hidden} wide"
        )
