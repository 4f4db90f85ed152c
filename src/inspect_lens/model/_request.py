"""What a call asks of the lens: `extra_body` as users write it, read once, spelled in one way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from inspect_ai.model import GenerateConfig
from pydantic import ValidationError

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.untrusted import parse_yaml
from inspect_lens._intake import Payload, encode_file, join, read_vector, stamp_of, write_file
from inspect_lens._settings import text, variable
from inspect_lens.errors import ArtifactError, LensError, SpecError, did_you_mean
from inspect_lens.lens import Lens, load_lens
from inspect_lens.sae import SparseAutoencoder, read_autoencoder
from inspect_lens.spec import (
    CAPTURE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    STEER_KEY,
    TENSOR_REFERENCE,
    WEIGHTS,
    Add,
    Cache,
    CaptureSpec,
    EditBase,
    Hook,
    LensRequest,
    LogitLens,
    ProbeUse,
    SinkUse,
    TensorData,
    check_name,
    explain,
    parse_edits,
    parse_extra_args,
    parse_hooks,
    read_as,
    several,
    shown,
    split_body,
    split_options,
    to_extra_args,
)
from inspect_lens.vector import Vector, VectorLike, load_vector, steering_vector

from ._host import (
    PrerequisiteError,
    RegistryType,
    active_generate_config,
    registry_add,
    registry_has,
    registry_info,
    registry_lookup,
)
from ._places import Place, find
from ._scores import ProbeLike, ask_probes

__all__ = ["lens_config"]

_live: WeakValueDictionary[str, TensorData] = WeakValueDictionary()
# For each log anew: its folder may have been emptied since the last one.
_saved: set[tuple[Place, str]] = set()


def unwritten(request: LensRequest, place: Place | None) -> list[TensorData]:
    """The tensors that the log will refer to, and that are in no file yet."""
    tensors = [tensor for edit in request.edits for tensor in edit.all_tensors]
    _live.update((tensor.sha256, tensor) for tensor in tensors)
    return [t for t in tensors if place is not None and (place, t.sha256) not in _saved]


def save_vectors(request: LensRequest, place: Place | None) -> None:
    """Write these tensors."""
    for tensor in unwritten(request, place):
        assert place is not None
        payload = Payload(tensors={"activations": tensor}, layers={})
        uri = f"lens-vectors/{tensor.sha256[:16]}.safetensors"
        write_file(join(place.root, uri), encode_file(payload))
        _saved.add((place, tensor.sha256))


def _tensor(reference: Mapping[str, Any]) -> TensorData:
    try:
        digest, uri = str(reference["sha256"]), str(reference["uri"])
    except KeyError as error:
        raise ArtifactError(f"steering reference without {error}; it came from a log?") from None
    tensor = _live.get(digest)
    if tensor is None:
        where, data = find(uri, None)
        tensor = read_vector(data, where=where)
        if tensor.sha256 != digest:
            raise ArtifactError(
                f"{where}: holds another vector (sha256 {tensor.sha256[:12]}…, the log refers to "
                f"{digest[:12]}…); restore the file that was written with this log"
            )
    return tensor


def resolve_references(value: Any) -> Any:
    """Replace every reference to a tensor inside lists and mappings."""
    if isinstance(value, Mapping) and value.get("$lens") == TENSOR_REFERENCE:
        return _tensor(value)
    if isinstance(value, Mapping):
        return {key: resolve_references(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(item) for item in value]
    return value


def resolve_edits(value: Any) -> Any:
    """Replace references in edits, and names: of vectors that are added, of directions."""
    if isinstance(value, list | tuple):
        return [resolve_edits(item) for item in value]
    if not isinstance(value, Mapping) or value.get("$lens") == TENSOR_REFERENCE:
        return resolve_references(value)
    if "vector" in value and "op" not in value:
        return steering_vector(resolve_references(value))
    found = {key: resolve_edits(item) for key, item in value.items()}
    if found.get("op") == "splice":
        return spliced(found)
    for key in ("direction", "vector"):
        if isinstance(found.get(key), str):
            named = load_vector(found[key])
            of_card = {"layers": list(named.layers), "site": named.site} if "op" in found else {}
            found = of_card | found | {key: named.raw(named.default_layer())}
    return found


def spliced(edit: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON form of a `Splice` with the name of its autoencoder's content, if it has a file."""
    given = edit.get("sae")
    if isinstance(given, str) and not _FILE.search(given):
        return edit  # that somebody has registered
    if isinstance(given, str | Path):
        given = _autoencoder(str(given), _files_of(Path(given).expanduser()))
    if not isinstance(given, SparseAutoencoder):
        return edit
    of_file: dict[str, Any] = {}
    if given.place is not None:
        of_file = {"layers": [given.place[0]], "site": given.place[1]}
    return of_file | dict(edit) | {"sae": given.content_name}


