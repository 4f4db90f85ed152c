from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import generate

from inspect_lens._intake import Payload, encode_file
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations
from inspect_lens.probe import Interval, ModelRef, Probe, ProbeCard, Threshold
from inspect_lens.scorer import deception_probe, probe_score
from inspect_lens.scorer._baselines import words_of
from inspect_lens.spec import CaptureReceipt, Receipt, SteerReceipt, TensorData

H, LAYERS = 8, (1, 3)
N_PROMPT, N_COMPLETION = 5, 4
THRESHOLD = Threshold(
    value=1.0, fpr=0.01, control="control", n_control=300, n_above=2,
    interval=Interval(low=0.0, high=0.02, method="m"),
)  # fmt: skip


def probe(layers: tuple[int, ...] = (3,), **card: Any) -> Probe:
    facts = {"name": "tiny/p", "layers": layers, "hidden": H, "thresholds": (THRESHOLD,), **card}
    return Probe.from_direction(np.eye(H)[: len(layers)], card=ProbeCard(**facts))


def payload(shift: float, *, seed: int = 0, receipt: Receipt | None = None) -> Payload:
    """Completion tokens at layer 3 score `shift` on average; all else is far away."""
    rng = np.random.default_rng(seed)
    n = N_PROMPT + N_COMPLETION - 1
    acts = rng.normal(size=(2, n, H)).astype(np.float32) + 100
    completion = rng.normal(size=N_COMPLETION - 1)
    acts[1, N_PROMPT:, 0] = shift + completion - completion.mean()
    return Payload(
        tensors={"residual_stream": TensorData(acts, "float32")},
        layers={"residual_stream": LAYERS},
        prompt_token_ids=tuple(range(N_PROMPT)),
        token_ids=tuple(range(50, 50 + N_COMPLETION)),
        receipt=receipt,
    )


def handle(made: Payload, folder: Path | None = None, name: str = "x") -> Activations:
    if folder is None:
        acts = Activations.of(made)
        acts.remember(made)
        return acts
    (folder / name).write_bytes(b"".join(encode_file(made)))
    return Activations.of(made, uri=name, root=str(folder))


def run(outputs: list[dict[str, Any] | None], scorer: Any, *, folder: Path) -> EvalLog:
    """A real eval of a mock model that attaches `outputs[i]` as metadata to sample i."""

    def reply(messages: Any, *_: Any) -> ModelOutput:
        output = ModelOutput.from_content("mockllm/model", "no")
        output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
        output.metadata = outputs[int(messages[-1].text)]
        return output

    dataset = [Sample(input=str(i), metadata={"label": i % 2}) for i in range(len(outputs))]
    task = Task(dataset=dataset, solver=generate(), scorer=scorer)
    model = get_model("mockllm/model", custom_outputs=reply, memoize=False)
    (log,) = eval(task, model=model, display="none", log_dir=str(folder))
    return log


def test_a_probe_reads_its_own_site_and_no_other(tmp_path: Path) -> None:
    made = payload(0.0)
    stream = made.tensors["residual_stream"].storage
    attention = TensorData((stream + 1).astype(np.float32), "float32")
    both = Payload(
        tensors={**made.tensors, "attn_out": attention},
        layers={**made.layers, "attn_out": LAYERS},
        prompt_token_ids=made.prompt_token_ids,
        token_ids=made.token_ids,
        receipt=None,
    )
    found = []
    for site in ("resid_post", "attn_out"):
        scorer = probe_score(probe(site=site), check_model=False, source="captured")
        log = run([{"activations": handle(both)}], scorer, folder=tmp_path)
        assert log.samples is not None
        found.append(next(iter((log.samples[0].scores or {}).values())).as_float())
    assert found[1] - found[0] == pytest.approx(1.0, abs=1e-5)
    scorer = probe_score(probe(site="mlp_out"), check_model=False, source="captured")
    log = run([{"activations": handle(both)}], scorer, folder=tmp_path)
    assert log.status == "error"
    assert "mlp_out was not captured" in str(log.error)


def captured(n: int = 4) -> list[dict[str, Any] | None]:
    return [{"activations": handle(payload(2.0 * (i % 2), seed=i))} for i in range(n)]


def scores(log: EvalLog) -> list[Any]:
    assert log.status == "success", log.error
    assert log.samples is not None
    return [next(iter((s.scores or {}).values())) for s in log.samples]


def test_the_words_of_answers_are_no_baseline_of_what_the_prompt_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for positions in ("last", "prompt", "last_prompt"):
        scorer = probe_score(probe(), positions=positions)  # type: ignore[arg-type]
        log = run(captured(), scorer, folder=tmp_path)
        reads_prompt = positions != "last"
        marked = [(one.metadata or {}).get("reads_prompt_alone", False) for one in scores(log)]
        assert marked == [reads_prompt] * 4
        assert log.results is not None
        assert math.isnan(log.results.scores[0].metrics["words_auroc"].value) is reads_prompt
        assert ("read the prompt alone" in caplog.text) is reads_prompt


