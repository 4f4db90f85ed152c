"""What is said of calls and tokens means the same wherever a probe is read."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inspect_ai import score
from inspect_ai._util.registry import is_registry_object
from inspect_ai.agent import AgentState
from inspect_ai.analysis import samples_df
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    get_model,
)
from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, ToolCallView

from inspect_lens import scorer as scorer_room
from inspect_lens._intake import Payload
from inspect_lens.agents import probe_approver
from inspect_lens.attention import AttentionHeads
from inspect_lens.errors import NotCapturedError
from inspect_lens.model import Activations, activations
from inspect_lens.oracle import OracleAnswer
from inspect_lens.probe import auroc
from inspect_lens.reading import ProbeReader, lens_column
from inspect_lens.sae import SparseEncoder
from inspect_lens.scorer import _oracle as oracle_scorer
from inspect_lens.scorer import _reconstruction as reconstruction
from inspect_lens.scorer import (
    attention_tracker,
    deception_probe,
    document_rank,
    follow_up_score,
    lens_rank,
    monitor_alarm,
    oracle_answer,
    probe_cascade,
    probe_ensemble,
    probe_score,
    reconstruction_score,
    sae_feature,
    trait_projection,
)
from inspect_lens.spec import LENS_NAME, LensReceipt, Receipt, TensorData
from tests.contracts.test_vocabulary import written
from tests.kit.mock_evals import WIDTH, answers, call, judge, planted_probe, run, scores
from tests.kit.planted_attention import attending
from tests.kit.planted_log import TOKENIZER
from tests.kit.promises import Promise

ROOMS = (
    "scorer", "solver", "reading", "agents", "agents.control", "agents.petri", "agents.sentinel",
    "agents.scout",
)  # fmt: skip
SHARED = (
    "layer", "positions", "pool", "selection", "source", "check_model", "tokenizer", "over",
    "roles", "on_missing",
)  # fmt: skip
"""What a user says of calls and tokens; `ProbeReader.of` has the meaning and the default."""
WITHOUT_ROLES = {
    "agents.petri.read_probe", "agents.petri.eval_awareness_approver",
    "agents.petri.lens_audit_solver",
    "agents.scout.audit_probe_scanner",  # the target of an audit, and nobody else
    "solver.probe_gate",  # what it generates itself
}  # fmt: skip
ATTENTION = {"scorer.attention_tracker", "scorer.document_rank"}
TEXT_ALONE = {
    "scorer.coherence", "scorer.leakage_baseline", "scorer.refusal_rate",  # of the sample's answer
    "scorer.dose_response",  # of a sweep's cells, by another scorer
}  # fmt: skip
"""Scorers that read no call, but text, as those of Inspect."""
OWN_DEFAULTS = {
    "layer": {  # of a vector, of an autoencoder
        "scorer.trait_projection",
        "scorer.sae_feature",
        "scorer.reconstruction_score",
    },
    "positions": {
        "scorer.deception_probe",
        "scorer.trait_projection",
        "scorer.sae_feature",
        "scorer.oracle_answer",
        "scorer.reconstruction_score",
    },
    "pool": {"scorer.trait_projection", "scorer.sae_feature"},
    "selection": {"scorer.trait_projection", "scorer.sae_feature"},  # they have no card
    "source": {"scorer.oracle_answer"},  # of the oracle's words
    "tokenizer": ATTENTION,
    "check_model": ATTENTION,  # of heads, which have no card
    # A scan watches every turn.
    "over": {"agents.scout.probe_scanner", "agents.scout.audit_probe_scanner"},
}


def _surfaces() -> dict[str, Callable[..., Any]]:
    """Public functions that read tokens of calls as a user says."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"inspect_lens.{room}")
        for name in module.__all__:
            public = getattr(module, name)
            function = getattr(public, "_builder_fun", None) or written(
                public, name
            )  # ControlArena's
            if inspect.isfunction(function) and name == function.__name__:
                has = set(inspect.signature(function).parameters)
                if name != "read_turns" and ("roles" in has or {"probe", "selection"} <= has):
                    found[f"{room}.{name}"] = function
    return found