_FILE = re.compile(r"/|\.(npz|safetensors)$")
"""In paths of autoencoders; a name that looks so is read as one."""


def _files_of(path: Path) -> tuple[str | None, ...]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(stamp_of(str(file)) for file in files)


@lru_cache(maxsize=4)
def _autoencoder(path: str, stamps: tuple[str | None, ...]) -> SparseAutoencoder:
    return read_autoencoder(path)


LENSES: Cache[str, Lens] = Cache(1 << 20, WEIGHTS)
"""By the name made of the content, under which a server is told of them."""


class Settled(dict[str, Any]):
    """An `extra_body` that the scopes around its call are in already.

    Inspect hands the config of a call to the hooks and then, as often as it is tried, to the
    provider; vectors must not be added twice. A copy is another call's, and a plain dict.
    """

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)


class Body(NamedTuple):
    """An `extra_body` and the request in it."""

    extra_body: dict[str, Any]
    """The same content; lens keys typed and spelled in one way, so equal requests have equal
    cache keys, and no tensor is there that Inspect would hash by its `repr`."""
    request: LensRequest | None


def read_body(
    extra_body: Mapping[str, Any] | None,
    default: LensRequest | None = None,
    scope: LensRequest | None = None,
    inherited: Sequence[LensRequest] = (),
) -> Body:
    """Read the lens request of a call; reading what this returned changes nothing.

    A call that says nothing itself shares the request of its scope or its model, which is judged.
    """
    settled = isinstance(extra_body, Settled)
    body, given = split_body(extra_body)
    args = {key: _loads(key, value) for key, value in given.items()}
    for key, value in args.items():
        native = key == NATIVE_KEY and isinstance(value, Mapping) and "edits" in value
        named = {**value, "edits": resolve_edits(value["edits"])} if native else value
        args[key] = resolve_edits(value) if key == STEER_KEY else resolve_references(named)
    # Refusals are for this side of the wire only; beside a native request they would not parse.
    declined = args.get(CAPTURE_KEY) is False and args.pop(CAPTURE_KEY) is False
    plain = args.get(STEER_KEY) == [] and args.pop(STEER_KEY) == []
    request = parse_extra_args(args)
    if request is not None and request.stream_results:
        raise SpecError(f"stream_results: {NOT_STREAMED}")
    if scope is not None and not settled:
        request = _under(request, scope, inherited, plain=plain)
    made, wanted, changes = request or _NOTHING, default or _NOTHING, dict[str, Any]()
    if wanted.capture is not None and not declined and made.capture is None:
        changes["capture"] = wanted.capture
    named = {use.name for use in made.probes}
    if more := tuple(use for use in wanted.probes if use.name not in named):
        changes["probes"] = (*made.probes, *more)
    if changes:
        request = default if request is None and not declined else made.with_fields(**changes)
    typed = {key: value for key, value in args.items() if key not in LENS_KEYS}
    typed |= to_extra_args(request)
    if declined:
        typed[CAPTURE_KEY] = False
    if plain and not (request is not None and request.edits):
        typed[STEER_KEY] = []
    if typed:
        body["extra_args"] = typed
    return Body(body, request)


def respelled(body: Mapping[str, Any], request: LensRequest) -> dict[str, Any]:
    """A body that `read_body` made, with another request in the place of its own."""
    made = dict(body)
    given = made.pop("extra_args", {})
    args = {k: v for k, v in given.items() if k not in LENS_KEYS} | to_extra_args(request)
    # What a call declines it goes on to decline, unless it asks for it now.
    if given.get(CAPTURE_KEY) is False and request.capture is None:
        args[CAPTURE_KEY] = False
    if given.get(STEER_KEY) == [] and not request.edits:
        args[STEER_KEY] = []
    return made | ({"extra_args": args} if args else {})


