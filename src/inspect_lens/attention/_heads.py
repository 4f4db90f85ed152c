"""Lists of attention heads for Attention Tracker and CoRe: their files, and how to find them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, ValidationError, model_validator

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import check_given, folders_named, name_below, write_atomic
from inspect_lens._base.published import settings_of
from inspect_lens._base.shipped import organism_advice
from inspect_lens._base.untrusted import parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import Threshold
from inspect_lens.spec import Value, explain

from ._pattern import Head, QueriesKeys, Span, check_span

__all__ = [
    "AttentionHeads",
    "HeadMethod",
    "HeadsFound",
    "contrastive_scores",
    "document_scores",
    "find_core_heads",
    "find_tracker_heads",
    "import_heads",
    "instruction_shares",
    "load_heads",
]

HeadMethod = Literal["attention_tracker", "core", "imported"]
"""Method that chose the heads; `imported` for a list from another tool."""

_FORMAT: Final = "inspect_lens/heads/1"
_FOLDER: Final = "heads"


class HeadsFound(Value):
    """How a list of heads was found: method, settings and data."""

    model_config = ConfigDict(allow_inf_nan=False)

    data: str = ""
    """Name of the samples that the heads were found on."""
    n_samples: dict[str, int] = Field(default_factory=dict)
    """How many samples of each kind, such as `normal` and `attack`."""
    rule: str = ""
    """Which heads were taken, in words."""
    settings: dict[str, float] = Field(default_factory=dict)
    """Numbers of the rule."""
    n_heads: int | None = None
    """Heads among which they were found."""
    source: str = ""
    """File or paper that they were taken from."""


class AttentionHeads(Value):
    """Chosen heads of a model, with what chose them, and a threshold where one was set."""

    model_config = ConfigDict(allow_inf_nan=False)

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
        """
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, **self.model_dump(mode="json", exclude_none=True)}
        write_atomic(file, (json.dumps(content, indent=2) + "\n").encode())
        return file


@judged_arguments
def load_heads(
    name: str | Path | AttentionHeads | Mapping[str, Any],
    *,
    method: Literal["attention_tracker", "core"] | None = None,
) -> AttentionHeads:
    """Load a list of attention heads by name or path, or a published one by the model's name.

    Args:
        name: path of the file; or its name below `heads/` of the working directory, of a folder
            above it, or of the installed organism, such as `organism/attention-tracker`;
            or a list, also as plain data, as a log has it; or a model of the hub, such as
            `Qwen/Qwen2-1.5B-Instruct`, whose heads were published (`published_settings`).
        method: which of the lists that were published for a model, where it has several.

    Returns:
        The list. A published one has no threshold.

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
    check_given("heads", name)
    if (path := _find(name)) is None:
        return _published(str(name), method)
    stored = _read(path)
    if stored.pop("format", None) != _FORMAT:
        raise ArtifactError(
            f"{path}: not a list of heads with format {_FORMAT!r}; read a list of another tool "
            "with import_heads and save it"
        )
    return _parse(stored, str(path))


def _published(name: str, method: str | None) -> AttentionHeads:
    found = [one for one in settings_of(name) if one.heads and method in (None, one.kind)]
    if advice := organism_advice(name):
        raise ArtifactError(f"heads: {advice}")
    if len(found) != 1:
        raise ArtifactError(
            f"heads={name!r} was not found; allowed are the path of a JSON file, or "
            f"{name_below(_FOLDER, folders_named(_FOLDER))}, or a model with "
            "published heads (inspect-lens settings MODEL); find heads with calibrate_tracker or "
            "find_core_heads, and save them"
        )
    (one,) = found
    facts = HeadsFound(source=f"{one.source} ({one.licence})", rule=one.note)
    return AttentionHeads.model_validate(
        {"method": one.kind, "model": one.model, "heads": one.heads, "found": facts}
    )


@judged_arguments
def import_heads(path: str | Path, *, model: str = "", top: int = 8) -> AttentionHeads:
    """Read a list of heads that another tool wrote; it has no threshold.

    Args:
        path: a configuration of Attention Tracker or of IBM's vLLM-Hook, which has
            `params.important_heads`; or the scores of CoRe heads, `{"layer-head": score}`.
        model: name of the model, where the file does not say it.
        top: heads to take from scores, the best first.

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
    advice = (
        'read are configurations with params.important_heads, and scores as {"layer-head": score}'
    )
    with parsing(file, "a list of heads", advice):
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


def _parse(stored: Mapping[str, Any], where: str) -> AttentionHeads:
    try:
        return AttentionHeads.model_validate(stored)
    except ValidationError as error:
        raise ArtifactError(f"{where}: not a list of heads ({explain(error)})") from None


