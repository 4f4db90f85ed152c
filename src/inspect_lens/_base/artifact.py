"""Files of trained artefacts: written whole, found by name, checked when read.

An artefact (a probe, a vector, a lens) is a folder with a safetensors file, `card.json` and
`card.md`. The safetensors file is complete in itself: its one metadata entry repeats all of the
card that decides what the tensors mean, so its sha256 (which any shell can compute) identifies the
artefact.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import os
import re
import reprlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from pydantic import BaseModel, Field, SerializationInfo, ValidationError, field_validator
from pydantic_core import SchemaSerializer, core_schema
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from inspect_lens._base.shipped import organism_advice, shipped_root
from inspect_lens._base.untrusted import metadata_of, parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.spec import Value, explain

Made = TypeVar("Made")

CARD_FILE = "card.json"
_KEY = "inspect_lens"
_ADDRESS: Final = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<folder>[\w./-]+?))?/?(?:@(?P<revision>[\w./-]+))?"
)


class ArtifactKind(NamedTuple):
    """What tells probes from vectors on disk."""

    name: str
    """`probe`; also the word of error messages."""
    folder: str
    """Folder that holds named ones, such as `probes`."""
    tensors: str
    """Name of the safetensors file."""
    format: str
    """Marks the files."""
    writer: str
    """Who writes them, for error messages."""
    example: str
    """A full name, for error messages."""


def package_version() -> str:
    """Of this package; `unknown` where it is not installed."""
    try:
        return version("inspect-lens")
    except PackageNotFoundError:
        return "unknown"


class ArtifactCard(Value):
    """What cards of probes, vectors and lenses have alike."""

    HEADER: ClassVar[frozenset[str]]
    """Fields that decide what the tensors mean, which their file repeats."""

    name: str = Field(min_length=1, description="`<model>/<name>`, its folder by custom.")
    layers: tuple[int, ...] = Field(
        min_length=1, description="Layers that the tensors are of, ascending and 0-based."
    )
    hidden: int = Field(gt=0, description="Width of the residual stream.")
    source: str = Field("", description="Paper or code that the method comes from.")
    notes: tuple[str, ...] = Field((), description="What a reader should know besides.")
    inspect_lens_version: str = Field(
        default_factory=package_version, description="Version that wrote the card."
    )
    command: str = Field("", description="Command that made it.")
    created: datetime = Field(
        default_factory=lambda: datetime.now(UTC).replace(microsecond=0), description="When."
    )

    @field_validator("layers")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or value[0] < 0:
            raise ValueError(f"{value} is not ascending, unique and 0-based; sort the layers")
        return value

    def header(self) -> dict[str, Any]:
        """What the tensors' file repeats, as JSON values."""
        return self.model_dump(mode="json", include=set(self.HEADER))

    def render(
        self,
        facts: Sequence[tuple[str, str]],
        sections: Sequence[str],
        *,
        digest: tuple[str, str],
        warnings: Sequence[str] = (),
    ) -> str:
        """The card as markdown: name, a table of facts with the origin, and what follows it."""
        model: Any = getattr(self, "model", None)
        known = [] if model is None else [
            ("model", model.name), ("model sha256", model.sha256 or "not recorded"),
        ]  # fmt: skip
        rows = [
            ("source", self.source), *facts, *known, digest,
            ("inspect_lens", self.inspect_lens_version),
            ("command", f"`{self.command}`" if self.command else ""),
            ("created", self.created.isoformat()),
        ]  # fmt: skip
        table = markdown_table(["fact", "value"], [[k, v] for k, v in rows if v])
        notes = "\n".join(f"- {note}" for note in self.notes)
        parts = [f"# {self.name}", getattr(self, "description", "")]
        parts += [f"> **Warning.** {text}" for text in warnings]
        parts += [table, *sections]
        parts += ["## Notes", notes] if notes else []
        return "\n\n".join(part for part in parts if part) + "\n"


