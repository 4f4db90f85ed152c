"""Lists of attention heads as small files: which heads, of which model, found on what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from inspect_lens._base.artifact import folders_named, write_atomic
from inspect_lens._base.untrusted import parse_json, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Threshold
from inspect_lens.spec import explain

from ._captured import Head

HeadMethod = Literal["attention_tracker", "core", "imported"]
"""Method that chose the heads; `imported` for a list from another tool."""

_FORMAT: Final = "inspect_lens/heads/1"
_FOLDER: Final = "heads"


class HeadsFound(BaseModel):
    """How a list of heads was found: method, settings and data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: str = ""
    """Name of the samples that the heads were found on."""
    n_samples: dict[str, int] = {}
    """How many samples of each kind, such as `normal` and `attack`."""
    rule: str = ""
    """Which heads were taken, in words."""
    settings: dict[str, float] = {}
    """Numbers of the rule."""
    n_heads: int | None = None
    """Heads among which they were found."""
    source: str = ""
    """File or paper that they were taken from."""


class AttentionHeads(BaseModel):
    """Chosen heads of a model, with what chose them, and a threshold where one was set.

    Example:
        ```python
        from inspect_lens.attention import AttentionHeads, load_heads

        heads = AttentionHeads(method="core", model="my/model", heads=[(12, 11), (9, 26)])
        assert heads.layers == (9, 12)
        heads.save("heads/my/core.json")
        assert load_heads("my/core") == heads
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: HeadMethod
    model: str = ""
    """Name of the model; heads of one model say nothing of another."""
    heads: tuple[Head, ...]
    """(layer, head) of each, both from 0."""
    head_scores: tuple[float, ...] | None = None
    """What each head was chosen by, where it is known."""
    threshold: Threshold | None = None
    """For Attention Tracker: of 1 minus the focus score, above which a prompt is flagged."""
    found: HeadsFound | None = None
    """Where they are from."""

    @model_validator(mode="after")
    def _check(self) -> AttentionHeads:
        if not self.heads or len(set(self.heads)) < len(self.heads):
            raise ValueError(f"heads: {len(self.heads)}; needed are (layer, head) pairs, each once")
        if wrong := [pair for pair in self.heads if min(pair) < 0]:
            raise ValueError(f"heads: {wrong}; layers and heads count from 0")
        if self.head_scores is not None and len(self.head_scores) != len(self.heads):
            raise ValueError(f"head_scores: {len(self.head_scores)} for {len(self.heads)} heads")
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have one of the heads, ascending: what to capture."""
        return tuple(sorted({layer for layer, _ in self.heads}))

    def with_threshold(self, threshold: Threshold) -> AttentionHeads:
        """The same heads with a threshold, as `inspect_lens.train.fit_threshold` sets it."""
        return self.model_copy(update={"threshold": threshold})

    def save(self, path: str | Path) -> Path:
        """Write the heads, how they were chosen and their threshold as JSON.

        Args:
            path: of the file; its folder is made. Below `heads/` it is found by name.

        Returns:
            The path.
        """
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, **self.model_dump(mode="json", exclude_none=True)}
        write_atomic(file, (json.dumps(content, indent=2) + "\n").encode())
        return file


def load_heads(name: str | Path | AttentionHeads | Mapping[str, Any]) -> AttentionHeads:
    """Load a list of attention heads by name or path.

    Args:
        name: path of the file; or its name below `heads/` of the working directory, of a folder
            above it, or of this package, such as `organism/attention-tracker`;
            or a list, also as plain data, as a log has it.

    Returns:
        The list.

    Raises:
        ArtifactError: there is none, or the file is another.

    Example:
        ```python
        from inspect_lens.attention import load_heads

        heads = load_heads("organism/attention-tracker")
        assert heads.method == "attention_tracker"
        print(heads.heads, heads.found.rule)
        ```
    """
    if isinstance(name, AttentionHeads):
        return name
    if isinstance(name, Mapping):
        return _parse(name, "heads")
    path = _find(name)
    stored = _read(path)
    if stored.pop("format", None) != _FORMAT:
        raise ArtifactError(
            f"{path}: not a list of heads with format {_FORMAT!r}; read a list of another tool "
            "with import_heads and save it"
        )
    return _parse(stored, str(path))


def import_heads(path: str | Path, *, model: str = "", top: int = 8) -> AttentionHeads:
    """Read a list of heads that another tool wrote.

    Args:
        path: a configuration of Attention Tracker or of IBM's vLLM-Hook, which has
            `params.important_heads`; or the scores of CoRe heads, `{"layer-head": score}`.
        model: name of the model, where the file does not say it.
        top: heads to take from scores, the best first.

    Returns:
        The list, without a threshold.

    Raises:
        ArtifactError: the file is none of these.
        SpecError: `top` is not positive.

    Example:
        ```python
        import json
        from pathlib import Path

        from inspect_lens.attention import import_heads

        Path("core.json").write_text(json.dumps({"0-0": 0.2, "0-1": 0.9, "1-0": 0.4}))
        assert import_heads("core.json", model="my/model", top=2).heads == ((0, 1), (1, 0))
        ```
    """
    if top < 1:
        raise SpecError(f"top={top}; allowed is a positive number of heads")
    file = Path(path).expanduser()
    stored = _read(file)
    found = HeadsFound(source=file.name)
    try:
        if isinstance(stored.get("params"), Mapping):
            heads = [(int(layer), int(head)) for layer, head in stored["params"]["important_heads"]]
            named = str((stored.get("model_info") or {}).get("model_id", ""))
            return AttentionHeads(
                method="imported", model=model or named, heads=tuple(heads), found=found
            )
        scores = {_pair(key): float(value) for key, value in stored.items()}
        best = sorted(scores, key=lambda pair: (-scores[pair], pair))[:top]
        return AttentionHeads(
            method="core", model=model, heads=tuple(best), found=found,
            head_scores=tuple(scores[pair] for pair in best),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{file}: not a list of heads ({type(error).__name__}: {error}); read are "
            'configurations with params.important_heads, and scores as {"layer-head": score}'
        ) from None


def _parse(stored: Mapping[str, Any], where: str) -> AttentionHeads:
    try:
        return AttentionHeads.model_validate(stored)
    except ValidationError as error:
        raise ArtifactError(f"{where}: not a list of heads ({explain(error)})") from None


def _pair(key: str) -> Head:
    layer, head = key.split("-")
    return int(layer), int(head)


def _find(name: str | Path) -> Path:
    given = Path(name).expanduser()
    if given.is_file():
        return given
    folders = folders_named(_FOLDER)
    relative = given if given.suffix == ".json" else given.with_name(f"{given.name}.json")
    if not given.is_absolute() and ".." not in given.parts:
        for folder in folders:
            if (folder / relative).is_file():
                return folder / relative
    raise ArtifactError(
        f"heads={str(name)!r} was not found; allowed are the path of a JSON file, or a name below "
        f"one of {[str(folder) for folder in folders]}; find heads with calibrate_tracker or "
        "find_core_heads, and save them"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        stored: Any = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(stored, dict):
        raise ArtifactError(f"{path}: not a list of heads; it holds a {type(stored).__name__}")
    return stored