def _pair(key: str) -> Head:
    layer, head = key.split("-")
    return int(layer), int(head)


def _find(name: str | Path) -> Path | None:
    given = Path(name).expanduser()
    if given.is_file():
        return given
    relative = given if given.suffix == ".json" else Path(f"{given}.json")
    if not given.is_absolute() and ".." not in given.parts:
        for folder in folders_named(_FOLDER):
            if (folder / relative).is_file():
                return folder / relative
    return None


def _read(path: Path) -> dict[str, Any]:
    with parsing(path, "a list of heads", "allowed is a JSON object"):
        stored: Any = parse_json(read_regular(path))
        if not isinstance(stored, dict):
            raise TypeError(f"it holds a {type(stored).__name__}")
        return stored


_EPSILON: Final = 1e-8


def instruction_shares(
    captured: QueriesKeys,
    heads: Sequence[Head],
    instruction: Sequence[Span],
    data: Sequence[Span],
    *,
    query: int = -1,
) -> NDArray[np.float64]:
    """Attention to the instruction, as a share of that to instruction and data, for each head.

    Args:
        captured: queries and keys of the call.
        heads: (layer, head) of each.
        instruction: token ranges of the instruction.
        data: token ranges of the data, which may hold an injected instruction.
        query: position that looks; the last token of the prompt, which is the last of all where
            one token was sampled.

    Returns:
        (heads,) float64 in [0, 1]; the paper's focus score is their mean over the chosen heads,
        and is low where the data draws the model away.

    Raises:
        SpecError: no range, an empty one, ranges that overlap, one behind the query, or a head
            that was not captured.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, instruction_shares

        rng = np.random.default_rng(0)
        meta = {"scale": 0.35, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
        q, k = (rng.standard_normal((1, 9, 2, 8), dtype=np.float32) for _ in range(2))
        names = {"attn_q": q, "attn_k": k, "qk_layers": [5], "qk_meta": [meta]}
        shares = instruction_shares(QueriesKeys.of(names), [(5, 0), (5, 1)], [(1, 4)], [(4, 8)])
        assert shares.shape == (2,)
        ```
    """
    at = query + captured.n_tokens if query < 0 else query
    spans = [*instruction, *data]
    if not instruction or not data:
        raise SpecError("instruction and data: one token range of each is needed at least")
    ordered = sorted(spans)
    for (_, stop), (first, _) in itertools.pairwise(ordered):
        if first < stop:
            raise SpecError(f"instruction and data: ranges overlap in {ordered}")
    if ordered[-1][1] > at + 1:
        raise SpecError(
            f"instruction and data: {ordered[-1]} reaches behind the query at position {at}, which "
            "cannot see it"
        )
    to = captured.attention_to(heads, spans, queries=[at])[:, 0].astype(np.float64)
    to_instruction = to[:, : len(instruction)].sum(axis=1)
    return np.asarray(to_instruction / (to.sum(axis=1) + _EPSILON))


@judged_arguments
def find_tracker_heads(
    normal: ArrayLike,
    attack: ArrayLike,
    heads: Sequence[Head],
    *,
    n_std: float = 4.0,
    model: str = "",
    data: str = "",
) -> AttentionHeads:
    """Find the important heads: those whose share falls in attacked prompts by more than it varies.

    A head is taken where mean(normal) - mean(attack) exceeds `n_std` times the sum of both standard
    deviations.

    Args:
        normal: (prompts, heads) `instruction_shares` of prompts without an injection.
        attack: (prompts, heads) of prompts with one.
        heads: (layer, head) of each column.
        n_std: how many standard deviations; the paper takes 4.
        model: name of the model.
        data: name of the prompts.

    Returns:
        The heads, the one with the largest margin first, without a threshold.

    Raises:
        SpecError: fewer than two prompts of a kind, shapes that do not fit, or no head whose
            margin is positive.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import find_tracker_heads

        rng = np.random.default_rng(0)
        normal, attack = (0.6 + 0.02 * rng.standard_normal((10, 3)) for _ in range(2))
        attack[:, 1] -= 0.4  # this head is drawn away
        found = find_tracker_heads(normal, attack, [(0, 0), (0, 1), (1, 0)])
        assert found.heads == ((0, 1),)
        ```
    """
    a, b = (np.asarray(x, dtype=np.float64) for x in (normal, attack))
    for name, values in (("normal", a), ("attack", b)):
        if values.ndim != 2 or len(values) < 2 or values.shape[1] != len(heads):
            raise SpecError(
                f"{name}: shape {values.shape}; wanted are two or more prompts and "
                f"{len(heads)} heads"
            )
        if not np.isfinite(values).all():
            raise SpecError(f"{name}: holds NaN or infinite shares; leave such prompts out")
    margin = a.mean(axis=0) - b.mean(axis=0) - n_std * (a.std(axis=0) + b.std(axis=0))
    chosen = [int(i) for i in np.argsort(-margin, kind="stable") if margin[i] > 0]
    if not chosen:
        best = int(margin.argmax())
        fall = a[:, best].mean() - b[:, best].mean()
        fits = fall / max(float(a[:, best].std() + b[:, best].std()), _EPSILON)
        raise SpecError(
            f"n_std={n_std:g}: no head's share falls by so much more than it varies; the closest "
            f"is {tuple(heads[best])}, whose share falls by {fall:.3f}, {fits:.2f} standard "
            "deviations; take a smaller n_std, or this model has no such heads for these attacks"
        )
    return _chosen(
        "attention_tracker", heads, margin, chosen, model=model, data=data,
        n_samples={"normal": len(a), "attack": len(b)}, settings={"n_std": n_std},
        rule="mean(normal) - mean(attack) > n_std * (std(normal) + std(attack))",
        source="arXiv:2411.00348",
    )  # fmt: skip