def read_only(name: str, given: ArrayLike, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """A tensor as an array that nobody writes to; SpecError where it is not finite."""
    array = np.array(given, dtype=dtype)
    if not np.isfinite(array).all():
        raise SpecError(
            f"{name}: holds NaN or infinity; allowed are finite numbers; check the data that it "
            "was fitted on, and the learning rate"
        )
    array.setflags(write=False)
    return array


BY_CONTENT = "content"
"""Context of pydantic in which an artefact is written as the hash of what it is and how it is
logged."""


class Artifact(ABC):
    """What probes, vectors and lenses have alike: a card, tensors, and a folder with both."""

    KIND: ClassVar[ArtifactKind]
    card: Any
    path: Path | None

    def _written(self, info: SerializationInfo) -> str | dict[str, str]:
        logged = self._repr_params_()
        return f"{self.sha256} {logged}" if info.context == BY_CONTENT else logged

    __pydantic_serializer__ = SchemaSerializer(
        core_schema.any_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        )
    )
    """Arguments of models are logged by it, and those that stand in lists."""

    @abstractmethod
    def _in_file(self) -> Mapping[str, NDArray[Any]]:
        """The tensors of the safetensors file, by name."""

    @abstractmethod
    def _render(self, digest: str) -> str:
        """Content of `card.md`."""

    @property
    def name(self) -> str:
        """`<model>/<name>`."""
        return str(self.card.name)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the card, ascending."""
        return tuple(self.card.layers)

    @cached_property
    def sha256(self) -> str:
        """Hash of the safetensors file: tensors, and all that decides what they mean."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Content of the safetensors file; what is equal gives equal bytes."""
        return encode_tensors(self.KIND, self._in_file(), self.card.header())

    def save(self, folder: str | Path) -> Path:
        """Write the safetensors file, `card.json` and `card.md`, each whole or not at all.

        Args:
            folder: made when missing; `<model>/<name>` below `probes`, `vectors` or `lenses` by
                custom.

        Returns:
            The folder.
        """
        return write_artifact(self.KIND, Path(folder), self.to_bytes(), self.card, self._render)

    def _freeze(self, half: Sequence[str] = (), **shapes: tuple[int, ...]) -> None:
        """Judge the tensors that are fields; those of `half` may be float16."""
        for name, shape in shapes.items():
            given = np.asarray(getattr(self, name))
            stays = name in half and given.dtype == np.float16
            array = read_only(name, given, np.float16 if stays else np.float32)
            if array.shape != shape:
                raise SpecError(
                    f"{name}: shape {array.shape}; allowed is {shape} for layers {self.layers} of "
                    f"width {self.card.hidden}; give one row per layer of the card"
                )
            object.__setattr__(self, name, array)

    def _repr_params_(self) -> str | dict[str, str]:
        """What Inspect logs for this object: a path that it can load again, else its identity."""
        if self.path is not None:
            return str(self.path)
        return {"name": self.name, "sha256": self.sha256}


def from_files(make: Callable[..., Made], folder: Path, **values: Any) -> Made:
    """Make what the files of a folder hold; what does not fit is their fault."""
    try:
        return make(**values, path=folder)
    except SpecError as error:
        raise ArtifactError(f"{folder}: {error}") from None


def markdown_cell(text: str) -> str:
    """A text that breaks no table, whoever wrote it."""
    return " ".join(text.split()).replace("|", "\\|")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of such cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(markdown_cell, row)) + " |" for row in lines)


