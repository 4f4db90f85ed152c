"""`lens_scope`: what every call below asks of the lens, however deep it is made.

Inspect merges configs by replacing `extra_body` as a whole, so a config that a solver sets is lost
as soon as an agent inside it passes one of its own. A scope is read by the provider, behind all
merging, and before the cache is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from inspect_ai.model import GenerateConfig, Model, get_model

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.model._host import active_model
from inspect_lens.model.request._body import parse_capture, read_body
from inspect_lens.model.request._config import lens_config
from inspect_lens.model.request._inherited import SCOPES, Scope, steering_around
from inspect_lens.model.scores._engine_probes import ProbeLike, ask_probes, including
from inspect_lens.spec import (
    Add,
    CaptureSpec,
    EditBase,
    LensRequest,
    LogitLens,
    ProbeUse,
)
from inspect_lens.vector import VectorLike

__all__ = ["lens_scope", "require_lens", "served_path"]


@contextmanager
def lens_scope(
    *,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = None,
    steer: Add | VectorLike | Mapping[str, Any] | Sequence[Any] | None = None,
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]] | None = None,
    probes: Sequence[ProbeUse | ProbeLike] | ProbeLike = (),
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
    model: Model | None = None,
) -> Iterator[None]:
    """Apply capture and steering to every call of a model inside the `with`.

    It reaches `generate()`, agents, tools and anything else that calls the model in this task or
    in tasks started inside, whatever config they pass. A call that says something itself keeps
    its own: its capture, its vectors, or `apply_steering_vectors: []` for none. Scopes nest:
    vectors add up, the inner capture counts. What the config of the task or of the model says is
    no call's own: the scope's vectors add to it, and its capture, lens and probes go before it.

    Args:
        capture: as for `lens_config`.
        steer: as for `lens_config`.
        edits: as for `lens_config`; those of nested scopes act in order, the outer ones first.
        probes: probes that the engine runs, as for `with_lens`; or uses of names that somebody
            registered. Names that a call uses itself are its own.
        lens: as for `lens_config`; a call that asks for a lens itself keeps its own.
        model: whose calls; the model under evaluation by default. A grader is not touched.

    Yields:
        Nothing.

    Raises:
        UnsupportedError: the model's provider has no lens, so that calls would go out plain.
        SpecError: a value is wrong, or vectors are given and the config of the task or of the
            model declines all vectors.
        ArtifactError: a named vector or probe cannot be found.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import activations, lens_scope


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint")
            with lens_scope(capture=[4], steer="organism/truth", model=model):
                output = await model.generate("Who is the founder of the town Velosh?")
            assert activations(output).layers == (4,)


        anyio.run(main)
        ```
    """
    target = require_lens("lens_scope", model)
    request = LensRequest()
    if steer is not None or edits is not None or lens is not None:
        spec = lens_config(steer=steer, edits=edits, lens=lens, base=GenerateConfig())
        request = read_body(spec.extra_body).request or request
    listed: list[Any] = list(probes) if isinstance(probes, list | tuple) else [probes]
    uses = tuple(use for use in listed if isinstance(use, ProbeUse))
    asked = ask_probes([p for p in listed if not isinstance(p, ProbeUse)] or None)
    spec_capture = parse_capture(capture)
    if asked.capture is not None:
        spec_capture = including(spec_capture, asked.capture)
    request = request.model_copy(update={"capture": spec_capture, "probes": (*uses, *asked.uses)})
    if request.edits and (around := steering_around(target)) is not None and around.declined:
        raise SpecError(
            "lens_scope: the config of the task or of the model says apply_steering_vectors: [], "
            "which declines these edits for every call that carries it; take that out of it, or "
            "say it in the calls that are not to be steered"
        )
    token = SCOPES.set((*SCOPES.get(), Scope(target, request)))
    try:
        yield
    finally:
        SCOPES.reset(token)


async def served_path(name: str, model: Model | None = None) -> str | None:
    """What the server of a model says that it serves under its name; None where nobody says."""
    found = model or active_model()
    ask = getattr(found.api, "served_path", None) if found is not None else None
    if found is None or ask is None or found.name != name:
        return None
    path: str | None = await ask()
    return path


def require_lens(asker: str, model: Model | None = None) -> Model:
    """The model, where it can do what a lens request asks for."""
    # Imported here: reading what was captured does without the provider.
    from ._provider import LensAPI

    target = model or get_model()
    if not isinstance(target.api, LensAPI):
        raise UnsupportedError(
            f"{asker}: {target} has no lens and would answer without steering or capture; allowed "
            "are vllm-lens/ and lens/ models; pass --model vllm-lens/…"
        )
    return target