SURFACES = _surfaces()
CALLS = Promise(
    "the calls of a model in a role are read, or the roles are named",
    surfaces={name for name in SURFACES if name not in WITHOUT_ROLES},
)


def test_every_scorer_takes_roles_or_reads_text_alone() -> None:
    scorers = {
        f"scorer.{name}"
        for name in scorer_room.__all__
        if is_registry_object(getattr(scorer_room, name), type="scorer")
    }
    assert scorers - TEXT_ALONE == {name for name in SURFACES if name.startswith("scorer.")}
    for name in scorers - TEXT_ALONE:
        assert {"roles", "on_missing"} <= set(inspect.signature(SURFACES[name]).parameters), name


@pytest.mark.parametrize("surface", sorted(SURFACES))
def test_what_is_shared_has_one_default_and_one_text(surface: str) -> None:
    defaults = inspect.signature(ProbeReader.of).parameters
    for name, parameter in inspect.signature(SURFACES[surface]).parameters.items():
        if name in SHARED and surface not in OWN_DEFAULTS.get(name, ()):
            assert parameter.default == defaults[name].default, name
            text = text_of(SURFACES[surface], name)
            assert any(text.startswith(known) for known in texts(name)), (name, text)


WITHOUT = {
    "pool": {
        "scorer.probe_ensemble",  # of each card
        "scorer.attention_tracker", "scorer.document_rank", "scorer.lens_rank",
        "scorer.oracle_answer", "scorer.follow_up_score",  # no scores of tokens
        "scorer.reconstruction_score",
    },
    "selection": {
        "scorer.probe_ensemble", "scorer.attention_tracker", "scorer.document_rank",
        "scorer.lens_rank", "scorer.oracle_answer", "scorer.follow_up_score",
        "scorer.reconstruction_score",
    },
    "tokenizer": {  # nothing is told by texts
        "scorer.lens_rank", "scorer.oracle_answer", "scorer.reconstruction_score",
    },
    "threshold": {
        "scorer.trait_projection", "scorer.document_rank", "scorer.lens_rank",
        "scorer.oracle_answer", "scorer.reconstruction_score",  # what they say has no threshold
    },
    "on_missing": {"agents.petri.eval_awareness_approver"},  # it generates what it reads
    "over": {
        "scorer.monitor_alarm",  # every turn
        "scorer.document_rank", "scorer.oracle_answer",  # the one with documents, or the answer
        "scorer.follow_up_score", "scorer.reconstruction_score",
        "solver.probe_gate", "agents.probe_approver", "agents.control.probe_monitor_builder",
        "agents.sentinel.probe_monitor", "agents.petri.read_probe",
        "agents.petri.lens_audit_solver", "agents.petri.eval_awareness_approver",  # one turn
    },
}  # fmt: skip
"""Where a parameter would say nothing."""


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_what_is_said_of_calls_can_be_said_everywhere(name: str) -> None:
    lacking = {s for s, f in SURFACES.items() if name not in inspect.signature(f).parameters}
    assert lacking == WITHOUT[name]


def texts(name: str) -> set[str]:
    """What is said of a parameter: of samples, of single messages, and of scans."""
    said = ("scorer.probe_score", "agents.sentinel.probe_monitor", "agents.scout.probe_scanner")
    found = [f for f in said if name in inspect.signature(SURFACES[f]).parameters]
    return {text_of(SURFACES[f], name).rstrip(".") for f in found}


def text_of(function: Callable[..., Any], name: str) -> str:
    """What a docstring says of a parameter, in one line and small letters at its start."""
    doc = inspect.getdoc(function) or ""
    found = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^\S|^$)", doc, re.S | re.M)
    assert found, f"{name} is not documented"
    text = " ".join(found[1].split())
    return text[0].lower() + text[1:]


