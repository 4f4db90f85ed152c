"""What a sweep and a trace found, as frozen objects with files and figures."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.artifact import write_atomic
from inspect_lens._base.installed import install_extra
from inspect_lens._base.untrusted import parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.spec import Site

__all__ = ["CausalTrace", "PatchCell", "PatchSweep", "RunScore", "Source"]

Source = Literal["clean", "zero", "mean", "rows"]
"""What to patch in: rows of the clean run, zeros, a mean of given rows, or given rows."""

Array = NDArray[np.float64]


class PatchCell(NamedTuple):
    """Result for one layer and one position."""

    layer: int
    position: int
    """In the prompt that is patched."""
    value: float
    """Metric of the sweep, or indirect effect of one draw of noise."""
    recovered: float
    """Share of the difference between the clean and the corrupted run; NaN where there is none."""
    draw: int = 0
    """Of the noise; 0 in a sweep."""


class RunScore(NamedTuple):
    """What one run predicts after its prompt."""

    logprob: float
    """Natural log-probability of the answer's token."""
    foil_logprob: float | None = None
    """That of the foil's token, where there is a foil."""

    @property
    def metric(self) -> float:
        """Log-probability of the answer, less that of the foil: the difference of their logits."""
        return self.logprob - (self.foil_logprob or 0.0)