_NOTHING = LensRequest()
NOT_STREAMED = (
    "Inspect reads a call as a whole, so nothing would see its rows earlier; "
    "leave it out, or read the stream with inspect_lens.client.LensClient.stream"
)


def _under(
    request: LensRequest | None,
    scope: LensRequest,
    inherited: Sequence[LensRequest],
    *,
    plain: bool,
) -> LensRequest | None:
    """A request with what a scope adds to it."""
    if request is None and not plain:
        return scope if scope.asked else None
    made = request or _NOTHING
    changes: dict[str, Any] = {}
    # What the config of the task or of the model asks is no call's own.
    for name in ("capture", "lens"):
        asked, ours = getattr(made, name), getattr(scope, name)
        if ours is not None and asked in (None, *(getattr(config, name) for config in inherited)):
            changes[name] = ours
    edits = bool(made.edits or made.edits_named)
    if scope.edits and not plain and (not edits or _edits(made) in map(_edits, inherited)):
        changes["edits"] = (*made.edits, *scope.edits)
    if scope.edits_meet != made.edits_meet:
        changes["edits_meet"] = "error"
    theirs = [use for config in inherited for use in config.probes]
    names = {use.name for use in scope.probes}
    kept = [use for use in made.probes if use.name not in names or use not in theirs]
    own = {use.name for use in kept}
    if more := tuple(use for use in scope.probes if use.name not in own):
        changes["probes"] = (*kept, *more)
    return made.with_fields(**changes) if changes else request


def _edits(request: LensRequest) -> object:
    """Edits of a request, to be compared: tensors by their hash."""
    return [edit.reference() for edit in request.edits], request.edits_named


def declines_steering(extra_body: Mapping[str, Any] | None) -> bool:
    """Whether a body says `apply_steering_vectors: []`, and so no to the vectors of scopes."""
    return bool(_loads(STEER_KEY, _lens_args(extra_body).get(STEER_KEY)) == [])


def is_lens_call(extra_body: Mapping[str, Any] | None) -> bool:
    """Whether a body, raw or normalised, asks the lens for something."""
    args = _lens_args(extra_body)
    return any(args.get(key) not in (None, False, []) for key in LENS_KEYS)