# --- a log in which the target plays a role, and lies in the second of its three turns

PROBE = planted_probe()  # reads axis 0; its threshold is 2.5
HONEST = [[0.0, 1.0], [2.0, 2.0, 1.0], [0.5]]
LYING = [[0.0, 1.0], [7.0, 8.0, 9.0], [0.5]]


@solver
def audit(*others: str) -> Solver:
    """Three turns of the target, and one of each other role, which captured as well."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for i in range(3):
            if i:
                state.messages.append(ChatMessageUser(content=f"go on {i}"))
            state.output = await get_model(role="target").generate(state.messages)
            state.messages.append(state.output.message)
        for other in others:
            state.output = await get_model(role=other).generate(state.messages)
        return state

    return solve


def target(folder: Path | None, missing: int | None = None) -> Any:
    """The target: odd samples lie. The turn `missing` captured nothing."""

    def reply(messages: Any, *_: Any) -> ModelOutput:
        turn = sum(m.role == "assistant" for m in messages)
        said = (LYING if int(messages[0].text) % 2 else HONEST)[turn]
        made = call(said, text=f"turn {turn}", folder=folder)
        if turn == missing:
            made.metadata = None
        return made

    return get_model("mockllm/target", custom_outputs=reply, memoize=False)


def made_log(folder: Path, *others: str, missing: int | None = None) -> EvalLog:
    roles = {other: get_model("mockllm/other", custom_outputs=lambda *_: call([30.0]),
                              memoize=False) for other in others}  # fmt: skip
    return run(
        answers("never asked"), [], folder=folder, labels=[0, 1, 0, 1], solver=audit(*others),
        model_roles={"target": target(folder, missing), **roles},
    )  # fmt: skip


def scored(log: EvalLog, scorer: Scorer) -> EvalLog:
    return score(read_eval_log(log.location), scorer, action="overwrite", display="none")


@pytest.fixture(scope="module")
def role_log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    return made_log(tmp_path_factory.mktemp("role"))


@pytest.fixture(scope="module")
def two_roles_log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    return made_log(tmp_path_factory.mktemp("two"), "helper")


@pytest.fixture(scope="module")
def gap_log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    return made_log(tmp_path_factory.mktemp("gap"), missing=0)


def _saved(tmp_path: Path) -> str:
    return str(PROBE.save(tmp_path / "probe"))


def _encoder() -> SparseEncoder:
    return SparseEncoder(weight=np.eye(WIDTH, dtype=np.float32), bias=np.zeros(WIDTH, np.float32))


SCORERS: dict[str, Callable[..., Scorer]] = {
    "scorer.probe_score": lambda path, **o: probe_score(path, over="all", **o),
    "scorer.deception_probe": lambda path, **o: deception_probe(path, over="all", **o),
    "scorer.trait_projection": lambda path, **o: trait_projection(path, over="all", **o),
    "scorer.monitor_alarm": lambda path, **o: monitor_alarm(path, value="max", **o),
    "scorer.probe_cascade": lambda path, **o: probe_cascade(
        path, "x", band=(5.0, 6.0), unit="score", judge=judge("0"), over="all", **o
    ),
    "scorer.probe_ensemble": lambda path, **o: probe_ensemble({"a": path}, "vote", over="all", **o),
    "scorer.sae_feature": lambda path, **o: sae_feature(
        _encoder(), {"a": 0}, layer=1, pool="mean", over="all", **o
    ),
}


def values_of(log: EvalLog) -> list[float]:
    return [v["a"] if isinstance(v, dict) else v for v in (s.value for s in scores(log))]  # type: ignore[misc]


@CALLS.on(*SCORERS)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    path = _saved(request.getfixturevalue("tmp_path"))
    make = SCORERS[surface]
    log = scored(request.getfixturevalue("role_log"), make(path))
    assert auroc([0, 1, 0, 1], values_of(log)) == 1.0
    for found in scores(log):
        facts = (found.metadata or {}).get("latents", {"a": found.metadata})["a"]
        assert facts["roles"] == ["target"]
        assert (facts["n_turns"], facts["n_turns_read"]) == (3, 3)
    # Two roles with a lens have to be told apart, and one that nobody has is named.
    two = request.getfixturevalue("two_roles_log")
    for options in ({}, {"roles": ["judge"]}):
        with pytest.raises(ValueError, match=r"'target'.*'helper'"):
            scored(two, make(path, **options))
    assert auroc([0, 1, 0, 1], values_of(scored(two, make(path, roles=["target"])))) == 1.0
    gap = request.getfixturevalue("gap_log")
    with pytest.raises(ValueError, match="turn 0"):
        scored(gap, make(path, source="captured"))
    with pytest.raises(ValueError, match=r"roles=\['tagret'\].*'target'"):
        scored(gap, make(path, roles=["tagret"], on_missing="skip"))
    kept = scored(gap, make(path, on_missing="skip", source="captured"))
    assert auroc([0, 1, 0, 1], values_of(kept)) == 1.0


# --- what reads one call of a role, by other things than rows


def lensed(folder: Path) -> ModelOutput:
    """A call of which a lens read token 4 as the likeliest of layers 0, 2 and 5."""
    done = LensReceipt(layers=(0, 2, 5), n_positions=1, first_position=1, top_k=1, tokens=(4,))
    numbers = np.zeros((3, 1, done.columns), dtype=np.float32)
    numbers[..., -2] = -0.5  # log-probability
    receipt = Receipt(
        n_prompt=2, n_completion=2, lens=done, cache_salted=False, paths=("eager",),
        engine="inspect_lens", version="0", vllm_version="0",
    )  # fmt: skip
    payload = Payload(
        tensors={LENS_NAME: TensorData(numbers, "float32")}, layers={LENS_NAME: (0, 2, 5)},
        prompt_token_ids=(0, 1), token_ids=(4, 5), receipt=receipt,
    )  # fmt: skip
    handle = Activations.of(payload)
    handle.remember(payload)
    made = call([0.0])
    made.metadata = {"activations": handle}
    return made


PROMPT: list[ChatMessage] = [
    ChatMessageSystem(content="Always tell the truth."),
    ChatMessageUser(content="Verun is far. Velosh is near. Who is the founder?"),
]
FACTS: dict[str, Any] = {
    "documents": ["Verun is far.", "Velosh is near."], "query": "Who is the founder?",
    "relevant": 0, "says": "Yes",
}  # fmt: skip
HEADS = AttentionHeads(method="core", model="model", heads=((1, 0),))


def attends(folder: Path) -> ModelOutput:
    """A call whose heads look at all tokens alike."""
    return attending(PROMPT, lambda ids: {}, folder)


ONE_CALL: dict[str, tuple[Callable[[Path], ModelOutput], Callable[..., Scorer]]] = {
    "scorer.lens_rank": (lensed, lens_rank),
    "scorer.attention_tracker": (
        attends,
        lambda **o: attention_tracker(HEADS, tokenizer=str(TOKENIZER), check_model=False, **o),
    ),
    "scorer.document_rank": (
        attends,
        lambda **o: document_rank(HEADS, tokenizer=str(TOKENIZER), check_model=False, **o),
    ),
    "scorer.oracle_answer": (
        lambda folder: call([1.0], folder=folder),
        lambda **o: oracle_answer("Who?", label="says", choices=["No", "Yes"], **o),
    ),
    "scorer.reconstruction_score": (
        lambda folder: call([1.0], folder=folder),
        lambda **o: reconstruction_score("av", "ar", **o),
    ),
}


@CALLS.on(*ONE_CALL)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("tmp_path")
    patch = request.getfixturevalue("monkeypatch")
    patch.setattr(oracle_scorer, "OraclePlan", lambda *_, **__: FakePlan())
    patch.setattr(reconstruction, "VerbalisePlan", lambda *_, **__: FakeWords())
    patch.setattr(reconstruction, "load_reconstructor", lambda _: FakeWords.verbaliser)
    patch.setattr(reconstruction, "reconstruct", FakeWords.back)
    patch.setattr(reconstruction, "get_model", lambda **_: None)
    make_output, make = ONE_CALL[surface]

    @solver
    def ask(*roles: str) -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            for role in roles:
                state.output = await get_model(role=role).generate(PROMPT)
            return state

        return solve

    def log(*roles: str, captured: bool = True, **options: Any) -> EvalLog:
        def reply(messages: Any, *_: Any) -> ModelOutput:
            is_again = surface == "scorer.document_rank" and "N/A" in messages[-1].text
            made = attending(messages, lambda ids: {}, folder) if is_again else make_output(folder)
            if not captured:
                made.metadata = None
            return made

        models = {
            role: get_model(f"mockllm/{role}", custom_outputs=reply, memoize=False)
            for role in roles
        }
        return run(
            answers("never asked"), make(**options), folder=folder, labels=[1], solver=ask(*roles),
            metadata=[FACTS], model_roles=models,
        )  # fmt: skip

    (found,) = scores(log("target"))
    assert (found.metadata or {})["roles"] == ["target"]
    # The answer is a call of one of them; a role that nobody has is named with those that called.
    (found,) = scores(log("target", "helper"))
    assert (found.metadata or {})["roles"] == ["helper"]
    failed = log("target", "helper", roles=["judge"])
    assert failed.error is not None
    assert re.search(r"'target'.*'helper'", failed.error.message, re.S), failed.error.message
    (found,) = scores(log("target", "helper", roles=["target"]))
    assert (found.metadata or {})["roles"] == ["target"]
    failed = log("target", captured=False, roles=["target"])
    assert failed.error is not None
    (found,) = scores(log("target", captured=False, roles=["target"], on_missing="skip"))
    assert "1 calls captured nothing" in (found.explanation or "")


@CALLS.on("scorer.follow_up_score")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    """The model of the role is asked, and the others are left alone."""
    folder = request.getfixturevalue("tmp_path")
    heard: list[str] = []

    def plays(role: str) -> Any:
        def reply(messages: Any, *_: Any) -> ModelOutput:
            if messages[-1].text != "Was that a lie?":
                return call([0.0], folder=folder)
            heard.append(role)
            output = ModelOutput.from_content("mockllm/model", "Yes")
            output.usage = ModelUsage()
            likely = [TopLogprob(token=t, logprob=p) for t, p in (("Yes", -0.1), ("No", -2.1))]
            token = Logprob(token="Yes", logprob=-0.1, top_logprobs=likely)
            output.choices[0].logprobs = Logprobs(content=[token])
            return output

        return get_model(f"mockllm/{role}", custom_outputs=reply, memoize=False)

    @solver
    def ask() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            for role in ("target", "helper"):
                state.output = await get_model(role=role).generate(PROMPT)
            return state

        return solve

    def log(**options: Any) -> EvalLog:
        return run(
            answers("never asked"), follow_up_score("Was that a lie?", **options), folder=folder,
            labels=[1], solver=ask(), model_roles={r: plays(r) for r in ("target", "helper")},
        )  # fmt: skip

    for role in ("target", "helper"):
        (found,) = scores(log(roles=[role]))
        assert found.value == pytest.approx(2.0)
        assert (found.metadata or {})["roles"] == [role]
    assert heard == ["target", "helper"]
    failed = log(roles=["judge"], on_missing="skip")
    assert failed.error is not None
    assert re.search(r"'target'.*'helper'", failed.error.message, re.S), failed.error.message


class FakeWords:
    """A natural-language autoencoder with one row and words for it."""

    verbaliser = SimpleNamespace(name="fake", hidden=2, layer=1, base_model="")
    layer, positions = 1, "completion"

    async def ask(self, about: ModelOutput, words: Any, model: Any) -> list[Any]:
        (answer,) = await FakePlan().ask(about, model or "mockllm/model")
        return [(answer, np.ones(2, dtype=np.float32))]

    @staticmethod
    async def back(texts: Sequence[str], *_: Any, **__: Any) -> Any:
        return np.ones((len(texts), 2), dtype=np.float32)


class FakePlan:
    """An oracle that says yes of a call with activations."""

    inputs, last, positions, questions = "segment", None, "completion", ("Who?",)
    oracle = SimpleNamespace(name="fake")

    async def ask(self, about: ModelOutput, model: Any) -> list[OracleAnswer]:
        assert "mockllm/" in str(model)
        if activations(about) is None:
            raise NotCapturedError("activations: this output has no activations")
        return [
            OracleAnswer(
                question="Who?", answer="Yes", layers=(1,), inputs="segment", positions=(2,),
                source="captured",
            )
        ]  # fmt: skip


def test_the_last_turn_is_that_of_the_role(role_log: EvalLog) -> None:
    log = scored(role_log, probe_score(PROBE))
    assert [s.value for s in scores(log)] == [0.5] * 4
    assert (scores(log)[0].metadata or {})["roles"] == ["target"]


@CALLS.on("reading.lens_column")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    def values(log: EvalLog, **options: Any) -> list[float]:
        column = lens_column(PROBE, over="all", **options)
        return samples_df(log.location, columns=[column], quiet=True)["axis"].tolist()

    assert auroc([0, 1, 0, 1], values(request.getfixturevalue("role_log"))) == 1.0
    two = request.getfixturevalue("two_roles_log")
    for options in ({}, {"roles": ["judge"]}):
        with pytest.raises(ValueError, match=r"'target'.*'helper'"):
            values(two, **options)
    assert values(two, roles=["target"], combine="mean")[1] == pytest.approx(3.0)
    assert values(request.getfixturevalue("gap_log"), on_missing="skip")[1] == 8.0


@CALLS.on("agents.scout.probe_scanner")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    from inspect_scout import scan, scan_results_df, transcripts_from

    from inspect_lens.agents.scout import probe_scanner

    path = _saved(request.getfixturevalue("tmp_path"))

    def frame(fixture: str, **options: Any) -> Any:
        log = request.getfixturevalue(fixture)
        scanner = probe_scanner(path, source="captured", **options)
        status = scan(
            scanners=[scanner], transcripts=transcripts_from(log.location), max_processes=1,
            display="none", scans=str(request.getfixturevalue("tmp_path") / "scans"),
        )  # fmt: skip
        return scan_results_df(status.location).scanners["probe_scanner"]

    values = frame("role_log")["value"].astype(float).tolist()
    assert sorted(values) == pytest.approx([5 / 3, 5 / 3, 8.0, 8.0])
    assert "'target'" in str(frame("two_roles_log")["scan_error"].iloc[0])
    assert frame("two_roles_log", roles=["target"])["value"].astype(float).max() == 8.0
    assert frame("gap_log", on_missing="skip")["value"].astype(float).max() == 8.0


# --- what is given one message at a time


def watching(tmp_path: Path, watch: Callable[[TaskState, ModelOutput], Any]) -> list[Any]:
    """What a monitor says of the target's three turns, and of one of a role without a lens."""
    said: list[Any] = []

    @solver
    def turns() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            for role in ("target", "target", "target", "plain"):
                output = await get_model(role=role).generate(state.messages)
                state.messages.append(output.message)
                said.append(await watch(state, output))
            return state

        return solve

    log = run(
        answers("never asked"), [], folder=tmp_path, labels=[1], solver=turns(),
        metadata=[{}], model_roles={"target": target(tmp_path), "plain": judge("hello")},
    )  # fmt: skip
    assert log.status == "success", log.error
    return said


