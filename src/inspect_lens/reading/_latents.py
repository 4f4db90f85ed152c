"""`LatentReader`: what latents of a sparse autoencoder are active in model calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from inspect_ai.model import Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_value
from inspect_lens.errors import SpecError
from inspect_lens.model import Activations
from inspect_lens.probe import parse_pool, pool_scores
from inspect_lens.sae import SparseEncoder, read_sae
from inspect_lens.spec import Positions, Site, parse_positions, several

from ._calls import CallReader, CallSelection, OnMissing, Over, positions_for
from ._reader import SAID
from ._rows import Rows, Source, in_thread, parse_source, read_rows
from ._shared import shared_parameters
from ._token_scores import TokenScores

__all__ = ["LatentReader", "LatentReading"]


@dataclass(frozen=True)
class LatentReading:
    """Activations of one latent on the tokens of one model call."""

    name: str
    """Key under which the latent was asked for."""
    value: float
    """The activations, pooled."""
    activations: NDArray[np.float64]
    """(tokens,) at `rows.positions`; 0 where the latent is not active."""
    rows: Rows
    """The activations of the model that were read."""
    reader: LatentReader

    @property
    def latent(self) -> int:
        """Its number in the autoencoder."""
        return self.reader.latents[self.name]

    @property
    def rate(self) -> None:
        """A latent has no card, so no false positive rate is known."""
        return None

    @property
    def n_active(self) -> int:
        """Tokens on which it is active."""
        return int(np.count_nonzero(self.activations))

    @property
    def peak(self) -> int | None:
        """Absolute position of the token with the largest activation; None where none is active."""
        at = int(self.activations.argmax())
        return int(self.rows.positions[at]) if self.activations[at] > 0 else None

    def explain(self) -> str:
        """A sentence for a reader."""
        peak = "" if self.peak is None else f", most at position {self.peak}"
        return (
            f"{self.name} has {self.value:.4g} ({self.reader.pool} over {len(self.activations)} "
            f"tokens at layer {self.reader.layer}, {SAID[self.rows.source]}); active on "
            f"{self.n_active}{peak}."
        )

    def metadata(self) -> dict[str, Any]:
        """Small facts only: Inspect writes this into every sample of the log."""
        return {
            "latent": self.latent,
            "n_active": self.n_active,
            "n_tokens": len(self.activations),
            "peak": self.peak,
            "source": self.rows.source,
        }

    def record(
        self, *, message_id: str | None = None, turn: int = 0, threshold: float | None = None
    ) -> TokenScores:
        """The activations as token scores, for a file beside the log.

        Args:
            message_id: assistant message of the call.
            turn: 0-based number of the call in its sample.
            threshold: of the pooled value.

        Returns:
            The record; its hash is that of the autoencoder and the latent's number.
        """
        reader, rows = self.reader, self.rows
        whole = f"{reader.encoder.sha256}:{self.latent}".encode()
        return TokenScores(
            probe=self.name, probe_sha256=hashlib.sha256(whole).hexdigest(),
            layers=(reader.layer,), site=str(reader.site), pool=reader.pool, threshold=threshold,
            value=self.value, message_id=message_id, turn=turn, source=rows.source,
            n_prompt=rows.n_prompt, positions=np.asarray(rows.positions, dtype=np.int64),
            token_ids=np.asarray(rows.token_ids, dtype=np.int64), scores=self.activations,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentReader(CallReader):
    """Latents of a sparse autoencoder, the tokens that are read, and how they become one number.

    Make one with `LatentReader.of`, which checks everything before any sample runs.

    Example:
        ```python
        import anyio
        import numpy as np
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import LatentReader
        from inspect_lens.sae import SparseEncoder

        weight = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        encoder = SparseEncoder(
            weight=weight, bias=np.zeros(64, np.float32), hook="blocks.4.hook_resid_post"
        )
        reader = LatentReader.of(encoder, {"first": 0, "other": 17}, pool="mean")
        sample = read_eval_log("logs/honesty.eval").samples[1]
        first, other = anyio.run(reader.read, sample.output)
        print(first.explain())
        assert len(first.activations) == len(first.rows.positions)
        ```
    """

    encoder: SparseEncoder
    latents: Mapping[str, int]
    """Numbers by name."""
    layer: int
    site: Site

    @classmethod
    @shared_parameters
    def of(
        cls,
        sae: str | Path | SparseEncoder,
        latents: int | Sequence[int] | Mapping[str, int],
        *,
        layer: int | None = None,
        site: Site | None = None,
        positions: Positions | list[int] | None = None,
        pool: str = "max",
        selection: str = "",
        source: Source = "auto",
        tokenizer: str | None = None,
        norm_scale: float | None = None,
        over: Over = "last",
        roles: Sequence[str] | None = None,
        on_missing: OnMissing = "error",
    ) -> Self:
        """Load an autoencoder and settle what is read.

        Args:
            sae: as `read_sae` takes it, or an encoder.
            latents: their numbers, or numbers by a name of yours; without names they are called
                `latent_17`.
            layer: whose rows are read; by default that of the file.
            site: likewise.
            positions: tokens to read; by default those that hold the selection, which is the
                completion without one.
            pool: how the activations of many tokens become one number.
            norm_scale: as in `read_sae`; of a path only.

        Raises:
            ArtifactError: no such file, or of another kind.
            SpecError: an argument is wrong, or no layer is known.
        """
        if isinstance(sae, SparseEncoder):
            if norm_scale is not None:
                raise SpecError("norm_scale: it is folded in while a file is read; leave it out")
            encoder = sae
        else:
            encoder = read_sae(sae, norm_scale=norm_scale)
        named = _named(latents, len(encoder.weight))
        at, where = encoder.settle(layer, site)
        holds = positions_for(selection) if selection else "completion"
        read = holds if positions is None else parse_positions(positions, field="positions")
        return cls(
            encoder=encoder, latents=named, layer=at, site=where, positions=read,
            pool=str(parse_pool(pool)), source=parse_source(source), selection=selection,
            tokenizer=tokenizer,
            calls=CallSelection.of(over=over, roles=roles, on_missing=on_missing),
        )  # fmt: skip

    async def read(
        self,
        output: ModelOutput | Activations,
        *,
        model_name: str | None = None,
        model: Model | None = None,
    ) -> tuple[LatentReading, ...] | None:
        """Read one model call.

        Args:
            output: of the call, or its activations alone.
            model_name: of the model that made it; its tokenizer tells sentences and selections.
            model: that recomputes; the active one by default.

        Returns:
            A reading per latent, or None when no token is selected in this output.

        Raises:
            ArtifactError: activations are missing, or a tokenizer that is needed.
            SpecError: the rows have another width than the autoencoder reads.
            UnsupportedError: the model cannot recompute.
        """
        rows = await read_rows(
            output, layers=(self.layer,), positions=self.positions, source=self.source,
            site=self.site, model=model,
        )  # fmt: skip
        return None if rows is None else await in_thread(lambda: self._of_rows(rows, model_name))

    def _of_rows(self, rows: Rows, model_name: str | None) -> tuple[LatentReading, ...] | None:
        read = self.select(rows, model_name)
        if read is None:
            return None
        rows, ends = read, self.sentence_ends(read, model_name)
        found = self.encoder.activations(rows.acts[0], list(self.latents.values()))
        return tuple(
            LatentReading(name, pool_scores(column, self.pool, ends=ends), column, rows, self)
            for name, column in zip(self.latents, np.ascontiguousarray(found.T), strict=True)
        )


def _named(latents: int | Sequence[int] | Mapping[str, int], n: int) -> dict[str, int]:
    given: dict[str, Any]
    if isinstance(latents, Mapping):
        given = {str(name): number for name, number in latents.items()}
    else:
        numbers = several(latents)
        given = {f"latent_{number}": number for number in numbers}
        if len(given) < len(numbers):
            raise SpecError(f"latents={numbers}: one is there twice; name each once")
    given = {name: judged_value("latents", number, int) for name, number in given.items()}
    if not given or not all(0 <= number < n for number in given.values()):
        raise SpecError(
            f"latents={latents!r}; allowed are numbers from 0 to {n - 1}, at least one, or numbers "
            "by name"
        )
    return given