def _chosen(
    method: Literal["attention_tracker", "core"], heads: Sequence[Head],
    scores: NDArray[np.float64], chosen: Sequence[int], *, model: str, **found: Any,
) -> AttentionHeads:  # fmt: skip
    """The list of some heads, with their scores and how they were found."""
    return AttentionHeads(
        method=method, model=model, head_scores=tuple(float(scores[i]) for i in chosen),
        heads=tuple((int(heads[i][0]), int(heads[i][1])) for i in chosen),
        found=HeadsFound(n_heads=len(heads), **found),
    )  # fmt: skip


_KEPT_STD: Final = 2.0
"""Tokens of a document this many standard deviations below its mean are left out."""


def document_scores(
    captured: QueriesKeys,
    without_query: QueriesKeys,
    heads: AttentionHeads | Sequence[Head],
    documents: Sequence[Span],
    *,
    query: Span,
    empty_query: Span,
) -> NDArray[np.float64]:
    """How relevant each document of a prompt is to the query at its end, by attention.

    A token's score is the attention that it gets from the query, summed over heads. That of an
    empty query, which knows nothing, is subtracted. Tokens far below the mean of their document
    are left out, and the others are summed.

    Args:
        captured: queries and keys of the prompt: documents first, then the query.
        without_query: of the same prompt with `N/A` in the place of the query.
        heads: CoRe heads.
        documents: token range of each document, the same in both prompts.
        query: token range of the query.
        empty_query: token range of `N/A` in the other prompt.

    Returns:
        (documents,) float64; `np.argsort(-scores)` ranks them.

    Raises:
        SpecError: a range that is empty, outside the tokens, or a document behind the query.

    Source:
        Calibration: Chen et al. 2024, arXiv:2410.02642. Heads: Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, document_scores

        meta = {"scale": 1.0, "num_heads": 1, "num_kv_heads": 1, "head_size": 4}
        k = np.eye(4, dtype=np.float32)[[0, 0, 1, 1, 2]].reshape(1, 5, 1, 4)


        def ask(direction: int) -> QueriesKeys:
            q = np.broadcast_to(5 * np.eye(4, dtype=np.float32)[direction], (1, 5, 1, 4))
            return QueriesKeys.of({"attn_q": q, "attn_k": k, "qk_layers": [0], "qk_meta": [meta]})


        spans = {"query": (4, 5), "empty_query": (4, 5)}
        scores = document_scores(ask(1), ask(3), [(0, 0)], [(0, 2), (2, 4)], **spans)
        assert scores[1] > 0 > scores[0]  # the query looks for what the second document has
        ```
    """
    pairs = heads.heads if isinstance(heads, AttentionHeads) else heads
    asked = _token_scores(captured, pairs, documents, query)
    base = _token_scores(without_query, pairs, documents, empty_query)
    return np.array([_pooled(asked[i:j] - base[i:j]) for i, j in documents], dtype=np.float64)


