"""A reconstructor's files as they are published, its row, and the scorer, on a known server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import yaml
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import get_model
from inspect_ai.scorer import SampleScore, Score
from inspect_ai.solver import generate
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from transformers import AutoModelForCausalLM

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model._places import MemoryStore
from inspect_lens.oracle import (
    _reconstruct,
    complete_reconstructor,
    fraction_explained,
    read_reconstructor,
    reconstruct,
)
from inspect_lens.scorer import (
    _reconstruction,
    fraction_explained_metric,
    reconstruction_score,
)
from inspect_lens.spec import parse_extra_args
from organism._model import CHECKPOINT_DIR
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

HIDDEN, LAYER = 8, 2
META: dict[str, Any] = {
    "kind": "nla_model",
    "role": "ar",
    "d_model": HIDDEN,
    "extraction": {"mse_scale": 2.83, "injection_scale": None},
    "extraction_layer_index": LAYER,
    "tokens": {"critic_suffix_ids": tokens_of("the end")},
    "prompt_templates": {"ar": "row of {explanation} is the end"},
}
MATRIX = np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN)).astype(np.float32)


def saved(folder: Path, meta: object = META, matrix: Any = MATRIX) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "nla_meta.yaml").write_text(yaml.safe_dump(meta))
    if matrix is not None:
        save_file({"weight": matrix}, folder / "value_head.safetensors")
    return folder


def test_the_contract_of_a_reconstructor_is_read(tmp_path: Path) -> None:
    found = read_reconstructor(saved(tmp_path))
    assert (found.hidden, found.layer) == (HIDDEN, LAYER)
    assert found.suffix_ids == tuple(tokens_of("the end"))
    np.testing.assert_array_equal(found.matrix, MATRIX)
    # As the training code writes it: other names, K below the half, and bfloat16.
    old = META | {
        "role": "critic", "critic": {"num_hidden_layers": 3}, "extraction_layer_index": None,
        "prompt_templates": {"critic": META["prompt_templates"]["ar"]}, "tokens": {},
    }  # fmt: skip
    half = torch.from_numpy(MATRIX).bfloat16()
    save_torch({"weight": half}, tmp_path / "value_head.safetensors")
    found = read_reconstructor(saved(tmp_path, old, None))
    assert (found.layer, found.suffix_ids) == (3, ())
    np.testing.assert_array_equal(found.matrix, half.float().numpy())


@pytest.mark.parametrize(
    ("change", "matrix", "message"),
    [
        ({"role": "av"}, MATRIX, "role 'av'"),
        ({"extraction_layer_index": None}, MATRIX, "no extraction_layer_index"),
        ({"prompt_templates": {"ar": "no place"}}, MATRIX, "no or several places"),
        ({"prompt_templates": {"av": "x"}}, MATRIX, "KeyError: 'critic'"),
        ({"d_model": 1 << 40}, MATRIX, "d_model 1099511627776"),
        ({}, MATRIX[:4], r"of the shape \(8, 8\)"),
        ({}, MATRIX * np.nan, "is not finite"),
        ({}, None, "cannot be made from the rest"),
    ],
)
def test_what_is_no_reconstructor_is_refused(
    tmp_path: Path, change: Any, matrix: Any, message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_reconstructor(saved(tmp_path, META | change, matrix))


def stream(text: str) -> np.ndarray[Any, Any]:
    """What the fake model has behind block 2 at the last token of a text."""
    ids = tokens_of(text)
    return residual(ids, (LAYER,), [len(ids) - 1]).to_float32()[0, 0]


def test_a_row_is_the_matrix_times_the_stream_at_the_last_token(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    async def main(server: FakeLensServer) -> None:
        model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
        made = await reconstruct(["a dog", "many small dogs"], folder, model=model)
        wanted = [MATRIX @ stream(f"row of {t} is the end") for t in ("a dog", "many small dogs")]
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)
        request = parse_extra_args(server.requests[-1]["vllm_xargs"])
        assert request is not None
        assert request.capture is not None
        assert request.capture.positions == "last_prompt"  # one row is sent
        alone = await reconstruct("a dog", folder, model=model)
        np.testing.assert_allclose(alone, made[:1], rtol=1e-5)
        assert (await reconstruct([], folder, model=model)).shape == (0, HIDDEN)
        other = read_reconstructor(folder).model_copy(update={"suffix_ids": (1, 2)})
        with pytest.raises(ArtifactError, match="another tokenizer"):
            await reconstruct(["x"], other, model=model)
        wide = read_reconstructor(folder).model_copy(update={"hidden": 9})
        with pytest.raises(ArtifactError, match="has a width of 9"):
            await reconstruct(["x"], wide, model=model)

    with FakeLensServer() as server:
        anyio.run(main, server)


LEFT, MARK, RIGHT = tokens_of("what mark is")
VERBALISER = {
    "kind": "nla_model", "role": "av", "d_model": HIDDEN, "extraction_layer_index": LAYER,
    "extraction": {"injection_scale": 5.0},
    "tokens": {"injection_char": "mark", "injection_token_id": MARK,
               "injection_left_neighbor_id": LEFT, "injection_right_neighbor_id": RIGHT},
    "prompt_templates": {"av": "say what {injection_char} is"},
}  # fmt: skip


@pytest.mark.parametrize("planted", [True, False])
def test_the_metric_is_the_fraction_over_the_rows_of_all_samples(
    tmp_path: Path,
    planted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the planted pair, words and prompt are the text behind which the row stands, and the
    matrix changes its length alone, so everything is explained."""
    monkeypatch.chdir(tmp_path)
    read: list[str] = []

    def read_sidecar(reference: Any, *, kind: str) -> bytes:
        read.append(reference["uri"])
        return real(reference, kind=kind)

    real = _reconstruction.read_sidecar
    monkeypatch.setattr(_reconstruction, "read_sidecar", read_sidecar)
    ends = [f"dog{i}" + " now" * (i % 3) for i in range(24)]
    back = META | {"prompt_templates": {"ar": "<user> tell me about {explanation}"}, "tokens": {}}
    matrix = 3 * np.eye(HIDDEN, dtype=np.float32) if planted else MATRIX
    av, ar = saved(tmp_path / "av", VERBALISER, None), saved(tmp_path / "ar", back, matrix)
    texts = ends if planted else [f"something {i % 5}" for i in range(24)]
    with FakeLensServer() as server, FakeLensServer() as verbaliser:
        roles: dict[str, Any] = {
            name: get_model("lens/org/tiny", base_url=one.url, memoize=False)
            for name, one in (("verbaliser", verbaliser), ("reconstructor", server))
        }
        verbaliser.says_next = [(text, []) for text in texts]
        task = Task(
            dataset=[Sample(input=f"tell me about {end}", id=str(i)) for i, end in enumerate(ends)],
            solver=generate(),
            scorer=reconstruction_score(str(av), str(ar), positions="last_prompt"),
        )
        (log,) = eval(
            task, model="lens/org/tiny", model_base_url=server.url, model_roles=roles,
            model_args={"capture": str(LAYER)}, max_samples=1, display="none",
        )  # fmt: skip
        assert log.status == "success", log.error
    rows, made = [], []
    for sample in log.samples or []:  # in the order of their ids, as texts
        end, text = ends[int(sample.id)], texts[int(sample.id)]
        rows.append(stream(f"<user> tell me about {end}"))
        made.append(matrix @ stream(f"<user> tell me about {text}"))
        cosine = rows[-1] @ made[-1] / np.linalg.norm(rows[-1]) / np.linalg.norm(made[-1])
        found = (sample.scores or {})["reconstruction_score"]
        assert found.value == pytest.approx(cosine, abs=1e-5)
        assert (found.metadata or {})["texts"] == [text]
    empty = matrix @ stream("<user> tell me about")
    wanted = fraction_explained(np.stack(rows), np.stack(made), empty_text=empty)
    assert wanted.empty_text is not None
    assert log.results is not None
    metrics = {name: m.value for name, m in log.results.scores[0].metrics.items()}
    assert metrics["fraction_explained"] == pytest.approx(wanted.fraction, abs=1e-5)
    assert metrics["shuffled"] == pytest.approx(wanted.shuffled, abs=1e-5)
    assert metrics["empty_text"] == pytest.approx(wanted.empty_text, abs=1e-5)
    assert (metrics["rows"], metrics["groups"], metrics["left_out"]) == (24, 24, 0)
    assert len(read) == 0, "what the process has written it does not read again"
    assert (wanted.fraction == pytest.approx(1.0)) is planted
    # The log has references; the numbers stand beside it, and go with it.
    logged = read_eval_log(log.location).samples or []
    facts = logged[0].scores["reconstruction_score"].metadata  # type: ignore[index]
    assert facts is not None
    assert set(facts["rows"]) == {"$lens", "uri", "root", "sha256"}
    # A lost file, and one with rows of another model, cost their own samples.
    (tmp_path / "logs" / facts["rows"]["uri"]).unlink()
    monkeypatch.setattr(_reconstruction, "_READ", MemoryStore(1 << 20))
    scores = [SampleScore(score=(one.scores or {})["reconstruction_score"]) for one in logged]
    monkeypatch.setenv("INSPECT_LENS_DIR", str(tmp_path / "more"))
    wide = _reconstruction._Rebuilt(np.ones(1), np.eye(1, 9), np.eye(2, 9), {})
    scores.append(SampleScore(score=Score(value=1.0, metadata=_reconstruction._keep_rows(
        wide, beside=None))))  # fmt: skip
    lost = sum(one.score.metadata["rows"] == facts["rows"] for one in scores[:-1])  # type: ignore[index]
    compute: Any = fraction_explained_metric()
    found = compute(scores)
    assert (found["rows"], found["left_out"]) == (24 - lost, lost + 1)
    assert math.isfinite(found["fraction_explained"])
    assert f"is without {lost + 1} of 25 samples" in caplog.text
    n_read = len(read)
    assert compute(scores) == found
    assert set(read[n_read:]) == {facts["rows"]["uri"]}, "but for what it cannot read"


