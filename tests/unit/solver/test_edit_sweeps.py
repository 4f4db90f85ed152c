"""Sweeps of edits and latents on a fake server: what was sent, kept, compared and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inspect_ai.event import InfoEvent, SpanBeginEvent
from inspect_ai.log import EvalLog
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState
from inspect_ai.tool import Tool, tool
from inspect_ai.util import Store

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import lens_config
from inspect_lens.reading import read_cells
from inspect_lens.reading._stored import CellScores
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.scorer import dose_response
from inspect_lens.solver import (
    EditVariant,
    SaeLatents,
    steering_sweep,
    with_lens,
    with_steering,
)
from inspect_lens.spec import Ablate, Add, EditBase, Latents, Zero
from tests.kit.fake_server import FakeLensServer, at_site, residual, tokens_of

from .conftest import LAYER, H, run, sample, sent

V = np.arange(1.0, H + 1)
ABLATE = Ablate(direction=V, layers=range(4))
ADD = Add(vector=V, layers=[LAYER], scale=2.0)


def control(edit: EditBase) -> dict[str, Any]:
    return {"name": "gone", "edits": edit, "control": True}


@scorer(metrics=[mean()])
def words() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion.split()))

    return score


def edits_sent(server: FakeLensServer) -> list[tuple[dict[str, Any], ...]]:
    return [tuple(e.reference() for e in sent(body).edits) for body in server.requests]


def test_each_variant_is_sent_once_beside_a_plain_request(server: FakeLensServer) -> None:
    other = Ablate(direction=V[::-1].copy(), layers=range(4))
    variants = [
        EditVariant(name="gone", edits=other, control=True),
        EditVariant(name="gone", edits=ABLATE),
        EditVariant(name="both", edits=[ABLATE, ADD]),
    ]
    log = run(server, steering_sweep(variants, scorer=words()), n=1, scorer=dose_response())
    expected = [(), (ABLATE,), (ABLATE, ADD), (other,)]
    found = edits_sent(server)
    assert len(found) == len(expected)
    for edits in expected:
        assert tuple(e.reference() for e in edits) in found
    made = read_cells(Store(sample(log).store))
    assert [(c.kind, c.vector, c.scale) for c in made] == [
        ("baseline", None, 0.0), ("vector", "gone", 1.0), ("vector", "both", 1.0),
        ("random", "gone", 1.0),
    ]  # fmt: skip
    assert len({c.message_id for c in made}) == 4
    assert CellScores(store=Store(sample(log).store)).values == [3.0] + [4.0] * 3
    spans = [e for e in sample(log).events if isinstance(e, SpanBeginEvent)]
    names = [s.name for s in spans if s.type == "steering_cell"]
    assert sorted(names) == sorted(
        ["baseline: unsteered", "vector: gone, scale 1", "vector: both, scale 1",
         "random: gone, scale 1"]
    )  # fmt: skip
    assert sample(log).output.message.id == made[0].message_id
    # The log has hashes and no numbers.
    (step,) = log.plan.model_dump(mode="json")["steps"]
    logged = [variant["edits"] for variant in step["params"]["steer"]]
    assert logged == [[e.reference() for e in variant.edits] for variant in variants]


def test_variants_may_be_named_edits_in_json(server: FakeLensServer) -> None:
    form = ABLATE.model_dump(mode="json")
    run(server, steering_sweep({"off": Zero(layers=[1]), "gone": [form, ADD]}), n=1)
    assert sorted(len(edits) for edits in edits_sent(server)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({}, "none that is not a control"),
        ([control(ABLATE)], "none that is not a control"),
        ([EditVariant(name="gone", edits=ABLATE)] * 2, "('gone', 1.0) are there twice"),
        (
            [EditVariant(name="x", edits=ABLATE), control(ABLATE)],
            "('gone', 1.0) has no variant",
        ),
        ({"gone": []}, "edits"),
        ({"gone": {"op": "nothing"}}, "nothing"),
        ([{"name": "", "edits": ABLATE}], "name"),
        ([{"name": "x", "edits": ABLATE, "dose": float("nan")}], "dose"),
        ([{"name": "x", "edits": ABLATE, "strength": 1}], "strength"),
    ],
)
def test_variants_that_cannot_be_compared_are_refused(variants: Any, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        steering_sweep(variants)
    assert said in str(raised.value)


@tool
def ring() -> Tool:
    async def execute(times: int) -> str:
        """Ring a bell.

        Args:
            times: how often.
        """
        return "ding"

    return execute


def autoencoder(n: int = 6, **change: Any) -> SparseAutoencoder:
    """Latent i reads component i + 1 and writes twice as much; 3 is never active."""
    rows = np.eye(H, dtype=np.float32)[1 : n + 1]
    bias = np.array([1, 4, 2.5, -20, -5, 9], dtype=np.float32)[:n]
    parts: dict[str, Any] = {
        "weight": rows, "bias": bias, "decoder": 2 * rows,
        "decoder_bias": np.zeros(H, np.float32), "hook": f"blocks.{LAYER}.hook_resid_post",
    }  # fmt: skip
    return SparseAutoencoder(**(parts | change))


SWEEPS = {
    "edits": lambda: steering_sweep({"gone": ABLATE}),
    "latents": lambda: steering_sweep(SaeLatents(autoencoder(), 0), [1.0]),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_baseline_that_would_be_edited_or_repeated_tools_are_refused(
    server: FakeLensServer, name: str
) -> None:
    from inspect_ai.solver import chain, use_tools

    sweep = SWEEPS[name]()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"solver": with_steering("tiny/v", inner=sweep)}, "around it steers"),
        ({"solver": with_lens(edits=ADD, inner=sweep)}, "layers [2], scale 2"),
        ({"solver": sweep, "config": lens_config(steer="tiny/v")}, "the config of the task"),
        ({"solver": chain(use_tools(ring()), sweep)}, "tools are set (ring)"),
    ]
    for options, said in cases:
        log = run(server, options.pop("solver"), n=1, fails=True, **options)
        assert log.error is not None
        assert log.error.message.count("steering_sweep") == 1
        assert said in log.error.message
    assert server.requests == []


def told(log: EvalLog) -> Any:
    """What a sample's transcript says of its controls."""
    (data,) = infos(log)
    return data


