"""Edits inside a real engine: closed forms on captured rows, solo answers in mixed batches."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.protocol import programs
from inspect_lens._engine.protocol.programs import file_of
from inspect_lens.spec import Ablate, Add, EditBase, Gate, Replace, run_program
from tests.engine.conftest import HIDDEN, Engine, tokens
from tests.kit.edit_cases import edit_cases, random_rows
from tests.kit.gate_twin import expected_gate
from tests.kit.reference import HuggingFace, max_relative_error, rows_of

pytestmark = pytest.mark.engine

CAPTURE = {"layers": "all"}


def ask(*edits: EditBase, capture: Any = CAPTURE) -> dict[str, Any]:
    return {"inspect_lens": LensRequest(capture=capture, edits=edits)}


def same_answer(a: Any, b: Any) -> bool:
    return list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)


def test_every_operation_on_captured_rows_is_its_definition(engine: Engine) -> None:
    prompt = tokens(70)
    plain = rows_of(engine.run([prompt], ask(), max_tokens=1)[0])
    cases = [edit for edit, _ in edit_cases(0, layer=2, width=HIDDEN)]
    outputs = engine.run([prompt] * len(cases), [ask(edit) for edit in cases], max_tokens=1)
    for edit, output in zip(cases, outputs, strict=True):
        found = rows_of(output)
        assert torch.equal(found[:2], plain[:2]), "layers in front of an edit keep their bits"
        for p in (0, 31, 64, 69):
            wanted = run_program(plain[2, p].numpy(), edit.program(0))
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(found[2, p].numpy(), wanted, rtol=1e-3, atol=1e-4 * scale)
        receipt = output.inspect_lens.steer
        assert (receipt.layers, receipt.n_tokens) == ((2,), 70)
        assert output.inspect_lens.cache_salted


def test_ablation_at_all_layers_leaves_nothing_of_the_direction(engine: Engine) -> None:
    v = random_rows(3, 1, HIDDEN)[0]
    unit = torch.from_numpy(v / np.linalg.norm(v))
    output = engine.run([tokens(100)], ask(Ablate(direction=v, layers=range(4))), max_tokens=12)[0]
    rows = rows_of(output)
    assert rows.shape[1] == 111
    assert ((rows @ unit).abs() <= 1e-5 * rows.norm(dim=-1)).all()


def test_a_run_patched_into_itself_is_equal_to_the_bit(engine: Engine) -> None:
    prompt = tokens(100, seed=2)
    plain = engine.run([prompt], ask(), max_tokens=8)[0]
    rows = rows_of(plain)
    where = [0, 31, 32, 63, 64, 99]
    patch = Replace(rows=rows[1:3, where], layers=[1, 2], positions=where)
    patched = engine.run([prompt], ask(patch), max_tokens=8)[0]
    assert torch.equal(rows_of(patched), rows)
    assert same_answer(patched, plain)


def test_a_patch_carries_one_prompt_into_another(engine: Engine) -> None:
    clean, corrupt = tokens(60), tokens(60, seed=3)
    clean_run = engine.run([clean], ask(), max_tokens=8)[0]
    # All positions of the last layer: what follows is that of the clean prompt.
    where = list(range(60))
    patch = Replace(rows=rows_of(clean_run)[3:, :60], layers=[3], positions=where)
    patched = engine.run([corrupt], ask(patch), max_tokens=1)[0]
    corrupt_run = engine.run([corrupt], ask(), max_tokens=1)[0]
    assert patched.outputs[0].token_ids[0] == clean_run.outputs[0].token_ids[0]
    assert not torch.equal(rows_of(patched)[3], rows_of(corrupt_run)[3])


def test_a_shut_gate_changes_no_bit_and_an_open_one_does(engine: Engine) -> None:
    prompt = tokens(90, seed=4)
    plain = engine.run([prompt], ask(), max_tokens=8)[0]
    v, probe = random_rows(5, 2, HIDDEN)
    scores = rows_of(plain)[1] @ torch.from_numpy(probe)
    never = Gate(direction=probe, layer=1, threshold=float(scores.abs().max()) + 10)
    shut = engine.run([prompt], ask(Add(vector=v, layers=[2], when=never)), max_tokens=8)[0]
    assert torch.equal(rows_of(shut), rows_of(plain))
    assert same_answer(shut, plain)
    # Between two scores, so that the last bit of neither decides.
    ordered = scores[:90].sort().values
    middle = float(ordered[44] + ordered[45]) / 2
    gate = Gate(direction=probe, layer=1, threshold=middle)
    some = engine.run([prompt], ask(Add(vector=v, layers=[2], when=gate)), max_tokens=1)[0]
    changed = (rows_of(some)[1] != rows_of(plain)[1, :90]).any(dim=-1)
    assert not changed.any(), "the gate only reads"
    # One layer behind the gate: only the tokens whose score is above are edited.
    difference = rows_of(some)[2] - rows_of(plain)[2, :90]
    is_open = scores[:90] > middle
    torch.testing.assert_close(
        difference[is_open],
        torch.from_numpy(v).expand(int(is_open.sum()), -1),
        rtol=1e-3,
        atol=1e-3,
    )
    assert torch.equal(difference[~is_open], torch.zeros_like(difference[~is_open]))


def rest_gate(plain: Any, n_prompt: int, probe: Any, **options: Any) -> tuple[Gate, int]:
    """A gate that fires first at the sampled token of the largest score, and that position."""
    scores = rows_of(plain)[options["layer"], n_prompt:] @ torch.from_numpy(probe)
    # Not among the last ones, so that something is left to be edited.
    at = int(scores[:-4].argmax())
    below = float(scores[:at].max()) if at else float(scores[at]) - 1
    threshold = (float(scores[at]) + below) / 2
    gate = Gate(direction=probe, threshold=threshold, scope="rest", **options)
    return gate, n_prompt + at


def test_a_gate_of_scope_rest_acts_behind_the_token_that_fires_and_in_any_batch(
    engine: Engine,
) -> None:
    v, *probes = random_rows(15, 9, HIDDEN)
    prompts = [tokens(n, seed=n) for n in (40, 64, 90, 130, 65, 7, 200, 33)]
    plain = engine.run(prompts, ask(), max_tokens=16)
    gates = [
        rest_gate(one, len(p), probe, layer=3)
        for one, p, probe in zip(plain, prompts, probes, strict=True)
    ]
    # The gate is read behind the layer that is edited: it decides on later tokens.
    asked = [ask(Add(vector=v, layers=[0], when=gate, positions="completion")) for gate, _ in gates]
    batch = engine.run(prompts * 2, [*asked, *[None] * len(prompts)], max_tokens=16)
    for i, (prompt, (_, at)) in enumerate(zip(prompts, gates, strict=True)):
        (receipt,) = batch[i].inspect_lens.steer.gates
        assert (receipt.fired_at, receipt.layer) == (at, 3)
        assert receipt.n_tokens == len(prompt) + 15 - at - 1
        found, before = rows_of(batch[i]), rows_of(plain[i])
        torch.testing.assert_close(found[:, : at + 1], before[:, : at + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            found[0, at + 1], before[0, at + 1] + torch.from_numpy(v), rtol=1e-4, atol=1e-4
        )
        assert same_answer(batch[len(prompts) + i], plain[i])
    for i in (2, 3, 6):
        solo = engine.run([prompts[i]], [asked[i]], max_tokens=16)[0]
        assert same_answer(solo, batch[i])
        torch.testing.assert_close(rows_of(solo), rows_of(batch[i]), rtol=1e-4, atol=1e-4)
        assert solo.inspect_lens.steer.gates == batch[i].inspect_lens.steer.gates


def running_gate(plain: Any, n_prompt: int, probe: Any, **options: Any) -> Gate:
    """A gate that opens and closes among the sampled tokens."""
    scores = (rows_of(plain)[options["layer"], n_prompt:] @ torch.from_numpy(probe)).numpy()
    middle, spread = float(np.median(scores)), float(scores.std())
    if "sharpness" in options:
        options["sharpness"] = options["sharpness"] / spread
    else:
        options["closes_below"] = middle - 0.3 * spread
    return Gate(direction=probe, threshold=middle, **options)


def check_running(
    output: Any, prompt: list[int], edit: Add, hugging_face: HuggingFace
) -> tuple[int, int]:
    """Each sampled token was edited by the factor that the gate's twin finds in the rows.

    Returns:
        At how many tokens the gate was open, and out of how many.
    """
    gate, found, n = edit.when, rows_of(output), len(prompt)
    assert isinstance(gate, Gate)
    probe = torch.from_numpy(gate.direction.to_float32().copy())
    factors, opens = expected_gate(gate, (found[gate.layer, n:] @ probe).numpy())
    (receipt,) = output.inspect_lens.steer.gates
    assert receipt.fired_at == (n + int(opens.argmax()) if opens.any() else None)
    assert receipt.n_tokens == int(opens.sum() if gate.scope == "token" else opens[:-1].sum())
    v = torch.from_numpy(edit.vector.to_float32().copy())
    factor = torch.zeros(found.shape[1], 1)
    if not gate.shadow:
        factor[n:, 0] = torch.from_numpy(factors)
    ids = [*prompt, *output.outputs[0].token_ids][: found.shape[1]]
    (layer,) = edit.layers
    expected = hugging_face.residual_stream(ids, {layer: lambda h: h + factor * v})
    assert max_relative_error(found, expected) <= 1e-4
    return int(opens.sum()), len(opens)


def test_running_gates_are_their_twin_and_their_neighbours_are_left_alone(
    engine: Engine, hugging_face: HuggingFace
) -> None:
    v, *probes = random_rows(19, 5, HIDDEN)
    prompts = [tokens(n, seed=n) for n in (40, 200, 7, 65)]
    plain = engine.run(prompts, ask(), max_tokens=24)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (0, {"layer": 3, "scope": "next"}),  # read behind the layer that is edited
        (0, {"layer": 3, "scope": "next", "ema": 0.5, "shadow": True}),
        (3, {"layer": 2, "ema": 0.4}),
        (1, {"layer": 2, "scope": "next", "ema": 0.5, "sharpness": 3.0}),
    ]
    edits = [
        Add(
            vector=v,
            layers=[layer],
            when=running_gate(one, len(prompt), probe, **options),
            positions="completion",
        )
        for one, prompt, probe, (layer, options) in zip(plain, prompts, probes, kinds, strict=True)
    ]
    batch = engine.run(prompts * 2, [*map(ask, edits), *[None] * 4], max_tokens=24)
    for i, (prompt, edit) in enumerate(zip(prompts, edits, strict=True)):
        n_open, n = check_running(batch[i], prompt, edit, hugging_face)
        assert 0 < n_open < n
        assert same_answer(batch[len(prompts) + i], plain[i])
    assert torch.equal(rows_of(batch[1]), rows_of(plain[1]))


def check_gates_of_pre_empted_requests(
    engine: Engine, prompts: list[list[int]], plain: list[Any], hugging_face: HuggingFace
) -> None:
    """Edits begin behind the token that fires, also where a request is computed again.

    Args:
        engine: with room for a part of the requests.
        prompts: of the requests.
        plain: what it answered to them, with all rows.
        hugging_face: the same model.
    """
    v, *probes = random_rows(18, 9, HIDDEN)
    gates = [
        rest_gate(one, len(prompt), probe, layer=3)
        for one, prompt, probe in zip(plain, prompts, probes, strict=True)
    ]
    for i in range(1, len(gates), 2):
        running = {"layer": 3, "scope": "next", "ema": 0.5}
        gates[i] = running_gate(plain[i], len(prompts[i]), probes[i], **running), -1
    edits = [Add(vector=v, layers=[0], when=gate, positions="completion") for gate, _ in gates]
    outputs = engine.run(prompts, list(map(ask, edits)), max_tokens=60)
    for prompt, output, edit, (_, at) in zip(prompts, outputs, edits, gates, strict=True):
        if at < 0:
            check_running(output, prompt, edit, hugging_face)
            continue
        (receipt,) = output.inspect_lens.steer.gates
        n_fed = len(prompt) + 59
        assert (receipt.fired_at, receipt.n_tokens) == (at, n_fed - at - 1)
        ids = [*prompt, *output.outputs[0].token_ids][:n_fed]
        behind = (torch.arange(n_fed) > at)[:, None]
        added = {0: lambda h, behind=behind: h + behind * torch.from_numpy(v)}
        expected = hugging_face.residual_stream(ids, added)
        assert max_relative_error(rows_of(output), expected) <= 1e-4


def test_a_shadow_gate_tells_when_it_would_have_acted_and_changes_no_bit(engine: Engine) -> None:
    prompt = tokens(50, seed=11)
    v, probe = random_rows(16, 2, HIDDEN)
    plain = engine.run([prompt], ask(), max_tokens=12)[0]
    gate, at = rest_gate(plain, 50, probe, layer=1, shadow=True)
    edit = Add(vector=v, layers=[2], when=gate, positions="completion")
    output = engine.run([prompt], ask(edit), max_tokens=12)[0]
    assert torch.equal(rows_of(output), rows_of(plain))
    (receipt,) = output.inspect_lens.steer.gates
    assert (receipt.fired_at, receipt.n_tokens) == (at, 61 - at - 1)


@pytest.mark.parametrize("fires", [False, True])
def test_a_condition_on_the_prompt_decides_on_the_answer_also_from_the_cache(
    engine: Engine, fires: bool
) -> None:
    prompt = tokens(128, seed=12)
    v, probe = random_rows(17, 2, HIDDEN)
    plain = engine.run([prompt], ask(), max_tokens=6)[0]
    row = rows_of(plain)[3, 127].double()
    cosine = float(row @ torch.from_numpy(probe).double() / row.norm()) / float(
        np.linalg.norm(probe.astype(np.float64))
    )
    where: dict[str, Any] = {"layer": 3, "scope": "rest", "reads": "last_prompt"}
    threshold = cosine - 0.01 if fires else cosine + 0.01
    gate = Gate(direction=probe, threshold=threshold, similarity="cosine", **where)
    extra = ask(
        Add(vector=v, layers=[1], when=gate, positions="completion"),
        capture={"layers": "all", "positions": [127, 128]},
    )
    first, cached = (engine.run([prompt], extra, max_tokens=6)[0] for _ in range(2))
    assert same_answer(first, cached)
    assert cached.num_cached_tokens >= 96
    for output in (first, cached):
        (receipt,) = output.inspect_lens.steer.gates
        assert (receipt.fired_at, receipt.n_tokens) == ((127, 5) if fires else (None, 0))
    wanted = rows_of(plain)[1, 128] + torch.from_numpy(v) * fires
    torch.testing.assert_close(rows_of(first)[1, 1], wanted, rtol=1e-4, atol=1e-4)


def test_different_programs_and_plain_requests_in_one_batch_keep_their_solo_answers(
    engine: Engine,
) -> None:
    asked: list[dict[str, Any] | None] = []
    prompts = []
    for seed in range(24):
        cases = [edit for edit, _ in edit_cases(seed, layer=seed % 4, width=HIDDEN)]
        edits = [cases[seed % len(cases)], cases[(7 * seed + 3) % len(cases)]]
        asked += [ask(*edits, capture=None), None]
        prompts += [tokens(20 + seed, seed=seed % 3)] * 2
    batch = engine.run(prompts, asked, max_tokens=6)
    for prompt, extra, output in zip(prompts[:16], asked[:16], batch[:16], strict=True):
        solo = engine.run([prompt], [extra], max_tokens=6)[0]
        assert same_answer(solo, output)
    for plain in batch[1::2]:
        assert getattr(plain, "inspect_lens", None) is None
    assert engine.stats()["steering_rows"] == 0


def test_edits_fork_the_prefix_cache(engine: Engine) -> None:
    prompt = tokens(128, seed=7)
    v = random_rows(8, 1, HIDDEN)[0]
    first = engine.run([prompt], max_tokens=4)[0]
    edited = engine.run([prompt], ask(Ablate(direction=v, layers=[0]), capture=None))[0]
    assert edited.num_cached_tokens == 0
    again = engine.run([prompt], ask(Ablate(direction=v, layers=[0]), capture=None))[0]
    assert again.num_cached_tokens >= 96
    assert same_answer(edited, again)
    assert same_answer(first, engine.run([prompt], max_tokens=4)[0])


def test_edits_that_lie_in_a_file_are_those_that_are_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, row = tokens(40, seed=8), random_rows(9, 1, HIDDEN)[0]
    edits = [Add(vector=row, layers=[1], positions="completion"), Ablate(direction=row, layers=[2])]
    plain = engine.run([prompt], ask(*edits), max_tokens=6)[0]
    paths: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> str | None:
        found = file_of(*args, **kwargs)
        paths.append(str(found))
        return found

    monkeypatch.setattr(programs, "LARGE", 1)
    monkeypatch.setattr("inspect_lens._engine.protocol.programs.file_of", noted)
    # Other programs, which the engine has not read before.
    other = [edits[0].model_copy(update={"scale": -1.0}), edits[1]]
    turned, again = engine.run([prompt] * 2, [ask(*other), ask(*edits)], max_tokens=6)
    assert paths
    assert all(path.startswith(f"{os.getpid()}/") for path in paths)
    assert torch.equal(rows_of(again), rows_of(plain))
    assert not torch.equal(rows_of(turned), rows_of(plain))
    monkeypatch.undo()
    alike = engine.run([prompt], ask(*other), max_tokens=6)[0]
    assert torch.equal(rows_of(turned), rows_of(alike))