def _lens_args(extra_body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What is asked of the lens, unread; nothing where it is wrong, which `read_body` says."""
    try:
        return split_body(extra_body).args
    except SpecError:
        return {}


def parse_capture(value: Any, *, field: str = "capture") -> CaptureSpec | None:
    """Read a capture as Python, JSON or the command line spells it."""
    if isinstance(value, str):
        given = value.strip()
        if given in ("", "none"):
            return None
        try:
            wanted = given if given[0] in "[{" else f"[{given}]"
            value = "all" if given == "all" else json.loads(wanted)
        except ValueError:
            raise SpecError(f"{field}={given!r}; {_ALLOWED}") from None
    if value is None or isinstance(value, CaptureSpec):
        return value
    if isinstance(value, list | tuple):
        # `-M capture=3,5` reaches us as ["3", "5"].
        value = [int(v) if isinstance(v, str) and v.strip().isdigit() else v for v in value]
    if isinstance(value, Mapping):
        return read_as(CaptureSpec, value, at=field)
    try:
        return read_as(CaptureSpec, {"layers": value}, at="capture")
    except SpecError as error:
        raise SpecError(f"{field}={value!r}: {error}; {_ALLOWED}") from None


def environment_capture() -> CaptureSpec | None:
    """What INSPECT_LENS_CAPTURE asks every call to capture."""
    return parse_capture(text("capture"), field=variable("capture"))


_ALLOWED = (
    'allowed are all, layers such as 3,5 or [3, 5], and an object such as {"layers": [3], '
    '"positions": "completion"}'
)


def _loads(key: str, value: Any) -> Any:
    """Text under a lens key is JSON, and a reference may be inside it."""
    if key in LENS_KEYS and isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # parse_extra_args says what is wrong with it
    return {"false": False}.get(value, value) if key == CAPTURE_KEY and value == "false" else value


LensLike = str | Path | Lens
"""A name that the server knows, or a lens, its path, or its name below `lenses/`."""


def name_of_lens(lens: LensLike) -> str:
    """The name under which a server has a lens, or is told of it."""
    if isinstance(lens, str) and "/" not in lens:
        return check_name(lens, field="lens")
    loaded = load_lens(lens)
    form = loaded.for_engine()
    name = f"lens-{form.sha256[:24]}"
    LENSES.keep(name, loaded, form.nbytes)
    return name


_INSPECTS = ("model_name", "base_url", "api_key", "config")
"""What Inspect passes to every model."""


def role_advice(layers: Sequence[int] | None = None) -> str:
    """The option that makes a model in a role capture."""
    wanted = "…" if layers is None else list(layers)
    return f"--model-role 'ROLE={{model: vllm-lens/…, model_args: {{capture: {wanted}}}}}'"


def capture_advice(layers: Sequence[int]) -> str:
    """What to do where a call had to capture and did not."""
    wanted = list(layers)
    return (
        f"run the eval with a vllm-lens/ model and -M capture={wanted}, or put "
        f"with_capture({wanted}) into the solver; for a model in a role write "
        f"{role_advice(wanted)}"
    )


def explain_none() -> None:
    """Make `--model none -M capture=…` an error that says what to do.

    Inspect passes `-M` to the model that `--model` names, and its `none` knows no arguments: the
    eval would end in a TypeError. Without arguments it is what it was.
    """
    kind: RegistryType = "modelapi"
    if not registry_has(kind, "none"):
        return
    plain: Any = registry_lookup(kind, "none")

    def none(*args: object, **options: object) -> object:
        given = [name for name in options if name not in _INSPECTS]
        if given:
            raise PrerequisiteError(
                f"--model none: takes no -M {given[0]}=…, which reaches the model of --model "
                f"alone, and there is none; for a model in a role write {role_advice()}"
            )
        return plain(*args, **options)

    registry_add(none, registry_info(plain))


@judged_arguments
def lens_config(
    *,
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = None,
    steer: Add | VectorLike | Mapping[str, Any] | Sequence[Any] | None = None,
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]] | None = None,
    hooks: Hook | Mapping[str, Any] | Sequence[Hook | Mapping[str, Any]] | None = None,
    qk: Sequence[int] | Sequence[tuple[int, int]] | bool | None = None,
    lens: LogitLens | Mapping[str, Any] | Sequence[int] | str | None = None,
    sink: SinkUse | Mapping[str, Any] | str | None = None,
    probes: ProbeUse | ProbeLike | Sequence[ProbeUse | ProbeLike] | None = None,
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
        qk: layers whose queries and keys to return, or (layer, head) of single heads, such as
            `heads.heads` of a list of heads; True for all, and False removes what `base` asks.
        lens: layers to read as predictions of the next token, `all`, or a `LogitLens`; None keeps
            what `base` asks for.
        sink: name of a store or a function of the server that gets the rows too, or a `SinkUse`
            with the sample's label; the receipt says what became of them. None keeps what `base`
            asks for.
        probes: as for `lens_scope`, instead of those of `base`; an empty list removes them.
        lora: adapter of this call: a path, a Hugging Face repository, the name of one that the
            server has loaded, or vLLM's `lora_request` fields.
        base: config to build on, all of it. None means only the `extra_body` of the task that
            is running, which Inspect would otherwise lose.
        **generate: fields of a `LensRequest` that have no argument here, such as `edits_named`,
            `configs` and `edits_meet="error"`, and other fields of GenerateConfig, of which
            `extra_body` is merged too.

    Raises:
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
    options, generate = split_options(generate)
    if options.pop("stream_results", False):
        raise SpecError(f"stream_results: {NOT_STREAMED}")
    start = GenerateConfig() if base is None else base
    inherited = (active_generate_config() if base is None else base).extra_body
    merged = _merge(inherited or {}, generate.pop("extra_body", None) or {})
    body, request = read_body(merged)
    changes: dict[str, Any] = {}
    if capture is not None:
        changes["capture"] = parse_capture(capture)
    if steer is not None or edits is not None:
        others = () if edits is None else parse_edits(resolve_edits(edits))
        changes["edits"] = (*_vectors(() if steer is None else steer), *others)
    if hooks is not None:
        changes["hooks"] = parse_hooks(hooks, where="hooks")
    if probes is not None:
        changes["probes"] = ask_probes(probes)
    given = {"qk": qk, "lens": lens, "sink": sink, **options}
    if given := {name: value for name, value in given.items() if value is not None}:
        wanted = {
            name: value for name, value in given.items() if name != "qk" or value is not False
        }
        asked = parse_extra_args({NATIVE_KEY: wanted}) or LensRequest()
        changes |= {name: getattr(asked, name) for name in given}
    if changes:
        body = respelled(body, (request or LensRequest()).with_fields(**changes))
    if lora is not None:
        body["lora_request"] = _lora(lora)
    for name in generate.keys() - GenerateConfig.model_fields:
        hint = did_you_mean(
            name, {*LensRequest.model_fields, *GenerateConfig.model_fields, "steer", "lora"}
        )
        raise SpecError(
            f"{name}: is no argument of lens_config, and no field of a LensRequest or of "
            f"GenerateConfig; {hint}"
        )
    config = start.merge(read_as(GenerateConfig, generate))
    config.extra_body = body or None
    return config


@contextmanager
def given_by(surface: str) -> Iterator[None]:
    """Whatever is wrong in here stood in an option or a variable of this name."""
    try:
        yield
    except (LensError, ValidationError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        option = surface.removeprefix("-M ")
        said = surface.removesuffix(option) + why if why.startswith(option) else f"{surface}: {why}"
        raise PrerequisiteError(f"vllm-lens: {said}") from None


def edits_of_every_call(
    edits: Any = None, steer: Any = None, edits_meet: Any = None
) -> LensRequest | None:
    """What `-M edits=`, `steer=` and `edits_meet=` do to each call; INSPECT_LENS_EDITS else."""
    source = "-M edits"
    if edits is None and steer is None and (wanted := text("edits")):
        source, edits = variable("edits"), wanted
    with given_by("-M steer"):
        first = asked_by(steer=steer).edits
    with given_by(source):
        asked = asked_by(edits=_written(edits) if isinstance(edits, str) else edits)
    with given_by("-M edits_meet"):
        meet = asked_by(edits_meet=edits_meet).edits_meet
    asked = LensRequest(edits=(*first, *asked.edits), edits_meet=meet)
    return asked if asked.asked else None


def asked_by(**options: Any) -> LensRequest:
    """What options of `lens_config` ask for alone."""
    body = lens_config(**options, base=GenerateConfig()).extra_body
    return read_body(body).request or LensRequest()


def _written(edits: str) -> Any:
    """Edits as text, or in a file."""
    try:
        inline = edits.lstrip()[:1] in ("[", "{")
        read = parse_yaml(edits if inline else Path(edits).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
    vectors = several(steer)
    for vector in vectors:
        if not isinstance(vector, Add | Vector | Mapping | str | Path):
            raise SpecError(
                f"steer={shown(vector)}; allowed are a vector, its name or path, an object such as "
                '{"vector": name, "scale": 0.5}, and a list of them'
            )
        if isinstance(vector, Mapping) and vector.keys() == {"name", "sha256"}:
            steering_vector({"vector": vector})  # never saved: all that a log has of such a one
    if not vectors:
        return ()
    resolved = [
        steering_vector(v) if isinstance(v, Vector | str | Path) else resolve_edits(v)
        for v in vectors
    ]
    request = parse_extra_args({STEER_KEY: resolved})
    return request.edits if request else ()


NamedVector = Add | Mapping[str, Any] | str
"""A vector, its JSON form, a name or path to load it from, or such a name with options, as
`{"vector": name, "layer": …, "scale": …}`."""


def as_steering(vector: NamedVector | tuple[Add, ...], scale: float) -> tuple[Add, ...]:
    """A vector as a request takes it, `scale` times as strong."""
    found = (edit for edit in _vectors(vector) if isinstance(edit, Add))
    return tuple(edit.model_copy(update={"scale": edit.scale * scale}) for edit in found)


def _lora(lora: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(lora, str | Mapping) or not lora:
        raise SpecError(
            f"lora={shown(lora)}; allowed are a path, a repository, the name of an adapter that "
            "the server has, and an object with lora_name"
        )
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
