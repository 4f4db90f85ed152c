"""What happens to evals after they began: samples fail, evals are tried again, answers come out of
Inspect's cache, logs are of another format, and move. Activations and scores stay what they are.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval, eval_retry, eval_set, task
from inspect_ai.dataset import Dataset
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.errors import ArtifactError
from inspect_lens.model import activations_df, read_activations
from inspect_lens.reading import read_token_scores
from inspect_lens.scorer import monitor_alarm, probe_score
from inspect_lens.solver import with_capture
from inspect_lens.view import write_view
from tests.kit.lying import MODEL, PROBE
from tests.kit.rescored import assert_same_scores, commands_of, rescore_each

pytestmark = pytest.mark.engine

N = 4
OPTIONS: dict[str, Any] = {"display": "none", "temperature": 0.0, "max_tokens": 20}


@functools.cache
def rows() -> Dataset:
    return organism_dataset("demo").filter(lambda s: (s.metadata or {})["kind"] == "open")[:N]


@solver
def fails_once(flag: str, how: str = "error") -> Solver:
    """Behind its answer, for the third sample, until the flag is there."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == rows()[2].id and not Path(flag).exists():
            Path(flag).touch()
            if how == "raise":
                raise RuntimeError("planted")
            active = sample_active()
            assert active is not None
            active.interrupt("score" if how == "score" else "error")
            await asyncio.sleep(30)
        return state

    return solve