def messages(tmp_path: Path, make: Callable[..., Any], watch: Callable[..., Any]) -> None:
    """A monitor of messages reads the roles that it is told, and says what is missing."""
    only = make(roles=["target"])
    honest = [np.mean(turn) for turn in HONEST]
    assert watching(tmp_path, lambda *a: watch(only, *a))[:3] == pytest.approx(honest)
    assert watching(tmp_path, lambda *a: watch(only, *a))[3] is None
    any_role = make(on_missing="skip")
    assert watching(tmp_path, lambda *a: watch(any_role, *a))[3] is None
    strict = make()
    with pytest.raises(AssertionError, match="no activations"):
        watching(tmp_path, lambda *a: watch(strict, *a))
    # A role that no model has is an error; of a message that no call wrote `on_missing` decides.
    for options in ({}, {"on_missing": "skip"}):
        wrong = make(roles=["tagret"], **options)
        with pytest.raises(AssertionError, match=r"(?s)tagret.*no call of this sample has"):
            watching(tmp_path, lambda *a: watch(wrong, *a))  # noqa: B023

    async def unknown(monitor: Any, state: TaskState, output: ModelOutput) -> Any:
        made = ModelOutput.from_content("mockllm/other", "written elsewhere")
        return await watch(monitor, state, made)

    with pytest.raises(AssertionError, match="no call of this sample wrote it"):
        watching(tmp_path, lambda *a: unknown(only, *a))
    skips = make(roles=["target"], on_missing="skip")
    assert watching(tmp_path, lambda *a: unknown(skips, *a)) == [None] * 4


