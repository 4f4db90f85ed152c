"""`ProbeReader`: a probe and what it reads, checked once; and what it says of a model call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from inspect_ai.model import Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens._base.concurrency import MadeOnce
from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model import Activations, ProbeScores, activations, probe_scores
from inspect_lens.model._scope import served_path
from inspect_lens.model._scores import as_array
from inspect_lens.probe import (
    SENTENCE_POOL,
    AnyProbe,
    Calibration,
    CardPoint,
    Found,
    NeuralProbe,
    Statistic,
    check_model,
    found_above,
    load_probe,
    parse_head_pool,
    parse_pool,
    pool_scores,
    running_pool,
)
from inspect_lens.spec import Numerics, Positions, parse_positions

from ._calls import CallReader, CallSelection, OnMissing, Over, positions_for
from ._rows import (
    Rows,
    Source,
    captured_rows,
    has_nothing_to_read,
    ids_at,
    in_thread,
    parse_source,
    places,
    read_rows,
    select_positions,
)
from ._shared import shared_parameters
from ._thresholds import (
    Promise,
    ThresholdLike,
    Verdict,
    acting_point,
    acting_value,
    promise,
    verdict,
)
from ._token_scores import TokenScores

__all__ = ["ProbeReader", "Reading"]


class ScoredTokens(NamedTuple):
    """Scores of the selected tokens of one output, in the place of their activations.

    What `Rows` says of activations, this says of scores; neither has the other's array.
    """

    scores: NDArray[np.float64]
    """(tokens,) what the probe's `score_tokens` says of them."""
    layers: tuple[int, ...]
    positions: range | tuple[int, ...]
    """Absolute positions over prompt and completion, in the order of the tokens."""
    source: Literal["engine"]
    n_prompt: int
    """Prompt tokens of the call."""
    token_ids: tuple[int, ...]
    """Id of the token at each position."""
    handle: ProbeScores
    """What the scores were taken from."""
    text: float | None
    """Score of all these tokens, of a pool that is no rule over token scores."""


def pick_scores(
    handle: ProbeScores,
    form: str,
    of_text: str | None,
    positions: Positions,
    layers: tuple[int, ...],
) -> ScoredTokens | None:
    """Take the scores of a probe out of what the engine said of a call; may read a file."""
    wanted = select_positions(positions, handle.n_prompt, handle.n_completion)
    if wanted is None:
        return None
    found = {column.by.engine_sha256: column for column in handle.columns}
    column = found.get(form)
    if column is None:
        raise ArtifactError(f"the engine ran {', '.join(handle.probes)}, and not this probe")
    try:
        at = places(column.positions, wanted)
    except KeyError as error:
        what = f"token position {error.args[0]} was not scored by the engine"
        raise ArtifactError(what) from None
    text = None
    if of_text is not None:
        running = found.get(of_text)
        first = tuple(running.positions[: len(wanted)]) if running is not None else ()
        if running is None or first != tuple(wanted):
            raise ArtifactError("the engine's attention was over other tokens")
        text = float(running.scores[len(wanted) - 1])
    ids = (*handle.prompt_token_ids, *handle.token_ids)
    chosen, scores = ids_at(ids, wanted), column.scores[at].astype(np.float64)
    return ScoredTokens(scores, layers, wanted, "engine", handle.n_prompt, chosen, handle, text)


