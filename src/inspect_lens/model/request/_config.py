"""`lens_config`: a GenerateConfig that adds to `extra_body` instead of replacing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from inspect_ai.model import GenerateConfig
from pydantic import ValidationError

from inspect_lens._settings import text, variable
from inspect_lens.errors import LensError, SpecError
from inspect_lens.model._host import active_generate_config
from inspect_lens.spec import (
    LENS_KEYS,
    NATIVE_KEY,
    Add,
    CaptureSpec,
    EditBase,
    Hook,
    LensRequest,
    LogitLens,
    SinkUse,
    parse_edits,
    parse_extra_args,
    parse_hooks,
    to_extra_args,
)
from inspect_lens.vector import Vector, VectorLike, steering_vector

from ._body import parse_capture, read_body, resolve_references

__all__ = ["edits_of_every_call", "lens_config"]


def lens_config(
    *,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = None,
    steer: Add | VectorLike | Mapping[str, Any] | Sequence[Any] | None = None,
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]] | None = None,
    hooks: Sequence[Hook | Mapping[str, Any]] | None = None,
    qk: Sequence[int] | bool | None = None,
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
    sink: SinkUse | Mapping[str, Any] | str | None = None,
    lora: str | Mapping[str, Any] | None = None,
    base: GenerateConfig | None = None,
    **generate: Any,
) -> GenerateConfig:
    """Build the config of a call that uses the lens.

    Inspect merges configs by replacing `extra_body` as a whole, so a scorer that asks for
    activations would drop the task's `chat_template_kwargs` and see another prompt than the
    one that was answered. This merges key by key.

    Args:
        capture: `all`, layers, or a `CaptureSpec`; None keeps what `base` asks for.
        steer: vectors, which with `edits` replace all edits of `base`; an empty list removes them.
            Each is a `SteeringVector`; a `Vector`, its name below `vectors/`, a path or an
            `hf://` address, which steers with scale 1 at the layer of its card; or a mapping
            `{"vector": name, "layer": 4, "scale": 0.5, "norm_match": false, "positions": null}`.
        edits: other edits of the stream, such as `Ablate(direction=v, layers=[4])`, in order and
            behind the vectors. In JSON a `direction` may be the name of a vector: its direction at
            the layer of its card, at the card's layers and site unless the edit says others.
        hooks: functions to run inside the server, which has to allow it, instead of those of
            `base`; an empty list removes them. What they save comes as
            `output.metadata["hook_results"]` and goes into the log, so it has to be small.
        qk: layers whose queries and keys to return, True for all; False removes what `base` asks.
        lens: layers to read as predictions of the next token, `all`, or a `LogitLens`; None keeps
            what `base` asks for.
        sink: name of a store or a function of the server that gets the rows too, or a `SinkUse`
            with the sample's label; the receipt says what became of them. None keeps what `base`
            asks for.
        lora: adapter of this call: a path, a Hugging Face repository, the name of one that the
            server has loaded, or vLLM's `lora_request` fields.
        base: config to build on, all of it. None means only the `extra_body` of the task that
            is running, which Inspect would otherwise lose.
        **generate: other fields of GenerateConfig; `extra_body` is merged too.

    Returns:
        A new config.

    Raises:
        SpecError: a value is wrong.
        ArtifactError: a named vector cannot be found.

    Example:
        ```python
        from inspect_lens.model import lens_config

        config = lens_config(
            capture=[4], steer={"vector": "organism/truth", "scale": 0.8}, temperature=0.0
        )
        assert config.temperature == 0.0
        assert set(config.extra_body) == {"extra_args"}
        # output = await model.generate(messages, config=config)
        ```
    """
    start = GenerateConfig() if base is None else base
    inherited = (active_generate_config() if base is None else base).extra_body
    merged = _merge(inherited or {}, generate.pop("extra_body", None) or {})
    body, request = read_body(merged)
    changes: dict[str, Any] = {}
    if capture is not None:
        changes["capture"] = parse_capture(capture)
    if steer is not None or edits is not None:
        others = () if edits is None else parse_edits(resolve_references(edits))
        changes["edits"] = (*_vectors(() if steer is None else steer), *others)
    if hooks is not None:
        changes["hooks"] = parse_hooks(list(hooks))
    if qk is not None:
        asked = parse_extra_args({"output_qk": qk if isinstance(qk, bool) else list(qk)})
        changes["qk"] = asked.qk if asked is not None else None
    if lens is not None:
        asked = parse_extra_args({NATIVE_KEY: {"lens": lens}})
        changes["lens"] = asked.lens if asked is not None else None
    if sink is not None:
        to = sink.model_dump() if isinstance(sink, SinkUse) else sink
        asked = parse_extra_args({NATIVE_KEY: {"sink": to}})
        changes["sink"] = asked.sink if asked is not None else None
    if changes:
        request = (request or LensRequest()).model_copy(update=changes)
        kept = {k: v for k, v in body.get("extra_args", {}).items() if k not in LENS_KEYS}
        args = kept | to_extra_args(request)
        body = {key: value for key, value in body.items() if key != "extra_args"}
        if args:
            body["extra_args"] = args
    if lora is not None:
        body["lora_request"] = _lora(lora)
    config = start.merge(GenerateConfig(**generate))
    config.extra_body = body or None
    return config


def edits_of_every_call(edits: Any = None, steer: Any = None) -> LensRequest | None:
    """What `-M edits=` and `-M steer=` do to each call; INSPECT_LENS_EDITS without them."""
    field = "edits"
    try:
        if edits is None and steer is None:
            if not (wanted := text("edits")):
                return None
            field, edits = variable("edits"), wanted
        if isinstance(edits, str):
            edits = _written(edits)
        config = lens_config(steer=steer, edits=edits, base=GenerateConfig())
    except (LensError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SpecError(f"{field if steer is None else 'steer'}: {why}") from None
    return read_body(config.extra_body).request


def _written(edits: str) -> Any:
    """Edits as text, or in a file."""
    try:
        inline = edits.lstrip()[:1] in ("[", "{")
        read = yaml.safe_load(edits if inline else Path(edits).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SpecError(
            f"{edits[:200]!r} cannot be read ({error}); allowed are edits as JSON, such as "
            '[{"op": "ablate", "direction": "organism/truth"}] or [{"vector": "organism/truth", '
            '"scale": 0.8}], and the path of a JSON or YAML file that has them'
        ) from None
    if not isinstance(read, list | dict) or not read:
        raise SpecError(f"{edits[:200]!r} has no edits; allowed are one object, or a list of them")
    return read


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _vectors(steer: Any) -> tuple[EditBase, ...]:
    single = isinstance(steer, Add | Vector | Mapping | str | Path)
    vectors = [steer] if single else list(steer)
    if not vectors:
        return ()
    resolved = [
        steering_vector(v) if isinstance(v, Vector | str | Path) else resolve_references(v)
        for v in vectors
    ]
    request = parse_extra_args({"apply_steering_vectors": resolved})
    return request.edits if request else ()


def _lora(lora: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(lora, Mapping):
        if not lora.get("lora_name"):
            raise SpecError(
                f"lora={dict(lora)!r}; lora_name is needed, lora_path and lora_int_id may follow"
            )
        return dict(lora)
    request: dict[str, Any] = {"lora_name": lora, "lora_int_id": 1}
    # A bare name is an adapter that the server has already; anything else has to be loaded.
    if "/" in lora or Path(lora).exists():
        request["lora_path"] = lora
    return request
