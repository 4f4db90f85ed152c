"""A threshold holds for engine, dtype and quantisation; others are named, once, where it acts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.analysis import samples_df
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model

from inspect_lens.model import activations
from inspect_lens.probe import CaptureFacts, Evaluation, Probe, RecallAt, Statistic, choose_point
from inspect_lens.reading import ProbeReader, lens_column
from inspect_lens.scorer import deception_probe, monitor_alarm, probe_score
from inspect_lens.spec import Numerics
from tests.kit.fake_server import FakeLensServer
from tests.kit.mock_evals import WIDTH, call, planted_probe, run, scores

MADE = CaptureFacts(engine="vllm 0.32.0", dtype="bfloat16")
SAME = Numerics(engine="vllm 0.32.0", dtype="bfloat16")
OTHER = Numerics(engine="vllm 0.32.0", dtype="float16", quantization="fp8")
DIFFERS = ["dtype float16 instead of bfloat16", "quantization fp8 instead of none"]


def probe_of(name: str, **card: Any) -> Probe:
    return planted_probe(name=f"test/{name}", capture=MADE, **card)


def test_what_one_side_does_not_tell_is_not_compared() -> None:
    assert SAME.differences(OTHER) == tuple(DIFFERS)
    assert SAME.differences(SAME) == ()
    for unknown in (Numerics(), Numerics(engine="vllm 0.32.0")):
        assert unknown.differences(OTHER) == SAME.differences(unknown) == ()
    assert SAME.differences(Numerics(engine="vllm 0.33.0")) == (
        "engine vllm 0.33.0 instead of vllm 0.32.0",
    )


def test_a_quantised_cache_is_told_from_another_where_both_are_known() -> None:
    usual = SAME.model_copy(update={"kv_cache_dtype": "bfloat16"})
    quantised = SAME.model_copy(update={"kv_cache_dtype": "fp8"})
    assert usual.differences(quantised) == ("kv_cache_dtype fp8 instead of bfloat16",)
    assert quantised.differences(usual) == ("kv_cache_dtype bfloat16 instead of fp8",)
    # A card or a recording of before this was told may be of either.
    assert SAME.differences(quantised) == quantised.differences(SAME) == ()
    card = MADE.model_copy(update={"kv_cache_dtype": "fp8"})
    assert card.numerics == quantised


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("quantization", ("awq", "awq_marlin", "auto_awq")),
        ("quantization", ("gptq", "gptq_marlin", "auto_gptq")),
        ("quantization", ("fp8", "fp8_per_tensor")),
        ("dtype", ("float16", "half", "torch.float16")),
        ("dtype", ("float32", "float")),
        ("kv_cache_dtype", ("fp8", "fp8_e4m3")),
    ],
)
@pytest.mark.parametrize("kind", [Numerics, CaptureFacts])
def test_two_names_of_one_thing_do_not_differ(
    kind: type[Numerics], field: str, names: tuple[str, ...]
) -> None:
    first, *others = (kind(**{"dtype": "bfloat16", field: name}) for name in names)
    for other in others:
        assert other == first
        assert first.differences(other) == ()
    assert first.differences(kind(**{"dtype": "bfloat16", field: "int8"})) != ()


@pytest.mark.parametrize("here", [SAME, OTHER, None])
@pytest.mark.parametrize("how", ["score", "deception", "alarm", "column"])
def test_every_reader_warns_once_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, here: Numerics | None, how: str
) -> None:
    origin = {} if here is None else {"numerics": here.model_dump(mode="json")}
    name = f"{how}-{here is OTHER}-{here is None}"
    probe = probe_of(name)
    outputs = [call([3.0], folder=tmp_path, origin=origin) for _ in range(3)]
    make: dict[str, Any] = {
        "score": probe_score, "deception": deception_probe,
        "alarm": lambda p: monitor_alarm(p, level="turn"), "column": lambda p: [],
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "inspect_lens"):
        log = run(outputs, make[how](probe), folder=tmp_path)
        if how == "column":
            samples_df(log.location, columns=[lens_column(probe, threshold="fpr=0.01")], quiet=True)
    told = [m for m in caplog.messages if f"test/{name}" in m and "instead of" in m]
    assert len(told) == (here is OTHER)
    if here is OTHER:
        assert all(part in told[0] for part in (*DIFFERS, "inspect-lens probe check"))
    if how in ("score", "deception"):
        facts = scores(log)[0].metadata or {}
        assert facts.get("computed_with") == (DIFFERS if here is OTHER else None)
        assert ("measured elsewhere" in (scores(log)[0].explanation or "")) == (here is OTHER)


def test_what_computed_a_call_is_that_of_the_reading_and_not_of_the_next_one(
    tmp_path: Path,
) -> None:
    """One log, one model name, two servers: each reading keeps its own."""
    reader = ProbeReader.of(probe_of("each"))
    handles = []
    for here in (OTHER, SAME):
        made = call([3.0], folder=tmp_path, origin={"numerics": here.model_dump(mode="json")})
        handles.append(activations(made))
    for order in (handles, handles[::-1]):
        read = {id(h): reader.read_captured(h) for h in order if h is not None}
        other, same = (read[id(h)] for h in handles)
        assert other is not None
        assert same is not None
        assert other.metadata()["computed_with"] == list(other.differences) == DIFFERS
        assert "measured elsewhere" in other.explain()
        assert same.differences == ()
        assert "computed_with" not in same.metadata()
        assert "measured elsewhere" not in same.explain()


@pytest.mark.parametrize("source", ["recompute", "captured", "engine"])
def test_what_the_server_computes_with_is_known_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    """Captured, scored in the engine and fed again alike; the server is asked once."""
    monkeypatch.chdir(tmp_path)
    probe = probe_of(f"served-{source}", model=None)
    options: dict[str, Any] = {
        "recompute": {}, "captured": {"capture": [1]}, "engine": {"probes": probe},
    }[source]  # fmt: skip
    with FakeLensServer(hidden=WIDTH) as server:
        server.computes_with = {"engine": "vllm 0.32.0", "dtype": "float16"}
        scorer = probe_score(probe, source="recompute" if source == "recompute" else "captured")
        (log,) = eval(
            Task(dataset=[Sample("who?"), Sample("where?")], scorer=scorer),
            model=get_model("lens/org/tiny", base_url=server.url, memoize=False, **options),
            display="none", log_dir="logs",
        )  # fmt: skip
        assert 1 <= server.read.count("/v1/inspect_lens") <= 2, "once for all calls; two may meet"
    for found in scores(log):
        assert (found.metadata or {})["computed_with"] == DIFFERS[:1]


def test_a_page_of_a_proxy_in_the_place_of_facts_fails_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeLensServer(hidden=WIDTH) as server:
        usual = server.get
        page = (200, b"<html>Not here</html>")
        monkeypatch.setattr(
            server, "get", lambda path: page if path == "/v1/inspect_lens" else usual(path)
        )
        (log,) = eval(
            Task(dataset=[Sample("who?")], scorer=probe_score(probe_of("page", model=None))),
            model=get_model("lens/org/tiny", base_url=server.url, memoize=False, capture=[1]),
            display="none", log_dir="logs",
        )  # fmt: skip
    assert log.status == "success", log.error
    assert "computed_with" not in (scores(log)[0].metadata or {})


@pytest.mark.parametrize("level", ["turn", "token"])
def test_a_threshold_has_what_its_own_control_set_was_computed_with(
    tmp_path: Path, level: Any
) -> None:
    """Trained elsewhere and set here: nothing differs; each threshold has its own."""
    (held,) = planted_probe().card.thresholds
    alarm: dict[str, Any] = {
        "statistic": Statistic(over="alarm", pool="last"), "numerics": SAME,
    }  # fmt: skip
    here, there = held.model_copy(update={"numerics": OTHER}), held.model_copy(update=alarm)
    probe = probe_of(f"own-{level}", thresholds=(here, there), model=None)
    made = call([3.0], folder=tmp_path, origin={"numerics": OTHER.model_dump(mode="json")})
    reading = ProbeReader.of(probe).read_captured(activations(made))  # type: ignore[arg-type]
    assert reading is not None
    assert reading.differences == ()
    (score,) = scores(run([made], monitor_alarm(probe, level=level), folder=tmp_path))
    assert ("measured elsewhere" in (score.explanation or "")) == (level == "token")
    engine = probe.with_card(pool="last").for_engine()
    assert engine.threshold_numerics == SAME
    # Rates that an evaluation measured against the same control set are of what computed that.
    recalls = [RecallAt(fpr=0.05, control=c, threshold=1.0, recall=0.5, interval=held.interval)
               for c in (held.control, "another")]  # fmt: skip
    for at, known in zip(recalls, (OTHER, SAME), strict=True):
        one = Evaluation(name="e", sha256="", n_positive=1, n_negative=1, disjoint_by="group",
                         recalls=(at,))  # fmt: skip
        card = probe.with_card(evaluations=(one,), thresholds=(here,)).card
        assert choose_point(card, "fpr=0.05").numerics == known


def test_an_alarm_in_the_engine_says_so_in_its_receipt() -> None:
    from inspect_lens._vllm.registered.probe_scores import Reading, Reads
    from inspect_lens.spec import LensRequest

    (held,) = planted_probe().card.thresholds
    alarm = held.model_copy(update={"statistic": Statistic(over="alarm", pool="mean")})
    engine = probe_of("engine", thresholds=(alarm,)).for_engine()
    assert engine.threshold_numerics == SAME
    for here, use, expected in (
        (OTHER, {"alarm": "flag"}, tuple(DIFFERS)),
        (SAME, {"alarm": "flag"}, None),
        (OTHER, {"alarm": "flag", "threshold": 1.0}, None),
        (OTHER, {}, None),
    ):
        uses = LensRequest(probes=[{"name": "p", **use}]).probes
        reading = Reading(Reads(uses, {"p": engine}, here), lo=0, n_prompt=1, n_max=3)
        reading.feed(np.ones((1, 3, 1), np.float32))
        (receipt,) = reading.receipts()
        assert receipt.threshold_differs == expected