@dataclass(frozen=True)
class Reading:
    """Score, token scores and threshold of a probe on one model call."""

    value: float
    """The pooled score; larger means more of what the probe finds."""
    rows: Rows | ScoredTokens
    """The activations that were read, or the scores that the engine gave to their tokens."""
    reader: ProbeReader
    scores: NDArray[np.float64] = field(repr=False, compare=False)
    """(tokens,) score of each token that was read, at `rows.positions`."""
    model_verified: bool
    """The model's fingerprint is that of the probe's card."""
    model_name: str | None = None
    """Of the model that made the call, where it was said."""
    refused: str | None = None
    """Why the engine did not run the probe, where it was asked to."""
    differences: tuple[str, ...] = ()
    """How engine, dtype and quantisation differ from those that the thresholds were set with, in
    phrases such as `dtype float16 instead of bfloat16`; the rate of a threshold may not hold then.
    Empty where nothing differs, or where the card or the server does not say."""

    @property
    def source(self) -> Literal["engine", "rows", "recomputed"]:
        """Where the scores are from.

        `engine`: a probe in the engine gave them as the tokens were written; `rows`: captured
        activations; `recomputed`: activations of the same tokens, fed again.
        """
        return self.rows.source

    @property
    def threshold(self) -> CardPoint | None:
        """Of the probe's card, for the settings that it was set for."""
        return self.reader.threshold

    @property
    def rate(self) -> float | None:
        """False positive rate of the threshold, where it holds.

        None without a threshold, for a model that is not known to be the card's, and for an answer
        of another length.
        """
        return None if self._promise is None else self._promise.rates.get("fpr")

    @cached_property
    def _promise(self) -> Promise | None:
        """What the threshold promises of this answer; None without one."""
        if self.threshold is None:
            return None
        n, cut = len(self.rows.positions), self.threshold.value
        return promise(self.reader, cut, self.model_name, n, differences=self.differences)

    @property
    def is_above(self) -> bool | None:
        """Whether the value is above the threshold; None without one."""
        return None if self.threshold is None else self.value > self.threshold.value

    @property
    def verdict(self) -> Verdict | None:
        """The same in words."""
        return verdict(self.value, self.threshold and self.threshold.value)

    @property
    def probability(self) -> float | None:
        """Calibrated probability of the positive class; None without a calibration."""
        calibration = self.reader.calibration
        return None if calibration is None else calibration.probability(self.value)

    def token_scores(self) -> NDArray[np.float64]:
        """Score of each token that was read, (tokens,) float64, at `rows.positions`."""
        return self.scores

    def first_crossing(self, threshold: float | None = None, *, pool: str = "last") -> int | None:
        """Index into `rows.positions` of the first token that raises the alarm, or None.

        Args:
            threshold: by default that of the card for an alarm on this pool.
            pool: what is compared: `last` for single tokens, `ema:0.1`, `mean`, …

        Raises:
            SpecError: there is no threshold, or the pool is unknown.
            ArtifactError: the pool goes by sentences, and there is no tokenizer.
        """
        cut = acting_value(self.reader, threshold, Statistic(over="alarm", pool=pool))
        return next((i for i, value in enumerate(self.running(pool)) if value > cut), None)

    def running(self, pool: str) -> NDArray[np.float64]:
        """The pooled score after each token that was read, (tokens,) float64.

        Args:
            pool: as of `first_crossing`.
        """
        ends = self.reader.sentence_ends(self.rows, self.model_name, pool)
        return running_pool(self.token_scores(), pool, ends=ends)

    def record(
        self, *, label: str | None = None, message_id: str | None = None, turn: int = 0
    ) -> TokenScores:
        """The token scores with all that a reader needs to draw them; see `read_token_scores`.

        Args:
            label: key of a dict score; the probe's name by default.
            message_id: assistant message of the call.
            turn: 0-based number of the call in its sample.
        """
        rows, probe, chosen = self.rows, self.reader.probe, self.reader.selection
        return TokenScores(
            probe=label or probe.name,
            probe_sha256=probe.sha256,
            layers=rows.layers,
            site=str(probe.site),
            pool=self.reader.pool,
            threshold=self.threshold.value if self.threshold else None,
            value=self.value,
            message_id=message_id,
            turn=turn,
            source=rows.source,
            n_prompt=rows.n_prompt,
            positions=as_array(rows.positions),
            token_ids=np.asarray(rows.token_ids, dtype=np.int64),
            scores=self.token_scores(),
            # A file of its own where other tokens are read than the engine scored.
            stands_in=rows.handle if isinstance(rows, ScoredTokens) and not chosen else None,
        )

    def explain(self) -> str:
        """One or two sentences for a reader."""
        rows, plan = self.rows, self.reader
        layers = ", ".join(map(str, rows.layers))
        text = (
            f"{plan.probe.name} scores {self.value:.4g} ({plan.pool} over {len(rows.positions)} "
            f"tokens at layer {layers}, {SAID[rows.source]})."
        )
        if (asked := plan.probe.card.follow_up) is not None:
            text += f" It was made for replies to the question {asked.question!r} only."
        if self.threshold is None or self._promise is None:
            return f"{text} No threshold was calibrated for these settings."
        return f"{text} That is {self.verdict} {self.threshold.value:.4g}. {self._promise.text}"

    def metadata(self) -> dict[str, Any]:
        """Small facts only: Inspect writes this into every sample of the log."""
        plan = self.reader
        facts = {
            "probe": plan.probe.name,
            "probe_sha256": plan.probe.sha256,
            "layers": list(self.rows.layers),
            "pool": plan.pool,
            "n_tokens": len(self.rows.positions),
            "positions": self._shown_positions(),
            "source": self.rows.source,
            "threshold": self.threshold.value if self.threshold else None,
            "fpr": None,
            "model_verified": self.model_verified,
        }
        if self._promise is not None:
            facts |= self._promise.rates
        if self.reader.selection:
            facts["selection"] = self.reader.selection
        if self.refused is not None:
            facts["not_in_engine"] = self.refused
        if (why := plan.no_rate(self.model_name)) is not None:
            facts["no_rate"] = why
        if self.differences:
            facts["computed_with"] = list(self.differences)
        calibration = self.reader.calibration
        if calibration is not None:
            facts["probability"] = self.probability
            facts["calibration"] = _small(calibration)
        return facts

    def _shown_positions(self) -> list[int]:
        """A range as [start, end), as of a selection, which may have gaps; others as they are."""
        read = self.rows.positions
        if isinstance(read, range):
            return [read.start, read.stop]
        return [min(read), max(read) + 1] if self.reader.selection else list(read)