def infos(log: EvalLog) -> list[Any]:
    events = [e for e in sample(log).events if isinstance(e, InfoEvent)]
    return [e.data for e in events if e.source == "inspect_lens/steering_sweep"]


def test_a_latent_is_set_beside_those_that_are_as_active(server: FakeLensServer) -> None:
    sae = autoencoder()
    log = run(server, steering_sweep(SaeLatents(sae, {"it": 0}), [0, 7.5], control_draws=2), n=1)
    first = sent(server.requests[0])
    assert first.capture is not None
    assert (first.capture.layers, first.edits) == ((LAYER,), ())
    # The rows of the answer are known, so its activations and the nearest latents are.
    prompt = tokens_of("<user> tell me about number 0")
    tokens = [*prompt, *tokens_of("word00 word01 word02")]
    fed = list(range(len(prompt), len(tokens) - 1))
    rows = residual(tokens, (LAYER,), fed).to_float32()[0]
    means = np.maximum(rows[:, 1:7] + sae.bias, 0.0).mean(axis=0)
    assert means[0] > 0
    nearest = sorted(range(1, 6), key=lambda i: abs(means[i] - means[0]))[:2]
    assert nearest == [2, 1], "components are alike, so biases tell"
    controls = told(log)["controls"]["it"]
    assert controls["latents"] == nearest
    assert controls["means"] == pytest.approx(means[nearest])
    assert controls["mean"] == pytest.approx(means[0])
    found = []
    for body in server.requests[1:]:
        (edit,) = sent(body).edits
        assert isinstance(edit, Latents)
        assert edit.bias is not None
        (number,) = np.flatnonzero(edit.encoder.to_float32()) - 1
        assert edit.decoder.to_float32()[0, number + 1] == 2.0
        assert (edit.layers, edit.mode) == ((LAYER,), "set")
        assert edit.bias.to_float32() == [sae.bias[number]]
        found.append((int(number), float(edit.value.to_float32()[0])))
    assert sorted(found) == sorted((i, v) for i in (0, *nearest) for v in (0.0, 7.5))
    made = read_cells(Store(sample(log).store))
    assert [(c.kind, c.vector, c.layer, c.scale) for c in made] == [
        ("baseline", None, None, 0.0),
        *(("vector", "it", LAYER, v) for v in (0.0, 7.5)),
        *(("random", "it", LAYER, v) for _ in nearest for v in (0.0, 7.5)),
    ]  # fmt: skip


