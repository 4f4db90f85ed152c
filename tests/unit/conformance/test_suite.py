"""Each test of the suite passes on a right engine, and fails on one that does it wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conformance import offline
from conformance.protocol import Suite
from conformance.round_trip import judge_round_trip
from conformance.suite import NAMES, run_suite
from tests.kit.child import ChildError
from tests.kit.fake_engine import FakeBackend, Model
from tests.kit.files import write_json

ENGINE_TESTS = [1, 2, 3, 4, 5, 6, 7, 8, 10]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def results(model: Model, tmp_path: Path, fault: str, tests: list[int]) -> dict[int, Any]:
    backend = FakeBackend(model, fault)
    suite = Suite(backend, model, tmp_path, aborts=64)
    rows = run_suite(suite, tests)["results"]
    return {int(row["test"].split()[0]): row for row in rows}


def test_a_right_engine_passes_all(model: Model, tmp_path: Path) -> None:
    found = results(model, tmp_path, "", ENGINE_TESTS)
    assert {n: row["passed"] for n, row in found.items()} == dict.fromkeys(ENGINE_TESTS, True), (
        found
    )
    assert [row["test"] for row in found.values()] == [NAMES[n] for n in sorted(ENGINE_TESTS)]


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("swapped requests", 1),
        ("layers swapped", 1),
        ("a row is missing", 1),
        ("positions of the chunk", 2),
        ("decodes as position 0", 3),
        ("steers nothing", 3),
        ("duplicate rows", 4),
        ("a row is missing", 4),
        ("one cache for all", 5),
        ("steers nothing", 5),
        ("answers anyway", 6),
        ("slots leak", 7),
        ("descriptors leak", 7),
        ("ranks differ", 8),
        ("lists of each rank", 8),
        ("five percent too much", 10),
        ("steers nothing", 10),
    ],
)
def test_a_wrong_engine_fails_the_test_made_for_it(
    model: Model, tmp_path: Path, fault: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.isolation.SETTLE_S", 0.0)
    row = results(model, tmp_path, fault, [number])[number]
    assert row["passed"] is False, row


def test_where_the_cache_cannot_be_reset_salts_keep_requests_apart(
    model: Model, tmp_path: Path
) -> None:
    assert results(model, tmp_path, "cannot reset", [5])[5]["passed"] is True


def test_one_device_is_not_a_pass(model: Model, tmp_path: Path) -> None:
    suite = Suite(FakeBackend(model, max_ranks=1), model, tmp_path)
    row = run_suite(suite, [8])["results"][0]
    assert (row["passed"], row["detail"]) == (None, "not run: no room for a second rank")


FIRST = {"log": "x.eval", "scores": {"a": 1.25, "b": -0.5}}
SAME = {"scores": dict(FIRST["scores"])}  # type: ignore[arg-type]
MISSING = {"error": "ArtifactError: x.safetensors is missing"}


@pytest.mark.parametrize(
    ("again", "without", "n_sidecars", "passed"),
    [
        (SAME, MISSING, 1, True),
        (SAME, SAME, 0, True),
        (SAME, SAME, 1, False),
        (SAME, {"error": "TypeError: 'NoneType' object"}, 1, False),
        ({"scores": {"a": 1.25, "b": -0.5000001}}, MISSING, 1, False),
        ({"scores": {"a": 1.25}}, MISSING, 1, False),
        ({"error": "TypeError: the log holds None"}, MISSING, 1, False),
    ],
)
def test_scores_of_a_log_must_be_bit_identical_and_a_lost_file_named(
    again: dict[str, Any], without: dict[str, Any], n_sidecars: int, passed: bool
) -> None:
    verdict = judge_round_trip(FIRST, again, without, n_sidecars=n_sidecars)
    assert verdict.passed is passed, verdict


def test_a_backend_that_raises_fails_its_tests_and_the_rest_are_run(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("the engine died")

    monkeypatch.setattr(FakeBackend, "rescore", broken)
    rows = run_suite(Suite(FakeBackend(model), model, tmp_path), [9, 10])["results"]
    assert [row["passed"] for row in rows] == [False, True]
    assert "the engine died" in rows[0]["detail"]


def test_a_run_that_is_cut_short_leaves_what_it_has(model: Model, tmp_path: Path) -> None:
    kept: list[list[str]] = []

    def keep(result: dict[str, Any]) -> None:
        kept.append([row["test"] for row in result["results"]])

    suite = Suite(FakeBackend(model), model, tmp_path)
    whole = run_suite(suite, [1, 3, 9], keep)
    assert kept == [[NAMES[1]], [NAMES[1], NAMES[3]], [NAMES[1], NAMES[3], NAMES[9]]]
    assert [row["test"] for row in whole["results"]] == kept[-1]


def test_without_inspect_the_round_trip_is_not_judged(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = "ChildError: Traceback …\nModuleNotFoundError: No module named 'platformdirs'\n"
    monkeypatch.setattr(FakeBackend, "rescore", lambda *_: {"error": lacking})
    (row,) = run_suite(Suite(FakeBackend(model), model, tmp_path), [9])["results"]
    assert row["passed"] is None
    assert "not run: Inspect is not there" in row["detail"]
    assert "platformdirs" in row["detail"]


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_inspect_in_a_folder_of_its_own_is_for_the_eval_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def run(command: Any, environment: Any) -> dict[str, Any]:
        found.append(environment["PYTHONPATH"])
        return {}

    monkeypatch.setattr(offline, "run_inspect", run)
    backend = offline.Offline(
        offline.OWN, tmp_path, work=tmp_path, path=None, options={}, inspect_path="/inspect"
    )
    backend.rescore(["score", "log"])
    assert found[0].split(os.pathsep)[0] == "/inspect"
    assert "/inspect" not in backend.child_environment()["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize(
    ("ranks", "gpus", "own", "bound"),
    [
        (1, 0, None, None),
        (2, 0, None, "3|5"),
        (3, 0, None, "3|5|8"),
        (2, 0, "0-3|4-7", "0-3|4-7"),
        (2, 2, None, None),
    ],
)
def test_ranks_on_a_cpu_have_a_core_each_unless_the_user_binds_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    gpus: int,
    own: str | None,
    bound: str | None,
) -> None:
    found: dict[str, str] = {}

    def child(module: str, *, environment: dict[str, str], log: Path) -> Any:
        found.update(environment)
        raise ChildError("enough")

    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(offline, "Child", child)
    monkeypatch.setattr(offline, "n_gpus", lambda: gpus)
    monkeypatch.setattr(offline, "cores", lambda: [3, 5, 8])
    backend = offline.Offline(offline.OWN, tmp_path, work=tmp_path, path=None, options={})
    assert backend.max_ranks == (gpus or 3)
    with pytest.raises(ChildError), backend.engine("wide", tensor_parallel=ranks):
        pass
    assert found.get(name) == bound


def test_a_failed_eval_is_told_with_the_place_where_it_failed() -> None:
    from inspect_ai.log import EvalError

    from conformance.inspect_child import _told

    traceback = 'Traceback:\n  File "a.py", line 3, in f\n    g()\n  File "b.py", line 7, in g\n'
    error = EvalError(message="no rows", traceback=traceback, traceback_ansi="")
    assert _told(error) == 'no rows (File "b.py", line 7, in g)'
    error = EvalError(message="no rows", traceback="", traceback_ansi="")
    assert _told(error) == "no rows"
