"""How well a natural-language autoencoder's words give back the rows that they were made of."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import anyio.to_thread
import numpy as np
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, Value, metric, scorer
from inspect_ai.solver import TaskState
from numpy.typing import NDArray

from inspect_lens._base.untrusted import parsing
from inspect_lens._intake import encode_tensors, read_tensors
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations
from inspect_lens.model._places import MemoryStore
from inspect_lens.model._read import read_sidecar, write_sidecar
from inspect_lens.oracle import fraction_explained, reconstruct
from inspect_lens.oracle._nla import VerbalisePlan
from inspect_lens.oracle._reconstruct import load_reconstructor
from inspect_lens.reading import CallSelection, OnMissing, Turn, read_calls
from inspect_lens.reading._samples import Found
from inspect_lens.reading._shared import shared_parameters

from ._labels import cluster_of
from ._probe import no_tokens

__all__ = ["fraction_explained_metric", "reconstruction_score"]

logger = logging.getLogger(__name__)

ROWS: Final = "reconstructions/1"
"""`$lens` of the reference in `Score.metadata["rows"]`."""


class _Parts(NamedTuple):
    """What a file beside the log holds."""

    rows: NDArray[np.float32]
    reconstructions: NDArray[np.float32]
    empty_text: NDArray[np.float32]
    """(1, hidden)."""

    @property
    def width(self) -> int:
        """Of the rows."""
        return int(self.rows.shape[1])

    @property
    def nbytes(self) -> int:
        """Of all three."""
        return sum(part.nbytes for part in self)


_READ: MemoryStore[_Parts] = MemoryStore(1 << 28)
"""By the hash in the reference: a metric is computed again and again while samples end."""


@metric(name="fraction_explained", scores="unreduced")
@shared_parameters
def fraction_explained_metric(cluster: str | None = None) -> Metric:
    """Fraction of the variance of all scored rows that their reconstructions explain.

    It is `fraction_explained` over the rows of all samples and epochs of the log. Its mean is that
    of exactly these rows, each at unit length. The rows of a sample are one group.

    Args:
        cluster: key of the sample metadata that says which samples are one group, such as the
            scenario; the sample by default.

    Returns:
        The metric: `fraction_explained`; `shuffled`, each row with the descriptions of other
        groups; `empty_text`, the same constant for each; the numbers `rows` and `groups`; and
        `left_out`, samples whose file cannot be read or has rows of another width. The mean row
        would have 0. With fewer than two rows the fractions are NaN.

    Example:
        ```python
        from inspect_lens.scorer import fraction_explained_metric, reconstruction_score

        by_town = [fraction_explained_metric(cluster="town")]
        # score(log, reconstruction_score("av", "ar"), metrics=by_town)
        ```
    """

    def compute(scores: list[SampleScore]) -> Value:
        groups: list[Hashable] = []
        found: list[_Parts] = []
        left_out: list[str] = []
        # Samples end in any order, and what stands for the empty text should not depend on it.
        for i, sample in enumerate(sorted(scores, key=lambda one: str(one.sample_id))):
            reference = (sample.score.metadata or {}).get("rows")
            if not isinstance(reference, Mapping):
                continue
            # Without an id nothing says that two scores are of one sample.
            own: Hashable = ("no id", i) if sample.sample_id is None else sample.sample_id
            group = cluster_of(sample, cluster) if cluster else own
            try:
                parts = _read_rows(reference)
            except (ArtifactError, OSError) as error:
                left_out.append(str(error))
                continue
            if found and parts.width != found[0].width:
                left_out.append(f"{reference['uri']}: rows of width {parts.width}, and the first "
                                f"ones have {found[0].width}")  # fmt: skip
                continue
            groups += [group] * len(parts.rows)
            found.append(parts)
        if left_out:
            logger.warning(
                "fraction_explained is without %d of %d samples: %s",
                len(left_out), len(scores), left_out[0],
            )  # fmt: skip
        values = dict.fromkeys(("fraction_explained", "shuffled", "empty_text"), math.nan)
        values |= {"rows": len(groups), "groups": len(set(groups)), "left_out": len(left_out)}
        if len(groups) < 2:  # while the first sample is scored, or of answers without a token
            return dict(values)
        try:
            made = fraction_explained(
                np.concatenate([parts.rows for parts in found]),
                np.concatenate([parts.reconstructions for parts in found]),
                groups=groups, empty_text=found[0].empty_text,
            )  # fmt: skip
        except SpecError as error:
            # The samples are paid for; a number that cannot be told must not fail the eval.
            logger.warning("fraction_explained is NaN: %s", error)
            return dict(values)
        empty = math.nan if made.empty_text is None else made.empty_text
        made_of = {"fraction_explained": made.fraction, "shuffled": made.shuffled}
        return dict(values | made_of | {"empty_text": empty})

    return compute


@scorer(metrics=[fraction_explained_metric()])
@shared_parameters
def reconstruction_score(
    verbaliser: str,
    reconstructor: str,
    layer: int | None = None,
    positions: str | list[int] = "completion",
    last: int | None = 1,
    max_tokens: int = 200,
    source: str = "auto",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    name: str | None = None,
) -> Scorer:
    """Put rows of each answer into words, turn the words back into rows, and compare.

    The value is the cosine of row and reconstruction, the mean over the sample's rows. What the
    words hold of the rows of the whole log is the metric's fraction of variance explained. The
    model of the role `verbaliser` serves the one checkpoint, that of `reconstructor` the other:
    `--model-role verbaliser=vllm-lens/…`.

    Args:
        verbaliser: checkpoint folder, `nla_meta.yaml`, or `hf://owner/repository`.
        reconstructor: checkpoint folder, or `hf://owner/repository`.
        layer: whose rows are put into words; that of the verbaliser's training by default.
        positions: tokens to choose from; those of the completion by default.
        max_tokens: longest text.
        name: under which tables show the score; the verbaliser by default.

    Returns:
        The scorer. Its metadata has the text, position and cosine of each row, and refers to a
        file beside the log with rows and reconstructions, which the metric reads. A sample
        without a token to read is unscored.

    Raises:
        SpecError: an argument is wrong, or the two halves do not belong together.
        ArtifactError: no such checkpoints; while scoring, activations or tokenizers that do not
            fit.

    Source:
        kitft/natural_language_autoencoders (2026).

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import reconstruction_score
        from inspect_lens.solver import with_capture

        model = "vllm-lens/organism/checkpoint"  # as both halves, which nobody trained it for
        scorer = reconstruction_score("nla/av", "nla/ar", max_tokens=8)
        task = Task(organism_dataset("demo")[:4], solver=with_capture([5]), scorer=scorer)
        roles = {"verbaliser": model, "reconstructor": model}
        (log,) = eval(task, model=model, model_roles=roles, temperature=0, max_tokens=24)
        metrics = log.results.scores[0].metrics
        print(metrics["fraction_explained"].value, metrics["shuffled"].value)
        ```
    """
    plan = VerbalisePlan(
        verbaliser, layer=layer, positions=positions, last=last, controls=False, seed=0,
        max_tokens=max_tokens, source=source,
    )  # fmt: skip
    back = load_reconstructor(reconstructor)
    if (back.hidden, back.layer) != (plan.verbaliser.hidden, plan.layer):
        raise SpecError(
            f"reconstructor={reconstructor!r}: gives rows of layer {back.layer} and width "
            f"{back.hidden}, and those of {verbaliser!r} are of layer {plan.layer} and width "
            f"{plan.verbaliser.hidden}; name the two halves of one autoencoder"
        )
    bases = (plan.verbaliser.base_model, back.base_model)
    if all(bases) and bases[0] != bases[1]:
        raise SpecError(
            f"reconstructor={reconstructor!r}: gives rows of {bases[1]!r}, and {verbaliser!r} "
            f"reads those of {bases[0]!r}; name the two halves of one autoencoder"
        )
    title = name or plan.verbaliser.name
    selection = CallSelection.of(roles=roles, on_missing=on_missing)

    async def score(state: TaskState, target: Target) -> Score:
        async def read(turn: Turn, model: Model | None) -> Found[_Rebuilt] | None:
            if not turn.output.choices:
                return None
            words = get_model(role="verbaliser", required=True)
            said = await plan.ask(turn.output, words, model)
            if not said:
                return None
            texts = [answer.answer for answer, _ in said]
            made = await reconstruct(
                [*texts, ""], back, model=get_model(role="reconstructor", required=True)
            )
            rows = np.stack([row for _, row in said])
            facts = {
                "verbaliser": plan.verbaliser.name, "reconstructor": back.name,
                "layer": plan.layer, "source": said[0][0].source, "texts": texts,
                "token_positions": [answer.positions[0] for answer, _ in said],
            }  # fmt: skip
            cosines = _cosines(rows, made[:-1])
            return Found(float(cosines.mean()), _Rebuilt(cosines, rows, made, facts))

        found = await read_calls(selection, state, read)
        if not found.read:
            return no_tokens(found, plan.positions)
        value, rebuilt, _ = found.top.reading
        keep = partial(_keep_rows, rebuilt, beside=activations(found.top.turn.output))
        cosines, texts = rebuilt.cosines, rebuilt.facts["texts"]
        return Score(
            value=value,
            answer=texts[-1],
            explanation=f"Row of token {rebuilt.facts['token_positions'][-1]} in words: "
            f"{texts[-1]!r}. Cosine with what is made of them: {cosines[-1]:.3f}.{found.say()}",
            metadata={"name": title, "cosines": [round(float(c), 6) for c in cosines]}
            | rebuilt.facts
            | found.facts()
            | await anyio.to_thread.run_sync(keep),
        )

    return score


class _Rebuilt(NamedTuple):
    """Rows of one call, and what came back of their descriptions."""

    cosines: NDArray[np.float64]
    rows: NDArray[np.float32]
    made: NDArray[np.float32]
    """(rows + 1, hidden); the last one of an empty text."""
    facts: dict[str, Any]


def _cosines(rows: NDArray[np.float32], made: NDArray[np.float32]) -> NDArray[np.float64]:
    x, guess = rows.astype(np.float64), made.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(guess, axis=1)
    if not np.isfinite(lengths).all() or not lengths.all():
        raise ArtifactError(
            "reconstruction_score: a row, or what was made of its description, is zero or not "
            "finite; look whether the right checkpoint is served"
        )
    return np.asarray((x * guess).sum(axis=1) / lengths)


def _keep_rows(found: _Rebuilt, *, beside: Any) -> dict[str, Any]:
    """Write rows and reconstructions beside the log; a reference to the file."""
    parts = _Parts(found.rows, found.made[:-1], found.made[-1:])
    tensors = {name: ("float32", part) for name, part in parts._asdict().items()}
    data = b"".join(encode_tensors(tensors, {"format": ROWS}))
    reference = write_sidecar(data, kind=ROWS, name="reconstructions", beside=beside)
    if reference is None:
        logger.warning(
            "reconstruction_score: there is no log beside which rows could be kept, so the "
            "fraction of variance explained cannot be told; set INSPECT_LENS_DIR"
        )
        return {}
    _READ.put(reference["sha256"], parts)
    return {"rows": reference}


def _read_rows(reference: Mapping[str, Any]) -> _Parts:
    key = str(reference.get("sha256"))
    if (known := _READ.get(key)) is not None:
        return known
    what = "a file of reconstructions of this release"
    with parsing(reference.get("uri"), what, f"wanted is {ROWS}"):
        tensors, _ = read_tensors(read_sidecar(reference, kind=ROWS))
        parts = _Parts(*(np.asarray(tensors[n][1], dtype=np.float32) for n in _Parts._fields))
        if any(part.ndim != 2 for part in parts):
            raise ValueError("a tensor that is no matrix")
    _READ.put(key, parts)
    return parts
