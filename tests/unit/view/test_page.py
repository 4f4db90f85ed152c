"""A written page holds exactly what probes say of what was captured."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model._places import read_log
from inspect_lens.probe import HeadSpec, NeuralProbe, Probe, ProbeCard
from inspect_lens.view import write_view
from inspect_lens.view._page import ranges
from tests.kit.page import Page, read_page
from tests.kit.planted_log import TOKENIZER, H, Planted, plant_log, planted_probe

TURNS = ("Where is it?", "And who </script> made it?", "Sure?")


def page_of(planted: Planted, out: Path, **options: Any) -> Page:
    options = {"tokenizer": str(TOKENIZER)} | options
    return read_page(write_view(planted.log.location, out, **options).path)


def test_every_captured_token_has_the_score_of_the_probe(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=3)
    page = page_of(planted, tmp_path / "p.html")
    # The log names the probe; it offers the mean of its layers and each of them.
    assert [s["name"] for s in page.facts["series"]] == ["t/p", "t/p · layer 1", "t/p · layer 2"]
    for block, rows, (prompt, completion) in zip(
        page.blocks, planted.scores, planted.ids, strict=True
    ):
        assert block.ids == [*prompt, *completion]
        for k, truth in enumerate((rows.mean(axis=0), rows[0], rows[1])):
            shown = block.scores[k]
            assert np.abs(shown[:-1] - truth).max() <= page.step(k) / 2 + 1e-6
            assert np.isnan(shown[-1]), "the last sampled token was never fed"


def test_the_pooled_score_is_the_scorers(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=4)
    page = page_of(planted, tmp_path / "p.html")
    assert page.facts["columns"] == ["probe_score"]
    for sample in page.facts["samples"]:
        assert sample["values"][0] == pytest.approx(sample["scores"][0], rel=1e-5)
    assert page.facts["series"][0]["threshold"] == 1.0
    # That of several layers together says nothing of one.
    assert page.facts["series"][1]["threshold"] is None


def test_a_learned_pool_and_a_selection_of_the_card_make_the_value(tmp_path: Path) -> None:
    """A page once read all tokens of its positions, and knew no pool that a probe had learned."""
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=2)
    axis, card = np.eye(H)[0], {"layers": (1,), "hidden": H}
    tensors = {"mean": np.zeros(H), "scale": np.ones(H), "value": axis[None], "query": axis[None],
               "bias": np.zeros(1)}  # fmt: skip
    neural = ProbeCard(name="t/n", kind="neural", head=HeadSpec(), pool="attention", **card)
    few = ProbeCard(name="t/f", selection="last:2", **card)
    probes = [NeuralProbe(tensors=tensors, card=neural), Probe.from_direction(axis, card=few)]
    page = page_of(planted, tmp_path / "p.html", probes=probes)
    for sample, block, rows, (prompt, completion) in zip(
        page.facts["samples"], page.blocks, planted.scores, planted.ids, strict=True
    ):
        n, total = len(prompt), len(prompt) + len(completion)
        # Of the completion, without its last token, which the model never read.
        assert np.flatnonzero(block.read[0]).tolist() == list(range(n, total - 1))
        assert np.flatnonzero(block.read[1]).tolist() == [total - 3, total - 2]
        read = rows[0, len(prompt) :]
        weights = np.exp(read - read.max())
        assert sample["values"][0] == pytest.approx(weights @ read / weights.sum(), rel=1e-4)
        assert sample["values"][1] == pytest.approx(read[-2:].mean(), rel=1e-4)


def test_a_conversation_repeats_no_token(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), turns=TURNS, n=1)
    (block,) = page_of(planted, tmp_path / "p.html").blocks
    *_, (prompt, completion) = planted.ids
    assert block.ids == [*prompt, *completion], "the last call has the whole conversation"
    assert [call["folded"] for call in block.calls] == [
        0, *(len(p) + len(c) for p, c in planted.ids[:-1])
    ]  # fmt: skip
    for call, rows in zip(block.calls, planted.scores, strict=True):
        shown = block.scores[0, call["start"] :][: rows.shape[1] - call["folded"]]
        assert np.allclose(shown, rows.mean(axis=0)[call["folded"] :], atol=1e-3)
    # The last token of an answer is read by the next call, and has the score from there.
    for (asked, said), after in zip(planted.ids[:-1], planted.scores[1:], strict=True):
        last = len(asked) + len(said) - 1
        assert block.scores[0, last] == pytest.approx(after.mean(axis=0)[last], abs=1e-3)
    said = {p for asked, answer in planted.ids for p in range(len(asked), len(asked + answer) - 1)}
    assert set(np.flatnonzero(block.read[0])) == said, "what each call read of its own answer"
    turns = [turn for call in block.calls for turn in call["turns"]]
    assert [(role, bool(made)) for role, _, _, made in turns] == [
        ("system", False), ("user", False), ("assistant", True), ("user", False),
        ("assistant", True), ("user", False), ("assistant", True),
    ]  # fmt: skip
    assert [start for _, start, _, _ in turns] == [0, *(stop for _, _, stop, _ in turns[:-1])]
    texts = ["".join(block.tokens[a:b]) for _, a, b, _ in turns]
    assert texts[1] == "<|user|>Where is it?<|end|>"
    assert texts[2] == "<|assistant|>It is found in Verun.<|end|>"
    assert texts[3] == "<|user|>And who </script> made it?<|end|>"


def test_completions_alone_leave_the_prompt_without_scores(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), positions="completion", n=1)
    (block,) = page_of(planted, tmp_path / "p.html").blocks
    n_prompt = len(planted.ids[0][0])
    assert np.isnan(block.scores[:, :n_prompt]).all()
    assert np.isfinite(block.scores[:, n_prompt:-1]).all()


def test_without_a_tokenizer_tokens_are_ids_and_the_page_says_so(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=1)
    page = page_of(planted, tmp_path / "p.html", tokenizer=None)
    assert page.blocks[0].tokens[0] == f"⟨{planted.ids[0][0][0]}⟩"
    assert any("No tokenizer was found for 'model'" in note for note in page.facts["notes"])
    roles = [turn[0] for turn in page.blocks[0].calls[0]["turns"]]
    assert roles == ["prompt", "assistant"]


def test_the_same_log_gives_the_same_page(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=2)
    first, second = (page_of(planted, tmp_path / f"{n}.html").html for n in "ab")
    assert first == second


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=6)
    made = write_view(planted.log.location, tokenizer=str(TOKENIZER), max_bytes=3000)
    assert 1 <= made.n_samples < 6
    assert made.n_left_out == 6 - made.n_samples
    assert f"the first {made.n_samples} of 6 samples are shown" in made.notes[-1]
    assert len(read_page(made.path).blocks) == made.n_samples
    assert write_view(planted.log.location, limit=2, tokenizer=str(TOKENIZER)).n_samples == 2


def test_samples_without_a_capture_are_counted(tmp_path: Path) -> None:
    probe = planted_probe(tmp_path)
    planted = plant_log(tmp_path, probe, n=3)
    log = read_eval_log(planted.log.location)
    assert log.samples is not None
    log.samples[1].events = []
    log.samples[1].output.metadata = None
    log.samples[1].scores = {}
    made = write_view(log, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    assert made.n_without == 1
    assert made.notes == ("1 of 3 samples captured nothing that these probes read.",)


class Outside(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "action")]


def test_nothing_is_loaded_and_texts_cannot_become_code(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), turns=TURNS, n=1, reply="<!--x--> </b>")
    page = page_of(planted, tmp_path / "p.html")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/", page.html)
    outside = Outside()
    outside.feed(page.html)
    assert outside.found == []
    assert page.html.count("<script") == page.html.count("</script>") == 3
    assert "default-src 'none'" in page.html
    assert "".join(page.blocks[0].tokens).count("<!--x--> </b>") == 3


def test_refusals_name_what_to_do(tmp_path: Path) -> None:
    planted = plant_log(tmp_path / "logs", planted_probe(tmp_path), n=1)
    log = planted.log.location
    with pytest.raises(ArtifactError, match="not found"):
        write_view(log, probes=["t/none"])
    with pytest.raises(ArtifactError, match="probe='t/none' was not found"):
        write_view(log, probes="t/none")  # one alone is no list of letters
    other = planted_probe(tmp_path, layers=(3,), name="t/other")
    with pytest.raises(ArtifactError, match=r"-M capture=\[3\]"):
        write_view(log, probes=[other])
    with pytest.raises(ArtifactError, match=r"none\.eval: there is no such log"):
        write_view(tmp_path / "none.eval")
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        write_view(log, tokenizer="no/such/folder")
    damaged, bytes_ = tmp_path / "logs/damaged.eval", bytearray(Path(log).read_bytes())
    with ZipFile(log) as archive:
        at = next(z.header_offset for z in archive.infolist() if z.filename.startswith("samples/"))
    bytes_[at + 80 : at + 140] = bytes(60)
    damaged.write_bytes(bytes_)
    for read in (write_view, read_log):
        with pytest.raises(ArtifactError, match=r"damaged\.eval: cannot be read as a log"):
            read(damaged)
    without = read_eval_log(log, header_only=True)
    with pytest.raises(ArtifactError, match="without its samples"):
        write_view(without)
    bare = read_eval_log(log)
    bare.eval.scorers = []
    for sample in bare.samples or []:
        sample.scores = {}
    with pytest.raises(SpecError, match="pass probes="):
        write_view(bare, tmp_path / "p.html")
    for sample in bare.samples or []:
        sample.events, sample.output = [], ModelOutput()
    with pytest.raises(ArtifactError, match=r"samples \(1 in all\) captured a row, .* layers \["):
        write_view(bare, tmp_path / "p.html", probes=[planted_probe(tmp_path)])
    bare.samples = []
    with pytest.raises(ArtifactError, match=r"has no sample.* has the status 'success'; allowed"):
        write_view(bare, tmp_path / "p.html")
    bare.eval.config.log_samples = False
    with pytest.raises(ArtifactError, match="and ran with --no-log-samples"):
        write_view(bare, tmp_path / "p.html")
    shutil.rmtree(tmp_path / "logs/planted.lens")
    shutil.rmtree(next((tmp_path / "logs").glob("*.lens")))
    with pytest.raises(ArtifactError, match="are not here, and the file of token scores"):
        write_view(log, tmp_path / "p.html", tokenizer=str(TOKENIZER), follow=[str(tmp_path)])
    assert not (tmp_path / "p.html").exists()


def test_another_version_of_the_probe_is_said(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=1)
    log = read_eval_log(planted.log.location)
    assert log.samples is not None
    score = (log.samples[0].scores or {})["probe_score"]
    assert score.metadata is not None
    score.metadata["probe_sha256"] = "0" * 64
    made = write_view(log, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    assert any("another version of t/p" in note for note in made.notes)


def test_the_scale_of_colours_leaves_out_attention_sinks() -> None:
    # As a probe reads real models: the first token of each sample is twenty times as long.
    scores = np.random.default_rng(0).normal(scale=3, size=(30, 1, 40)).astype(np.float32)
    scores[:15, 0, 0], scores[15:, 0, 0] = -169, 169
    every = np.ones((1, 40), bool)
    samples: Any = [SimpleNamespace(token_scores=rows, read=every) for rows in scores]
    (found,) = ranges(samples, 1)
    assert (found.low, found.high) == (-169, 169)
    assert -8 < found.q02 < -4 < 4 < found.q98 < 8
    flat: Any = SimpleNamespace(token_scores=np.array([[1.0, 1.0, 9.0]]), read=every[:, :3])
    assert ranges([flat], 1)[0].q98 > 8
    unread: Any = SimpleNamespace(
        token_scores=np.array([[-50.0, 1.0, 9.0]]), read=np.array([[False, True, True]])
    )
    (found,) = ranges([unread], 1)
    assert (found.low, found.q02 >= 1) == (-50, True), "colours are of what was read"
