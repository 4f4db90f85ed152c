"""Probes that a call asks the engine to run: registered once, scores kept, and what else if not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import Solver, generate

from inspect_lens.errors import ArtifactError, CaptureError, SpecError
from inspect_lens.model import (
    ProbeScores,
    _scores,
    activations,
    lens_config,
    lens_scope,
    probe_scores,
    read_probe_scores,
    receipt,
)
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model._read import probe_scores_for
from inspect_lens.probe import HeadSpec, NeuralProbe, Probe, ProbeCard
from inspect_lens.solver import with_lens
from inspect_lens.spec import ProbeUse, Site
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

from .conftest import GetModel

H = 8
REGISTRY = "/v1/inspect_lens/registry"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def linear(
    layer: int = 2, *, site: Site = "resid_post", name: str = "org/sum", **card: Any
) -> Probe:
    facts = ProbeCard(name=name, layers=(layer,), hidden=H, site=site, **card)
    return Probe.from_direction(np.arange(1.0, H + 1), card=facts, bias=0.5)


def gated() -> NeuralProbe:
    ones = {"mean": np.zeros(H), "scale": np.ones(H), "value": np.ones((1, H)), "bias": np.ones(1)}
    card = ProbeCard(
        name="org/gated",
        layers=(1,),
        hidden=H,
        kind="neural",
        pool="mean",
        head=HeadSpec(gate=True),
    )
    return NeuralProbe(tensors=ones, card=card)


def truth(prompt: list[int], done: list[int], layer: int = 2) -> np.ndarray:
    """What `linear` says of the completion's tokens but the last."""
    tokens = prompt + done
    fed = list(range(len(prompt), len(tokens) - 1))
    rows = residual(tokens, (layer,), fed).to_float32()[0]
    return rows @ np.arange(1.0, H + 1) + 0.5


@pytest.mark.anyio
async def test_scores_come_with_their_provenance_and_nothing_else_in_the_metadata(
    server: FakeLensServer, model_of: GetModel
) -> None:
    probe = linear()
    output = await model_of(server, probes=[probe]).generate("one two three")
    scores = probe_scores(output)
    assert scores is not None
    column = scores.of("org/sum")
    prompt, done = list(scores.prompt_token_ids), list(scores.token_ids)
    assert prompt == tokens_of("<user> one two three")
    np.testing.assert_allclose(column.scores, truth(prompt, done), rtol=1e-6)
    assert column.positions == range(4, 6)
    assert (column.by.probe, column.by.probe_sha256) == ("org/sum", probe.sha256)
    assert (column.by.layers, column.by.site, column.by.positions) == (
        (2,), "resid_post", "completion",
    )  # fmt: skip
    assert activations(output) is None
    (receipt,) = output.metadata["inspect_lens"]["probes"]
    assert "tokens" not in receipt
    assert probe_scores_for(output.message) is scores
    with pytest.raises(ArtifactError, match="'org/other' did not score"):
        scores.of("org/other")


@pytest.mark.anyio
async def test_a_probe_is_registered_once_whoever_asks_at_the_same_time(
    server: FakeLensServer, model_of: GetModel
) -> None:
    server.delay_s = 0.05
    model = model_of(server, probes=[linear()])

    async def call(i: int) -> None:
        output = await model.generate(f"number {i}")
        assert probe_scores(output) is not None

    async with anyio.create_task_group() as group:
        for i in range(6):
            group.start_soon(call, i)
    assert server.paths.count(REGISTRY) == 1
    # Another eval of the same probe under the same name, whatever its card says of the pool.
    await model_of(server, probes=[linear(pool="max")]).generate("again")
    assert len(server.registry) == 1


@pytest.mark.anyio
async def test_a_server_that_was_started_again_gets_the_probe_again(
    server: FakeLensServer, model_of: GetModel
) -> None:
    model = model_of(server, probes=[linear()])
    await model.generate("one")
    server.registry.clear()
    output = await model.generate("two")
    assert probe_scores(output) is not None
    assert server.paths.count(REGISTRY) == 2


@pytest.mark.anyio
async def test_a_key_that_may_not_register_captures_too(
    server: FakeLensServer, model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"error": {"message": "send INSPECT_LENS_REGISTRY_KEY", "code": 401}}
    monkeypatch.setattr(server, "_register", lambda body: (401, refusal))
    output = await model_of(server, probes=[linear()]).generate("one")
    handle = activations(output)
    assert handle is not None
    assert "set VLLM_API_KEY to that key" in output.metadata["probes_refused"]["org/sum"]


