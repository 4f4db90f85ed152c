"""Judging what is asked against the engine that is to do it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.asks._probe import EngineProbe
from inspect_lens.spec.asks._steer import check_scales
from inspect_lens.spec.engine._facts import EngineFacts
from inspect_lens.spec.engine._sites import TapPoint, tap_points
from inspect_lens.spec.request._request import LensRequest

from ._check_edits import check_edits, check_layers, check_writable
from ._check_lens import check_lens
from ._eager import check_eager, check_qk

__all__ = ["check_probe", "check_request"]


def check_request(
    request: LensRequest, facts: EngineFacts, probes: Mapping[str, EngineProbe] | None = None
) -> None:
    """Check a request against the engine that will run it.

    Args:
        request: the parsed request.
        facts: of the engine.
        probes: registered probes by name, with those that the request names.

    Raises:
        SpecError: a layer or a width that the model does not have, or steering that overflows.
        UnsupportedError: a site of a layer without a tap, or more rows than the buffers hold.

    Example:
        ```python
        from inspect_lens import LensRequest
        from inspect_lens.errors import SpecError
        from inspect_lens.spec import EngineFacts, check_request, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes)
        check_request(LensRequest(capture={"layers": [1]}), facts)
        try:
            check_request(LensRequest(capture={"layers": [99]}), facts)
        except SpecError as error:
            print(error)  # what was asked, and what is possible
        ```
    """
    rows = 0
    if facts.no_steering:
        for name, asked in (
            ("steer", request.steer),
            ("edits", request.edits),
            ("hooks", request.hooks),
        ):
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
        if use.alarm is not None and use.threshold is None and probe.threshold is None:
            raise SpecError(
                f"probes: alarm={use.alarm!r} of {use.name!r} without a threshold, which the probe "
                "has none of; give threshold"
            )
        taps.update(probe.taps)
    taps |= _captured(request, facts)
    # Captures and probes share the buffer, and what does not fit would fail its neighbours.
    step_tokens = facts.least_step_tokens or facts.max_step_tokens
    if (rows_needed := facts.rows_of(taps) * step_tokens) > facts.ring_rows:
        enough = rows_needed * facts.ring_row_bytes
        fitting = facts.ring_rows // facts.rows_of(taps)
        smaller = f"max_num_batched_tokens of {fitting} or less, or with " if fitting else ""
        raise UnsupportedError(
            f"capture.layers, lens and probes: {len(taps)} taps times {step_tokens} tokens a step "
            f"need {rows_needed} rows and the capture buffer has {facts.ring_rows}; ask for "
            f"fewer layers, sites or probes, or start the engine with {smaller}"
            "INSPECT_LENS_RING_BYTES" + (f"={enough}" if enough else " raised")
        )
    for i, vector in enumerate(request.steer):
        field = f"steer[{i}]"
        check_writable(vector.site, f"{field}.site")
        check_layers(vector.layer_indices, vector.site, facts, f"{field}.layer_indices")
        shape = vector.activations.shape
        if shape[-1] != facts.hidden:
            raise SpecError(
                f"{field}.activations: width {shape[-1]} in shape {shape}; the residual "
                f"stream of {facts.model} is {facts.hidden} wide"
            )
        rows += math.prod(shape[:-1])
    check_scales(request.steer, facts.dtype)
    if len({vector.norm_match for vector in request.steer}) == 2:
        # Where plain and norm-matched vectors meet at a token, it needs a row of each.
        rows *= 2
    rows += check_edits(request.edits, facts)
    if rows > facts.bank_rows:
        raise UnsupportedError(
            f"{'edits' if request.edits else 'steer'}: {rows} vectors and the steering table has "
            f"{facts.bank_rows} rows; "
            "steer fewer positions or layers, or raise INSPECT_LENS_BANK_BYTES"
        )


def _captured(request: LensRequest, facts: EngineFacts) -> set[TapPoint]:
    """Taps whose rows are captured, or read by a lens; see `check_request`."""
    taps: set[TapPoint] = set()
    if request.capture is not None:
        asked = request.capture.layers
        layers = tuple(range(facts.n_layers)) if asked == "all" else asked
        what = "'all' needs each layer, and layer" if asked == "all" else "layer"
        for site in request.capture.sites:
            check_layers(layers, site, facts, "capture.layers", what)
        taps.update(tap_points(request.capture.sites, layers))
    if request.qk is not None:
        check_qk(request.qk, facts)
        asked_qk = facts.layers if request.qk.layers == "all" else request.qk.layers
        taps.update(tap_points(("q", "k"), asked_qk))
    if request.lens is not None:
        taps.update(check_lens(request.lens, facts))
    return taps


def check_probe(probe: EngineProbe, facts: EngineFacts, field: str = "probe") -> None:
    """Check a probe against the engine that will run it.

    Args:
        probe: the probe.
        facts: of the engine.
        field: path of the field, for error messages.

    Raises:
        SpecError: a layer or a width that the model does not have.
        UnsupportedError: a site of a layer without a tap, or more taps than the buffers hold.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import EngineFacts, EngineProbe, check_probe, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes)
        probe = EngineProbe(layers=(1,), tensors={"weight": np.ones((1, 256))})
        check_probe(probe, facts)  # raises where it does not fit
        ```
    """
    check_writable(probe.site, f"{field}.site")
    check_layers(probe.layers, probe.site, facts, f"{field}.layers")
    if probe.hidden != facts.hidden:
        raise SpecError(
            f"{field}: reads rows of width {probe.hidden}; the residual stream of {facts.model} is "
            f"{facts.hidden} wide"
        )
