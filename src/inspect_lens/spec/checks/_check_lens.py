"""Judging what is asked of a logit lens."""

from __future__ import annotations

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.asks._lens import LogitLens
from inspect_lens.spec.engine._facts import EngineFacts
from inspect_lens.spec.engine._sites import RESID_POST, TapPoint, tap_points

from ._check_edits import check_layers

__all__ = ["check_lens"]


def check_lens(lens: LogitLens, facts: EngineFacts) -> tuple[TapPoint, ...]:
    """Check a logit lens against the engine that will run it.

    Args:
        lens: what was asked for.
        facts: of the engine.

    Returns:
        The taps that it reads.

    Raises:
        SpecError: a layer or a token that the model does not have.
        UnsupportedError: a layer without a tap, or an engine that cannot apply its unembedding to
            other rows.

    Example:
        ```python
        from inspect_lens.spec import EngineFacts, LogitLens, check_lens, tap_points

        places = {"layers": (0, 1), "sites": ("resid_post",)}
        taps = tap_points(["resid_post"], (0, 1))
        sizes = {"hidden": 256, "max_step_tokens": 64, "ring_rows": 128, "bank_rows": 8}
        engine = {"model": "m", "n_layers": 2, "dtype": "float32", "vllm_version": "0"}
        facts = EngineFacts(**engine, **places, taps=taps, **sizes, vocab=1000)
        assert check_lens(LogitLens(layers=[1], tokens=[999]), facts) == (taps[1],)
        ```
    """
    if facts.no_lens:
        raise UnsupportedError(f"lens: {facts.no_lens}")
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
