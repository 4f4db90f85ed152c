"""A threshold of a card acts only on the statistic that it was calibrated for."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import inspect_lens
from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, Statistic, choose_point, found_above, load_probe
from inspect_lens.reading import ProbeReader, Suspicion
from inspect_lens.reading._thresholds import acting_point, acting_value
from inspect_lens.spec import ProbeUse
from tests.kit.mock_evals import call, planted_probe
from tests.kit.promises import Promise

SOURCE = Path(inspect_lens.__file__).parent
OWNERS = {"probe", "reader", "card"}
"""Arguments that bring the card whose threshold acts."""
CARRIERS = {"Reading", "ProbeReader"}
"""Classes that hold a reader, so that their methods name none."""
ANSWER = Statistic(over="answer", pool="mean")
ALARM = Statistic(over="alarm", pool="mean")


def _surfaces() -> Iterator[str]:
    """Every public function that a card and a `threshold` reach, and what a request says."""
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    for path, text in texts.items():
        if "threshold:" not in text and "alarm:" not in text:
            continue  # to parse all of them takes seconds
        for owner in ast.walk(ast.parse(text)):
            for one in ast.iter_child_nodes(owner):
                if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
                    continue
                names = {a.arg for a in (*one.args.args, *one.args.kwonlyargs)}
                asks = {"threshold", "alarm"} & names
                if asks and (names & OWNERS or getattr(owner, "name", "") in CARRIERS):
                    parts = path.relative_to(SOURCE).with_suffix("").parts
                    public = parts[:-1] if parts[-1].startswith("_") else parts
                    module = ".".join(("inspect_lens", *public))
                    within = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                    yield f"{module}:{within}{one.name}"
    yield from (f"inspect_lens.spec:ProbeUse.{n}" for n in ProbeUse.model_fields if n == "alarm")


PROMISE = Promise("a threshold acts only on the statistic it is for", surfaces=_surfaces())


def only(statistic: Statistic) -> AnyProbe:
    """A probe of the mean, whose one threshold is for this statistic."""
    (held,) = planted_probe().card.thresholds
    return planted_probe(thresholds=(held.model_copy(update={"statistic": statistic}),))


def refused() -> Any:
    return pytest.raises(SpecError, match="cannot stand in")


@PROMISE.on(
    "inspect_lens.agents:probe_approver",
    "inspect_lens.agents.control:probe_monitor_builder",
    "inspect_lens.agents.petri:eval_awareness_approver",
    "inspect_lens.agents.petri:lens_audit_solver",
    "inspect_lens.agents.petri:read_probe",
    "inspect_lens.agents.scout:audit_probe_scanner",
    "inspect_lens.agents.scout:probe_scanner",
    "inspect_lens.reading:ProbeReader.of",
    "inspect_lens.reading:lens_column",
    "inspect_lens.scorer:deception_probe",
    "inspect_lens.scorer:follow_up_score",
    "inspect_lens.scorer:monitor_alarm",
    "inspect_lens.scorer:probe_cascade",
    "inspect_lens.scorer:probe_score",
    "inspect_lens.agents.sentinel:probe_monitor",
    "inspect_lens.solver:probe_gate",
)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    """What compares a whole answer takes no threshold of an alarm, and its own."""
    folder = request.getfixturevalue("tmp_path")
    module, _, name = surface.partition(":")
    make: Any = importlib.import_module(module)
    for part in name.split("."):
        make = getattr(make, part)
    if module.endswith("sentinel"):
        make = partial(make, unit="threshold")  # compares; the raw score is a number alone
    if name == "probe_cascade":
        make = partial(make, question="It is so.", band=(0.0, 1.0), unit="score")
    if name == "follow_up_score":
        make = partial(make, "Was that a lie?")
    for statistic in (ANSWER, ALARM):
        only(statistic).save(folder / statistic.over)
    make(probe=str(folder / "answer"), threshold="fpr=0.01")
    with refused():
        make(probe=str(folder / "alarm"), threshold="fpr=0.01")
    if name == "monitor_alarm":
        make(probe=str(folder / "alarm"), level="token", watch="mean")
        for watch in ("last", "ema:0.1"):
            with refused():
                make(probe=str(folder / "alarm"), level="token", watch=watch)
        with refused():
            make(probe=str(folder / "answer"), level="token", watch="mean")


@PROMISE.on("inspect_lens.probe.card:choose_point")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    assert choose_point(only(ALARM).card, statistic=ALARM).value == 2.5
    for named in (None, "fpr=0.01", 2.5):
        with refused():
            choose_point(only(ALARM).card, named)
        with refused():
            choose_point(only(ANSWER).card, named, ALARM)


@PROMISE.on("inspect_lens.probe.card:found_above")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    card = load_probe("organism/deception-md").card.model_copy(update={"pool": "mean"})
    (alarm,) = only(ALARM).card.thresholds
    assert found_above(card, card.thresholds[0].value) is not None
    assert found_above(card.model_copy(update={"thresholds": (alarm,)}), alarm.value) is None


@PROMISE.on("inspect_lens.reading:acting_point", "inspect_lens.reading:ProbeReader.point_for")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    """None for another statistic, so that there is no rate and no verdict."""
    for own, other in ((ANSWER, ALARM), (ALARM, ANSWER)):
        probe = only(own)
        for asked, there in ((own, True), (other, False)):
            if surface.endswith("acting_point"):
                found = acting_point(probe, None, asked, same_tokens=True)
            else:
                found = ProbeReader.of(probe).point_for(asked)
            assert (found is not None) is there


@PROMISE.on("inspect_lens.reading:acting_value", "inspect_lens.reading:Suspicion.of")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    reader, bare = ProbeReader.of(only(ANSWER)), ProbeReader.of(only(ALARM))
    if surface.endswith("acting_value"):
        assert (acting_value(reader, None), acting_value(bare, None, ALARM)) == (2.5, 2.5)
        with refused():
            acting_value(bare, None)
        assert acting_value(bare, 1.0) == 1.0, "a number of the user's own acts on anything"
    else:
        assert Suspicion.of(reader, unit="threshold").threshold == 2.5
        with refused():
            Suspicion.of(bare, unit="threshold")


@PROMISE.on("inspect_lens.reading:Reading.first_crossing")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    def read(probe: AnyProbe) -> Any:
        return anyio.run(ProbeReader.of(probe).read, call([0.0, 9.0, 9.0]))

    assert read(only(ALARM)).first_crossing(pool="mean") == 1
    with refused():
        read(only(ALARM)).first_crossing()
    with refused():
        read(only(ANSWER)).first_crossing(pool="mean")


@PROMISE.on("inspect_lens.spec:ProbeUse.alarm")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    engine, bare = only(ALARM).for_engine(), only(ANSWER).for_engine()
    for action in ("flag", "stop"):
        assert engine.alarm_threshold(ProbeUse(name="p", alarm=action)) == 2.5
        for other in ({"aggregate": "last"}, {"positions": "all"}):
            with pytest.raises(SpecError, match="was calibrated for"):
                engine.alarm_threshold(ProbeUse(name="p", alarm=action, **other))
        with pytest.raises(SpecError, match="no threshold for the running mean"):
            bare.alarm_threshold(ProbeUse(name="p", alarm=action))
        assert bare.alarm_threshold(ProbeUse(name="p", alarm=action, threshold=1.0)) == 1.0


test_promise = PROMISE.test()
