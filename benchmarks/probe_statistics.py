"""What the statistics of probes are worth, in simulation: `python -m benchmarks.probe_statistics`.

Four questions, each on a stated grid. How often an interval holds the truth: few samples, unequal
groups, areas from 0.6 to 0.99. How often a verdict says that a probe transfers where a length or a
topic explains all that it reads. Which rate a threshold has on new samples, and whether the test of
exchangeability sees that a set is another one. And how often bootstrap intervals hold the truth,
of which nothing is promised. The table is written as Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from inspect_lens.probe import (
    bootstrap_interval,
    compare_auroc,
    conformal_threshold,
    delong_interval,
    rate_interval,
)
from inspect_lens.train import ActivationSet, LogisticProbe, train_probe

__all__ = ["COVERAGE", "FALSE_TRANSFERS", "cells", "verdicts"]

COVERAGE: Final = 0.93
"""Least coverage of intervals of 95% in every cell of the grid."""
FALSE_TRANSFERS: Final = 0.05
"""Largest share of sets that a verdict says a probe transfers to where a baseline explains all."""
AREAS: Final = (0.6, 0.8, 0.9, 0.95, 0.99)
SAMPLES: Final = ((8, 300), (10, 10), (10, 300), (30, 30), (300, 15), (150, 150))
GROUPS: Final = ("equal", "one large", "falling", "log-normal")
HIDDEN: Final = 24
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One cell of the grid."""

    what: str
    cell: str
    found: float
    n: int
    note: str = ""

    @property
    def error(self) -> float:
        """Standard error of a share of n simulated sets."""
        return math.sqrt(max(self.found * (1.0 - self.found), 1e-9) / self.n)


