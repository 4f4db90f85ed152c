"""What can be registered: its kinds, how it is read, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import load_lens
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import (
    EditBase,
    EngineEdits,
    EngineLens,
    EngineProbe,
    LensEntry,
    Registrable,
    TensorLimits,
    check_counts,
    check_name,
    judging,
    shown,
)

Item = EngineProbe | EngineEdits | LensEntry
"""What a front-end keeps; of a lens, the workers have the tensors."""

WORDS = {
    EngineProbe: "probe",
    EngineEdits: "edits",
    LensEntry: "lens",
    None: "name",
}
_LENS_FILE = "lens.safetensors"
"""As `Lens.save` names it."""


def kept_of(item: Registrable) -> Item:
    if isinstance(item, EditBase):
        return EngineEdits(edits=(item,))
    return item.entry if isinstance(item, EngineLens) else item


def nbytes_of(item: Item) -> int:
    """Bytes that it takes of this process, with all its tensors."""
    if isinstance(item, LensEntry):
        return 0  # of the workers; they have a limit of their own
    if isinstance(item, EngineProbe):
        return sum(tensor.nbytes for tensor in item.tensors.values())
    return item.nbytes


def parse_item(
    body: Mapping[str, Any], limits: TensorLimits | None = None
) -> tuple[str, Registrable]:
    """Read `{"name": …, "probe": {…}}`, or `edits` or `lens` in the place of `probe`."""
    kinds: dict[str, type[Registrable]] = {
        "probe": EngineProbe,
        "edits": EngineEdits,
        "lens": EngineLens,
    }
    given = [kind for kind in kinds if kind in body]
    if len(given) != 1 or set(body) - {"name", *kinds}:
        raise SpecError(
            f"the body has {shown(sorted(map(str, body)))}; it has to have 'name', and one "
            "of 'probe', 'edits' (of which a vector is one) and 'lens'"
        )
    name = check_name(body.get("name"))
    context = None if limits is None else limits.context
    check_counts(body[given[0]], field=given[0])
    with judging(given[0]):
        return name, kinds[given[0]].model_validate(body[given[0]], context=context)


def parse_shared(body: Mapping[str, Any]) -> tuple[str, Item]:
    """Read what another front-end of the same engine keeps of a registered name."""
    if "entry" in body:
        return body["name"], LensEntry.model_validate(body["entry"])
    name, item = parse_item(body)
    return name, kept_of(item)


def start_items(setting: str) -> dict[str, Registrable]:
    items: dict[str, Registrable] = {}
    for pair in filter(None, (part.strip() for part in setting.split(","))):
        name, equals, path = pair.partition("=")
        if not equals:
            raise SpecError(f"INSPECT_LENS_REGISTER: {pair!r}; give name=path, comma-separated")
        try:
            if Path(path).name == _LENS_FILE or (Path(path) / _LENS_FILE).is_file():
                items[name] = load_lens(path).for_engine()
            elif Path(path).is_dir():
                probe = load_probe(path)
                if not isinstance(probe, Probe):
                    raise ValueError(f"a {type(probe).__name__} has no form for the engine yet")
                items[name] = probe.for_engine()
            else:
                body = json.loads(Path(path).read_text(encoding="utf-8"))
                items[name] = parse_item({"name": name, **body})[1]
        except (OSError, ValueError, ArtifactError) as error:
            raise SpecError(f"INSPECT_LENS_REGISTER: {name}={path}: {error}") from None
    return items
