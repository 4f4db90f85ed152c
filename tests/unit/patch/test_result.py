"""Numbers, files and figures of what was found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.patch import CausalTrace, PatchSweep, RunScore


def made(**changes: Any) -> PatchSweep:
    fields: dict[str, Any] = {
        "layers": (0, 4), "positions": (1, 2), "tokens": ("a", " b", " $c"),
        "clean_tokens": ("a", " x", ""), "answer": " yes", "foil": " no", "site": "resid_post",
        "source": "clean", "alpha": 1.0, "window": 1, "clean": RunScore(-1.0, -3.0),
        "corrupted": RunScore(-3.0, -1.0), "floor": 0.1,
        "logprob": np.array([[-3.0, -2.0], [-1.0, -3.04]]),
        "foil_logprob": np.array([[-1.0, -2.0], [-3.0, -1.0]]),
    }  # fmt: skip
    return PatchSweep(**fields | changes)


def trace(**changes: Any) -> CausalTrace:
    fields: dict[str, Any] = {
        "layers": (0, 4), "positions": (1, 2), "tokens": ("a", " b", " c"), "subject": (1,),
        "answer": " yes", "site": "resid_post", "window": 1, "noise_std": 0.3, "seed": 0,
        "clean": 0.9, "corrupted": np.array([0.1, 0.3]),
        "restored": np.array([[[0.5, 0.1], [0.1, 0.9]], [[0.9, 0.3], [0.2, 0.9]]]),
    }  # fmt: skip
    return CausalTrace(**fields | changes)


def test_recovered_is_the_share_of_the_way_from_corrupted_to_clean() -> None:
    sweep = made()
    assert sweep.gap == 4.0
    np.testing.assert_allclose(sweep.recovered, [[0.0, 0.5], [1.0, -0.01]])
    assert sweep.above_floor.tolist() == [[False, True], [True, False]]
    best = sweep.best()
    assert (best.layer, best.position, best.recovered) == (4, 1, 1.0)
    assert sweep.best(layers=(0,)).position == 2
    with pytest.raises(SpecError, match=r"allowed are some of \[0, 4\]"):
        sweep.best(layers=(1,))


def test_towards_the_clean_run_may_be_downwards() -> None:
    sweep = made(clean=RunScore(-5.0), corrupted=RunScore(-2.0), foil=None, foil_logprob=None)
    assert (sweep.best().layer, sweep.best().position) == (4, 2)
    assert sweep.best().recovered == pytest.approx(1.04 / 3)


def test_a_gap_within_the_floor_recovers_nothing() -> None:
    assert np.isnan(made(floor=4.0).recovered).all()
    assert np.isfinite(made(floor=3.9).recovered).all()


def test_effects_are_means_over_draws_with_a_t_interval() -> None:
    found = trace()
    assert found.total_effect == pytest.approx(0.7)
    np.testing.assert_allclose(found.effect, [[0.5, 0.0], [-0.05, 0.7]])
    low, high = found.interval()
    # Two draws, 0.0 and -0.1: t(0.975, 1) = 12.706 and a standard error of 0.05.
    assert (low[1, 0], high[1, 0]) == pytest.approx((-0.05 - 0.6353, -0.05 + 0.6353), abs=1e-3)
    assert found.best().recovered == pytest.approx(1.0)
    assert found.best(layers=(0,)).position == 1
    single = trace(corrupted=np.array([0.1]), restored=np.zeros((1, 2, 2)))
    assert all(np.isnan(end).all() for end in single.interval())


@pytest.mark.parametrize("found", [made(), made(foil=None, foil_logprob=None), trace()])
def test_a_file_gives_back_what_was_saved(found: PatchSweep | CausalTrace, tmp_path: Path) -> None:
    again = type(found).load(found.save(tmp_path / "new" / "found.json"))
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        np.testing.assert_array_equal(getattr(again, field.name), value)
        assert type(getattr(again, field.name)) is type(value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = trace().save(tmp_path / "trace.json")
    with pytest.raises(
        ArtifactError, match=r"trace\.json: .*allowed is 'inspect_lens\.patch_sweep/1'"
    ):
        PatchSweep.load(path)
    form = json.loads(path.read_text()) | {"more": 1}
    with pytest.raises(ArtifactError, match="CausalTrace: cannot be read"):
        CausalTrace.from_json(form)
    path.write_text("{")
    with pytest.raises(ArtifactError, match=r"trace\.json: not what CausalTrace\.save writes"):
        CausalTrace.load(path)


@pytest.mark.parametrize("found", [made(), made(floor=4.0), trace()])
def test_figures_are_the_same_bytes_each_time(found: PatchSweep | CausalTrace) -> None:
    png = found.figure(title="a title")
    assert png[1:4] == b"PNG"
    assert png == found.figure(title="a title")
    assert png != found.figure()