def test_several_latents_are_no_controls_of_each_other(server: FakeLensServer) -> None:
    log = run(
        server, steering_sweep(SaeLatents(autoencoder(), [0, 2]), [1.0], control_draws=2), n=1
    )
    for name in ("latent_0", "latent_2"):
        assert set(told(log)["controls"][name]["latents"]) <= {1, 3, 4, 5}
    assert len(server.requests) == 1 + 2 + 2 * 2


def test_a_latent_may_be_added_to_at_another_place_without_controls(server: FakeLensServer) -> None:
    added = SaeLatents(
        autoencoder(), 1, mode="add", only_if_active=True, layer=1, site="attn_out", threshold=0.5
    )
    swept = steering_sweep(added, [3.0], controls=[], positions="completion")
    log = run(server, swept, n=1)
    assert infos(log) == []
    assert len(server.requests) == 2
    (edit,) = next(edits for body in server.requests if (edits := sent(body).edits))
    assert isinstance(edit, Latents)
    assert edit.threshold is not None
    assert (edit.layers, edit.site, edit.positions) == ((1,), "attn_out", "completion")
    assert (edit.mode, edit.only_if_active) == ("add", True)
    assert edit.threshold.to_float32() == [0.5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scales": []}, "allowed is one at least"),
        ({"scales": [1, 1.0]}, "each once"),
        ({"latents": 6}, "from 0 to 5"),
        ({"latents": []}, "at least one"),
        ({"control_draws": 6}, "1 to 5"),
        ({"control_draws": 0}, "1 or more"),
        ({"controls": ["orthogonal"]}, "or none"),
        ({"layers": [1], "capture": [1]}, "layers, capture: a sweep of latents"),
        ({"sae": autoencoder(hook="")}, "pass layer="),
        ({"sae": autoencoder(top_k=2)}, "pass the smallest activation"),
        ({"norm_scale": 2.0}, "leave it out"),
        ({"scales": [float("inf")]}, "value"),
    ],
)
def test_latents_that_cannot_be_swept_are_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"sae": autoencoder(), "latents": 0} | options
    of_sweep = {"scales": [1.0]} | {
        key: given.pop(key)
        for key in ("scales", "controls", "control_draws", "layers", "capture")
        if key in given
    }
    with pytest.raises(ValueError, match=said):
        steering_sweep(SaeLatents(**given), **of_sweep)


def test_what_does_not_go_with_edits_is_refused() -> None:
    with pytest.raises(SpecError, match="scales, controls: a sweep of edits"):
        steering_sweep({"gone": ABLATE}, [1.0], controls=["random"])


def test_a_file_that_is_none_is_named() -> None:
    with pytest.raises(ArtifactError, match="nowhere: cannot be read"):
        steering_sweep(SaeLatents("nowhere", 0), [1.0])


def test_the_site_of_the_rows_is_that_of_the_edit(server: FakeLensServer) -> None:
    log = run(
        server,
        steering_sweep(SaeLatents(autoencoder(), 0, site="attn_out"), [1.0], control_draws=1),
        n=1,
    )
    prompt = tokens_of("<user> tell me about number 0")
    tokens = [*prompt, *tokens_of("word00 word01 word02")]
    fed = list(range(len(prompt), len(tokens) - 1))
    rows = at_site(residual(tokens, (LAYER,), fed), "attn_out").to_float32()[0]
    means = np.maximum(rows[:, 1:7] + autoencoder().bias, 0.0).mean(axis=0)
    assert told(log)["controls"]["latent_0"]["mean"] == pytest.approx(means[0])
