"""The trainer of the organism's oracle: its adapter, its questions, its controls and its card."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest

from inspect_lens.oracle import load_oracle
from oracles._card import _readme
from oracles._contexts import Context, training_rows
from oracles._lora import TARGETS, LoRA, inject
from oracles._measure import Cell, Contexts, _asks, wilson
from oracles._prompts import Prompts
from oracles._questions import SHARES, Sampler, Task, wordings
from organism._model import CHECKPOINT_DIR, build_model, load_tokenizer
from organism._splits import Row, read_split
from organism._world import build_world
from tests.kit.repository import ROOT

FOLDER = ROOT / "oracles/organism"


def test_an_adapter_is_stored_as_peft_does_and_read_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model()
    lora = LoRA(model, rank=4, alpha=8)
    for p in lora.parameters():
        torch.nn.init.normal_(p)
    lora.round_(torch.bfloat16)
    lora.save(tmp_path, base="x")
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert len(weights) == 2 * len(TARGETS) * 6
    path = "model.layers.3.mlp.down_proj"
    a = weights[f"base_model.model.{path}.lora_A.weight"].float()
    b = weights[f"base_model.model.{path}.lora_B.weight"].float()
    assert (a.shape, b.shape) == ((4, 512), (256, 4))
    expected = model.get_submodule(path).weight + 8 / 4 * b @ a
    again = LoRA.load(model, tmp_path).merged()
    torch.testing.assert_close(again[f"{path}.weight"], expected)
    assert again.keys() == lora.merged().keys()


def test_the_hook_adds_the_closed_form_and_nothing_elsewhere() -> None:
    torch.manual_seed(0)
    model = build_model().eval()
    ids = torch.randint(6, 1000, (2, 9))
    units = torch.zeros(2, 9, 256)
    units[0, 4] = torch.nn.functional.normalize(torch.randn(256), dim=-1)
    units[1, 2] = torch.nn.functional.normalize(torch.randn(256), dim=-1)
    seen: list[torch.Tensor] = []
    # What block 2 reads is what block 1 wrote, edit included.
    model.model.layers[2].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).clone()),
        with_kwargs=True,
    )
    with torch.no_grad():
        plain = model(ids).logits
        with inject(model, 1, units, coefficient=1.5):
            edited = model(ids).logits
        again = model(ids).logits
    h = seen[0]
    torch.testing.assert_close(seen[1], h + 1.5 * h.norm(dim=-1, keepdim=True) * units)
    # Tokens before the edit do not see it, those from there on do, and then it is gone.
    torch.testing.assert_close(edited[0, :4], plain[0, :4])
    assert not torch.allclose(edited[0, 4:], plain[0, 4:])
    torch.testing.assert_close(again, plain)


def test_training_has_nothing_of_what_is_judged() -> None:
    made = training_rows(3000, seed=0)
    held = {e.name for e in build_world().entities if e.held_out}
    assert held
    assert not {row["entity"] for row, _ in made} & held
    judged = {
        row["phrasing_id"].partition("|")[2]
        for split in ("heldout_phrasing", "heldout_entity", "hidden_reason")
        for row in read_split(split)
    }
    systems = {row["messages"][0]["content"] for row, _ in made if len(row["messages"]) == 2}
    theirs = {r["messages"][0]["content"] for r in read_split("hidden_reason")}
    assert judged
    assert not systems & theirs
    # Being told to lie and lying are two things.
    kinds = Counter((told, row["deceptive"]) for row, told in made)
    assert kinds[True, False] > 100
    assert kinds[False, True] == 0


def test_no_held_out_wording_is_trained_and_yes_is_as_frequent_as_no() -> None:
    for task in get_args(Task):
        trained = {text for text, _ in wordings(task, held_out=False)}
        assert trained
        assert not trained & {text for text, _ in wordings(task, held_out=True)}
    assert len(wordings("lying", held_out=True)) >= 3
    sampler = Sampler(contexts().items, seed=0)
    asks = sampler.draw(4000)
    assert {a.task for a in asks} == set(SHARES)
    for task in ("lying", "told"):
        answers = Counter(a.answer for a in asks if a.task == task)
        share = answers["Yes"] / answers.total()
        # Five standard deviations of a fair coin.
        assert abs(share - 0.5) < 5 * 0.5 / answers.total() ** 0.5


def contexts() -> Contexts:
    """Conversations without a model: every fed token is the same."""
    rows: list[Row] = read_split("probe_train")[:200]
    items = tuple(
        Context(
            row=row, ids=tuple(range(30)), n_prompt=20, told=row["deceptive"],
            completion=row["values"][0], start=30 * i,
        )
        for i, row in enumerate(rows)
    )  # fmt: skip
    return Contexts(items, torch.zeros(1))


def test_the_other_sample_is_of_either_label() -> None:
    asks = _asks(Cell("x", "lying", "completion", 4, "trained"), contexts(), 100)
    lying = [contexts().items[a.context].lying for a in asks]
    assert sum(lying) == 50
    same = sum(a == b for a, b in zip(lying, [*lying[1:], lying[0]], strict=True))
    assert 30 < same < 70


def test_prompts_are_what_the_tokenizer_makes_of_the_whole() -> None:
    tokenizer = load_tokenizer(CHECKPOINT_DIR)
    prompts = Prompts(tokenizer)
    for layer, count in ((1, 1), (3, 7), (4, 60)):
        question = "Is the speaker lying? Answer yes or no."
        whole = tokenizer(prompts.text(layer, count, question), add_special_tokens=False)
        assert prompts.ids(layer, count, question) == whole["input_ids"]


@pytest.mark.parametrize(("k", "n"), [(0, 10), (5, 10), (97, 100), (200, 200)])
def test_wilson_is_that_of_scipy(k: int, n: int) -> None:
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_shipped_card_is_of_the_shipped_adapter_and_makes_its_page() -> None:
    card = json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))
    weights = (FOLDER / "adapter_model.safetensors").read_bytes()
    assert card["adapter_sha256"] == hashlib.sha256(weights).hexdigest()
    assert card["adapter_sha256"] == load_oracle(FOLDER).sha256
    assert len(weights) < 2_000_000
    base = (CHECKPOINT_DIR / "model.safetensors").read_bytes()
    assert card["base_sha256"] == hashlib.sha256(base).hexdigest()
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == _readme(card)
    # What the oracle is for: lies, on prompts, entities and reasons that it was not trained on.
    lines = [r for r in card["results"] if r["task"] == "lying" and r["inputs"] == "completion"]
    assert {r["split"] for r in lines} == {"heldout_phrasing", "heldout_entity", "hidden_reason"}
    assert all(r["beats_controls"] for r in lines)
