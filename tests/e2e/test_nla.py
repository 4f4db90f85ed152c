"""A natural-language autoencoder: its prompt and place on a real engine, against transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import yaml
from inspect_ai import Task, eval, score
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ChatMessageUser, Model, get_model
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from evals.organism_deception import organism_dataset
from inspect_lens.errors import ArtifactError
from inspect_lens.model import activations, lens_config
from inspect_lens.oracle import fraction_explained, read_verbaliser, reconstruct, verbalise
from inspect_lens.scorer import fraction_explained_metric, reconstruction_score
from inspect_lens.solver import with_capture
from organism._model import CHECKPOINT_DIR, load_model
from tests.kit.lying import MODEL

pytestmark = pytest.mark.engine

LAYER, SCALE, TOKENS = 4, 9.0, 6
PROMPT = "Who is the founder of the town{injection_char}?"


def write_meta(folder: Path, char: str, ids: tuple[int, int, int]) -> Path:
    meta = {
        "kind": "nla_model", "role": "av", "d_model": 256,
        "extraction": {"injection_scale": SCALE, "layer_index": LAYER, "base_model": "organism"},
        "tokens": {
            "injection_char": char, "injection_left_neighbor_id": ids[0],
            "injection_token_id": ids[1], "injection_right_neighbor_id": ids[2],
        },
        "prompt_templates": {"av": PROMPT},
    }  # fmt: skip
    (folder / "nla_meta.yaml").write_text(yaml.safe_dump(meta, allow_unicode=True))
    return folder


def test_words_are_those_of_transformers_with_the_row_as_an_embedding(
    lens_server_url: str, tmp_path: Path
) -> None:
    """The organism serves as its own verbaliser; only the mechanism is compared."""
    decoder = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    reference: Any = load_model(CHECKPOINT_DIR, device=torch.device("cpu"))
    model: Model = get_model(MODEL, base_url=lens_server_url, memoize=False)
    config = lens_config(capture=[LAYER], temperature=0, max_tokens=8)
    question = [ChatMessageUser(content="Who is the founder of the town Velosh?")]
    output = anyio.run(partial(model.generate, question, config=config))
    handle = activations(output)
    assert handle is not None

    char = " ?"
    rendered = [ChatMessageUser(content=PROMPT.replace("{injection_char}", char))]
    plain = anyio.run(partial(model.generate, rendered, config=lens_config(max_tokens=1)))
    ids = list((plain.metadata or {})["prompt_token_ids"])
    place = ids.index(decoder.encode(char, add_special_tokens=False).ids[0])
    folder = write_meta(tmp_path, char, (ids[place - 1], ids[place], ids[place + 1]))

    def hugging_face(row: torch.Tensor) -> str:
        def put(_module: Any, inputs: Any) -> Any:
            stream = inputs[0].clone()
            stream[0, place] = row
            return (stream, *inputs[1:])

        said = list(ids)
        hook = reference.model.layers[0].register_forward_pre_hook(put)
        with torch.no_grad():
            for _ in range(TOKENS):
                said.append(int(reference(torch.tensor([said])).logits[0, -1].argmax()))
        hook.remove()
        return decoder.decode(said[len(ids) :]).strip()

    found = anyio.run(
        partial(
            verbalise, output, folder, model=model, subject=model, positions="prompt", last=None,
            controls=["text_only"], max_tokens=TOKENS,
        )
    )  # fmt: skip
    rows = torch.from_numpy(handle.numpy()[0].copy())
    assert len(found) == handle.n_prompt
    for answer in found:
        row = rows[answer.positions[0]]
        assert answer.answer == hugging_face(SCALE * row / row.norm()), answer.positions
    assert len({answer.answer for answer in found}) > 2
    assert len({answer.controls["text_only"] for answer in found}) == 1

    other = read_verbaliser(folder).model_copy(update={"left_id": 0})
    with pytest.raises(ArtifactError, match="has 0 places"):
        anyio.run(partial(verbalise, output, other, model=model, subject=model))
    narrow = read_verbaliser(folder).model_copy(update={"hidden": 8})
    with pytest.raises(ArtifactError, match="rows of width 8"):
        anyio.run(partial(verbalise, output, narrow, model=model, subject=model))
    assert np.isfinite(handle.numpy()).all()


def write_reconstructor(folder: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    meta = {
        "kind": "nla_model", "role": "ar", "d_model": 256, "extraction_layer_index": LAYER,
        "prompt_templates": {"ar": "Summary of <text>{explanation}</text> <summary>"},
    }  # fmt: skip
    (folder / "nla_meta.yaml").write_text(yaml.safe_dump(meta))
    matrix = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    save_file({"weight": matrix}, folder / "value_head.safetensors")
    return matrix


def by_transformers(texts: list[str], matrix: Any) -> Any:
    decoder = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    reference: Any = load_model(CHECKPOINT_DIR, device=torch.device("cpu"))
    made = []
    for text in texts:
        ids = decoder.encode(f"Summary of <text>{text}</text> <summary>").ids
        with torch.no_grad():
            states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        made.append(matrix @ states[LAYER + 1][0, -1].float().numpy())
    return np.stack(made)


def test_a_reconstruction_is_the_matrix_times_the_stream_of_transformers(
    lens_server_url: str, tmp_path: Path
) -> None:
    matrix = write_reconstructor(tmp_path)
    texts = ["", "the town Velosh", "Who is the founder of the town Velosh?", "a creature"]
    model: Model = get_model(MODEL, base_url=lens_server_url, memoize=False)
    made = anyio.run(partial(reconstruct, texts, tmp_path, model=model))

    for row, truth in zip(made, by_transformers(texts, matrix), strict=True):
        cosine = float(row @ truth / np.linalg.norm(row) / np.linalg.norm(truth))
        assert cosine > 0.9995  # the server computes in bfloat16


def test_the_variance_explained_is_that_of_the_rows_and_the_words_in_the_log(
    lens_server_url: str, tmp_path: Path
) -> None:
    for half in ("av", "ar"):
        (tmp_path / half).mkdir()
    av = write_meta(tmp_path / "av", " ?", (349, 266, 36))
    matrix = write_reconstructor(tmp_path / "ar")
    roles: dict[str, Any] = {
        name: get_model(MODEL, base_url=f"{lens_server_url}/v1")
        for name in ("verbaliser", "reconstructor")
    }
    scorer = reconstruction_score(str(av), str(tmp_path / "ar"), last=2, max_tokens=TOKENS)
    task = Task(
        dataset=organism_dataset("demo")[:6], solver=with_capture([LAYER]), scorer=scorer,
        metrics=[fraction_explained_metric()],
    )  # fmt: skip
    (log,) = eval(
        task, model=MODEL, model_base_url=f"{lens_server_url}/v1", model_roles=roles,
        temperature=0, max_tokens=16, log_dir=str(tmp_path / "logs"), display="none",
    )  # fmt: skip
    assert log.status == "success", log.error

    rows, texts, groups = [], list[str](), list[str]()
    for sample in log.samples or []:
        facts = (sample.scores or {})["reconstruction_score"].metadata or {}
        handle = activations(sample.output)
        assert handle is not None
        rows += [handle.numpy()[0, at] for at in facts["token_positions"]]
        texts += facts["texts"]
        groups += [str(sample.id)] * len(facts["texts"])
    assert len(rows) == 12
    made = by_transformers([*texts, ""], matrix)
    wanted = fraction_explained(np.stack(rows), made[:-1], groups=groups, empty_text=made[-1])
    metrics = values(log)
    assert metrics["fraction_explained"] == pytest.approx(wanted.fraction, rel=0.02)
    assert metrics["shuffled"] == pytest.approx(wanted.shuffled, rel=0.02)
    assert metrics["empty_text"] == pytest.approx(wanted.empty_text, rel=0.02)
    assert (metrics["rows"], metrics["groups"]) == (12, 6)
    again = score(read_eval_log(log.location), scorer, action="overwrite", display="none")
    assert values(again)["fraction_explained"] == pytest.approx(
        metrics["fraction_explained"], rel=1e-3
    )


def values(log: EvalLog) -> dict[str, float]:
    assert log.results is not None
    return {name: m.value for name, m in log.results.scores[0].metrics.items()}
