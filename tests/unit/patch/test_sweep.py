"""Sweeps and traces on a toy whose numbers are known."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens._patching.runs import Run, warn_without_space
from inspect_lens._patching.sweep import windows
from inspect_lens.errors import SpecError
from inspect_lens.patch import PatchCell, PatchSweep, causal_trace, patch_sweep
from inspect_lens.patch._sweep import open_runs
from tests.kit.toy_runs import WORDS, ToyRuns

CLEAN, CORRUPTED = "The river Talmo is in", "The river Velosh is in"


def sweep(**options: Any) -> PatchSweep:
    options = {"clean": CLEAN, "corrupted": CORRUPTED, "answer": " Verun", "foil": " Sar"} | options
    return patch_sweep(None, **options)


def logit_difference(toy: ToyRuns, run: Run) -> float:
    logits = toy.logits(run)
    return float(logits[WORDS.index(" Verun")] - logits[WORDS.index(" Sar")])


def test_ends_of_the_scale_are_the_clean_and_the_corrupted_run(toy: ToyRuns) -> None:
    found = sweep()
    assert (found.layers, found.positions) == ((0, 1, 2), (3, 4, 5, 6))
    assert found.clean.metric == pytest.approx(logit_difference(toy, Run(toy.tokens(CLEAN))))
    assert found.corrupted.metric == pytest.approx(
        logit_difference(toy, Run(toy.tokens(CORRUPTED)))
    )
    # Behind the last block only the last row counts, and it counts alone.
    np.testing.assert_allclose(found.recovered[2], [0, 0, 0, 1], atol=1e-5)
    assert found.floor < 1e-5
    assert found.above_floor.tolist()[2] == [False, False, False, True]


def test_every_cell_is_the_run_with_that_row(toy: ToyRuns) -> None:
    found = sweep(window=2)
    rows = toy.run(Run(toy.tokens(CLEAN)))
    for i, layer in enumerate(found.layers):
        for j, position in enumerate(found.positions):
            h = toy.embedding[toy.tokens(CORRUPTED)]
            for at in range(toy.layers):
                seen = np.cumsum(h, axis=0) / np.arange(1, len(h) + 1)[:, None]
                h = h + np.tanh(seen @ toy.mix[at])
                if at in (layer - 1, layer):
                    h[position] = rows[at, position]
            logits = h[-1] @ toy.unembed
            wanted = logits[WORDS.index(" Verun")] - logits[WORDS.index(" Sar")]
            assert found.metric[i, j] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0, 2.0])
def test_behind_the_last_block_alpha_is_the_recovered_share(toy: ToyRuns, alpha: float) -> None:
    found = sweep(layers=[2], positions=[-1], alpha=alpha)
    assert found.recovered[0, 0] == pytest.approx(alpha, abs=1e-5)


def test_zeros_and_given_rows(toy: ToyRuns) -> None:
    zero = sweep(layers=[2], positions=[-1], source="zero")
    assert zero.metric[0, 0] == pytest.approx(0.0, abs=1e-6)
    rows = np.random.default_rng(1).standard_normal((1, 5, 6))
    difference = toy.unembed[:, WORDS.index(" Verun")] - toy.unembed[:, WORDS.index(" Sar")]
    mean = sweep(layers=[2], positions=[-1], source="mean", rows=rows)
    assert mean.metric[0, 0] == pytest.approx(float(rows[0].mean(axis=0) @ difference), abs=1e-5)
    given = sweep(layers=[2], positions=[-2, -1], source="rows", rows=rows[:, :2])
    assert given.metric[0, 1] == pytest.approx(float(rows[0, 1] @ difference), abs=1e-5)
    assert given.recovered[0, 0] == pytest.approx(0.0, abs=1e-5)


def test_unequal_prompts_meet_at_their_ends(toy: ToyRuns) -> None:
    options = {"corrupted": "The town is in", "layers": [2]}
    with pytest.raises(SpecError, match=r"clean\[2:5\] = \[' river', ' Tal', 'mo'\]"):
        sweep(**options)
    found = sweep(**options, align="ends")
    assert found.recovered[0, -1] == pytest.approx(1.0, abs=1e-5)
    assert found.clean_tokens[2:] == ("mo", " is", " in")


def test_without_a_foil_the_metric_is_the_log_probability(toy: ToyRuns) -> None:
    found = sweep(foil=None)
    assert found.metric_name == "log-probability"
    np.testing.assert_array_equal(found.metric, found.logprob)
    assert found.recovered[2, 3] == pytest.approx(1.0, abs=1e-5)


def test_cells_come_as_they_are_done_and_idle_runs_are_among_them(toy: ToyRuns) -> None:
    cells: list[PatchCell] = []
    found = sweep(on_cell=cells.append, floor_runs=2)
    assert len(cells) == len(set(cells)) == 12
    for cell in cells:
        at = found.layers.index(cell.layer), found.positions.index(cell.position)
        assert cell.value == pytest.approx(found.metric[at])
        assert cell.recovered == pytest.approx(found.recovered[at])
    batch = toy.asked[2:]
    idle = [i for i, run in enumerate(batch) if not run.edits or len(run.edits[0].positions) > 1]
    assert len(batch) == 12 + 4
    assert len(idle) == 4
    assert idle[:2] == [0, 1], "they say what noise there is"
    assert 2 < idle[2] < idle[3] < len(batch) - 1


def test_where_both_runs_are_one_nothing_is_recovered(toy: ToyRuns) -> None:
    found = sweep(corrupted=CLEAN, source="zero", layers=[2])
    assert found.positions == tuple(range(7))
    assert np.isnan(found.recovered).all()
    assert found.above_floor.tolist() == [[False] * 6 + [True]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"site": "nowhere"}, SpecError, "site='nowhere'; allowed are resid_pre, q"),
        ({"layers": []}, SpecError, "layers=.*at least one"),
        (
            {"clean": "The river Tal", "corrupted": "The town Tal", "answer": "k"},
            SpecError,
            "joins the last token",
        ),
        ({"clean": [0, 1], "corrupted": [0, 2]}, SpecError, "answer=' Verun': a prompt of token"),
        ({"foil": " Verun"}, SpecError, "begins with the same token"),
        ({"source": "noise"}, SpecError, "allowed are clean, zero, mean, rows"),
        ({"source": "mean"}, SpecError, "rows=none"),
        ({"rows": np.ones((3, 1, 6))}, SpecError, "rows=given"),
        ({"source": "rows", "rows": np.ones((3, 2, 6))}, SpecError, "7 positions, 6"),
        ({"source": "mean", "rows": np.ones((3, 0, 6))}, SpecError, "allowed for source='mean'"),
        ({"alpha": float("nan")}, SpecError, "alpha=nan"),
        ({"window": 0}, SpecError, "window=0"),
        ({"floor_runs": 0}, SpecError, "floor_runs=0"),
    ],
)
def test_what_does_not_fit_is_refused(
    toy: ToyRuns, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sweep(**options)
    assert not toy.asked, "it is refused before anything runs"


def test_other_models_are_refused() -> None:
    with pytest.raises(SpecError, match=r"model=str; allowed are a vllm\.LLM"):
        open_runs("organism")


def test_a_window_has_the_layers_around_each_and_is_cut_at_the_ends() -> None:
    assert windows([0, 2], [0, 1, 2, 3], 3) == ((0, 1), (1, 2, 3))
    assert windows([1], [0, 1, 2, 3], 1) == ((1,),)
    assert windows([2], [0, 2, 4], 4) == ((0, 2),)


def test_a_trace_restores_all_that_the_noise_took(toy: ToyRuns) -> None:
    cells: list[PatchCell] = []
    found = causal_trace(
        None, CLEAN, subject=" river", answer=" Verun", draws=5, on_cell=cells.append, std=1.0
    )
    assert found.subject == (2,)
    assert found.positions == (2, 3, 4, 5, 6)
    assert found.noise_std == 3.0
    # One token has the noise, so restoring it in front of everything else restores all.
    early = causal_trace(
        None, CLEAN, subject=" river", answer=" Verun", draws=5, std=1.0,
        layers=[0], positions=[2], site="resid_pre",
    )  # fmt: skip
    np.testing.assert_allclose(early.corrupted, found.corrupted)
    np.testing.assert_allclose(early.restored[:, 0, 0], early.clean, atol=1e-6)
    assert early.effect[0, 0] == pytest.approx(early.total_effect, abs=1e-6)
    # The last row behind the last block is all that counts.
    np.testing.assert_allclose(found.restored[:, 2, -1], found.clean, atol=1e-6)
    for j in range(4):
        np.testing.assert_allclose(found.restored[:, 2, j], found.corrupted, atol=1e-6)
    assert found.total_effect == pytest.approx(found.clean - found.corrupted.mean())
    assert len(set(cells)) == 5 * 3 * 5
    for cell in cells:
        at = found.layers.index(cell.layer), found.positions.index(cell.position)
        back = found.restored[cell.draw][at] - found.corrupted[cell.draw]
        assert cell.value == pytest.approx(back)


def test_noise_has_the_size_that_was_asked_for_and_comes_from_its_seed(toy: ToyRuns) -> None:
    options: dict[str, Any] = {"subject": [1, 2, 3], "answer": " Verun", "draws": 60, "layers": [0]}
    found = causal_trace(None, CLEAN, **options, noise=2.0, std=0.5)
    ids = toy.tokens(CLEAN)
    plain = [run for run in toy.asked if len(run.edits) == 1]
    noise = np.stack([run.edits[0].rows.to_float32()[0] for run in plain])  # type: ignore[union-attr]
    noise = noise - toy.embedding[ids][[1, 2, 3]]
    assert len(plain) == 60
    assert noise.std() == pytest.approx(1.0, rel=0.05)
    assert abs(noise.mean()) < 0.1
    assert abs(np.corrcoef(noise[:, 0].ravel(), noise[:, 1].ravel())[0, 1]) < 0.15, "a draw each"
    same = causal_trace(None, CLEAN, **options, noise=2.0, std=0.5)
    np.testing.assert_array_equal(same.restored, found.restored)
    other = causal_trace(None, CLEAN, **options, noise=2.0, std=0.5, seed=1)
    assert not np.array_equal(other.corrupted, found.corrupted)
    default = causal_trace(None, CLEAN, **options | {"draws": 1})
    assert default.noise_std == pytest.approx(3 * toy.embedding[ids].std(), rel=1e-5)


def test_a_trace_refuses_what_does_not_fit(toy: ToyRuns) -> None:
    for options, message in (
        ({"subject": "Velosh"}, "stands 0 times"),
        ({"draws": 0}, "draws=0"),
        ({"noise": 0.0}, r"noise=0\.0"),
        ({"site": "nowhere"}, "site='nowhere'"),
        ({"layers": []}, "layers=.*at least one"),
    ):
        with pytest.raises(SpecError, match=message):
            causal_trace(None, CLEAN, **{"subject": "Talmo", "answer": " Verun"} | options)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers_also_in_the_file(toy: ToyRuns, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"layers": np.arange(1, 3), "window": np.int64(2)}
    at = np.array([5, 6])
    found = sweep(**numbers, positions=at, alpha=np.float32(0.5), floor_runs=np.int64(2))
    assert (found.layers, found.positions) == ((1, 2), (5, 6))
    ids = toy.tokens(CLEAN)
    token = np.int64(WORDS.index(" Verun"))
    traced = causal_trace(
        None, ids, subject=np.array([2]), answer=token, draws=np.int64(1), seed=np.int64(3),
        **numbers, positions=np.arange(len(ids)) > 4,
    )  # fmt: skip
    assert (traced.layers, traced.positions) == ((1, 2), (5, 6))
    for made in (found, traced):
        again = type(made).load(made.save(tmp_path / "made.json"))
        assert (again.layers, again.window) == ((1, 2), 2)


def test_an_answer_that_goes_on_in_the_last_word_is_told(toy: ToyRuns) -> None:
    with pytest.warns(UserWarning, match=r"answer='The'.*'inThe'.* write ' The'"):
        sweep(answer="The")
    with pytest.warns(UserWarning, match="foil='The'"):
        sweep(foil="The")
    # Behind Japanese, and at the start of a turn, there is no space.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_without_space("フランスの首都は", answer="パリ")
        warn_without_space([{"role": "user", "content": "Where"}], answer="Paris")
        warn_without_space([1, 2], answer=3, foil=None)
