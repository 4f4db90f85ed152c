from __future__ import annotations

import io
from dataclasses import replace

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from inspect_lens.errors import SpecError
from inspect_lens.probe import Evaluation, Interval, Probe, ProbeCard, Transfer, load_probe
from inspect_lens.train import cascade_frontier
from inspect_lens.view import draw_cascade, draw_transfer


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures behind the bytes."""
    made: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *given: object, **options: object) -> None:
            super().__init__(*given, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Kept)
    return made


def test_a_cascade_shows_recall_and_rate_over_its_cost(drawn: list[Figure]) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(400) % 2
    probe, judge = rng.normal(size=400) + y, rng.normal(size=400) + 4 * y
    points = cascade_frontier(y, probe, judge, probe_threshold=0.5, judge_threshold=2.0,
                              judge_cost=120.0)  # fmt: skip
    png = draw_cascade(points, unit="tokens of the judge", title="mine")
    assert imread(io.BytesIO(png), format="png").shape[2] == 4
    assert png == draw_cascade(points, unit="tokens of the judge", title="mine")
    (axes,) = drawn[0].axes
    recall, rate = axes.lines
    np.testing.assert_array_equal(recall.get_xdata(), [p.cost for p in points])
    np.testing.assert_array_equal(recall.get_ydata(), [p.recall for p in points])
    np.testing.assert_array_equal(rate.get_ydata(), [p.fpr for p in points])
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == min(p.recall_interval.low for p in points)
    assert band[:, 1].max() == max(p.recall_interval.high for p in points)
    assert "tokens of the judge" in axes.get_xlabel()
    assert [t.get_text() for t in axes.texts] == ["probe alone", "judge alone"]
    with pytest.raises(SpecError, match="is empty"):
        draw_cascade([])


def card(name: str, areas: dict[str, float], transfers: bool | None) -> Probe:
    evaluations = tuple(
        Evaluation(
            name=n, sha256="ab", n_positive=9, n_negative=9, disjoint_by="group", auroc=a,
            recall=0.25, auroc_interval=Interval(low=a - 0.1, high=a + 0.05, method="x"),
        )
        for n, a in areas.items()
    )  # fmt: skip
    said = tuple(Transfer(set=n, transfers=transfers, bar=0.7, statement="-") for n in areas)
    facts = ProbeCard(name=name, layers=(0,), hidden=2, evaluations=evaluations, transfers=said)
    return Probe.from_direction(np.eye(2)[0], card=facts)


def test_a_matrix_shows_each_probe_on_each_set(drawn: list[Figure]) -> None:
    probes = [card("m/a", {"x": 0.95, "y": 0.5}, True), card("m/b", {"y": 0.7, "z": 0.8}, False)]
    draw_transfer(probes)
    axes, _ = drawn[0].axes
    areas = np.ma.filled(axes.images[0].get_array().astype(float), np.nan)
    np.testing.assert_array_equal(areas, [[0.95, 0.5, np.nan], [np.nan, 0.7, 0.8]])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["x", "y", "z"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["m/a", "m/b"]
    texts = {t.get_position(): t.get_text() for t in axes.texts}
    assert texts[(0, 0)] == "0.950\n[0.85, 1.00]\nrecall 0.25 ✓"
    assert texts[(1, 1)].endswith("✗")
    assert len(texts) == 4, "what was not measured is empty"
    draw_transfer({"mine": card("m/c", {"x": 0.6}, None)})
    assert drawn[1].axes[0].texts[0].get_text().endswith("?")
    bare = replace(probes[0], card=probes[0].card.model_copy(update={"evaluations": ()}))
    with pytest.raises(SpecError, match="no card has an evaluation"):
        draw_transfer([bare])
    with pytest.raises(SpecError, match=r"2 with the names \['m/a'\]"):
        draw_transfer([probes[0], card("m/a", {"y": 0.9}, True)])


def test_the_shipped_probes_make_one() -> None:
    names = ("deception-lr", "deception-md", "truth-mm")
    assert len(draw_transfer([load_probe(f"organism/{n}") for n in names])) > 5000