def test_it_scores_what_the_generation_captured(tmp_path: Path) -> None:
    made = probe()
    log = run(captured(), probe_score(made), folder=tmp_path)
    got = scores(log)
    assert [s.value for s in got] == pytest.approx([0.0, 2.0, 0.0, 2.0], abs=1e-5)
    # Inspect wraps the lines of each text of a score twice, for its summary.
    texts = [value for value in got[1].metadata.values() if isinstance(value, str)]
    assert max(map(len, texts)) <= 64
    assert got[1].metadata.pop("token_scores")["$lens"] == "scores/1"
    assert log.samples is not None
    assert got[1].metadata.pop("words") == words_of(log.samples[1].output.completion)["words"]
    assert got[1].metadata == {
        "name": "tiny/p mean",
        "probe": "tiny/p",
        "probe_sha256": made.sha256,
        "layers": [3],
        "pool": "mean",
        "turn": 0,
        "n_tokens": N_COMPLETION - 1,
        "positions": [N_PROMPT, N_PROMPT + N_COMPLETION - 1],
        "source": "rows",
        "threshold": 1.0,
        "fpr": 0.01,
        "model_verified": False,
    }
    assert [s.answer for s in got] == ["below threshold", "above threshold"] * 2
    assert "mean over 3 tokens at layer 3" in got[1].explanation
    assert log.results is not None
    assert log.results.scores[0].metrics["auroc"].value == 1.0
    assert log.eval.scorers is not None
    assert log.eval.scorers[0].name == "probe_score"


def test_the_log_holds_no_arrays(tmp_path: Path) -> None:
    log = run(captured(2), probe_score(probe()), folder=tmp_path)
    assert log.samples is not None
    sizes = [len(s.model_dump_json()) for s in log.samples]
    assert max(sizes) < 20_000


def test_several_layers_are_averaged_or_picked(tmp_path: Path) -> None:
    both = probe(LAYERS)
    (averaged,) = scores(run(captured(1), probe_score(both), folder=tmp_path))
    (first,) = scores(run(captured(1), probe_score(both, layer=1), folder=tmp_path))
    (second,) = scores(run(captured(1), probe_score(both, layer=3), folder=tmp_path))
    assert averaged.value == pytest.approx((first.value + second.value) / 2)
    assert averaged.metadata["layers"] == [1, 3]


def test_an_output_without_tokens_to_read_is_unscored_never_zero(tmp_path: Path) -> None:
    made = payload(1.0)
    short = Payload(
        tensors={
            "residual_stream": TensorData(
                made.tensors["residual_stream"].storage[:, :N_PROMPT], "float32"
            )
        },
        layers=made.layers,
        prompt_token_ids=made.prompt_token_ids,
        token_ids=(7,),
    )
    outputs: list[Any] = [*captured(2), {"activations": handle(short)}]
    log = run(outputs, probe_score(probe()), folder=tmp_path)
    got = scores(log)[2]
    assert math.isnan(got.value)
    assert got.reason == "no_tokens"
    assert "positions='completion' selects none" in (got.explanation or "")
    assert log.results is not None
    assert log.results.scores[0].unscored_samples == 1


@pytest.mark.parametrize("source", ["auto", "captured"])
@pytest.mark.parametrize("metadata", [None, {}, {"other": 1}])
def test_no_activations_is_an_error_that_says_what_to_do(
    tmp_path: Path, source: Any, metadata: dict[str, Any] | None
) -> None:
    log = run([metadata], probe_score(probe(), source=source), folder=tmp_path)
    assert log.status == "error"
    assert log.error is not None
    assert "-M capture=[3]" in log.error.message
    assert "no activations" in log.error.message


def test_a_layer_that_was_not_captured_is_an_error(tmp_path: Path) -> None:
    log = run(captured(1), probe_score(probe((4,)), source="captured"), folder=tmp_path)
    assert log.error is not None
    assert "layer 4 was not captured" in log.error.message


def test_positions_follow_the_receipt(tmp_path: Path) -> None:
    made = payload(2.0)
    storage = made.tensors["residual_stream"].storage[:, N_PROMPT:]
    receipt = Receipt(
        n_prompt=N_PROMPT, n_completion=N_COMPLETION, cache_salted=False, paths=("graph",),
        engine="inspect_lens", version="0", vllm_version="0",
        capture=CaptureReceipt(
            layers=LAYERS, n_positions=N_COMPLETION - 1, first_position=N_PROMPT,
            dtype="float32", rows=6,
        ),
    )  # fmt: skip
    part = Payload(
        tensors={"residual_stream": TensorData(storage, "float32")}, layers=made.layers,
        prompt_token_ids=made.prompt_token_ids, token_ids=made.token_ids, receipt=receipt,
    )  # fmt: skip
    outputs: list[Any] = [{"activations": handle(part)}]
    (got,) = scores(run(outputs, probe_score(probe()), folder=tmp_path))
    assert got.value == pytest.approx(2.0, abs=1e-5)
    log = run(outputs, probe_score(probe(), positions="prompt", source="captured"), folder=tmp_path)
    assert log.error is not None
    assert "token position 0 was not captured" in log.error.message