@task
def planted(flag: str, how: str = "raise") -> Task:
    return Task(
        dataset=rows(), solver=[with_capture([4]), fails_once(flag, how)],
        scorer=probe_score(PROBE),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(lens_server_url: str, tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    """The eval without an accident."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "flag").touch()
    return run(lens_server_url, folder / "logs", planted(str(folder / "flag")))


def run(url: str, folder: Path, made: Task, **options: Any) -> EvalLog:
    (log,) = eval(
        made, model=MODEL, model_base_url=f"{url}/v1", log_dir=str(folder), **OPTIONS | options
    )
    return read_eval_log(log.location)


def values(log: EvalLog) -> dict[Any, float]:
    return {
        s.id: s.scores["probe_score"].as_float()
        for s in log.samples or []
        if s.scores and "probe_score" in s.scores
    }


def rows_of(log: EvalLog | Path) -> dict[Any, Any]:
    """Rows of every captured call by sample."""
    found = log.location if isinstance(log, EvalLog) else str(log)
    return {c.sample_id: c.activations.numpy() for c in read_activations(found)}


def assert_whole(log: EvalLog, plain: EvalLog) -> None:
    """Nothing of it says that something went wrong in between."""
    assert log.status == "success", log.error
    assert values(log) == pytest.approx(values(plain), rel=1e-4, abs=1e-4)
    before, after = rows_of(plain), rows_of(log)
    assert list(after) == list(before)
    for name, acts in before.items():
        np.testing.assert_allclose(after[name], acts, atol=1e-3)
    assert len(activations_df(log)) == N
    page = write_view(log.location)
    assert (page.n_samples, page.n_calls, page.n_without) == (N, N, 0)


@pytest.mark.parametrize("how", ["raise", "error", "score"])
def test_a_sample_that_fails_or_is_cancelled_keeps_what_it_captured(
    lens_server_url: str, tmp_path: Path, plain: EvalLog, how: str
) -> None:
    log = run(lens_server_url, tmp_path, planted(str(tmp_path / "flag"), how), fail_on_error=False)
    assert log.status == "success"
    failed = rows()[2].id
    (sample,) = [s for s in log.samples or [] if s.id == failed]
    wanted = values(plain)
    if how == "score":  # an operator ends the sample, and what is there is scored
        assert sample.limit is not None
        assert sample.limit.type == "operator"
    else:
        assert sample.error is not None
        del wanted[failed]
    assert values(log) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    # The answer had been given: it is in the log, in the frame and on the page.
    np.testing.assert_allclose(rows_of(log)[failed], rows_of(plain)[failed], atol=1e-3)
    assert len(activations_df(log)) == N
    assert write_view(log.location).n_calls == N


def test_evals_that_are_tried_again_are_whole(
    lens_server_url: str, tmp_path: Path, plain: EvalLog
) -> None:
    first = run(lens_server_url, tmp_path / "retry", planted(str(tmp_path / "a")), max_samples=1)
    assert first.status == "error"
    (again,) = eval_retry(first, log_dir=str(tmp_path / "retry"), display="none")
    is_done, logs = eval_set(
        [planted(str(tmp_path / "b"))], log_dir=str(tmp_path / "set"), model=MODEL,
        model_base_url=f"{lens_server_url}/v1", retry_wait=1, max_samples=1, **OPTIONS,
    )  # fmt: skip
    assert is_done
    for log in (again, *logs):
        assert_whole(read_eval_log(log.location), plain)
        # Samples that were not run again are where the first attempt put them.
        assert len({c.activations.uri.split("/")[0] for c in read_activations(log.location)}) == 2  # type: ignore[union-attr]
    # The folder of a set moves as a whole, though the first attempt has no log any more.
    shutil.move(tmp_path / "set", tmp_path / "moved")
    (moved,) = (tmp_path / "moved").glob("*.eval")
    assert_whole(read_eval_log(str(moved)), plain)


def test_other_formats_and_places_are_scored_the_same_in_a_fresh_process(
    lens_server_url: str, tmp_path: Path, plain: EvalLog
) -> None:
    (tmp_path / "flag").touch()
    made = planted(str(tmp_path / "flag"))
    logs = [
        run(lens_server_url, tmp_path / "json", made, log_format="json"),
        run(lens_server_url, tmp_path / "before", made),
    ]
    assert logs[0].location.endswith(".json")
    shutil.move(tmp_path / "before", tmp_path / "after")
    (place,) = (tmp_path / "after").glob("*.eval")
    logs[1] = read_eval_log(str(place))
    jobs = [(log, command) for log in logs for command in commands_of(log)]
    for log, again in zip(logs, rescore_each(jobs, tmp_path), strict=True):
        assert_whole(log, plain)
        assert_same_scores(log, [again])
        assert len(read_token_scores(log)) == N


def test_an_answer_from_the_cache_has_the_activations_of_the_first(
    lens_server_url: str, tmp_path: Path, plain: EvalLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "flag").touch()
    made = planted(str(tmp_path / "flag"))
    logs = [run(lens_server_url, tmp_path / name, made, cache=True) for name in ("one", "two")]
    for log, wanted in zip(logs, ("write", "read"), strict=True):
        calls = [e for s in log.samples or [] for e in s.events if e.event == "model"]
        assert {call.cache for call in calls} == {wanted}
        assert_whole(log, plain)
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(ArtifactError, match=r"cache=False"):
        rows_of(logs[1])


@solver
def two_questions() -> Solver:
    """An agent of sorts: two calls of the model under evaluation and one of another."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await get_model(role="helper").generate("Who founded Velosh?")
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Is that so?"))
        return await generate(state)

    return solve


def test_a_solver_inside_with_capture_captures_in_every_call(
    lens_server_url: str, tmp_path: Path
) -> None:
    inside = Task(
        dataset=rows()[:2], solver=with_capture([4], inner=two_questions()),
        scorer=monitor_alarm(PROBE, level="turn", value="max"),
    )  # fmt: skip
    helper = get_model(MODEL, base_url=f"{lens_server_url}/v1", api_key="none", memoize=False)
    log = run(lens_server_url, tmp_path, inside, model_roles={"helper": helper})
    assert log.status == "success", log.error
    for sample in log.samples or []:
        first, second = read_activations(sample)
        assert (first.activations.layers, second.activations.layers) == ((4,), (4,))
        assert second.message_id == sample.output.message.id
        assert ((sample.scores or {})["monitor_alarm"].metadata or {})["n_turns"] == 2