SAID = {"engine": "in the engine", "rows": "captured", "recomputed": "recomputed"}


def _small(calibration: Calibration) -> dict[str, Any]:
    """What a metric needs to compute probabilities again; steps of isotonic are too many."""
    facts = calibration.model_dump(include={"method", "slope", "intercept"}, exclude_none=True)
    return {**facts, "set": calibration.set}


logger = logging.getLogger(__name__)

_TOLD: set[tuple[str, str | None, tuple[str, ...]]] = set()
"""Probes, models and differences that were warned of: a log has many calls and scorers."""


@dataclass(frozen=True, kw_only=True)
class ProbeReader(CallReader):
    """A probe, the tokens that it reads and how their scores become one.

    Make one with `ProbeReader.of`, which checks everything before any sample runs.

    Example:
        ```python
        import anyio
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import ProbeReader

        reader = ProbeReader.of("organism/deception-lr", source="captured")
        sample = read_eval_log("logs/honesty.eval").samples[1]
        reading = anyio.run(reader.read, sample.output)
        print(reading.value, reading.verdict, reading.probability, reading.explain())
        print(reading.first_crossing(0.5))  # the first token above 0.5, or None
        assert reading.token_scores().shape == (len(reading.rows.positions),)
        ```
    """

    probe: AnyProbe
    threshold: CardPoint | None
    """For what the reader says of a whole answer; None where the card has none for these settings.
    """
    check_model: bool = True
    calibration: Calibration | None = None
    """From scores to probabilities; None when it does not hold for these settings."""
    same_tokens: bool = True
    """Whether layer, positions and selection are those that the card's thresholds hold for."""
    acts: CardPoint | None = None
    """The card's threshold that acts, where that is not `threshold`."""
    _verified: MadeOnce[bool] = field(default_factory=MadeOnce, repr=False, compare=False)
    """Whether a model is known to be the card's, by name."""
    _others: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Models that are not known to be the card's, with the reason, by name."""

    @classmethod
    @shared_parameters
    def of(
        cls,
        probe: str | Path | AnyProbe,
        *,
        layer: int | None = None,
        positions: Positions | list[int] | None = None,
        pool: str | None = None,
        source: Source = "auto",
        check_model: bool = True,
        tokenizer: str | None = None,
        selection: str | None = None,
        threshold: ThresholdLike = None,
        over: Over = "last",
        roles: Sequence[str] | None = None,
        on_missing: OnMissing = "error",
    ) -> Self:
        """Load a probe and settle how it reads.

        Args:
            threshold: an operating point of the card, such as `fpr=0.05`; its first by default.
                A number that is no point of the card changes nothing here.

        Raises:
            ArtifactError: no such probe.
        """
        whole = loaded = load_probe(probe)
        if layer is not None:
            loaded = loaded.at(layer)
        chosen = loaded.card.selection if selection is None else selection
        if positions is not None:
            read = parse_positions(positions, field="positions")
        elif chosen and chosen != loaded.card.selection:
            read = positions_for(chosen)
        else:
            read = loaded.positions
        if chosen:
            positions_for(chosen)  # refuse a wrong name before any sample
        rule = loaded.pool if pool is None else str(parse_pool(pool))
        card = (whole.layers, loaded.positions, loaded.card.selection)
        same = (loaded.layers, read, chosen) == card
        statistic = Statistic(over="answer", pool=rule)
        return cls(
            probe=loaded,
            threshold=acting_point(loaded, threshold, statistic, same_tokens=same),
            calibration=loaded.card.calibration if same and rule == loaded.pool else None,
            check_model=check_model,
            same_tokens=same,
            positions=read,
            pool=rule,
            source=parse_source(source),
            selection=chosen,
            tokenizer=tokenizer,
            calls=CallSelection.of(over=over, roles=roles, on_missing=on_missing),
        )

    @cached_property
    def statistic(self) -> Statistic:
        """What the reader says of a whole answer."""
        return Statistic(over="answer", pool=self.pool)

    @property
    def capture(self) -> dict[str, Any]:
        """What a call has to capture to be read, as fields of a `CaptureSpec`."""
        probe = self.probe
        return {"layers": list(probe.layers), "site": probe.site, "positions": self.positions}

    def point_for(self, statistic: Statistic, threshold: ThresholdLike = None) -> CardPoint | None:
        """The card's threshold for a statistic of what is read; None where it has none.

        Args:
            statistic: what is to be compared.
            threshold: as `of` takes it.

        Raises:
            SpecError: the card has no point of this name for the statistic.
        """
        if statistic == self.statistic:
            return self.threshold
        return acting_point(self.probe, threshold, statistic, same_tokens=self.same_tokens)

    def found_above(self, cut: float, statistic: Statistic) -> Found | None:
        """Recall of a threshold on the held-out sets that the card has it for.

        Args:
            cut: a threshold that the card has.
            statistic: that it is compared with.

        Returns:
            As `inspect_lens.probe.found_above` says it; None without one.
        """
        key = (cut, str(statistic))
        if key not in self._found:
            self._found[key] = found_above(self.probe.card, cut, statistic)
        return self._found[key]

    async def read(
        self,
        output: ModelOutput | Activations | ProbeScores,
        *,
        model_name: str | None = None,
        model: Model | None = None,
    ) -> Reading | None:
        """Score one model call: where the engine scored it, else from its rows.

        Args:
            output: of the call, or its activations or scores alone.
            model_name: of the model that made it, such as `state.model.name`; compared with the
                probe's card.
            model: that recomputes; the active one by default.

        Returns:
            The reading, or None when the selection has no token in this output.

        Raises:
            ArtifactError: activations are missing, the model is not the probe's, or the pool goes
                by sentences and there is no tokenizer.
            UnsupportedError: the model cannot recompute.
        """
        if model_name is not None:
            await self._verified.of(model_name, lambda: self._is_own(model_name, model))
        if isinstance(output, ModelOutput) and has_nothing_to_read(output):
            return None
        unread = ""
        if self.source != "recompute":
            scores = output if isinstance(output, ProbeScores) else None
            if isinstance(output, ModelOutput):
                scores = probe_scores(output)
            try:
                if scores is not None and scores.in_memory and self._pools_at_once:
                    return self._of_scores(scores, model_name)
                if scores is not None:
                    return await in_thread(lambda: self._of_scores(scores, model_name))
            except ArtifactError as error:
                unread = f"{error}; "  # its rows may be there
        call = (
            await in_thread(lambda: _behind(output)) if isinstance(output, ProbeScores) else output
        )
        handle = activations(call)
        refused = _refused(call, self.probe.name)
        if handle is not None and self.source != "recompute":
            try:
                # Rows, scores and pool in one visit to a thread.
                return await in_thread(lambda: self._of_handle(handle, model_name, refused))
            except ArtifactError:
                pass  # said below, or recomputed
        try:
            rows = await read_rows(
                call,
                layers=self.probe.layers,
                positions=self.positions,
                source=self.source,
                site=self.probe.site,
                model=model,
            )
        except (ArtifactError, UnsupportedError) as error:
            raise type(error)(f"{unread}{error}") from None
        if rows is None:
            return None
        return await in_thread(lambda: self._of_rows(rows, model_name, refused))

    async def _is_own(self, model_name: str, model: Model | None) -> bool:
        """Whether a model is known by its weights to be the card's; refuses that it is another."""
        known = self.probe.card.model
        try:
            if await in_thread(lambda: check_model(self.probe, model_name)):
                return True
            served = await served_path(model_name, model) or model_name
            if await in_thread(lambda: check_model(self.probe, served)):
                return True
        except ArtifactError as error:
            if self.check_model:
                raise
            self._others[model_name] = f"no rate of it holds for {model_name!r}."
            logger.warning("no rate of the card holds: %s", error)
            return False
        if known is not None and known.name not in (model_name, served, "unknown"):
            self._others[model_name] = (
                f"no rate of it is known for {model_name!r}: its weights or its adapter are not on "
                "this machine, so nobody can tell whether it is that model; calibrate on its "
                "answers to know one."
            )
            logger.warning(
                "probe %s: it was made for %r, and whether %r is that model is not known, as its "
                "weights are not on this machine; so no rate of the card is given",
                self.probe.name, known.name, model_name,
            )  # fmt: skip
        return False

    def no_rate(self, model_name: str | None) -> str | None:
        """Why no rate of the card is known to hold for a model that was read.

        Args:
            model_name: as it was given to `read`; None for any of those.

        Returns:
            Half a sentence; None where the weights are those of the card's model, or it has the
            name of that, or the card names none.
        """
        if model_name is None:
            return next(iter(self._others.values()), None)
        return self._others.get(model_name)

    def _compare(
        self, call: Activations | ProbeScores | None, model_name: str | None
    ) -> tuple[str, ...]:
        """How the numerics of a call differ from the thresholds' own; warns once of each."""
        if call is None or self._set_with is None:
            return ()
        card, here = self.probe.card, call.numerics
        found = () if here is None else self._set_with.differences(here)
        if found and (told := (card.name, model_name, found)) not in _TOLD:
            _TOLD.add(told)
            logger.warning(
                "probe %s: its thresholds were set elsewhere, and %s computes with %s; their rates "
                "may not hold here; inspect-lens probe check measures by how much they change",
                card.name, repr(model_name) if model_name else "this model", " and ".join(found),
            )  # fmt: skip
        return found

    def read_captured(
        self, handle: Activations | ProbeScores, *, model_name: str | None = None
    ) -> Reading | None:
        """Score a call without an event loop, as for a data frame.

        The model is not compared with the card: a log's model may be anywhere.

        Args:
            handle: activations of one call, or its scores.
            model_name: of the model that made it, whose tokenizer tells sentences and selections.

        Returns:
            The reading, or None when the selection has no token in this call.

        Raises:
            ArtifactError: what the probe reads was not captured, or the pool goes by sentences and
                there is no tokenizer.
        """
        if isinstance(handle, ProbeScores):
            return self._of_scores(handle, model_name)
        return self._of_handle(handle, model_name, None)

    def _of_handle(
        self, handle: Activations, model_name: str | None, refused: str | None
    ) -> Reading | None:
        rows = captured_rows(
            handle, layers=self.probe.layers, positions=self.positions, site=self.probe.site
        )
        return None if rows is None else self._of_rows(rows, model_name, refused)

    def _of_rows(self, rows: Rows, model_name: str | None, refused: str | None) -> Reading | None:
        read = self.select(rows, model_name)
        if read is None:
            return None
        scores = self.probe.score_tokens(read.acts, read.layers)
        if isinstance(self.probe, NeuralProbe):
            ends = self.sentence_ends(read, model_name)
            value = self.probe.score(read.acts, read.layers, pool=self.pool, ends=ends)
        else:
            value = self._pooled(scores, read, model_name)
        return self._reading(value, scores, read, model_name, refused)

    def _of_scores(self, handle: ProbeScores, model_name: str | None) -> Reading | None:
        """What the engine said, where it ran this probe over these tokens; else ArtifactError."""
        if self._forms is None:
            raise ArtifactError("the engine has no form for this probe")
        form, of_text = self._forms
        if parse_head_pool(self.pool).name != "attention":
            of_text = None  # another pool than its own, over tokens
        if of_text is not None and self.selection:
            raise ArtifactError("the engine's attention was over all tokens, not the selection")
        found = pick_scores(handle, form, of_text, self.positions, self.probe.layers)
        rows = None if found is None else self.select(found, model_name)
        if rows is None:
            return None
        value = self._pooled(rows.scores, rows, model_name) if rows.text is None else rows.text
        return self._reading(value, rows.scores, rows, model_name, None)

    def _reading(
        self,
        value: float,
        scores: NDArray[np.float64],
        rows: Rows | ScoredTokens,
        model_name: str | None,
        refused: str | None,
    ) -> Reading:
        differs = self._compare(rows.handle, model_name)
        verified = self._verified.made.get(model_name or "", False)
        return Reading(value, rows, self, scores, verified, model_name, refused, differs)

    @cached_property
    def _forms(self) -> tuple[str, str | None] | None:
        """Hashes of the engine's forms: of tokens, and of the text up to one where it has that."""
        try:
            tokens, text = self.probe.engine_forms()
        except UnsupportedError:
            return None
        return tokens.sha256, None if text is None else text.sha256

    @cached_property
    def _found(self) -> dict[tuple[float, str], Found | None]:
        """What the card says of thresholds, by value and statistic: each sample asks the same."""
        return {}

    @cached_property
    def _set_with(self) -> Numerics | None:
        """What the threshold that acts was set with; None where none holds, or it is not known."""
        point, card = self.acts or self.threshold, self.probe.card
        if not card.thresholds or not self.same_tokens:
            return None
        return point.numerics if point else card.numerics_of(card.thresholds[0])

    @cached_property
    def _pools_at_once(self) -> bool:
        """Whether pooling token scores takes microseconds, and no tokenizer."""
        return not self.selection and parse_head_pool(self.pool).name != SENTENCE_POOL

    def _pooled(
        self, scores: NDArray[np.float64], rows: Rows | ScoredTokens, model_name: str | None
    ) -> float:
        rule = "max" if self.pool == "multimax" else self.pool  # the engine runs it of one head
        return pool_scores(scores, rule, ends=self.sentence_ends(rows, model_name))

    @property
    def _card_model(self) -> str:
        known = self.probe.card.model
        return known.name if known else ""


def _behind(scores: ProbeScores) -> Activations | ModelOutput:
    """What else is known of a call that the engine scored with other probes."""
    if scores.activations is not None:
        return scores.activations
    output = ModelOutput(model=str(scores.origin.get("model") or ""))
    output.metadata = {
        "prompt_token_ids": list(scores.prompt_token_ids), "token_ids": list(scores.token_ids)
    }  # fmt: skip
    return output


def _refused(output: ModelOutput | Activations, probe: str) -> str | None:
    facts = output.metadata if isinstance(output, ModelOutput) else None
    found = (facts or {}).get("probes_refused")
    return found.get(probe) if isinstance(found, Mapping) else None