def with_interval(value: float | None, interval: object | None = None, ends: str = ".3f") -> str:
    """A number and its interval for people; `n/a` for None."""
    if value is None:
        return "n/a"
    return f"{value:{ends}}" if interval is None else f"{value:{ends}} {interval:{ends}}"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part.

    Args:
        path: its folder has to exist.
        content: all of it.

    Example:
        ```python
        from pathlib import Path

        from inspect_lens.probe import write_atomic

        write_atomic(Path("notes.json"), b"{}")
        assert Path("notes.json").read_bytes() == b"{}"
        ```
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes it private; an artefact is as readable as its folder says.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode_tensors(
    kind: ArtifactKind, tensors: Mapping[str, NDArray[Any]], header: Mapping[str, Any]
) -> bytes:
    """Content of the safetensors file."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    text = json.dumps({"format": kind.format, **header}, sort_keys=True)
    content: bytes = save_tensors(contiguous, metadata={_KEY: text})
    return content


def decode_tensors(
    kind: ArtifactKind,
    content: bytes,
    header: Mapping[str, Any],
    folder: Path,
    *,
    allowed: Sequence[str],
    exact: bool,
    what: str,
    dtypes: Sequence[str] = ("float32",),
) -> dict[str, NDArray[np.float32]]:
    """Read the safetensors file and compare it with the card."""
    file = folder / kind.tensors
    again = f"restore the file or train the {kind.name} again"
    advice = f"allowed is what {kind.writer} writes; {again}"
    with parsing(file, f"a {kind.name} of inspect_lens", advice):
        tensors: dict[str, NDArray[np.float32]] = load_tensors(content)
        found = dict(parse_json(metadata_of(content)[_KEY]))
    names = set(tensors)
    fits = names == set(allowed) if exact else names >= set(allowed)
    if not fits or any(str(t.dtype) not in dtypes for t in tensors.values()):
        held = {name: str(t.dtype) for name, t in sorted(tensors.items())}
        raise ArtifactError(
            f"{file}: holds {held}; allowed for {what} are {sorted(allowed)}, all "
            f"{' or '.join(dtypes)}; {again}"
        )
    for key, expected in {"format": kind.format, **header}.items():
        if found.get(key) != expected:
            raise ArtifactError(
                f"{folder / CARD_FILE}: {key} is {expected!r} and the tensors were saved with "
                f"{found.get(key)!r}; both have to agree; undo the edit, or make the {kind.name} "
                "anew"
            )
    return tensors


def write_artifact(
    kind: ArtifactKind, folder: Path, content: bytes, card: BaseModel, render: Callable[[str], str]
) -> Path:
    """Write the three files; the card comes last among those that are read back."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(content).hexdigest()
    stored = {"format": kind.format, "sha256": digest, "card": card.model_dump(mode="json")}
    # A crash between two writes over an older artefact leaves a hash that does not fit, which
    # loading reports; it never leaves a mixture that loads.
    write_atomic(folder / kind.tensors, content)
    write_atomic(
        folder / CARD_FILE, (json.dumps(stored, indent=2, allow_nan=False) + "\n").encode()
    )
    write_atomic(folder / "card.md", render(digest).encode())
    return folder