IDS = {
    "prompt_token_ids": list(range(N_PROMPT)),
    "token_ids": list(range(50, 50 + N_COMPLETION)),
}


class TestRecompute:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """`recapture` as the provider delivers it, with a note of each call."""
        made: list[dict[str, Any]] = []

        async def recapture(model: Model, **request: Any) -> Activations:
            made.append(request)
            return handle(payload(7.0))

        monkeypatch.setattr("inspect_lens.reading._rows.recapture", recapture)
        return made

    def test_it_feeds_the_same_token_ids(self, tmp_path: Path, calls: list[Any]) -> None:
        (got,) = scores(run([dict(IDS)], probe_score(probe()), folder=tmp_path))
        assert got.value == pytest.approx(7.0, abs=1e-5)
        assert got.metadata["source"] == "recomputed"
        assert got.metadata["positions"] == [N_PROMPT, N_PROMPT + N_COMPLETION - 1]
        assert calls == [{**IDS, "layers": (3,), "site": "resid_post", "adapter": None}]

    def test_auto_prefers_what_was_captured(self, tmp_path: Path, calls: list[Any]) -> None:
        (got,) = scores(run(captured(1), probe_score(probe()), folder=tmp_path))
        assert got.metadata["source"] == "rows"
        assert calls == []

    def test_auto_recomputes_a_missing_layer(self, tmp_path: Path, calls: list[Any]) -> None:
        part = Payload(
            tensors={"residual_stream": TensorData(np.zeros((1, 8, H), np.float32), "float32")},
            layers={"residual_stream": (0,)},
            prompt_token_ids=tuple(range(N_PROMPT)),
            token_ids=tuple(range(50, 50 + N_COMPLETION)),
        )
        outputs: list[Any] = [{"activations": handle(part)}]
        (got,) = scores(run(outputs, probe_score(probe()), folder=tmp_path))
        assert got.metadata["source"] == "recomputed"

    def test_recompute_can_be_asked_for(self, tmp_path: Path, calls: list[Any]) -> None:
        scorer = probe_score(probe(), source="recompute")
        (got,) = scores(run(captured(1), scorer, folder=tmp_path))
        assert got.value == pytest.approx(7.0, abs=1e-5)

    def test_a_steered_generation_is_not_recomputed_unasked(
        self, tmp_path: Path, calls: list[Any]
    ) -> None:
        steered = Receipt(
            n_prompt=N_PROMPT, n_completion=N_COMPLETION, cache_salted=True, paths=("graph",),
            engine="inspect_lens", version="0", vllm_version="0",
            steer=SteerReceipt(layers=(1,), n_tokens=3, vectors=("a" * 64,)),
        )  # fmt: skip
        outputs: list[Any] = [{**IDS, "inspect_lens": steered.model_dump(mode="json")}]
        log = run(outputs, probe_score(probe()), folder=tmp_path)
        assert log.error is not None
        assert "was steered" in log.error.message
        scorer = probe_score(probe(), source="recompute")
        assert scores(run(outputs, scorer, folder=tmp_path))[0].metadata["source"] == "recomputed"

    def test_without_token_ids_it_is_an_error(self, tmp_path: Path, calls: list[Any]) -> None:
        log = run([{}], probe_score(probe(), source="recompute"), folder=tmp_path)
        assert log.error is not None
        assert "no token ids" in log.error.message


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"source": "guess"}, "allowed are auto, captured, recompute"),
            ({"positions": "assistant"}, "positions='assistant'"),
            ({"pool": "median"}, "pool='median'"),
        ],
    )
    def test_wrong_ones_are_refused_before_any_sample(
        self, options: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(SpecError, match=match):
            probe_score(probe(), **options)

    def test_a_layer_that_the_probe_lacks_is_refused(self) -> None:
        with pytest.raises(ArtifactError, match="directions at"):
            deception_probe(probe(), layer=2)

    def test_a_missing_probe_is_refused(self) -> None:
        with pytest.raises(ArtifactError, match="was not found"):
            deception_probe("no/such-probe")


def test_a_probe_of_another_model_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()  # mockllm/model, by name
    (tmp_path / "model" / "x.safetensors").write_bytes(b"\x00" * 64)
    other = probe(model=ModelRef(name="other", sha256="0" * 64))
    log = run(captured(1), probe_score(other), folder=tmp_path)
    assert log.error is not None
    assert "trained on 'other'" in log.error.message
    assert scores(run(captured(1), probe_score(other, check_model=False), folder=tmp_path))
