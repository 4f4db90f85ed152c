"""When edits act inside an engine: conditions of the prompt, rules, schedules, conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens.spec import Add, Gate, Rule, Schedule
from inspect_lens.train import similarity
from tests.engine.conftest import HIDDEN, Engine, tokens
from tests.kit.edit_cases import random_rows
from tests.kit.reference import HuggingFace, ids_of, max_relative_error, rows_of

pytestmark = pytest.mark.engine

CAPTURE = {"layers": "all", "positions": "completion"}
PROMPTS = [tokens(n, seed=n) for n in (40, 200, 7, 130)]
"""Two of them come in chunks."""


def ask(*edits: Add, capture: Any = CAPTURE, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"inspect_lens": LensRequest(capture=capture, edits=edits, open_gates=keys)}


def expected(
    hugging_face: HuggingFace, prompt: list[int], output: Any, layer: int, added: torch.Tensor
) -> torch.Tensor:
    """Rows of sampled tokens where `added`, (tokens, hidden), was added to those at a layer."""
    fed = [*prompt, *ids_of(output)][:-1]
    whole = torch.zeros(len(fed), HIDDEN)
    whole[len(prompt) :] = added[: len(fed) - len(prompt)]
    return hugging_face.residual_stream(fed, {layer: lambda h: h + whole})[:, len(prompt) :]


def prompt_gate(
    hugging_face: HuggingFace, prompt: list[int], probe: Any, *, above: bool, **options: Any
) -> Gate:
    """A gate of layer 3 that the prompt's rows in transformers are above or below."""
    rows = hugging_face.residual_stream(prompt)[3].double().numpy()
    u = np.asarray(probe, dtype=np.float64)
    if "active_above" in options:
        z = rows @ u + options["bias"]
        score = float(np.where(z > options["active_above"], z, 0).mean())
    else:
        mean = rows.mean(0) if options["reads"] == "prompt_mean" else rows[-1]
        score = float(similarity(mean, u))
        options["similarity"] = "cast"
    # Far from rounding. A mean without a chunk would be farther off; one without a token may not.
    away = 0.002 * max(abs(score), 1.0)
    threshold = score - away if above else score + away
    return Gate(direction=probe, layer=3, threshold=threshold, scope="rest", **options)