def read_artifact(
    kind: ArtifactKind, path: Path, parse: Callable[[Any], BaseModel]
) -> tuple[Path, bytes, Any]:
    """Read tensors and card and compare the hash."""
    folder = path.parent if path.is_file() else path
    try:
        content = read_regular(folder / kind.tensors)
        text = read_regular(folder / CARD_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{folder}: cannot be read as a {kind.name} ({error}); allowed is a folder with "
            f"{kind.tensors} and {CARD_FILE}; check the path"
        ) from None
    try:
        stored: Any = parse_json(text)
        if stored["format"] != kind.format:
            raise ValueError(f"format {stored['format']!r}, this release reads {kind.format!r}")
        digest, card = stored["sha256"], parse(stored["card"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        if isinstance(error, ValidationError) and (unknown := _unknown_fields(error)):
            raise ArtifactError(
                f"{folder / CARD_FILE}: has fields that this version does not know "
                f"({', '.join(unknown)}), so another version of inspect_lens wrote it; use that "
                f"version, or make the {kind.name} again"
            ) from None
        why = (
            explain(error, at="card")
            if isinstance(error, ValidationError)
            else f"{type(error).__name__}: {error}"
        )
        raise ArtifactError(
            f"{folder / CARD_FILE}: not a card ({why}); allowed is what "
            f"{kind.writer} writes; restore the file, or update inspect_lens if a newer one wrote "
            "it"
        ) from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise ArtifactError(
            f"{folder / kind.tensors}: sha256 {actual}, the card says {digest}; the file was "
            f"damaged or replaced; restore both files, or train the {kind.name} again"
        )
    return folder, content, card


def _unknown_fields(error: ValidationError) -> list[str]:
    """Fields of a card that its class does not have, where nothing else is wrong with it."""
    found = error.errors(include_url=False, include_input=False)
    if any(one["type"] != "extra_forbidden" for one in found):
        return []
    return [".".join(map(str, one["loc"])) for one in found]


def is_artifact(kind: ArtifactKind, path: Path) -> bool:
    """Whether a path is a folder with such files, or one of them."""
    if path.is_file():
        return path.name in (kind.tensors, CARD_FILE)
    return (path / kind.tensors).exists() or (path / CARD_FILE).exists()


def find_artifact(kind: ArtifactKind, given: str | Path, registered: Sequence[Path] = ()) -> Path:
    """Find an artefact by name, by path or on the Hugging Face hub.

    A path that exists wins. Else it is looked up in the registered folders, then in the working
    directory and each folder above it (Inspect loads a task in the task's own folder), as a name
    below the kind's folder and as a path, and among those that come with the organism. The last
    part alone of a name is enough when it is unique, which is all that Inspect logs of a `Path`.
    """
    check_given(kind.name, given)
    if str(given).startswith("hf://"):
        return download(kind.name, str(given), (kind.tensors, CARD_FILE))
    path = Path(given).expanduser()
    if is_artifact(kind, path):
        return path
    roots = folders_named(kind.folder, registered)
    for root in roots:
        found = _find(kind, root, path)
        if found is not None:
            return found
    if len(path.parts) > 1 and ".." not in path.parts:
        for folder in Path.cwd().parents:
            if (folder / path / kind.tensors).is_file():
                return folder / path
    if advice := organism_advice(str(given)):
        raise ArtifactError(f"{kind.name}: {advice}")
    raise ArtifactError(
        f"{kind.name}={str(given)!r} was not found; allowed are a folder with {kind.tensors}, or "
        f"{name_below(kind.folder, roots)}; {_near(kind, str(given), roots)}"
    )


def check_given(what: str, given: object, more: str = "") -> None:
    """Refuse what does not say where an artefact is."""
    if not isinstance(given, str | Path):
        raise ArtifactError(
            f"{what}={reprlib.repr(given)}: a {type(given).__name__}; allowed are a name, a path, "
            "or what was loaded; a log that shows this used one that was never saved: save it and "
            f"pass its path{more}"
        )


def _near(kind: ArtifactKind, given: str, roots: Sequence[Path]) -> str:
    """A hint at the name below these folders that is most like the given one."""
    files = (file for root in roots for file in root.glob(f"*/*/{kind.tensors}"))
    names = {file.parent.relative_to(file.parents[2]).as_posix() for file in files}
    known = {name if "/" in given else name.rpartition("/")[2]: name for name in names}
    near = difflib.get_close_matches(given, known, n=1)
    if near:
        return f"did you mean {known[near[0]]!r}?"
    return f"check the spelling, or train the {kind.name} first"


def folders_named(name: str, registered: Sequence[Path] = ()) -> list[Path]:
    """Folders that hold named artefacts, in the order in which they are searched."""
    here = Path.cwd()
    root = shipped_root()
    shipped = [] if root is None else [root]
    candidates = [*registered, *(p / name for p in (here, *here.parents, *shipped))]
    return [p for p in dict.fromkeys(candidates) if p.is_dir()]


def name_below(name: str, folders: Sequence[Path]) -> str:
    """For a message: which names were looked up, given the folders of `folders_named`."""
    if not folders:
        return f"a name below {name}/ (there is no such folder here or above)"
    return f"a name below one of {[str(folder) for folder in folders]}"


def _find(kind: ArtifactKind, root: Path, name: Path) -> Path | None:
    if name.is_absolute() or ".." in name.parts:
        return None
    if (root / name / kind.tensors).is_file():
        return root / name
    if len(name.parts) != 1:
        return None
    found = sorted(p.parent for p in root.glob(f"*/*/{kind.tensors}") if p.parent.name == name.name)
    if len(found) > 1:
        raise ArtifactError(
            f"{kind.name}={str(name)!r} is ambiguous: {[str(p) for p in found]}; allowed is one; "
            f"give the model as well, as in {kind.example}"
        )
    return found[0] if found else None


def download(what: str, address: str, files: Sequence[str]) -> Path:
    """Fetch files of `hf://owner/repository[/folder][@revision]`; the folder that has them."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ArtifactError(
            f"{what}={address!r}; allowed is hf://owner/repository, then /folder and @revision if "
            "they are needed; correct the address"
        )
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ArtifactError(
            f"{what}={address!r}: needs the package huggingface_hub; install it, or download the "
            "folder and pass its path"
        ) from None
    names = [f"{match['folder']}/{name}" if match["folder"] else name for name in files]
    try:
        found = [
            hub.hf_hub_download(match["repo"], name, revision=match["revision"]) for name in names
        ]
    except Exception as error:  # noqa: BLE001 (the hub raises errors of many packages)
        raise ArtifactError(
            f"{what}={address!r}: could not be downloaded ({type(error).__name__}: {error}); "
            f"needed are {', '.join(names)} in that repository; check the address and your access "
            "to it"
        ) from None
    return Path(found[0]).parent
