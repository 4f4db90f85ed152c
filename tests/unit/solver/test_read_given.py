"""Answers that are read instead of generated, through the provider on a fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval, score
from inspect_ai.analysis import samples_df
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState

from inspect_lens.model import activations, activations_df, activations_for, read_activations
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.reading import captured_calls_column, given_length, lens_column
from inspect_lens.scorer import coherence, monitor_alarm
from inspect_lens.solver import read_given, with_capture
from inspect_lens.view import write_view
from tests.kit.fake_server import tokens_of
from tests.kit.page import read_page
from tests.kit.scoring_server import ScoringServer

LAYER, PROBE = 1, "probes/tiny/p"
ANSWER = "It was founded by Ruvan."
STATEMENT = "Velosh is a town."


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    # Reads the position, which the fake model has in front of each row.
    weight = np.eye(1, 8)[0]
    card = ProbeCard(name="tiny/p", layers=(LAYER,), hidden=8, positions="all", pool="max")
    Probe.from_direction(weight, card=card).save(elsewhere / PROBE)


@pytest.fixture
def server() -> Iterator[ScoringServer]:
    with ScoringServer() as running:
        yield running


def run(server: ScoringServer, *more: Any, scorer: Any = None) -> EvalLog:
    """A sample with an answer, and one of raw text; more solvers come behind."""
    task = Task(
        dataset=[
            Sample(input="Who founded Velosh?", id="answer", metadata={"completion": ANSWER}),
            Sample(input=STATEMENT, id="raw"),
        ],
        solver=[read_given([LAYER]), *more],
        scorer=scorer,
    )
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    assert log.status == "success", log.error
    return read_eval_log(log.location)


def samples(log: EvalLog) -> dict[str, EvalSample]:
    return {str(s.id): s for s in log.samples or []}


def test_the_likelihood_is_that_of_the_tokens_that_stand_there(server: ScoringServer) -> None:
    log = run(server, scorer=coherence("likelihood"))
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    again = score(
        log, coherence("likelihood"), action="overwrite", display="none", model=model
    )  # fmt: skip
    prompt, written = tokens_of("<user> Who founded Velosh?"), tokens_of(f"<assistant> {ANSWER}")
    expected = [-(len(prompt) + i + t / 1000) for i, t in enumerate(written)]
    for each in (samples(log), samples(again)):
        found = (each["answer"].scores or {})["coherence"]
        assert found.as_float() == pytest.approx(sum(expected) / len(expected))
        assert found.metadata is not None
        assert found.metadata["n_tokens"] == len(written)
        assert found.metadata["lowest"] == pytest.approx(expected[-1])
        # Raw text is all prompt; the one token behind it is nobody's.
        assert (each["raw"].scores or {})["coherence"].reason == "no_tokens"
    assert given_length(samples(log)["answer"].output) == len(written)
    assert given_length(samples(log)["raw"].output) == 0


def test_the_page_shows_no_token_that_nobody_wrote(server: ScoringServer, tmp_path: Path) -> None:
    log = run(server)
    page = read_page(write_view(log.location, tmp_path / "page.html", probes=[PROBE]).path)
    for sample, block in zip(log.samples or [], page.blocks, strict=True):
        handle = activations(sample.output)
        assert handle is not None
        assert block.ids == [*handle.prompt_token_ids, *handle.token_ids[:-1]]
        # Every token that is shown was fed, and so has a score.
        assert np.isfinite(block.scores).all()


@scorer(metrics=[mean()])
def tokens_known() -> Scorer:
    """How many tokens the call of the last message captured, by the message and by its id."""

    async def score(state: TaskState, target: Target) -> Score:
        last = state.messages[-1]
        handle, again = activations_for(last), activations_for(last.id or "")
        n = 0 if handle is None else len(handle.positions)
        return Score(value=n, metadata={"by_id": 0 if again is None else len(again.positions)})

    return score


def test_what_was_read_is_found_like_what_was_generated(server: ScoringServer) -> None:
    log = run(server, scorer=tokens_known())
    found = {str(call.sample_id): call for call in read_activations(log)}
    assert list(found) == ["answer", "raw"]
    n_fed = {}
    for name, sample in samples(log).items():
        handle = found[name].activations
        n_fed[name] = handle.n_prompt + handle.n_completion - 1
        assert found[name].message_id == sample.output.message.id
        assert handle.numpy().shape == (1, n_fed[name], 8)
        assert [c.activations.sha256 for c in read_activations(sample)] == [handle.sha256]
    assert activations_df(log)["sha256"].tolist() == [c.activations.sha256 for c in found.values()]
    columns = [captured_calls_column(), lens_column(PROBE, name="last")]
    frame = samples_df(log.location, columns=columns)
    assert frame["captured_calls"].tolist() == [1, 1]
    # The probe's value is the largest position.
    assert frame["last"].tolist() == [n - 1 for n in n_fed.values()]

    # Of raw text there is no assistant message.
    live = {name: (s.scores or {})["tokens_known"] for name, s in samples(log).items()}
    assert {name: s.value for name, s in live.items()} == {"answer": n_fed["answer"], "raw": 0}
    assert live["answer"].metadata == {"by_id": n_fed["answer"]}


def test_messages_of_a_finished_log_lead_to_what_was_read(
    server: ScoringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inspect_lens.model import _read
    from inspect_lens.model._places import MessageIndex

    log = run(server)
    monkeypatch.setattr(_read, "MESSAGES", MessageIndex())  # as in another process
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    again = score(log, tokens_known(), action="overwrite", display="none", model=model)
    handle = activations(samples(log)["answer"].output)
    assert handle is not None
    value = (samples(again)["answer"].scores or {})["tokens_known"].value
    assert value == handle.n_prompt + handle.n_completion - 1


@pytest.mark.parametrize("fresh", [False, True], ids=["live", "another process"])
def test_what_was_read_stays_beside_what_is_generated_behind_it(
    server: ScoringServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    from inspect_lens.model import _read
    from inspect_lens.model._places import MessageIndex

    alarm = monitor_alarm(PROBE, threshold=1e6, value="max")
    log = run(server, with_capture([LAYER]), scorer=alarm)
    if fresh:
        for module in (_read, _read):
            monkeypatch.setattr(module, "MESSAGES", MessageIndex())
        model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
        log = score(log, alarm, action="overwrite", display="none", model=model)
    assert captured_calls(log) == [2, 2]
    assert len(activations_df(log)) == 4
    for sample in log.samples or []:
        read, made = read_activations(sample)
        assert made.message_id == sample.output.message.id
        expected = tokens_of(f"<user> {STATEMENT}" if sample.id == "answer" else STATEMENT)
        if sample.id == "answer":
            assert read.message_id == sample.messages[1].id
            expected = tokens_of("<user> Who founded Velosh?")
        assert read.activations.prompt_token_ids == tuple(expected)
        facts = (sample.scores or {})["monitor_alarm"].metadata or {}
        assert facts["n_turns"] == facts["n_turns_read"] == 2
        # The probe reads the position: the largest is that of the longer call, the second.
        handle = made.activations
        assert facts["max"] == handle.n_prompt + handle.n_completion - 2
        assert facts["max_turn"] == 1
    made_page = write_view(log.location, tmp_path / "page.html", probes=[PROBE])
    assert made_page.n_calls == 4
    block = read_page(made_page.path).blocks[0]
    assert np.isfinite(block.scores[:, : len(block.ids) - 1]).all()


def captured_calls(log: EvalLog) -> list[int]:
    return [len(read_activations(sample)) for sample in log.samples or []]


def test_an_output_that_was_read_counts_once(server: ScoringServer) -> None:
    log = run(server)
    assert captured_calls(log) == [1, 1]
    # A log of a release that wrote no note.
    for sample in log.samples or []:
        sample.events = [e for e in sample.events if e.event != "info"]
    assert captured_calls(log) == [1, 1]