def test_the_prompt_decides_as_in_transformers_in_chunks_and_where_it_is_cached(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    v, *probes = random_rows(70, 5, HIDDEN)
    kinds: list[dict[str, Any]] = [
        {"reads": "prompt_mean"},
        {"reads": "prompt_mean"},
        {"reads": "last_prompt"},
        {"reads": "prompt_mean", "bias": 0.5, "active_above": 0.25},
    ]
    plain = engine.run(PROMPTS, max_tokens=8)
    for above in (True, False):
        gates = [
            prompt_gate(hugging_face, prompt, probe, above=above, **kind)
            for prompt, probe, kind in zip(PROMPTS, probes, kinds, strict=True)
        ]
        # The edit lies in front of the layer that is read.
        asked = [ask(Add(vector=v, layers=[1], when=g, positions="completion")) for g in gates]
        # The second time all prompts are in the prefix cache, those of plain requests, too.
        for _ in range(2):
            outputs = engine.run(PROMPTS * 2, [*asked, *[None] * 4], max_tokens=8)
            for i, prompt in enumerate(PROMPTS):
                n = len(prompt)
                (receipt,) = outputs[i].inspect_lens.steer.gates
                assert (receipt.fired_at, receipt.n_tokens) == ((n - 1, 7) if above else (None, 0))
                added = above * torch.from_numpy(v).expand(7, -1)
                wanted = expected(hugging_face, prompt, outputs[i], 1, added)
                assert max_relative_error(rows_of(outputs[i]), wanted) <= 1e-4
                assert ids_of(outputs[len(PROMPTS) + i]) == ids_of(plain[i])
                assert ids_of(outputs[i])[0] == ids_of(plain[i])[0]


def check_schedules(engine: Engine, hugging_face: HuggingFace, *, max_tokens: int = 20) -> None:
    """Schedules act at the same token alone, in a batch, and beside a condition on the prompt."""
    v, probe = random_rows(71, 2, HIDDEN)
    vector = torch.from_numpy(v)
    schedules = [
        Schedule(points=[(0, 1.0), (12, -1.0)], between="cosine"),
        Schedule(points=[(2, 0.0), (3, 1.0), (9, 0.25)], between="step"),
        Schedule(half_life=3.0),
        Schedule(points=[(0, 0.0), (10, 2.0)]),
    ]
    prompts = [*PROMPTS[:3], [5, 6, 7, 8] * 12]
    holds = prompt_gate(hugging_face, prompts[3], probe, above=True, reads="prompt_mean")
    edits = [
        Add(vector=v, layers=[0, 2], schedule=schedule, positions="completion", when=when)
        for schedule, when in zip(schedules, [None, None, None, holds], strict=True)
    ]
    plain = engine.run(prompts, max_tokens=max_tokens)
    asked = [ask(edit, capture=None) for edit in edits]
    batch = engine.run(prompts * 2, [*map(ask, edits), *[None] * 4], max_tokens=max_tokens)
    for i, (prompt, edit) in enumerate(zip(prompts, edits, strict=True)):
        schedule = edit.schedule
        assert schedule is not None
        added = torch.stack([schedule.at(k) * vector for k in range(max_tokens - 1)])
        fed = [*prompt, *ids_of(batch[i])][:-1]
        whole = torch.zeros(len(fed), HIDDEN)
        whole[len(prompt) :] = added
        both = dict.fromkeys((0, 2), lambda h, whole=whole: h + whole)
        wanted = hugging_face.residual_stream(fed, both)[:, len(prompt) :]
        assert max_relative_error(rows_of(batch[i]), wanted) <= 1e-4
        assert ids_of(batch[len(prompts) + i]) == ids_of(plain[i])
    for i in (0, 3):
        solo = engine.run([prompts[i]], asked[i], max_tokens=max_tokens)[0]
        assert ids_of(solo) == ids_of(batch[i])


def test_schedules_are_those_of_transformers(engine: Engine, hugging_face: HuggingFace) -> None:
    check_schedules(engine, hugging_face)


def test_a_rule_joins_the_prompt_with_what_is_sampled(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    v, probe, other = random_rows(72, 3, HIDDEN)
    prompt = PROMPTS[1]
    holds, fails = (
        prompt_gate(hugging_face, prompt, probe, above=above, reads="prompt_mean")
        for above in (True, False)
    )
    plain = engine.run([prompt], ask(), max_tokens=12)[0]
    scores = rows_of(plain)[1] @ torch.from_numpy(other)
    token = Gate(direction=other, layer=1, threshold=float(scores.median()) + 1e-3)
    rules: dict[str, tuple[Rule, Callable[[torch.Tensor], torch.Tensor]]] = {
        "and": (Rule(all=[holds, token]), lambda now: now),
        "or": (Rule(any=[fails, token]), lambda now: now),
        "not": (Rule(all=[holds], none=[token, fails]), lambda now: ~now),
        "never": (Rule(all=[token, fails]), lambda now: now & False),
    }
    edits = [
        Add(vector=v, layers=[2], when=rule, positions="completion") for rule, _ in rules.values()
    ]
    outputs = engine.run([prompt] * 5, [*map(ask, edits), None], max_tokens=12)
    for output, (_, acts) in zip(outputs[:4], rules.values(), strict=True):
        # The gate reads in front of the edit, so the rows say which tokens it is open on.
        now = rows_of(output)[1] @ torch.from_numpy(other) > token.threshold
        assert now.any()
        assert not now.all()
        added = acts(now)[:, None] * torch.from_numpy(v)
        wanted = expected(hugging_face, prompt, output, 2, added)
        assert max_relative_error(rows_of(output), wanted) <= 1e-4
    assert ids_of(outputs[3]) == ids_of(outputs[4]) == ids_of(plain)


def test_a_gate_stays_open_in_the_next_turn_whose_request_brings_its_key(engine: Engine) -> None:
    v, probe = random_rows(73, 2, HIDDEN)
    first, second = PROMPTS[0], [*PROMPTS[0], *tokens(30, seed=9)]
    scores = rows_of(engine.run([first], ask(), max_tokens=8)[0])[1] @ torch.from_numpy(probe)
    gate = Gate(
        direction=probe,
        layer=1,
        threshold=float(scores[:-2].max()) - 1e-3,
        scope="rest",
        conversation=True,
    )
    never = gate.model_copy(update={"threshold": 1e9})
    edit, shut = (
        Add(vector=v, layers=[2], when=when, positions="completion") for when in (gate, never)
    )
    (receipt,) = engine.run([first], ask(edit), max_tokens=8)[0].inspect_lens.steer.gates
    assert receipt.key == gate.key
    assert receipt.fired_at is not None
    assert not receipt.began_open
    # What it reads in the next turn would not open it.
    outputs = engine.run(
        [second] * 4,
        [
            ask(shut, keys=(never.key,)),
            ask(shut, keys=(gate.key,)),
            ask(shut),
            ask(Add(vector=v, layers=[2], positions="completion")),
        ],
        max_tokens=8,
    )
    opened, other, without, ungated = outputs
    (told,) = opened.inspect_lens.steer.gates
    assert (told.began_open, told.key, told.fired_at, told.n_tokens) == (True, never.key, None, 7)
    assert torch.equal(rows_of(opened), rows_of(ungated))
    for one in (other, without):
        (told,) = one.inspect_lens.steer.gates
        assert (told.began_open, told.key, told.n_tokens) == (False, None, 0)
        assert torch.equal(rows_of(one), rows_of(other))
    assert not torch.equal(rows_of(other), rows_of(opened))


def test_the_prefix_cache_cannot_be_asked_for_where_a_mean_needs_the_prompt(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    v, probe = random_rows(74, 2, HIDDEN)
    for reads, is_refused in (("prompt_mean", True), ("last_prompt", False)):
        gate = prompt_gate(hugging_face, PROMPTS[0], probe, above=True, reads=reads)
        edit = Add(vector=v, layers=[1], when=gate, positions="completion")
        asked = {"inspect_lens": LensRequest(edits=[edit], skip_reading_prefix_cache=False)}
        if is_refused:
            with pytest.raises(ValueError, match="gate of prompt tokens"):
                engine.run([PROMPTS[0]], asked, max_tokens=2)
        else:
            engine.run([PROMPTS[0]], asked, max_tokens=2)