@pytest.mark.anyio
async def test_scores_have_their_provenance_when_the_weights_have_made_room(
    server: FakeLensServer, model_of: GetModel
) -> None:
    probe = linear()
    model = model_of(server, probes=[probe])
    await model.generate("one")
    _scores.FORMS.forget(lambda _: True)
    scores = probe_scores(await model.generate("two"))
    assert scores is not None
    assert scores.of("org/sum").by.probe_sha256 == probe.sha256
    server.registry.clear()
    with pytest.raises(SpecError, match=r"'org/sum': .* made room for others, .* again"):
        await model.generate("three")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (linear(site="attn_out"), "site attn_out is not served"),
        (linear(layer=7), "layers 0 to 3"),
        (gated(), "a tanh gate"),
    ],
)
async def test_what_the_server_cannot_run_is_captured_with_the_reason(
    server: FakeLensServer, model_of: GetModel, probe: Any, reason: str
) -> None:
    server.n_layers = 4
    if probe.layers == (7,):
        server_layers, server.n_layers = 4, 8  # for the capture alone
        fake = pytest.MonkeyPatch()
        from tests.kit import fake_probes

        real = fake_probes.register
        fake.setattr(
            fake_probes, "register", lambda body, **facts: real(
                body, **{**facts, "n_layers": server_layers}
            )
        )  # fmt: skip
    try:
        output = await model_of(server, probes=[probe]).generate("one two three")
    finally:
        if probe.layers == (7,):
            fake.undo()
    assert probe_scores(output) is None
    handle = activations(output)
    assert handle is not None
    assert handle.layers == probe.layers
    assert handle.positions == (4, 5)
    assert reason in output.metadata["probes_refused"][probe.name]


@pytest.mark.anyio
@pytest.mark.parametrize("asker", ["-M", "scope", "config"])
async def test_whoever_asks_learns_why_no_engine_runs_it(
    server: FakeLensServer, model_of: GetModel, asker: str
) -> None:
    """The probe has no form for engines, whichever they are."""
    model = model_of(server, **({"probes": [gated(), linear()]} if asker == "-M" else {}))
    probes = [gated(), linear()] if asker == "scope" else []
    config = lens_config(probes=[gated(), linear()]) if asker == "config" else GenerateConfig()
    with lens_scope(probes=probes, model=model):
        output = await model.generate("one two", config=config)
    assert list(output.metadata["probes_refused"]) == ["org/gated"]
    assert "a tanh gate" in output.metadata["probes_refused"]["org/gated"]
    assert activations(output).layers == (1,)
    assert probe_scores(output).probes == ("org/sum",)


@pytest.mark.anyio
async def test_an_empty_list_of_probes_is_none_of_them(
    server: FakeLensServer, model_of: GetModel
) -> None:
    base = lens_config(probes=[linear()])
    model = model_of(server, probes=[])
    with lens_scope(probes=[], model=model):
        assert probe_scores(await model.generate("one", config=base)) is not None
        none = await model.generate("one", config=lens_config(probes=[], base=base))
    assert probe_scores(none) is None
    assert isinstance(with_lens(probes=[]), Solver)
    for wrong in ("", ["org", ""]):
        with pytest.raises(SpecError, match=r"probes=.*leave it out for none"):
            lens_config(probes=wrong)


def test_positions_are_said_once() -> None:
    use = ProbeUse(name="lies")
    with pytest.raises(SpecError, match="probe_positions='all': the ProbeUse of 'lies' has its"):
        with_lens(probes=[linear(), use], probe_positions="all")
    with pytest.raises(SpecError, match="probe_positions='all': there is no probe"):
        with_lens(capture=[1], probe_positions="all")
    with pytest.raises(SpecError, match="probe_positions='al'"):
        with_lens(probes=linear(), probe_positions="al")
    with pytest.raises(SpecError, match="a name stands twice"):
        lens_config(probes=[use, ProbeUse(name="lies", tokens=True)])


@pytest.mark.anyio
async def test_a_server_without_registry_captures_too(
    peer: FakeLensServer, model_of: GetModel
) -> None:
    output = await model_of(peer, probes=[linear()], capture={"layers": [1]}).generate("one")
    handle = activations(output)
    assert handle is not None
    assert handle.layers == (1, 2)
    assert "no route to register names" in output.metadata["probes_refused"]["org/sum"]


@pytest.mark.anyio
async def test_scopes_and_the_model_ask_together_and_capture_stays(
    server: FakeLensServer, model_of: GetModel
) -> None:
    model = model_of(server, probes=[linear()], capture="1")
    with lens_scope(probes=linear(layer=3, name="org/three", positions="all"), model=model):
        output = await model.generate("one two")
    scores = probe_scores(output)
    assert scores is not None
    assert set(scores.probes) == {"org/sum", "org/three"}
    assert scores.of("org/three").positions == range(5)
    handle = activations(output)
    assert handle is not None
    assert handle.layers == (1,)
    assert handle.receipt is not None
    assert all(probe.tokens is None for probe in handle.receipt.probes)
    assert scores.activations is handle