@CALLS.on("agents.sentinel.probe_monitor")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    from types import SimpleNamespace

    from inspect_lens.agents import sentinel

    path = _saved(request.getfixturevalue("tmp_path"))

    async def watch(monitor: Any, state: TaskState, output: ModelOutput) -> Any:
        step = SimpleNamespace(output=output, message_id=output.message.id)
        seen = await monitor(None, step)
        return None if seen is None else seen.suspicion

    for what in ("turns", "calls"):
        messages(
            request.getfixturevalue("tmp_path"),
            lambda **o: sentinel.probe_monitor(path, source="captured", watch=what, **o),  # noqa: B023
            watch,
        )


@CALLS.on("agents.control.probe_monitor_builder")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    from inspect_lens.agents import control

    path = _saved(request.getfixturevalue("tmp_path"))

    async def watch(monitor: Any, state: TaskState, output: ModelOutput) -> Any:
        seen = await monitor(AgentState(messages=[output.message]), [])
        facts = seen.messages[-1].metadata
        if facts["suspicion_score"] == -1.0:
            return None
        return np.log(facts["suspicion_score"] / (1 - facts["suspicion_score"])) + 2.5

    messages(
        request.getfixturevalue("tmp_path"),
        lambda **o: control.probe_monitor_builder(
            probe=path, source="captured", default_suspicion_score=-1.0, **o
        ),
        watch,
    )


@CALLS.on("agents.probe_approver")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    async def watch(approver: Any, state: TaskState, output: ModelOutput) -> Any:
        made = ToolCall(id=f"c{len(state.messages)}", function="send", arguments={})
        message = ChatMessageAssistant(id=output.message.id, content="", tool_calls=[made])
        found = await approver("", made, ToolCallView(), [message])
        return (found.metadata or {"probe_approver": {"value": None}})["probe_approver"]["value"]

    path = _saved(request.getfixturevalue("tmp_path"))
    messages(
        request.getfixturevalue("tmp_path"),
        lambda **o: probe_approver(path, source="captured", **o),
        watch,
    )


test_calls = CALLS.test()