def test_two_halves_of_different_autoencoders_are_refused(tmp_path: Path) -> None:
    av = saved(tmp_path / "av", VERBALISER, None)
    ar = saved(tmp_path / "ar", META | {"extraction_layer_index": 1})
    with pytest.raises(SpecError, match="of layer 1 and width 8, and those of"):
        reconstruction_score(str(av), str(ar))
    stated: Any = VERBALISER["extraction"]
    saved(av, VERBALISER | {"extraction": stated | {"base_model": "org/one"}}, None)
    ar = saved(tmp_path / "ar2", META | {"extraction": {"base_model": "org/two"}})
    with pytest.raises(SpecError, match=r"rows of 'org/two', and .* reads those of 'org/one'"):
        reconstruction_score(str(av), str(ar))


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_published_checkpoint_is_completed_for_vllm(
    tmp_path: Path, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The organism up to block 3, saved as the training code does: no norm, no output matrix."""
    layer, ids = 3, torch.tensor([[5, 17, 203, 44]])
    whole: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR)
    with torch.no_grad():
        wanted = whole(ids, output_hidden_states=True).hidden_states[layer + 1]
    folder = saved(tmp_path / "ar", META | {"d_model": 256, "extraction_layer_index": layer},
                   np.eye(256, dtype=np.float32))  # fmt: skip
    kept = {
        name: tensor
        for name, tensor in load_torch(CHECKPOINT_DIR / "model.safetensors").items()
        if name.startswith(
            ("model.embed_tokens", *(f"model.layers.{i}." for i in range(layer + 1)))
        )
    }
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    config |= {"num_hidden_layers": layer + 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = "part.safetensors" if is_sharded else "model.safetensors"
    save_torch(kept, folder / weights)
    if is_sharded:  # with what upstream adds for another trainer
        more = {"model.norm.weight": torch.ones(256), "lm_head.weight": torch.eye(256)}
        save_torch(more, folder / "more.safetensors")
        index = dict.fromkeys(kept, weights) | dict.fromkeys(more, "more.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    made = complete_reconstructor(folder, tmp_path / "served")
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.norm.weight" in index
    assert not {"weight", "lm_head.weight"} & set(index)
    assert read_reconstructor(made).layer == layer
    if not is_sharded:  # transformers, unlike vLLM, looks at an output matrix that is tied
        served: Any = AutoModelForCausalLM.from_pretrained(made, dtype=whole.dtype)
        seen: list[torch.Tensor] = []
        served.model.layers[-1].register_forward_hook(lambda _m, _i, out: seen.append(out))
        with torch.no_grad():
            served(ids)
        torch.testing.assert_close(seen[0], wanted)
    with pytest.raises(SpecError, match="is there already"):
        complete_reconstructor(folder, made)
    with monkeypatch.context() as broken:
        broken.setattr(_reconstruct.json, "dumps", interrupt)
        with pytest.raises(KeyboardInterrupt):
            complete_reconstructor(folder, tmp_path / "half")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ar", "served"]
    config["num_hidden_layers"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"6 layers in config\.json, and 4 are"):
        complete_reconstructor(folder, tmp_path / "other")