def contrastive_scores(
    captured: QueriesKeys,
    heads: Sequence[Head],
    positive: Span,
    negatives: Sequence[Span],
    *,
    query: Span,
    temperature: float = 0.001,
) -> NDArray[np.float64]:
    """How well each head tells the relevant document of one prompt from others.

    Args:
        captured: queries and keys of the prompt: documents first, then the query.
        heads: (layer, head) of each.
        positive: token range of the relevant document.
        negatives: token ranges of others, best of hard ones.
        query: token range of the query.
        temperature: of the softmax; the paper takes 0.001.

    Returns:
        (heads,) float64 in [0, 1]: the softmax over documents, at the relevant one, of the
        attention that the query pays to each, summed over tokens and divided by the temperature.

    Raises:
        SpecError: no negative, a temperature that is not positive, or as for `document_scores`.

    Source:
        Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, contrastive_scores

        meta = {"scale": 1.0, "num_heads": 2, "num_kv_heads": 2, "head_size": 4}
        k = np.eye(4, dtype=np.float32)[[0, 1, 2]][None, :, None].repeat(2, axis=2)
        q = np.zeros((1, 3, 2, 4), np.float32)
        # Head 0 looks at the second document, head 1 at the first.
        q[0, 2, 0, 1] = q[0, 2, 1, 0] = 5
        names = {"attn_q": q, "attn_k": k, "qk_layers": [7], "qk_meta": [meta]}
        found = contrastive_scores(
            QueriesKeys.of(names), [(7, 0), (7, 1)], (1, 2), [(0, 1)], query=(2, 3)
        )
        assert found.round(3).tolist() == [1.0, 0.0]
        ```
    """
    if not negatives:
        raise SpecError("negatives: none; a head is judged by documents that are not relevant")
    if not temperature > 0:
        raise SpecError(f"temperature={temperature}; allowed is a positive number")
    spans = [positive, *negatives]
    _check(captured, spans, query)
    to = captured.attention_to(heads, spans, queries=range(*query)).astype(np.float64)
    # On use: whatever reads a log imports this folder, and scipy takes a second.
    from scipy.special import softmax

    found: NDArray[np.float64] = softmax(to.mean(axis=1) / temperature, axis=1)[:, 0]
    return found


@judged_arguments
def find_core_heads(
    scores: ArrayLike, heads: Sequence[Head], *, top: int = 8, model: str = "", data: str = ""
) -> AttentionHeads:
    """Choose the heads that tell relevant documents best, the best first.

    Args:
        scores: (prompts, heads) `contrastive_scores` of prompts with known relevant documents.
        heads: (layer, head) of each column.
        top: how many to take; the paper takes 8.
        model: name of the model.
        data: name of the prompts.

    Raises:
        SpecError: shapes that do not fit, NaN, or another number of heads than there are.

    Source:
        Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        from inspect_lens.attention import find_core_heads

        found = find_core_heads([[0.2, 0.9], [0.1, 0.8]], [(3, 0), (3, 1)], top=1)
        assert found.heads == ((3, 1),)
        ```
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or not len(values) or values.shape[1] != len(heads):
        raise SpecError(f"scores: shape {values.shape}; wanted are prompts and {len(heads)} heads")
    if not np.isfinite(values).all():
        raise SpecError("scores: hold NaN or infinite numbers; leave such prompts out")
    if not 1 <= top <= len(heads):
        raise SpecError(f"top={top}; allowed are 1 to {len(heads)}, as many as heads were scored")
    mean = values.mean(axis=0)
    best = [int(i) for i in np.argsort(-mean, kind="stable")[:top]]
    return _chosen(
        "core", heads, mean, best, model=model, data=data, n_samples={"prompts": len(values)},
        rule="largest mean contrastive score", settings={"top": top}, source="arXiv:2510.02219",
    )  # fmt: skip


def _token_scores(
    captured: QueriesKeys, heads: Sequence[Head], documents: Sequence[Span], query: Span
) -> NDArray[np.float64]:
    """(tokens,) attention from the query, mean over its tokens and summed over heads."""
    if not documents:
        raise SpecError("documents: none; name the token range of each")
    _check(captured, documents, query)
    found = captured.mean_attention(heads, queries=range(*query))
    return np.asarray(found.sum(axis=0, dtype=np.float64))


def _check(captured: QueriesKeys, documents: Sequence[Span], query: Span) -> None:
    for span in (*documents, query):
        check_span(span, captured.n_tokens)
    if behind := [span for span in documents if span[1] > query[0]]:
        raise SpecError(
            f"documents: {behind} end behind the first token of the query at {query[0]}, which "
            "cannot see all of them; put documents first"
        )


def _pooled(scores: NDArray[np.float64]) -> float:
    """Sum over the tokens that are not far below the mean."""
    spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
    return float(scores[scores >= scores.mean() - _KEPT_STD * spread].sum())