class _Saved:
    """A frozen dataclass of numbers as JSON."""

    FORMAT: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; NaN is null."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"format": self.FORMAT, **{name: _plain(value) for name, value in values.items()}}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """Read what `to_json` made.

        Args:
            form: the JSON value.

        Raises:
            ArtifactError: it is something else.
        """
        if form.get("format") != cls.FORMAT:
            raise ArtifactError(
                f"format={form.get('format')!r}; allowed is {cls.FORMAT!r}, which "
                f"{cls.__name__}.save writes"
            )
        try:
            return cls(
                **{name: _read(cls, name, v) for name, v in form.items() if name != "format"}
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ArtifactError(f"{cls.__name__}: cannot be read ({error})") from None

    def save(self, path: str | Path) -> Path:
        """Write the JSON form to a file, whose folder is made when missing; returns its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, (json.dumps(self.to_json(), allow_nan=False) + "\n").encode())
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; ArtifactError where it is none."""
        with parsing(path, f"what {cls.__name__}.save writes", "check the path", but=()):
            return cls.from_json(parse_json(read_regular(Path(path))))


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchSweep(_Saved):
    """Result of `patch_sweep`: what each patched layer and position changes."""

    FORMAT: ClassVar[str] = "inspect_lens.patch_sweep/1"

    layers: tuple[int, ...]
    """Rows of the arrays, ascending."""
    positions: tuple[int, ...]
    """Columns of the arrays: positions in the corrupted prompt, ascending."""
    tokens: tuple[str, ...]
    """Text of every token of the corrupted prompt, also of those that were not patched."""
    clean_tokens: tuple[str, ...]
    """Text of the clean token that stands for each of `tokens`; empty where none does."""
    answer: str
    foil: str | None
    site: Site
    source: Source
    alpha: float
    window: int
    clean: RunScore
    """Of the clean run."""
    corrupted: RunScore
    """Of the corrupted run, unpatched."""
    floor: float
    """Noise floor in units of the metric: how far runs that change nothing are from `corrupted`.
    These are repeats, and runs with their own rows patched in."""
    logprob: Array
    """(layers, positions) log-probability of the answer's token in each patched run."""
    foil_logprob: Array | None
    """(layers, positions) that of the foil's token."""

    @property
    def metric_name(self) -> str:
        """What `metric` is."""
        return "log-probability" if self.foil_logprob is None else "logit difference"

    @property
    def metric(self) -> Array:
        """(layers, positions) as `RunScore.metric`."""
        return self.logprob - (0.0 if self.foil_logprob is None else self.foil_logprob)

    @property
    def gap(self) -> float:
        """Metric of the clean run minus that of the corrupted run."""
        return self.clean.metric - self.corrupted.metric

    @property
    def recovered(self) -> Array:
        """(layers, positions) `(patched - corrupted) / (clean - corrupted)`.

        0 changes nothing and 1 restores the clean run. NaN where the two runs differ by no more
        than the floor.
        """
        gap = self.gap if abs(self.gap) > self.floor else math.nan
        found: Array = (self.metric - self.corrupted.metric) / gap
        return found

    @property
    def above_floor(self) -> NDArray[np.bool_]:
        """(layers, positions) whether a cell moves the metric further than the floor."""
        found: NDArray[np.bool_] = np.abs(self.metric - self.corrupted.metric) > self.floor
        return found

    def best(self, layers: tuple[int, ...] | None = None) -> PatchCell:
        """The cell that moves the metric furthest towards the clean run.

        Args:
            layers: among these; all by default.

        Raises:
            SpecError: a layer that was not swept.
        """
        towards = (self.metric - self.corrupted.metric) * (-1.0 if self.gap < 0 else 1.0)
        i, j = _largest(towards, self.layers, layers)
        return PatchCell(
            self.layers[i], self.positions[j], float(self.metric[i, j]), float(self.recovered[i, j])
        )

    def figure(self, title: str = "") -> bytes:
        """Heat map as PNG of `recovered`: layers upwards, tokens to the right, grey below floor.

        Args:
            title: above the map.

        Raises:
            LensError: matplotlib is not installed.
        """
        known = np.isfinite(self.recovered).all()
        return draw_cells(
            self.recovered if known else self.metric - self.corrupted.metric,
            layers=self.layers,
            labels=[_label(self.clean_tokens[p], self.tokens[p]) for p in self.positions],
            name=f"recovered {self.metric_name}" if known else f"change of {self.metric_name}",
            unit=1.0 if known else None,
            hidden=~self.above_floor,
            title=title,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalTrace(_Saved):
    """Result of `causal_trace`: what each restored row brings back."""

    FORMAT: ClassVar[str] = "inspect_lens.causal_trace/1"

    layers: tuple[int, ...]
    """Rows of the arrays, ascending."""
    positions: tuple[int, ...]
    """Columns of the arrays, ascending."""
    tokens: tuple[str, ...]
    """Text of every token of the prompt."""
    subject: tuple[int, ...]
    """Positions that get the noise."""
    answer: str
    site: Site
    window: int
    noise_std: float
    """Standard deviation of the noise at each number of an embedding."""
    seed: int
    clean: float
    """Probability of the answer's token in the clean run."""
    corrupted: Array
    """(draws,) probability under each draw of the noise."""
    restored: Array
    """(draws, layers, positions) probability with one row restored."""

    @property
    def total_effect(self) -> float:
        """Probability that the noise takes away, mean over draws."""
        return self.clean - float(self.corrupted.mean())

    @property
    def effect(self) -> Array:
        """(layers, positions) average indirect effect: probability that a restored row gives back.

        It is the mean over draws of the noise.
        """
        found: Array = self._each.mean(axis=0)
        return found

    @property
    def _each(self) -> Array:
        return self.restored - self.corrupted[:, None, None]

    def interval(self, confidence: float = 0.95) -> tuple[Array, Array]:
        """Interval of `effect` over draws of the noise, by Student's t.

        Args:
            confidence: two-sided level.

        Returns:
            Lower and upper end, (layers, positions) each; NaN for a single draw.
        """
        from scipy.stats import t

        n = len(self.corrupted)
        if n < 2:
            nothing = np.full(self.effect.shape, math.nan)
            return nothing, nothing
        half = t.ppf((1 + confidence) / 2, n - 1) * self._each.std(axis=0, ddof=1) / math.sqrt(n)
        return self.effect - half, self.effect + half

    def best(self, layers: tuple[int, ...] | None = None) -> PatchCell:
        """The cell with the largest average indirect effect.

        Args:
            layers: among these; all by default.

        Returns:
            The cell; `recovered` is its share of the total effect.

        Raises:
            SpecError: a layer that was not traced.
        """
        i, j = _largest(self.effect, self.layers, layers)
        value = float(self.effect[i, j])
        share = value / self.total_effect if self.total_effect else math.nan
        return PatchCell(self.layers[i], self.positions[j], value, share)

    def figure(self, title: str = "") -> bytes:
        """Heat map as PNG of `effect`; grey where its interval has 0; subject tokens have a star.

        Args:
            title: above the map.

        Raises:
            LensError: matplotlib is not installed.
        """
        low, high = self.interval()
        return draw_cells(
            self.effect,
            layers=self.layers,
            labels=[self.tokens[p] + "*" * (p in self.subject) for p in self.positions],
            name="average indirect effect",
            unit=None,
            hidden=(low <= 0) & (high >= 0),
            title=title,
        )


def _largest(
    values: Array, known: tuple[int, ...], layers: tuple[int, ...] | None
) -> tuple[int, int]:
    among = known if layers is None else tuple(layers)
    if not among or set(among) - set(known):
        raise SpecError(f"layers={list(among)}; allowed are some of {list(known)}")
    masked = np.where(np.isin(known, among)[:, None], values, -np.inf)
    i, j = np.unravel_index(int(np.nanargmax(masked)), masked.shape)
    return int(i), int(j)


def _label(clean: str, corrupted: str) -> str:
    return corrupted if clean in ("", corrupted) else f"{clean.strip()} → {corrupted.strip()}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        # Engines count in float32, of which nine digits say all.
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value


def _read(cls: type, name: str, value: Any) -> Any:
    kind = str(cls.__dataclass_fields__[name].type)  # type: ignore[attr-defined]
    if value is None:
        return math.nan if kind == "float" else None
    if kind.startswith("Array"):
        return np.array(value, dtype=np.float64)
    if kind == "RunScore":
        return RunScore(*value)
    return tuple(value) if kind.startswith("tuple") else value


def draw_cells(
    values: NDArray[np.float64],
    *,
    layers: Sequence[int],
    labels: Sequence[str],
    name: str,
    unit: float | None,
    hidden: NDArray[np.bool_],
    title: str,
) -> bytes:
    """Draw a map with a scale that is symmetric about 0."""
    try:
        figure_class: Any = importlib.import_module("matplotlib.figure").Figure
        canvas: Any = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError:
        raise LensError(f"figure: needs the package matplotlib: {install_extra('train')}") from None
    n_layers, n = values.shape
    width, height = max(4.8, 1.9 + 0.3 * n), max(2.6, 1.5 + 0.22 * n_layers)
    figure = figure_class(figsize=(width, height), dpi=130, layout="constrained")
    canvas(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("#e3e8ec")
    top = unit or float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    shown = np.where(hidden, np.nan, values)
    # Orange restores, and purple does the opposite.
    drawn = axes.pcolormesh(
        np.arange(n + 1) - 0.5, np.arange(n_layers + 1) - 0.5, shown, cmap="PuOr_r",
        vmin=-top, vmax=top, edgecolors="white", linewidth=0.6,
    )  # fmt: skip
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    pieces = [label.replace("\n", "⏎").replace("$", r"\$") for label in labels]
    axes.set_xticks(range(n), pieces, rotation=60, ha="right", rotation_mode="anchor", fontsize=8.5)
    step = max(1, n_layers // 16)
    axes.set_yticks(range(0, n_layers, step), [str(at) for at in layers[::step]], fontsize=8.5)
    axes.set_ylabel("layer")
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label(name, fontsize=8.5)
    buffer = io.BytesIO()
    # No software name: the same data give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