def group_sizes(kind: str, k: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Sizes (k,) of groups: even numbers, so that both classes are in each."""
    made = np.full(k, 6)
    if kind == "one large":
        made = np.full(k, 4)
        made[0] = 2 * k
    elif kind == "falling":
        made = 2 * (30 // np.arange(1, k + 1)) + 2
    elif kind == "log-normal":
        made = 2 * np.maximum(1, np.exp(rng.normal(1.0, 0.8, k)).astype(int))
    return made.astype(np.int64)


def cells(n: int, pipelines: int, *, seed: int = 0) -> list[Callable[[], list[Row]]]:
    """The whole grid, in the order of the table; each cell has numbers of its own.

    Args:
        n: simulated sets of a cell.
        pipelines: trained probes of a cell.
        seed: of all.

    Returns:
        Functions without arguments that can be sent to another process.
    """
    made: list[Callable[[], list[Row]]] = []
    for m, k in SAMPLES:
        for shape in SHAPES:
            made.append(partial(_samples, m, k, shape, n, _numbers(seed, len(made))))
    for groups in (12, 30, 80):
        for kind in GROUPS:
            made.append(partial(_grouped, groups, kind, n, _numbers(seed, len(made))))
    made += [partial(_verdict, name, pipelines, seed) for name in WORLDS]
    for size in (300, 1000):
        made.append(partial(_rate_of_samples, size, 4 * n, _numbers(seed, len(made))))
    for groups in (125, 300):
        made.append(partial(_rate_of_groups, groups, 4 * n, _numbers(seed, len(made))))
    for groups in (16, 60):
        for kind in GROUPS:
            made.append(partial(_drawn, groups, kind, n, _numbers(seed, len(made))))
    return made


def _numbers(seed: int, cell: int) -> np.random.Generator:
    return np.random.default_rng([seed, cell])


SHAPES: Final[dict[str, float]] = {
    "equal variances": 1.0,
    "positives vary 3 times as much": 3.0,
}
"""Standard deviation of the positives where that of the negatives is 1."""


def _samples(m: int, k: int, shape: str, n: int, rng: np.random.Generator) -> list[Row]:
    """How often the interval of m independent positives and k negatives holds the truth."""
    y, wide, found = np.arange(m + k) < m, SHAPES[shape], []
    for area in AREAS:
        hits = 0
        for _ in range(n):
            s = rng.normal(size=m + k)
            s[:m] = s[:m] * wide + norm.ppf(area) * math.sqrt(1.0 + wide**2)
            made = delong_interval(y, s)
            hits += made.low <= area <= made.high
        found.append(hits / n)
    return [_least("AUROC, samples", f"{m} against {k}, {shape}", found, n)]


def _grouped(k: int, kind: str, n: int, rng: np.random.Generator) -> list[Row]:
    """How often intervals by group hold the truth."""
    rows = []
    for both in (True, False):
        found, pairs = [], []
        for area in AREAS:
            hits = paired = 0
            for _ in range(n):
                y, group, own = _labels(k, kind, both, rng)
                spread = math.sqrt(3.0) if both else 2.0
                shift = norm.ppf(area) * spread
                noise = rng.normal(size=y.size)
                s = noise + (shift + own) * y if both else noise + own + shift * y
                made = delong_interval(y, s, groups=group)
                hits += made.low <= area <= made.high
                other = rng.normal(size=y.size) + (
                    (shift + rng.normal(size=k)[np.array(group)]) * y
                    if both
                    else rng.normal(size=k)[np.array(group)] + shift * y
                )
                compared = compare_auroc(y, s, other, groups=group).interval
                paired += compared.low <= 0.0 <= compared.high
            found.append(hits / n)
            pairs.append(paired / n)
        cell = f"{k} groups, {kind}, {'both classes' if both else 'one class'} in each"
        rows.append(_least("AUROC, groups", cell, found, n))
        rows.append(_least("difference of two equal probes, groups", cell, pairs, n))
    found = []
    for rate in (0.05, 0.3, 0.6, 0.9):
        hits = 0
        for _ in range(n):
            sizes = group_sizes(kind, k, rng)
            own_rate = rng.beta(3.0 * rate, 3.0 * (1.0 - rate), k)
            drawn = np.repeat(np.arange(k), sizes)
            made = rate_interval(rng.random(drawn.size) < own_rate[drawn], drawn.tolist())
            hits += made.low <= rate <= made.high
        found.append(hits / n)
    return [*rows, _least("rate such as recall, groups", f"{k} groups, {kind}", found, n)]


def _labels(
    k: int, kind: str, both: bool, rng: np.random.Generator
) -> tuple[NDArray[np.int64], list[int], Floats]:
    sizes = rng.permutation(group_sizes(kind, k, rng))
    group = np.repeat(np.arange(k), sizes)
    y = np.concatenate([np.arange(n) % 2 for n in sizes]) if both else group % 2
    return y.astype(np.int64), group.tolist(), rng.normal(size=k)[group]


def _least(what: str, cell: str, found: Sequence[float], n: int) -> Row:
    low = min(found)
    return Row(what, cell, low, n, f"{low:.3f} to {max(found):.3f} over the areas or rates")


@dataclass(frozen=True)
class World:
    """What a simulated set of activations holds."""

    concept: float = 0.0
    """Distance of the class means along the concept's direction, in standard deviations."""
    length: bool = False
    """The label decides how many tokens there are, and the stream knows their number."""
    topic: bool = False
    """The label decides which words there are, and the stream knows the topic."""
    noise: float = 0.0
    """Share of training labels that are wrong."""
    positive: float = 0.5
    """Share of positives."""
    unequal: bool = False
    """Groups of unequal size."""
    shift: str = ""
    """What is another in the judged set: `topic` (an offset of its own for each of its topics),
    `template` (one offset for all), `length` (twice as long)."""

    def draw(self, name: str, n: int, seed: int, *, judged: bool = False) -> ActivationSet:
        """A set of n samples."""
        rng = np.random.default_rng([seed, sum(map(ord, name))])
        y = rng.random(n) < (0.0 if name == "control" else self.positive)
        basis = np.linalg.qr(np.random.default_rng(7).normal(size=(HIDDEN, 4)))[0].T
        group = np.sort(rng.zipf(1.6, n) % (n // 4)) if self.unequal else np.arange(n) // 4
        own = rng.normal(scale=0.5, size=(int(group.max()) + 1, HIDDEN))
        acts, words = [], []
        for i in range(n):
            tokens = int(rng.integers(4, 7)) + (4 * int(y[i]) if self.length else 0)
            tokens *= 2 if judged and self.shift == "length" else 1
            mean = own[group[i]] + self.concept * y[i] * basis[0]
            mean = mean + (0.5 * tokens * basis[1] if self.length else 0.0)
            mean = mean + (2.0 * (y[i] - 0.5) * basis[2] if self.topic else 0.0)
            if judged and self.shift in ("topic", "template"):
                drift = basis[3] + basis[0]
                mean = mean + drift * (group[i] % 2 if self.shift == "topic" else 1.0)
            acts.append((mean + rng.normal(size=(1, tokens, HIDDEN))).astype(np.float32))
            about = ("harbour", "orchard")[int(y[i])] if self.topic else "weather"
            filler = rng.choice(["calm", "grey", "wide", "late"], size=tokens)
            words.append(f"the {about} is {' '.join(filler)}")
        labels = y ^ (rng.random(n) < self.noise) if name == "train" else y
        return ActivationSet(
            name=name, model="simulated", layers=(0,), acts=tuple(acts), labels=labels,
            groups=tuple(f"{name}-{g}" for g in group),
            ids=tuple(f"{name}-{i}" for i in range(n)), columns={"completion": tuple(words)},
        )  # fmt: skip


WORLDS: Final[dict[str, tuple[World, bool]]] = {
    "length explains all": (World(length=True), False),
    "topic explains all": (World(topic=True), False),
    "length and topic explain all": (World(length=True, topic=True), False),
    "topic explains all, 10% of labels wrong": (World(topic=True, noise=0.1), False),
    "topic explains all, 15% positive": (World(topic=True, positive=0.15), False),
    "length explains all, unequal groups": (World(length=True, unequal=True), False),
    "nothing to find": (World(), False),
    "the concept": (World(concept=2.0), True),
    "the concept, another template": (World(concept=2.0, shift="template"), True),
    "the concept, other topics": (World(concept=2.0, shift="topic"), True),
    "the concept, twice as long": (World(concept=2.0, shift="length"), True),
    "the concept, 10% of labels wrong": (World(concept=2.0, noise=0.1), True),
    "the concept, 15% positive": (World(concept=2.0, positive=0.15), True),
    "the concept, unequal groups": (World(concept=2.0, unequal=True), True),
}
"""By name, with whether there is a concept that transfers."""


def verdicts(n: int, *, seed: int = 0, worlds: Sequence[str] = tuple(WORLDS)) -> Iterator[Row]:
    """How often the whole pipeline says that a probe transfers, and the rate of its threshold."""
    for name in worlds:
        yield from _verdict(name, n, seed)


def _verdict(name: str, n: int, seed: int) -> list[Row]:
    world, real = WORLDS[name]
    said, flagged, above, moved = 0, 0.0, [], 0
    for i in range(n):
        train, control, test = (
            world.draw(part, size, seed * 10_000 + i, judged=part == "test")
            for part, size in (("train", 160), ("control", 400), ("test", 160))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            probe = train_probe(
                LogisticProbe(), train, name="simulated/lr", control=control, held_out=[test],
                seed=i,
            )  # fmt: skip
        found = probe.card.evaluations[0]
        (verdict,) = probe.card.transfers
        said += verdict.transfers is True
        flagged += found.fpr or 0.0
        above.append(found.recall or 0.0)
        shifted = found.control_shift
        moved += shifted is not None and shifted.exchangeable is False
    note = (
        f"mean recall {np.mean(above):.2f}, mean rate of false alarms {flagged / n:.3f}, "
        f"negatives found unlike the control set in {moved / n:.2f}"
    )
    what = "says transfers, rightly" if real else "says transfers, wrongly"
    return [Row(what, name, said / n, n, note)]


def _rate_of_samples(size: int, n: int, rng: np.random.Generator) -> list[Row]:
    """The true rate of thresholds at 1%, and what is said of one set."""
    true = [norm.sf(conformal_threshold(rng.normal(size=size), 0.01)) for _ in range(n)]
    over = float(np.mean(np.array(true) > 0.01))
    note = f"above 0.01 in {over:.2f} of the control sets"
    return [Row("true rate at 0.01", f"{size} samples", float(np.mean(true)), n, note)]


def _rate_of_groups(k: int, n: int, rng: np.random.Generator) -> list[Row]:
    by: dict[str, list[float]] = {"samples": [], "groups": []}
    for _ in range(n):
        sizes = rng.permutation(group_sizes("falling", k, rng))
        group = np.repeat(np.arange(k), sizes)
        s = rng.normal(size=k)[group] + rng.normal(size=group.size)
        for rule, made in by.items():
            names = group.tolist() if rule == "groups" else None
            made.append(float(norm.sf(conformal_threshold(s, 0.01, groups=names) / 2**0.5)))
    rows = []
    for rule, made in by.items():
        note = f"above 0.02 in {np.mean(np.array(made) > 0.02):.2f} of the control sets"
        cell = f"{k} unequal groups, quantile of {rule}"
        rows.append(Row("true rate at 0.01", cell, float(np.mean(made)), n, note))
    return rows


def _drawn(k: int, kind: str, n: int, rng: np.random.Generator) -> list[Row]:
    """How often the percentiles of draws of whole groups hold the true area."""
    found = []
    for area in AREAS:
        hits = 0
        for i in range(n):
            y, group, own = _labels(k, kind, True, rng)
            s = rng.normal(size=y.size) + (norm.ppf(area) * math.sqrt(3.0) + own) * y
            made = bootstrap_interval(y, s, groups=group, n_resamples=1000, seed=i)
            hits += made.low <= area <= made.high
        found.append(hits / n)
    return [_least("bootstrap of the AUROC", f"{k} groups, {kind}", found, n)]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| what | cell | share | sets | more |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.what} | {r.cell} | {r.found:.3f} | {r.n} | {r.note} |" for r in rows]
    return "\n".join(lines)


def run(todo: Sequence[Callable[[], list[Row]]], workers: int) -> list[Row]:
    """All rows, in order; progress on stderr."""
    start, found = time.monotonic(), dict[int, list[Row]]()
    with ProcessPoolExecutor(workers) as pool:
        jobs = {pool.submit(cell): i for i, cell in enumerate(todo)}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            seconds = time.monotonic() - start
            sys.stderr.write(f"{len(found)} of {len(todo)} cells, {seconds:.0f} s\n")
            for row in found[jobs[job]]:
                sys.stderr.write(f"  {row.what}; {row.cell}: {row.found:.3f}\n")
            sys.stderr.flush()
    return [row for i in range(len(todo)) for row in found[i]]


def outside(row: Row) -> bool:
    """Whether a row breaks its promise by more than the error of so many sets."""
    if row.what.endswith("wrongly"):
        return row.found - 2 * row.error > FALSE_TRANSFERS
    free = ("says", "true", "bootstrap")
    return not row.what.startswith(free) and row.found + 3 * row.error < COVERAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; returns 1 where a cell is outside what is promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", type=int, default=400, help="simulated sets of a cell")
    parser.add_argument("--pipelines", type=int, default=100, help="trained probes of a cell")
    parser.add_argument("--workers", type=int, default=1, help="processes; no number depends on it")
    parser.add_argument("--out", default="benchmarks/results/probe-statistics.md")
    options = parser.parse_args(arguments)
    rows = run(cells(options.sets, options.pipelines), options.workers)
    page = (
        "# Statistics of probes, in simulation\n\n"
        f"`python -m benchmarks.probe_statistics --sets {options.sets} --pipelines "
        f"{options.pipelines}`. Intervals are those of 95%; the "
        f"share is that of the worst area or rate of the cell ({', '.join(map(str, AREAS))}), and "
        f"the promise is {COVERAGE} less the error of so many sets. Verdicts are those of "
        "`train_probe`; where a baseline explains all, 0.05 or less may say that the probe "
        "transfers. Of bootstrap intervals nothing is promised.\n\n"
        f"{table(rows)}\n"
    )
    Path(options.out).write_text(page, encoding="utf-8")
    sys.stdout.write(page)
    wrong = [row for row in rows if outside(row)]
    for row in wrong:
        sys.stderr.write(f"outside what is promised: {row}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
