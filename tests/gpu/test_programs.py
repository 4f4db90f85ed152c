"""Programs that nobody would write: the Triton kernel against the definition of instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from inspect_lens._engine.tap.edit_table import GATE_SHIFT, SEES_EDITS
from inspect_lens.spec import N_REGISTERS, Instruction, Kind, run_program
from tests.kit.edit_cases import random_rows
from tests.kit.edit_table import make_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

WIDTH, N_VECTORS, TAP = 24, 6, 1
NUMBERS = st.integers(-16, 16).map(lambda n: n / 8)
# Between the eighths that everything else is made of: rounding alone moves nothing across.
THRESHOLDS = NUMBERS.map(lambda n: n + 0.0137)
# Number 0 is no direction.
VECTOR = st.integers(0, N_VECTORS)


@st.composite
def instructions(draw: st.DrawFn) -> tuple[Kind, int, int, tuple[float, ...], bool, int]:
    """Kind, directions that are read and written, parameters, whether it sees edits, and gate."""
    kinds = [k for k in Kind if k <= Kind.COSINE_GATE or k == Kind.SCHEDULE]
    kinds.remove(Kind.SPLICE)  # which no kernel does
    kind = draw(st.sampled_from(kinds))
    a, b, c = draw(NUMBERS), draw(THRESHOLDS), draw(NUMBERS)
    is_gate = kind >= Kind.JOIN
    if kind == Kind.JOIN:
        a, b = float(draw(st.integers(0, 2))), float(draw(st.integers(0, N_REGISTERS - 1)))
        c = float(draw(st.booleans()))
    elif kind == Kind.SCHEDULE:
        a, b = float(draw(st.integers(1, WIDTH))), float(draw(st.integers(-WIDTH, 2)))
    elif is_gate:
        a = draw(st.sampled_from([0.5, 4.0, float("inf")]))
    if kind == Kind.CLIP:
        b, c = min(b, c), max(b, c)
    register = draw(st.integers(0 if is_gate else -1, N_REGISTERS - 1))
    return (
        kind,
        draw(st.integers(1, N_VECTORS)) if kind == Kind.SCHEDULE else draw(VECTOR),
        0 if kind == Kind.SCHEDULE else draw(VECTOR),
        (a, b, c, float(draw(st.booleans()))),
        draw(st.booleans()),
        register,
    )


@settings(max_examples=60, deadline=None)  # the first compiles the kernel
@given(program=st.lists(instructions(), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_a_program_does_what_its_definition_says(
    program: list[tuple[Kind, int, int, tuple[float, ...], bool, int]], seed: int
) -> None:
    from inspect_lens._engine.tap.tap_triton import launch

    n = 3
    state = make_state(device="cuda")
    bank = state.bank
    vectors = np.round(random_rows(seed, N_VECTORS, WIDTH)).astype(np.float32)
    vectors /= 8  # what chains make of the stream stays small
    bank.vectors[1 : N_VECTORS + 1] = torch.from_numpy(vectors)
    for at, (kind, read, write, params, sees_edits, gate) in enumerate(program, 1):
        code = int(kind) | (SEES_EDITS if sees_edits else 0) | (gate + 1) << GATE_SHIFT
        link = at + 1 if at < len(program) else 0
        bank.entries[at] = torch.tensor([code, read, write, link], dtype=torch.int32)
        bank.params[at] = torch.tensor(params)
    bank.table[1, TAP] = 1
    state.tokens[:n, 0] = 1
    state.tokens[:n, 1] = -1
    state.header[0] = n
    state.flags[TAP] = 1
    rows = np.round(random_rows(seed + 100, n, WIDTH) * 8) / 8
    hidden = torch.tensor(rows, device="cuda")
    launch(hidden, None, tap=TAP, state=state)
    row = [None, *vectors]
    chain = [
        Instruction(kind, row[read], row[write], params, sees_edits, gate)
        for kind, read, write, params, sees_edits, gate in program
    ]
    steps = [np.stack([run_program(x, chain[:k]) for x in rows]) for k in range(len(chain) + 1)]
    sizes = np.linalg.norm(steps, axis=-1)
    # What is left of a stream that edits took away is rounding, and a norm would make it large.
    assume(bool(((sizes == 0) | (sizes > 0.01)).all()))
    largest = max(1.0, float(np.abs(steps).max()))
    np.testing.assert_allclose(hidden.cpu().numpy(), steps[-1], rtol=0, atol=1e-4 * largest)
    assert not state.faults.any()
