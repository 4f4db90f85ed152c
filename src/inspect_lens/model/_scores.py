"""Probes that calls ask the engine to run, and what they said of each token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from inspect_ai.log import transcript
from numpy.typing import NDArray
from pydantic import PrivateAttr
from pydantic_core import to_json
from safetensors.numpy import load

from inspect_lens._base.untrusted import metadata_of, parse_json, parsing
from inspect_lens._intake import encode_tensors
from inspect_lens.errors import ArtifactError, CaptureError, SpecError, UnsupportedError
from inspect_lens.probe import AnyProbe, load_probe
from inspect_lens.spec import (
    WEIGHTS,
    Cache,
    CaptureSpec,
    EngineProbe,
    Positions,
    ProbeUse,
    Site,
    in_site_order,
    parse_positions,
    resolve_positions,
    several,
)

from ._handle import Activations, LoggedHandle
from ._places import MemoryStore, MessageIndex, judge_digest

__all__ = ["ProbeScores"]

ProbeLike = str | Path | AnyProbe

Role = Literal["tokens", "text"]
"""Whether the numbers are scores of tokens, or each that of the text up to its token."""


class Known(NamedTuple):
    """A probe that this process may register."""

    probe: str
    """Name of its card."""
    probe_sha256: str
    """Of its file."""
    role: Role
    layers: tuple[int, ...]
    site: Site
    refused: str | None = None
    """Why no engine runs it; its rows are captured then."""


KNOWN: dict[str, Known] = {}
"""By the name at a server, which is made of the content: whoever asks for a probe, in this eval or
in another, finds what is registered already. Scores of each name are told apart by it to the end,
so that only the weights make room for others."""
FORMS: Cache[str, EngineProbe] = Cache(1 << 20, WEIGHTS)
"""The engine's forms by the same names; aggregate and threshold play no part."""


def ask_probes(
    probes: ProbeUse | ProbeLike | Sequence[ProbeUse | ProbeLike] | None,
    positions: Positions | list[int] | None = None,
) -> tuple[ProbeUse, ...]:
    """Say in a request what runs probes in the engine; uses of registered names stay."""
    if isinstance(probes, str):
        probes = [part.strip() for part in probes.split(",")]
    listed = [] if probes is None else several(probes)
    if "" in listed:
        raise SpecError(
            f"probes={probes!r}; allowed are names, paths and probes; leave it out for none"
        )
    uses = [probe for probe in listed if isinstance(probe, ProbeUse)]
    asked = {use.name: use for use in uses}
    if len(asked) < len(uses):
        raise SpecError(f"probes: a name stands twice in {[use.name for use in uses]!r}")
    if positions is not None:
        positions = parse_positions(positions, field="probe_positions")
        if asked or not listed:
            why = f"the ProbeUse of {uses[0].name!r} has its own" if asked else "there is no probe"
            raise SpecError(f"probe_positions={positions!r}: {why}; leave probe_positions out")
    for probe in listed:
        if isinstance(probe, ProbeUse):
            continue
        loaded = load_probe(probe)
        read = loaded.positions if positions is None else positions
        # Scores are wanted as they come; which token is the last one is known at the end.
        read = "completion" if read == "last" else read
        for name in _register(loaded):
            asked.setdefault(name, ProbeUse(name=name, positions=read, tokens=True))
    return tuple(asked.values())


def note_refused(name: str, reason: str) -> None:
    """Say in the transcript that an engine does not run a probe, and what happens instead."""
    note: dict[str, Any] = {
        "probe": name,
        "not in the engine": reason,
        "instead": "rows are captured",
    }
    transcript().info(note, source="inspect_lens")


def _register(probe: AnyProbe) -> list[str]:
    """Note the forms of a probe; their names."""
    try:
        tokens, text = probe.engine_forms()
    except UnsupportedError as error:
        name = f"probe-{probe.sha256[:24]}"
        KNOWN[name] = Known(
            probe.name, probe.sha256, "tokens", probe.layers, probe.site, refused=str(error)
        )
        return [name]
    forms: list[tuple[Role, EngineProbe | None]] = [("tokens", tokens), ("text", text)]
    names = []
    for role, form in forms:
        if form is not None:
            # What a card says of pool and threshold is for readers, and no other probe.
            bare = form.model_copy(
                update={
                    "aggregate": "mean", "threshold": None, "threshold_tokens": None,
                    "threshold_positions": None, "threshold_numerics": None,
                }
            )  # fmt: skip
            name = f"probe-{form.sha256[:24]}"
            KNOWN[name] = Known(probe.name, probe.sha256, role, bare.layers, bare.site)
            FORMS.keep(name, bare, bare.nbytes)
            names.append(name)
    return names


def widened(
    capture: CaptureSpec | None, layers: tuple[int, ...], site: Site, positions: Positions
) -> CaptureSpec:
    """A capture with what a probe reads, too."""
    if capture is None:
        return CaptureSpec(layers=layers, site=site, positions=positions)
    if capture.reduce != "none":
        return capture
    return _widened(capture, layers, site, positions)