@pytest.mark.anyio
async def test_every_choice_has_its_own_scores(server: FakeLensServer, model_of: GetModel) -> None:
    model = model_of(server, probes=[linear()], config=GenerateConfig(num_choices=2))
    output = await model.generate("one two")
    first, second = output.choices
    handles = [probe_scores(output), probe_scores(second.message.metadata)]
    for choice, handle in zip((first, second), handles, strict=True):
        assert handle is not None
        done = tokens_of(choice.message.text)
        assert list(handle.token_ids) == done
        expected = truth(list(handle.prompt_token_ids), done)
        np.testing.assert_allclose(handle.of("org/sum").scores, expected, rtol=1e-6)


@pytest.mark.anyio
async def test_streamed_answers_have_scores_too(server: FakeLensServer, model_of: GetModel) -> None:
    output = await model_of(server, probes=[linear()], stream=True).generate("one two three")
    scores = probe_scores(output)
    assert scores is not None
    expected = truth(list(scores.prompt_token_ids), list(scores.token_ids))
    np.testing.assert_allclose(scores.of("org/sum").scores, expected, rtol=1e-6)


@pytest.mark.anyio
async def test_scores_of_other_tokens_than_asked_are_an_error(
    server: FakeLensServer, model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.kit import fake_probes

    real = fake_probes.run_probe

    def short(probe: Any, use: ProbeUse, prompt: Any, done: Any) -> Any:
        return real(probe, use, prompt, done[:-1])

    monkeypatch.setattr(fake_probes, "run_probe", short)
    with pytest.raises(CaptureError, match="scored 1 tokens from position 4, and 2 from 4"):
        await model_of(server, probes=[linear()]).generate("one two three")


def evaluated(server: FakeLensServer, folder: Path, probe: str, **args: Any) -> EvalLog:
    task = Task(dataset=[Sample(input="one two"), Sample(input="three")], solver=generate())
    model = get_model(
        f"lens/{server.model}", base_url=server.url, probes=probe, memoize=False, **args
    )
    (log,) = eval(task, model=model, display="none", log_dir=str(folder / "logs"))
    assert log.status == "success", log.error
    return log


def test_the_log_has_a_reference_and_the_file_the_scores(
    server: FakeLensServer, tmp_path: Path
) -> None:
    saved = str(linear().save(tmp_path / "probe"))
    log = evaluated(server, tmp_path, saved)
    raw = read_eval_log(log.location)
    for sample in raw.samples or []:
        (call,) = read_probe_scores(sample)
        reference = sample.output.metadata["probe_scores"]
        assert isinstance(reference, dict)
        assert set(reference) == {
            "$lens", "uri", "root", "probes", "sha256", "n_prompt", "n_completion",
        }  # fmt: skip
        assert (tmp_path / "logs" / reference["uri"]).exists()
        # Inspect walks every value of a log again and again: nothing is there that says nothing.
        (event,) = (event for event in sample.events if isinstance(event, ModelEvent))
        assert event.config.extra_body is not None
        assert set(event.config.extra_body["extra_args"]["inspect_lens"]) == {"probes"}
        said = sample.output.metadata["inspect_lens"]
        assert all(value not in (None, []) for value in said.values())
        assert set(said["probes"][0]) == {
            "name", "sha256", "aggregate", "score", "n_tokens", "first_position",
        }  # fmt: skip
        done = receipt(sample.output)
        assert done is not None
        assert (done.tiers, done.probes[0].stopped) == ((), False)
        column = call.scores.of("org/sum")
        expected = truth(list(call.scores.prompt_token_ids), list(call.scores.token_ids))
        np.testing.assert_allclose(column.scores, expected, rtol=1e-6)
        assert call.scores.origin["message_id"] == call.message_id
        again = pickle.loads(pickle.dumps(call.scores))  # Inspect's cache
        np.testing.assert_array_equal(again.of("org/sum").scores, column.scores)
    damaged = next((tmp_path / "logs").rglob("*.scores.safetensors"))
    damaged.write_bytes(damaged.read_bytes() + b" ")
    fresh = [
        c.scores for s in read_eval_log(log.location).samples or [] for c in read_probe_scores(s)
    ]
    with pytest.raises(ArtifactError, match="restore the file"):
        [scores.columns for scores in fresh]


def test_in_memory_no_file_is_written(server: FakeLensServer, tmp_path: Path) -> None:
    evaluated(server, tmp_path, str(linear().save(tmp_path / "p")), activations="memory")
    assert list((tmp_path / "logs").rglob("*.safetensors")) == []


def test_a_reference_of_another_kind_is_refused() -> None:
    with pytest.raises(ArtifactError, match="not a logged reference to probe scores"):
        ProbeScores.from_reference({"$lens": "activations/2", "probes": []})


@pytest.mark.parametrize("probes", ["", "no/such-probe", [linear(), ""]])
def test_wrong_probes_are_said_before_any_call(
    server: FakeLensServer, model_of: GetModel, probes: Any
) -> None:
    with pytest.raises(PrerequisiteError, match="-M"):
        model_of(server, probes=probes)
