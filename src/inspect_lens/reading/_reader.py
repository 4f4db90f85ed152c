"""`ProbeReader`: a probe and what it reads, checked once, applied to any number of calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from inspect_ai.model import Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model import Activations, ProbeScores, activations, probe_scores
from inspect_lens.model._scope import served_path
from inspect_lens.probe import (
    SENTENCE_POOL,
    AnyProbe,
    Calibration,
    CardPoint,
    NeuralProbe,
    Statistic,
    check_model,
    load_probe,
    parse_head_pool,
    parse_pool,
    pool_scores,
)
from inspect_lens.spec import Positions, parse_positions

from ._calls import CallSelection, OnMissing, Over
from ._reading import Forms, Reading, ScoredTokens, forms_of, pick_scores
from ._rows import (
    Rows,
    Source,
    captured_rows,
    has_nothing_to_read,
    in_thread,
    parse_source,
    read_rows,
)
from ._shared import shared_parameters
from ._texts import CallReader, positions_for
from ._thresholds import ThresholdLike, acting_point

logger = logging.getLogger(__name__)


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
        print(reading.explain())
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
    _verified: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)
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

        Returns:
            The reader.

        Raises:
            ArtifactError: no such probe.
            SpecError: an argument is wrong.
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

    @property
    def statistic(self) -> Statistic:
        """What the reader says of a whole answer."""
        return Statistic(over="answer", pool=self.pool)

    @property
    def capture(self) -> dict[str, Any]:
        """What a call has to capture to be read, as fields of a `CaptureSpec`."""
        probe = self.probe
        return {"layers": list(probe.layers), "site": probe.site, "positions": self.positions}

    def point_for(self, statistic: Statistic, threshold: ThresholdLike = None) -> CardPoint | None:
        """The card's threshold for a statistic of what is read.

        Args:
            statistic: what is to be compared.
            threshold: as `of` takes it.

        Returns:
            The point; None where the card has none for these settings.

        Raises:
            SpecError: the card has no point of this name for the statistic.
        """
        if statistic == self.statistic:
            return self.threshold
        return acting_point(self.probe, threshold, statistic, same_tokens=self.same_tokens)

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
        if model_name is not None and model_name not in self._verified:
            self._verified[model_name] = await self._is_own(model_name, model)
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
                f"no rate of it is known for {model_name!r}, whose weights could not be compared."
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

    def read_captured(self, handle: Activations | ProbeScores) -> Reading | None:
        """Score a call without an event loop, as for a data frame.

        The model is not compared with the card: a log's model may be anywhere.

        Args:
            handle: activations of one call, or its scores.

        Returns:
            The reading, or None when the selection has no token in this call.

        Raises:
            ArtifactError: what the probe reads was not captured, or the pool goes by sentences and
                there is no tokenizer.
        """
        if isinstance(handle, ProbeScores):
            return self._of_scores(handle, None)
        return self._of_handle(handle, None, None)

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
        rows = read
        scores = self.probe.score_tokens(rows.acts, rows.layers)
        if isinstance(self.probe, NeuralProbe):
            ends = self.sentence_ends(rows, model_name)
            value = self.probe.score(rows.acts, rows.layers, pool=self.pool, ends=ends)
        else:
            value = self._pooled(scores, rows, model_name)
        return self._reading(value, scores, rows, model_name, refused)

    def _of_scores(self, handle: ProbeScores, model_name: str | None) -> Reading | None:
        """What the engine said, where it ran this probe over these tokens; else ArtifactError."""
        forms = self._forms
        if forms is None:
            raise ArtifactError("the engine has no form for this probe")
        rule = parse_head_pool(self.pool)
        if forms.text is not None and rule.name != "attention":
            forms = forms._replace(text=None)  # another pool than its own, over tokens
        if forms.text is not None and self.selection:
            raise ArtifactError("the engine's attention was over all tokens, not the selection")
        found = pick_scores(handle, forms, self.positions, self.probe.layers)
        rows = None if found is None else self.select(found, model_name)
        if rows is None:
            return None
        value = rows.text
        if value is None:
            value = self._pooled(rows.scores, rows, model_name)
        return self._reading(value, rows.scores, rows, model_name, None)

    def _reading(
        self,
        value: float,
        scores: NDArray[np.float64],
        rows: Rows | ScoredTokens,
        model_name: str | None,
        refused: str | None,
    ) -> Reading:
        verified = self._verified.get(model_name or "", False)
        reading = Reading(value, rows, self, verified, model_name, refused)
        reading.__dict__["_scores"] = scores  # nobody multiplies again
        return reading

    @cached_property
    def _forms(self) -> Forms | None:
        return forms_of(self.probe)

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