@lru_cache(maxsize=64)
def _widened(
    capture: CaptureSpec, layers: tuple[int, ...], site: Site, positions: Positions
) -> CaptureSpec:
    wanted: dict[str, Any] = {}
    if capture.layers != "all":
        wanted["layers"] = tuple(sorted({*capture.layers, *layers}))
    if site not in capture.sites:
        wanted["site"] = in_site_order((*capture.sites, site))
    if capture.positions != positions:
        wanted["positions"] = "all"
    if capture.phase != "both":
        wanted["phase"] = "both"
    if capture.heads is not None:
        wanted["heads"] = None
    return capture.model_copy(update=wanted) if wanted else capture


SCORES_REFERENCE = "scores/1"
"""The format of every file of token scores, and `$lens` of what refers to one."""


def encode_scores(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]], **facts: Any
) -> bytes:
    """A file of token scores: facts of each record, and its arrays, such as `0.scores`."""
    text = to_json({"format": SCORES_REFERENCE, "records": records, **facts}).decode()
    named = {name: (_DTYPES[array.dtype], array) for name, array in arrays.items()}
    return b"".join(encode_tensors(named, {"inspect_lens": text}))


_DTYPES = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64")}
"""The name of an array's type, which NumPy makes anew each time that it is asked."""


@contextmanager
def decoded_scores(
    data: bytes, *, where: str
) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]]]]:
    """Facts and arrays of such a file; what does not fit, here or in the block, is an error."""
    what, wanted = "a file of token scores of this release", f"wanted is {SCORES_REFERENCE}"
    with parsing(where, what, wanted):
        facts = parse_json(metadata_of(data)["inspect_lens"])
        if facts["format"] != SCORES_REFERENCE:
            raise ValueError(f"format {facts['format']!r}")
        yield facts, load(data)


class ScoredBy(NamedTuple):
    """Which probe scored which tokens."""

    probe: str
    """Name of the card; that at the server, where somebody else registered it."""
    probe_sha256: str
    """Of the probe's file; empty where not known."""
    engine_sha256: str
    """Of the form that the engine ran: all that decides a token's score."""
    role: Role
    layers: tuple[int, ...]
    site: Site | None
    positions: Any
    """Tokens that were asked for: a name, or positions."""


class Column(NamedTuple):
    """The scores of one probe of one call."""

    by: ScoredBy
    positions: range | tuple[int, ...]
    """Absolute, over prompt and completion."""
    scores: NDArray[np.float32]
    """(tokens,)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreData:
    """What stands in the file of a call."""

    columns: tuple[Column, ...]
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        ids = len(self.prompt_token_ids) + len(self.token_ids)
        return 8 * ids + sum(column.scores.nbytes for column in self.columns) + 512

    def encode(self) -> bytes:
        """The file, a safetensors file."""
        ids = (*self.prompt_token_ids, *self.token_ids)
        arrays: dict[str, NDArray[Any]] = {"token_ids": np.asarray(ids, dtype=np.int32)}
        for i, column in enumerate(self.columns):
            arrays[f"{i}.scores"] = column.scores
            arrays[f"{i}.positions"] = as_array(column.positions)
        records = [column.by._asdict() for column in self.columns]
        n_prompt = len(self.prompt_token_ids)
        return encode_scores(records, arrays, n_prompt=n_prompt, origin=dict(self.origin))

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> ScoreData:
        """Read what `encode` wrote."""
        with decoded_scores(data, where=where) as (facts, arrays):
            ids, n_prompt = arrays["token_ids"].tolist(), facts["n_prompt"]
            columns = tuple(
                Column(
                    _scored_by(record),
                    as_positions(arrays[f"{i}.positions"]),
                    arrays[f"{i}.scores"],
                )
                for i, record in enumerate(facts["records"])
            )
            return cls(
                columns=columns, prompt_token_ids=tuple(ids[:n_prompt]),
                token_ids=tuple(ids[n_prompt:]), origin=facts["origin"],
            )  # fmt: skip


def as_array(positions: range | tuple[int, ...]) -> NDArray[np.int64]:
    """Positions as an array; of a range without a look at each."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)


def as_positions(positions: NDArray[np.int64]) -> range | tuple[int, ...]:
    """Positions as a range, if they are one."""
    if len(positions) and (np.diff(positions) == 1).all():
        return range(int(positions[0]), int(positions[-1]) + 1)
    return tuple(positions.tolist())


def _scored_by(facts: Mapping[str, Any]) -> ScoredBy:
    read = facts["positions"]
    known = {**facts, "layers": tuple(facts["layers"])}
    return ScoredBy(**{**known, "positions": read if isinstance(read, str) else tuple(read)})


