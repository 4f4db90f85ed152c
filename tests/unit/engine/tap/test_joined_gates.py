"""Rules over several gates, latents and schedules in a worker's table, against plain numpy."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens.spec import Add, EditBase, Gate, LensRequest, Rule, Schedule, TokenMatch
from tests.kit.edit_cases import random_rows
from tests.kit.edit_table import (
    N_FED,
    N_PROMPT,
    admitted,
    configs_of,
    make_state,
    run,
    sealed,
    streams,
)
from tests.kit.gate_twin import expected_factors

AT = 1
"""The edit acts at layer 1."""
GATES = tuple(random_rows(40, 6) / 5)


def edited(edits: list[EditBase], x: list[torch.Tensor], ids: list[int] | None = None) -> Any:
    """Rows of layer 1 after a prompt in one pass and sampled tokens one by one."""
    state = make_state()
    bank = Bank(state.bank)
    envelope = sealed(LensRequest(edits=edits))
    index = {point: i for i, point in enumerate(state.taps)}
    steering = bank.admit(envelope, index)
    bank.reset(7)
    bank.keep_history("a", 7, envelope, index)
    bank.flush()
    configs, out = configs_of(steering), []
    for first, end in [(0, N_PROMPT), *((p, p + 1) for p in range(N_PROMPT, N_FED))]:
        if ids is not None:
            state.bank.fed.ids[: end - first] = torch.tensor(ids[first:end])
        rows = run(state, configs[first:end], [one[first:end] for one in x], first=first)
        out.append(rows[AT])
    return torch.cat(out).numpy()


def a_gate(rng: Random) -> Gate:
    """Any gate that a rule may have, but those that read the prompt."""
    scope = rng.choice(("token", "next", "rest"))
    options: dict[str, Any] = {"scope": scope, "threshold": rng.choice((-0.3, 0.0, 0.4))}
    if scope != "rest" and rng.random() < 0.5:
        options["sharpness"] = 2.0
    if rng.random() < 0.5:
        options |= {"bias": rng.choice((-0.2, 0.5)), "active_above": 0.1}
    if rng.random() < 0.5:
        options["ema"] = 0.5
    return Gate(direction=rng.choice(GATES), layer=rng.randint(0, AT), **options)


def a_rule(rng: Random, n_gates: int) -> Gate | Rule:
    """A rule over so many gates."""
    if n_gates == 1:
        return a_gate(rng)
    at = sorted({0, n_gates, rng.randrange(1, n_gates)})
    parts: dict[str, list[Gate | Rule]] = {"all": [], "any": [], "none": []}
    for a, b in pairwise(at):
        parts[rng.choice(sorted(parts))].append(a_rule(rng, b - a))
    return Rule(all=parts["all"], any=parts["any"], none=parts["none"])


SCHEDULES = (
    None,
    Schedule(points=[(0, 1.0), (2, -0.5)]),
    Schedule(points=[(1, 2.0), (3, 0.0)], between="cosine"),
    Schedule(points=[(0, 0.25), (2, 1.5)], between="step"),
    Schedule(half_life=1.5),
)


@pytest.mark.parametrize("seed", range(60))
def test_an_edit_is_multiplied_by_what_its_rule_and_schedule_say(seed: int) -> None:
    rng = Random(seed)
    rule, schedule = a_rule(rng, rng.randint(1, 3)), rng.choice(SCHEDULES)
    by_id = rng.random() < 0.3
    x, v = streams(seed), random_rows(seed + 1, 1)[0] / 5
    ids = [rng.randrange(3) for _ in range(N_FED)]
    named = TokenMatch(token_ids=[1], among="completion") if by_id else "completion"
    edit = Add(vector=v, layers=[AT, 2], when=rule, positions=named, schedule=schedule)
    got = edited([edit], x, ids)
    plain = np.stack([row.numpy().astype(np.float64) for row in x])
    factors = expected_factors(rule, plain, N_PROMPT)
    factors *= [1.0 if schedule is None else schedule.at(k) for k in range(len(factors))]
    factors *= np.asarray(ids[N_PROMPT:]) == 1 if by_id else 1.0
    wanted = plain[AT].copy()
    wanted[N_PROMPT:] += factors[:, None] * v
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert np.array_equal(got[:N_PROMPT], x[AT][:N_PROMPT].numpy()), "a prompt keeps its bits"


def test_edits_with_several_conditions_leave_each_other_alone() -> None:
    x, (v, w) = streams(3), random_rows(4, 2) / 5
    a, b = (Gate(direction=GATES[i], layer=0) for i in (0, 1))
    edits: list[EditBase] = [
        Add(vector=v, layers=[AT], when=Rule(all=[a, b]), positions="completion"),
        Add(vector=w, layers=[AT], when=Rule(none=[a, b]), positions="completion"),
        Add(vector=w, layers=[2], when=Rule(none=[a]), positions="completion"),
    ]
    got = edited(edits, x)
    scores = x[0][N_PROMPT:].numpy() @ np.stack(GATES[:2]).T > 0
    wanted = x[AT].numpy().copy()
    wanted[N_PROMPT:] += scores.all(1)[:, None] * v + (~scores).all(1)[:, None] * w
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opens", [False, True])
def test_a_gate_that_an_earlier_request_has_opened(opens: bool) -> None:
    x, v = streams(5), random_rows(6, 1)[0] / 5
    never = Gate(direction=GATES[0], layer=0, threshold=1e9, scope="rest", conversation=True)
    asks = {
        "alone": (never, opens),
        "all": (Rule(all=[never, Gate(direction=GATES[1], layer=0, threshold=-1e9)]), opens),
        "any": (Rule(any=[never, Gate(direction=GATES[1], layer=0, threshold=1e9)]), opens),
        "none": (Rule(none=[never]), not opens),
    }
    for name, (when, acts) in asks.items():
        edit = Add(vector=v, layers=[AT], when=when, positions="completion")
        keys = [never.key, "0" * 64] if opens else ["0" * 64]
        request = LensRequest(edits=[edit], open_gates=keys)
        state = make_state()
        _, steering = admitted(request, state)
        configs = configs_of(steering)
        got = [
            run(state, configs[p : p + 1], [one[p : p + 1] for one in x], first=p)[AT]
            for p in range(N_PROMPT, N_FED)
        ]
        wanted = x[AT][N_PROMPT:] + acts * torch.from_numpy(v)
        torch.testing.assert_close(torch.cat(got), wanted, msg=name)
        (entry,) = [one for one in sealed(request).edits if one.key]
        assert (entry.key, entry.is_open) == (never.key, opens)
    # What is computed differs, so blocks of the cache are not shared.
    shut, opened = (
        sealed(LensRequest(edits=[edit], open_gates=keys)).edited.content
        for keys in ([], [never.key])
    )
    assert shut != opened
