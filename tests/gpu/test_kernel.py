"""The Triton kernel against its definition, over dtypes, layouts and widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inspect_lens._engine.tap.buffers import TapState
from inspect_lens.spec import (
    N_LATCHES,
    Add,
    Gate,
    LensRequest,
    Renormalise,
    Rule,
    Scale,
    Schedule,
    TapPoint,
    TokenMatch,
    Zero,
)
from tests.kit.edit_cases import edit_cases, random_rows
from tests.kit.edit_table import (
    N_PROMPT,
    add_entries,
    admitted,
    configs_of,
    make_state,
    sealed,
)
from tests.kit.wide_edits import admitted_at, wide_facts, wide_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("width", [128, 200, 4096, 7168])
@pytest.mark.parametrize("n_tokens", [1, 7, 3000])
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype, is_fused: bool, width: int, n_tokens: int
) -> None:
    from inspect_lens._engine.tap.op import capture_rows, edit_rows, ring_rows
    from inspect_lens._engine.tap.tap_triton import launch

    torch.manual_seed(n_tokens)
    device = torch.device("cuda")
    state = TapState(
        taps=tuple(TapPoint("resid_post", i) for i in range(3)),
        hidden=width,
        dtype=dtype,
        max_tokens=n_tokens,
        max_groups=2,
        ring_rows=n_tokens,
        bank_rows=5,
        device=device,
    )
    bank, tap = state.bank, 1
    bank.vectors[1:] = torch.randn(5, width, device=device)
    add_entries(bank, by_norm=[2, 4], links={3: 4, 5: 2})
    bank.table[1:, tap] = torch.tensor([3, 1, 5, 2, 0], device=device)
    state.tokens[:, 0] = torch.randint(0, 6, (n_tokens,), device=device)
    state.tokens[:, 1] = torch.randint(-1, 2, (n_tokens,), device=device)
    state.tokens[:, 2] = torch.arange(n_tokens, device=device)
    state.base[0, tap] = 0  # the other group does not capture here
    state.header[1] = origin = n_tokens  # the second half of the ring
    # Padding behind the tokens that the maps describe.
    described = max(1, n_tokens - 5)
    state.header[0] = described
    hidden = torch.randn(n_tokens, width, device=device).to(dtype)
    residual = torch.randn(n_tokens, width, device=device).to(dtype) if is_fused else None
    ring = state.ring
    ring.fill_(7.0)
    expected, expected_ring = hidden.clone(), ring.clone()
    rows = bank.table[:, tap][state.tokens[:, 0].long()]
    slots = ring_rows(state.tokens, state.base[:, tap].contiguous(), origin)
    rows[described:], slots[described:] = 0, -1
    left = edit_rows(expected, residual, rows, bank)
    assert not len(left)
    capture_rows(expected, residual, slots, expected_ring, torch.ones_like(slots))
    state.flags[tap] = 3

    def run() -> None:
        launch(hidden, residual, tap=tap, state=state)

    before = hidden.clone()
    run()
    plain = rows == 0
    assert torch.equal(hidden[plain], before[plain]), "tokens without a row keep their bits"
    # The norm is summed in another order, so an edited value may be rounded to the other side;
    # where the halves of the stream cancel, that step is large beside what is left.
    # In float32 the norm's own last bits are what differs, times the vector's size.
    step = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(hidden, expected, rtol=0, atol=step)
    torch.testing.assert_close(ring, expected_ring, rtol=0, atol=step)
    assert not state.faults.any()
    hidden.copy_(before)
    state.flags.zero_()
    run()
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("width", [24, 4096, 7168])
@pytest.mark.parametrize("seed", range(4))
def test_programs_of_all_operations_equal_the_reference(
    is_fused: bool, width: int, seed: int
) -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    cases = [edit for edit, _ in edit_cases(seed, width=width)]
    v, probe = random_rows(seed + 50, 2, width) / width**0.5
    gate = Gate(
        direction=probe,
        layer=1,
        sharpness=2.0 if seed % 2 else None,
        similarity="cosine" if seed > 1 else "dot",
    )
    for k in range(0, len(cases), 5):
        # The gate reads first: what is left behind some of the others is rounding.
        edits = [Add(vector=v, layers=[1], when=gate), *cases[k : k + 5]]
        edits += [Add(vector=v, layers=[1], scale=3.0), Renormalise(layers=[1])]
        state = make_state(width=width, device="cuda")
        _, steering = admitted(LensRequest(edits=edits), state)
        configs = configs_of(steering)
        configs[3], n = 0, len(configs)
        state.tokens[:n, 0] = torch.tensor(configs, dtype=torch.int32, device="cuda")
        state.header[0] = n
        state.flags.fill_(1)
        hidden = torch.randn(n, width, device="cuda") * 2
        residual = torch.randn(n, width, device="cuda") if is_fused else None
        expected, before = hidden.clone(), hidden.clone()
        edit_rows(
            expected, residual, state.bank.table[:, 1][state.tokens[:n, 0].long()], state.bank
        )
        state.bank.registers.zero_()
        launch(hidden, residual, tap=1, state=state)
        assert torch.equal(hidden[3], before[3]), "tokens without edits keep their bits"
        scale = float(expected.abs().max())
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("width", [24, 4096])
def test_edits_of_sampled_tokens_with_some_ids_equal_the_reference(width: int) -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    v, w = random_rows(61, 2, width) / width**0.5
    some = TokenMatch(token_ids=[0, 3, 200_000], among="completion")
    others = TokenMatch(token_ids=[3], among="completion", exclude=True)
    edits = [
        Add(vector=v, layers=[1], positions=some),
        Add(vector=w, scale=4.0, layers=[1], positions=others),
    ]
    state = make_state(width=width, device="cuda")
    _, steering = admitted(LensRequest(edits=edits), state)
    configs = configs_of(steering)
    n, fed = len(configs), [3, 3, 3, 3, 3, 3, 0, 3, 200_000, 7]
    ids = torch.tensor(fed, dtype=torch.int32, device="cuda")
    state.bank.fed.source = lambda: ids
    state.bank.fed.note()
    state.tokens[:n, 0] = torch.tensor(configs, dtype=torch.int32, device="cuda")
    state.header[0] = n
    state.flags.fill_(1)
    hidden = torch.randn(n, width, device="cuda")
    expected, before = hidden.clone(), hidden.clone()
    edit_rows(expected, None, state.bank.table[:, 1][state.tokens[:n, 0].long()], state.bank)
    state.bank.registers.zero_()
    launch(hidden, None, tap=1, state=state)
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(hidden[:6], before[:6]), "a prompt keeps its bits"
    one, other = (torch.tensor(x, device="cuda") for x in (v, 4.0 * w))
    wanted = torch.stack([one + other, one, one + other, other])
    torch.testing.assert_close(hidden[6:] - before[6:], wanted, rtol=1e-3, atol=1e-4)


def test_gates_that_stay_open_equal_the_reference() -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    v, probe = random_rows(60, 2, 256) / 16
    gate = Gate(direction=probe, layer=1, scope="rest")
    edit = Add(vector=v, layers=[1], when=gate, positions="completion")
    state = make_state(width=256, device="cuda")
    _, steering = admitted(LensRequest(edits=[edit]), state)
    config = configs_of(steering)[-1]
    latches, n = state.bank.latches, 12
    torch.manual_seed(0)
    # A token of each of 12 requests in each of 5 steps that repeat.
    for step in range(5):
        state.tokens[:n, 0] = config
        state.tokens[:n, 3] = torch.arange(n, device="cuda")
        state.tokens[:n, 4] = 40
        state.header[0], state.header[2] = n, step
        state.flags.fill_(1)
        hidden = torch.randn(n, 256, device="cuda")
        expected, before = hidden.clone(), (latches.first.clone(), latches.noted.clone())
        first = state.bank.table[:, 1][state.tokens[:n, 0].long()]
        edit_rows(expected, None, first, state.bank, state.tokens[:n, 3:5], step)
        wanted = latches.first.clone(), latches.noted.clone()
        latches.first.copy_(before[0])
        latches.noted.copy_(before[1])
        launch(hidden, None, tap=1, state=state)
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(latches.first, wanted[0])
        assert torch.equal(latches.noted, wanted[1])
    assert (latches.noted[:n, 0] > 0).any()


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "next"},
        {"scope": "next", "ema": 0.4, "sharpness": 2.0},
        {"ema": 0.4, "closes_below": -0.5, "similarity": "cosine"},
        {"scope": "rest", "ema": 0.4},
    ],
)
def test_running_gates_equal_the_reference(options: dict[str, Any]) -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    v, probe = random_rows(61, 2, 256) / 16
    gate = Gate(direction=probe, layer=1, **options)
    edit = Add(vector=v, layers=[1], when=gate, positions="completion")
    state = make_state(width=256, device="cuda")
    request = LensRequest(edits=[edit])
    bank, steering = admitted(request, state)
    index = {point: i for i, point in enumerate(state.taps)}
    n = 12
    for record in range(n):
        bank.keep_history(str(record), record, sealed(request, width=256), index)
    bank.flush()
    noted, table = state.bank.latches.noted, state.bank.vectors
    torch.manual_seed(0)
    # A token of each of 12 requests in each of 4 steps that repeat, one of them a second time.
    for step in (0, 1, 1, 2, 3):
        state.tokens[:n, 0] = configs_of(steering)[-1]
        state.tokens[:n, 3] = torch.arange(n, device="cuda")
        state.tokens[:n, 4] = N_PROMPT
        state.header[0], state.header[2] = n, step
        state.flags.fill_(1)
        hidden = torch.randn(n, 256, device="cuda")
        expected, before = hidden.clone(), (table.clone(), noted.clone())
        first = state.bank.table[:, 1][state.tokens[:n, 0].long()]
        edit_rows(expected, None, first, state.bank, state.tokens[:n, 3:5], step)
        wanted = table.clone(), noted.clone()
        table.copy_(before[0])
        noted.copy_(before[1])
        launch(hidden, None, tap=1, state=state)
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(table, wanted[0], rtol=1e-3, atol=1e-4, equal_nan=True)
        assert torch.equal(noted, wanted[1])
    assert (noted[:n, 0] > 0).any()
    assert (noted[:n, N_LATCHES] > 0).all()


@pytest.mark.parametrize("width", [256, 4096])
def test_rules_latents_and_schedules_equal_the_reference(width: int) -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    v, *probes = random_rows(62, 5, width) / width**0.5
    plain, latent, late, once = (
        Gate(direction=probe, layer=1, **options)
        for probe, options in zip(
            probes,
            (
                {"sharpness": 2.0},
                {"bias": 0.3, "active_above": 0.2, "threshold": 0.4},
                {"scope": "next", "ema": 0.5, "bias": -0.1, "active_above": 0.0},
                {"scope": "rest", "threshold": 0.5},
            ),
            strict=True,
        )
    )
    rule = Rule(all=[plain], any=[latent, Rule(none=[late])], none=[once])
    fading = Schedule(points=[(0, 1.0), (300, 0.25)], between="cosine")
    edits = [
        Add(vector=v, layers=[1], when=rule, positions="completion", schedule=fading),
        Add(vector=-v, layers=[1], when=Rule(none=[latent]), positions="completion"),
    ]
    state = make_state(width=width, device="cuda")
    request = LensRequest(edits=edits)
    bank, steering = admitted(request, state)
    index = {point: i for i, point in enumerate(state.taps)}
    n = 12
    for record in range(n):
        bank.keep_history(str(record), record, sealed(request, width=width), index)
    bank.flush()
    latches, table = state.bank.latches, state.bank.vectors
    kept = latches.noted, latches.first, table
    torch.manual_seed(0)
    changed = 0
    for step in (0, 1, 1, 2, 3):
        state.tokens[:n, 0] = configs_of(steering)[-1]
        state.tokens[:n, 3] = torch.arange(n, device="cuda")
        state.tokens[:n, 4] = N_PROMPT
        state.header[0], state.header[2] = n, step
        state.flags.fill_(1)
        hidden = torch.randn(n, width, device="cuda")
        expected, before = hidden.clone(), [one.clone() for one in kept]
        first = state.bank.table[:, 1][state.tokens[:n, 0].long()]
        edit_rows(expected, None, first, state.bank, state.tokens[:n, 3:5], step)
        changed += int((expected != hidden).any(-1).sum())
        wanted = [one.clone() for one in kept]
        for one, was in zip(kept, before, strict=True):
            one.copy_(was)
        state.bank.registers.fill_(7.0)
        launch(hidden, None, tap=1, state=state)
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
        for one, found in zip(wanted, kept, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert changed > n


@pytest.mark.parametrize("similarity", ["dot", "cosine", "cast", "latent"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_prompt_is_decided_on_the_device_as_on_the_host(similarity: str, is_open: bool) -> None:
    v, probe = random_rows(63, 2, 256) / 16
    options: dict[str, Any] = {"similarity": similarity}
    if similarity == "latent":
        options = {"bias": 0.5, "active_above": 0.25}
    prompt = torch.from_numpy(random_rows(64, N_PROMPT, 256))
    decided: list[torch.Tensor] = []
    for threshold in (-10.0 if is_open else 10.0, 0.02):
        gate = Gate(
            direction=probe, layer=2, scope="rest", reads="prompt_mean", threshold=threshold,
            **options,
        )  # fmt: skip
        edit = Add(vector=v, layers=[1], when=gate, positions="completion")
        request, found = LensRequest(edits=[edit]), []
        for device in ("cpu", "cuda"):
            state = make_state(width=256, device=device)
            bank, _ = admitted(request, state)
            index = {point: i for i, point in enumerate(state.taps)}
            bank.keep_history("a", 7, sealed(request, width=256), index)
            bank.flush()
            reads = bank.prompt_reads("a")
            assert reads is not None
            for a, b in ((0, 2), (1, N_PROMPT)):
                bank.read_prompt(reads, a, {state.taps[2]: prompt[a:b].to(device)})
            latches = state.bank.latches
            found.append(torch.stack([latches.first[7].long(), latches.noted[7, :N_LATCHES]]).cpu())
        assert torch.equal(*found)
        decided.append(found[0])
    assert int(decided[0][1, 0]) == (N_PROMPT if is_open else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "row"), [(64, 128), (300, 128), (14336, 4096), (8, 4096)])
@pytest.mark.parametrize("n_tokens", [1, 7, 3000])
def test_rows_of_another_width_equal_the_reference(
    dtype: torch.dtype, width: int, row: int, n_tokens: int
) -> None:
    from inspect_lens._engine.tap.op import capture_rows, ring_rows
    from inspect_lens._engine.tap.tap_triton import launch

    torch.manual_seed(n_tokens)
    device, tap, parts = torch.device("cuda"), 1, -(-width // row)
    state = TapState(
        taps=tuple(TapPoint("k", i) for i in range(3)),
        hidden=row,
        dtype=dtype,
        max_tokens=n_tokens,
        max_groups=2,
        ring_rows=parts * n_tokens,
        parts=2,
        bank_rows=1,
        device=device,
        tap_rows=[1, parts, 1],
    )
    state.tokens[:, 1] = torch.randint(-1, 2, (n_tokens,), device=device)
    state.tokens[:, 2] = torch.arange(n_tokens, device=device)
    state.base[0, tap], state.base[0, -1] = 0, n_tokens  # the other group does not capture here
    state.header[1] = origin = parts * n_tokens
    state.header[0] = described = max(1, n_tokens - 5)
    # Of a wider tensor, as queries and keys are, and in float32, as a router's may be.
    wide = torch.randn(n_tokens, 2 * width, device=device)
    hidden = wide.to(dtype)[:, width:]
    for rows in (hidden, wide[:, width:]):
        state.ring.fill_(7.0)
        expected = state.ring.clone()
        slots = ring_rows(state.tokens, state.base[:, tap].contiguous(), origin)
        slots[described:] = -1
        capture_rows(rows, None, slots, expected, torch.full_like(slots, n_tokens))
        state.flags[tap] = 0
        launch(rows, None, tap=tap, state=state)
        assert (state.ring == 7.0).all(), "an idle tap writes nothing"
        state.flags[tap] = 2
        launch(rows, None, tap=tap, state=state)
        assert torch.equal(state.ring, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "row"), [(64, 128), (300, 128), (14336, 4096), (8, 4096), (28672, 8192)]
)
def test_edits_of_rows_of_another_width_equal_the_reference(
    dtype: torch.dtype, width: int, row: int
) -> None:
    from inspect_lens._engine.tap.op import edit_rows
    from inspect_lens._engine.tap.tap_triton import launch

    layer, n, device = 1, 9, torch.device("cuda")
    site, heads = ("z", 4) if width == 64 else ("mlp_hidden", 0)
    facts = wide_facts(site, width, heads, row)
    cases = [edit for edit, _ in edit_cases(0, layer=layer, width=width)]
    edits = [one.model_copy(update={"site": site}) for one in cases]
    part = {"heads": [1, 3]} if heads else {"neurons": [0, width - 1, 5]}
    edits += [Zero(layers=[layer], site=site, **part)]
    edits += [Scale(layers=[layer], site=site, factor=0.5, **part)]
    fading = Schedule(half_life=2.0)
    edits += [Zero(layers=[layer], site=site, positions="completion", schedule=fading)]
    for edit in edits:
        state = wide_state(facts, dtype, device)
        config = admitted_at(edit, facts, state)
        # A view of a wider tensor, as queries and keys are.
        hidden = torch.randn(n, 2 * width, device=device).to(dtype)[:, width:]
        expected, before = hidden.clone(), hidden.clone()
        state.tokens[:n, 0] = torch.tensor([0, *[config] * (n - 1)], device=device)
        state.tokens[:n, 1] = -1
        state.tokens[:n, 4] = torch.arange(n, device=device)
        state.header[0] = n
        state.flags.fill_(1)
        rows = state.bank.table[:, layer][state.tokens[:n, 0].long()]
        assert not len(edit_rows(expected, None, rows, state.bank))
        launch(hidden, None, tap=layer, state=state)
        assert torch.equal(hidden[0], before[0]), "tokens without edits keep their bits"
        step = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=max(step, 1e-4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["device", "host"])
def test_rows_that_would_be_too_large_stay_and_are_told_of(
    dtype: torch.dtype, is_fused: bool, is_pinned: bool
) -> None:
    """The note goes to memory of the host, every fifth number of it, as on a worker's board."""
    from inspect_lens._engine.tap.edit_table import largest_norm
    from inspect_lens._engine.tap.tap_triton import launch

    width, n_tokens, device = 200, 64, torch.device("cuda")
    state = TapState(
        taps=(TapPoint("resid_post", 0),),
        hidden=width,
        dtype=dtype,
        max_tokens=n_tokens,
        max_groups=1,
        ring_rows=n_tokens,
        bank_rows=4,
        device=device,
    )
    if is_pinned:
        board = torch.zeros(100, 5, dtype=torch.int64).pin_memory()
        state.faults = board[:, 4]
    bank, largest = state.bank, largest_norm(dtype)
    bank.vectors[1, 0] = 1.0
    bank.vectors[2, 0] = 0.9 * largest
    bank.vectors[3, 0] = 1.2 * largest
    bank.vectors[4, 0] = 3e38  # times the norm: infinity
    add_entries(bank, by_norm=[4])
    bank.table[1:5, 0] = torch.arange(1, 5, device=device)
    hidden = torch.randn(n_tokens, width, device=device).to(dtype)
    residual = torch.randn(n_tokens, width, device=device).to(dtype) if is_fused else None
    hidden[60, 3] = float("nan")
    state.tokens[:, 0] = torch.arange(n_tokens, device=device) % 5
    state.tokens[60, 0] = 1  # adds little to a row that is not finite
    state.tokens[:, 1] = -1
    state.tokens[:, 3] = torch.arange(n_tokens, device=device)
    state.header[0], state.flags[0] = n_tokens, 1
    before = hidden.clone()
    launch(hidden, residual, tap=0, state=state)
    torch.cuda.synchronize()
    numbers = torch.arange(n_tokens)
    is_bad = (numbers % 5 >= 3) | (numbers == 60)
    assert torch.equal(state.faults.cpu()[:n_tokens] != 0, is_bad)
    at = is_bad.to(device)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(hidden[at].view(bits), before[at].view(bits))
    edited = (numbers % 5 != 0) & ~is_bad
    assert (hidden[edited.to(device), 0] != before[edited.to(device), 0]).all()
    assert torch.isfinite(hidden[~at]).all()


@pytest.mark.parametrize("is_pinned", [False, True], ids=["device", "host"])
def test_requests_of_spliced_rows_that_are_not_fine_are_noted(is_pinned: bool) -> None:
    """Every fifth number of the host's memory, as on a worker's board, or a table on the device."""
    from inspect_lens._engine.tap.tap_triton import note_faults

    device, rng = torch.device("cuda"), torch.Generator().manual_seed(0)
    board = torch.zeros(100, 5, dtype=torch.int64)
    board = board.pin_memory() if is_pinned else board.to(device)
    records = torch.randint(100, (1000,), generator=rng).to(device)
    is_fine = (torch.rand(1000, generator=rng) > 0.03).to(device)
    note_faults(board[:, 4], records, is_fine)
    torch.cuda.synchronize()
    wanted = torch.zeros(100, dtype=torch.int64)
    wanted[records.cpu()[~is_fine.cpu()]] = 1
    assert 0 < wanted.sum() < 100
    assert torch.equal(board[:, 4].cpu(), wanted)
    assert not board[:, :4].any()