def columns_of(
    receipt: Mapping[str, Any], uses: Sequence[ProbeUse], *, n_prompt: int, n_completion: int
) -> tuple[Column, ...]:
    """Read the token scores of a response."""
    found = {entry.get("name"): entry for entry in receipt.get("probes") or ()}
    columns = []
    for use in (use for use in uses if use.tokens):
        entry = found.get(use.name, {})
        scores = np.asarray(entry.get("tokens") or (), dtype=np.float32)
        read = _read_by(use, n_prompt, n_completion)
        first = read[0] if len(read) else None
        if len(scores) != len(read) or entry.get("first_position") != first:
            raise CaptureError(
                f"probes: {use.name!r} scored {len(scores)} tokens from position "
                f"{entry.get('first_position')}, and {len(read)} from {first} were asked for"
            )
        known = KNOWN.get(use.name)
        by = ScoredBy(
            probe=use.name if known is None else known.probe,
            probe_sha256="" if known is None else known.probe_sha256,
            engine_sha256=str(entry.get("sha256")),
            role="text" if entry.get("aggregate") == "attention" else "tokens",
            layers=() if known is None else known.layers,
            site=None if known is None else known.site,
            positions=use.positions,
        )
        columns.append(Column(by, read, scores))
    return tuple(columns)


def _read_by(use: ProbeUse, n_prompt: int, n_completion: int) -> range | tuple[int, ...]:
    n_max = n_prompt + max(n_completion - 1, 0)
    try:
        read = resolve_positions(use.positions, n_prompt=n_prompt, n_max=n_max, field="positions")
    except SpecError:  # a position behind the end of this text
        named = cast("tuple[int, ...]", use.positions)
        read = tuple(p + n_prompt if p < 0 else p for p in named)
    # In the order of the text, and only as far as it goes.
    return read if isinstance(read, range) else tuple(sorted(p for p in read if 0 <= p < n_max))


_DIGITS = 16

SCORES: MemoryStore[ScoreData] = MemoryStore()
"""Token scores that this process holds."""


class ProbeScores(LoggedHandle):
    """Scores that probes in the engine gave to the tokens of one model call.

    The handle is small. The scores stand in a file beside the log, with the hash of each probe,
    its layers and the tokens that it read; in the log the handle is a reference to the file.
    Outside an eval they are in memory.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.model import probe_scores


        async def main() -> None:
            model = get_model("vllm-lens/organism/checkpoint", probes="organism/deception-lr")
            output = await model.generate("Who is the founder of the town Velosh?")
            scores = probe_scores(output)
            assert len(scores.of("organism/deception-lr").scores) == scores.n_completion - 1


        anyio.run(main)
        ```
    """

    probes: tuple[str, ...]
    """Names of the probes that scored the call; the file has their hashes, layers and tokens."""
    sha256: str
    """Of the file, 16 hex digits."""
    n_completion: int
    """Sampled tokens; the last one is never read."""

    KIND = SCORES_REFERENCE
    METADATA = "probe_scores"
    MEMORY = SCORES

    _activations: Activations | None = PrivateAttr(default=None)

    @classmethod
    def keep(
        cls, data: ScoreData, *, uri: str | None, root: str | None
    ) -> tuple[ProbeScores, bytes]:
        """Make a handle, whose scores are in memory.

        Args:
            data: the scores.
            uri: where their file will lie; None where it is not known yet.
            root: folder that a relative `uri` starts from.

        Returns:
            The handle, and the contents of its file, which the caller writes.
        """
        content = data.encode()
        handle = cls.model_construct(
            _fields_set=_FIELDS,
            probes=tuple(dict.fromkeys(column.by.probe for column in data.columns)),
            sha256=hashlib.sha256(content).hexdigest()[:_DIGITS],
            n_prompt=len(data.prompt_token_ids),
            n_completion=len(data.token_ids),
            uri=uri,
            root=root,
        )
        handle.remember(data)
        return handle, content

    def of(self, probe: str) -> Column:
        """The token scores of a probe.

        Args:
            probe: name of its card, or hash of its file.

        Returns:
            Positions and scores.

        Raises:
            ArtifactError: it scored nothing here, or the file is missing.
        """
        for column in self.columns:
            if column.by.role == "tokens" and probe in (column.by.probe, column.by.probe_sha256):
                return column
        raise ArtifactError(
            f"probe {probe!r} did not score this call; {', '.join(self.probes)} did"
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """All scores."""
        columns: tuple[Column, ...] = self._load().columns
        return columns

    @property
    def activations(self) -> Activations | None:
        """What the same call captured, where this process made it."""
        return self._activations

    def beside(self, activations: Activations | None) -> None:
        """Attach the activations that the same call captured."""
        self._activations = activations

    def _contents(self) -> dict[str, Any]:
        return {"probes": list(self.probes)}

    def _most(self) -> int:
        # A number and a position for each token.
        return 16 * (self.n_prompt + self.n_completion) * max(len(self.probes), 1)

    def _decoded(self, content: bytes, where: str) -> ScoreData:
        judge_digest(where, hashlib.sha256(content).hexdigest()[:_DIGITS], self.sha256)
        return ScoreData.decode(content, where=where)

    def _encoded(self) -> bytes:
        data: ScoreData = self._load()
        return data.encode()


_FIELDS = set(ProbeScores.model_fields)


SCORED_MESSAGES: MessageIndex[ProbeScores] = MessageIndex()
"""Handles of this process, by message id."""
