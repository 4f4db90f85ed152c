"""The refusal direction: its candidates, what they do to a model, and which is chosen."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens.errors import SpecError
from inspect_lens.train import (
    ActivationSet,
    RefusalCandidate,
    RefusalMeter,
    RefusalScores,
    refusal_candidates,
    select_refusal,
)

H = 6
RNG = np.random.default_rng(0)


def prompts(name: str, lengths: list[int], *, layers: tuple[int, ...] = (0, 2)) -> ActivationSet:
    acts = tuple(RNG.normal(size=(len(layers), n, H)) for n in lengths)
    return ActivationSet(
        name=name, model="m", layers=layers, acts=acts, labels=[0] * len(lengths),
        groups=[f"{name}{i}" for i in range(len(lengths))],
    )  # fmt: skip


def test_candidates_are_differences_of_means_at_the_end_of_the_prompt() -> None:
    harmful, harmless = prompts("bad", [5, 4, 7]), prompts("good", [3, 6])
    found = {(c.layer, c.position): c.direction for c in refusal_candidates(
        harmful, harmless, n_positions=3)}  # fmt: skip
    assert set(found) == {(layer, p) for layer in (0, 2) for p in (-3, -2, -1)}
    expected = np.mean([a[1, -2] for a in harmful.acts], axis=0) - np.mean(
        [a[1, -2] for a in harmless.acts], axis=0
    )
    np.testing.assert_allclose(found[2, -2], expected, rtol=1e-5)
    with pytest.raises(SpecError, match="fewer tokens"):
        refusal_candidates(harmful, harmless, n_positions=4)
    with pytest.raises(SpecError, match="the same layers"):
        refusal_candidates(harmful, prompts("x", [5], layers=(0, 1)))


def candidate(layer: int, position: int = -1) -> RefusalCandidate:
    return RefusalCandidate(layer, position, np.ones(H))


def test_the_best_of_those_that_do_no_harm_is_chosen() -> None:
    measured = {
        0: RefusalScores(-1.0, 2.0, 0.01), 1: RefusalScores(-5.0, 2.0, 0.09),
        2: RefusalScores(-9.0, 2.0, 0.11), 3: RefusalScores(-9.0, -0.1, 0.01),
        4: RefusalScores(math.nan, 2.0, 0.01), 5: RefusalScores(-4.0, 0.0, 0.1),
    }  # fmt: skip
    asked = []

    def measure(c: RefusalCandidate) -> RefusalScores:
        asked.append(c.layer)
        return measured[c.layer]

    tried = [candidate(n) for n in (*measured, 7, 8, 9)]
    choice = select_refusal(tried, measure, n_layers=10)
    assert choice.candidate.layer == 1
    assert choice.scores == measured[1]
    why = {c.layer: reason for c, _, reason in choice.table}
    assert why[0] == why[1] == why[5] == ""
    assert "KL" in why[2]
    assert "induces" in why[3]
    assert why[4] == "not a number"
    # The source drops its layers 8 and 9 of 10, inputs of blocks: outputs of our 7 and 8.
    assert asked == [0, 1, 2, 3, 4, 5]
    assert all("last 20%" in why[n] for n in (7, 8, 9))


def test_layers_before_the_last_fifth_are_measured() -> None:
    good = RefusalScores(-1.0, 2.0, 0.01)
    choice = select_refusal([candidate(6)], lambda _: good, n_layers=10)
    assert choice.candidate.layer == 6
    with pytest.raises(SpecError, match=r"all 2 are left out \(1 KL above 0.1, 1 one of the last"):
        select_refusal([candidate(3), candidate(7)], lambda _: good._replace(kl=1.0), n_layers=10)
    # How far the limits are off, so that others can be chosen.
    measured = {2: good._replace(kl=0.7, induce=-3.0), 3: good._replace(kl=0.31)}
    with pytest.raises(SpecError, match=r"smallest KL is 0\.31, and the most .* induces 2;"):
        select_refusal([candidate(2), candidate(3)], lambda c: measured[c.layer], n_layers=10)
    measured[1] = RefusalScores(-1.0, math.nan, 0.01)
    with pytest.raises(SpecError, match=r"smallest KL is 0\.31, and the most .* induces 2;"):
        select_refusal([candidate(n) for n in (1, 2, 3)], lambda c: measured[c.layer], n_layers=10)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained("organism/checkpoint", dtype=torch.float32)
    return loaded.eval()


IDS = [[5, 9, 17, 30], [6, 11, 8], [7, 9, 21, 40], [8, 33, 12, 14, 29]]


def logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """One prompt after the other."""
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([p])).logits[0, -1] for p in prompts]
    return torch.stack(rows).double()


def score(rows: torch.Tensor, tokens: list[int]) -> float:
    chance = rows.softmax(-1)[:, tokens].sum(-1)
    return float(((chance + 1e-8).log() - (1 - chance + 1e-8).log()).mean())  # as in the source


def test_hooks_do_what_weights_without_the_direction_do(model: Any) -> None:
    """Ablation at every block, attention and MLP is the removal from all weights that write."""
    hidden = model.config.hidden_size
    direction = np.random.default_rng(1).normal(size=hidden)
    meter = RefusalMeter(model, harmful=IDS[:2], harmless=IDS[1:], refusal_tokens=[20, 21], batch=2)
    measured = meter(RefusalCandidate(2, -1, direction))

    unit = torch.from_numpy(direction / np.linalg.norm(direction)).float()
    edited = copy.deepcopy(model)
    keep = torch.eye(hidden) - torch.outer(unit, unit)
    with torch.no_grad():
        embedding = edited.get_input_embeddings()
        head = edited.get_output_embeddings()
        if head.weight is embedding.weight:  # tied, and only what writes is edited
            head.weight = torch.nn.Parameter(embedding.weight.clone())
        embedding.weight.copy_(embedding.weight @ keep)
        for block in edited.model.layers:
            for linear in (block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight.copy_(keep @ linear.weight)
    plain, changed = logits(model, IDS[1:]), logits(edited, IDS[1:])
    kl = (plain.softmax(-1) * (plain.log_softmax(-1) - changed.log_softmax(-1))).sum(-1).mean()
    assert measured.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    assert float(kl) > 1e-4
    assert measured.bypass == pytest.approx(
        score(logits(edited, IDS[:2]), [20, 21]), rel=1e-3, abs=1e-3
    )
    # And everything is as before when the hooks are gone.
    assert meter.baseline.bypass == pytest.approx(score(logits(model, IDS[:2]), [20, 21]), rel=1e-4)
    assert meter.baseline.induce == pytest.approx(score(plain, [20, 21]), rel=1e-4)
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in model.modules())


def test_what_is_added_is_added_behind_the_block_of_the_candidate(model: Any) -> None:
    """Added behind the last block, the direction of a token's logit induces that token."""
    head, last = model.get_output_embeddings().weight, len(model.model.layers) - 1
    toward = 50.0 * head[20].detach().double().numpy()
    meter = RefusalMeter(model, harmful=IDS[:1], harmless=IDS, refusal_tokens=[20])
    assert meter(RefusalCandidate(last, -1, toward)).induce > meter.baseline.induce + 3.0

    seen = {}
    handle = model.model.layers[3].register_forward_pre_hook(
        lambda _m, args, kwargs: seen.__setitem__("rows", (args or tuple(kwargs.values()))[0]),
        with_kwargs=True,
    )
    logits(model, IDS[:1])
    before = seen["rows"].clone()
    meter = RefusalMeter(model, harmful=IDS[:1], harmless=IDS[:1], refusal_tokens=[20])
    meter(RefusalCandidate(2, -1, toward))
    handle.remove()
    np.testing.assert_allclose((seen["rows"] - before)[0, 0].detach().numpy(), toward, atol=1e-3)


def test_nothing_to_measure_is_refused(model: Any) -> None:
    with pytest.raises(SpecError, match="one of each at least"):
        RefusalMeter(model, harmful=[], harmless=IDS, refusal_tokens=[1])
    with pytest.raises(SpecError, match="layout is not known"):
        RefusalMeter(
            model, harmful=IDS, harmless=IDS, refusal_tokens=[1], blocks=[torch.nn.Linear(2, 2)]
        )
