"""Reductions: however the steps are cut, what comes is what numpy makes of all the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope, seal
from inspect_lens.errors import SpecError
from inspect_lens.spec import REDUCTIONS, Reduce
from tests.kit.cases import DTYPES, KEYS, REJECTED, Case, checked, compare
from tests.kit.steps import FACTS, LAYERS, Worker, begin


def chunks(case: Case) -> Iterator[tuple[int, int, bool] | None]:
    """First position, tokens, and whether they were just sampled; None is a pre-emption."""
    fed, highest, k, restarts = 0, 0, 0, sorted(case.restarts)
    while fed < case.n_fed + case.surplus:
        if restarts and fed >= restarts[0]:
            restarts.pop(0)
            fed = 0
            yield None
        # What was sampled is fed one by one, and all at once where it is computed again.
        limit = max(case.n_prompt, highest) if fed < max(case.n_prompt, highest) else fed + 1
        n = min(case.cuts[k % len(case.cuts)], limit - fed)
        k += 1
        yield fed, n, fed >= max(case.n_prompt, highest)
        fed += n
        highest = max(highest, fed)
    if case.again:
        yield None
        yield 0, case.again, False


def feed(worker: Worker, cases: dict[str, tuple[int, Case, Envelope]], order: int) -> None:
    """Run all requests together, each at its own pace."""
    steps = {key: chunks(case) for key, (_, case, _) in cases.items()}
    turn = 0
    while steps:
        keys = sorted(steps, key=lambda key: hash((key, order, turn)))
        turn += 1
        parts = []
        for key in keys[: 1 + turn % 3]:
            number, case, envelope = cases[key]
            step = next(steps[key], "end")
            if step == "end":
                del steps[key]
            elif step is None:
                worker.stepper.remove(key)
                others = crowd(worker) if case.crowded else []
                worker.stepper.add(key, envelope.pack())
                for other in others:
                    worker.stepper.remove(other)
            else:
                first, n, is_sampled = step
                parts.append((key, number, first, n))
                # vLLM drafts behind what it sampled last, and nothing where it computes again.
                if case.drafts and is_sampled:
                    parts[-1:] = [(key, number + REJECTED, first, 1 + case.drafts)]
        if parts:
            worker.step(parts)


def crowd(worker: Worker) -> list[str]:
    """Requests that take all the room there is for sums."""
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, reduce="max"))
    envelope = seal(request, FACTS, reply="ipc:///nobody", n_prompt=2, max_tokens=9).pack()
    keys = [f"r{next(KEYS)}" for _ in range(len(worker.state.sums) // len(LAYERS))]
    for key in keys:
        worker.stepper.add(key, envelope)
    return keys


SPECS = st.fixed_dictionaries(
    {},
    optional={
        "reduce": st.sampled_from(list(REDUCTIONS)),
        "dtype": st.sampled_from(["model", *DTYPES]),
        "phase": st.sampled_from(["prefill", "decode", "both"]),
        "positions": st.sampled_from(
            ["all", "prompt", "completion", "last", "last_prompt", "mask", [-1, 0], [1, 4, 7, -2]]
        ),
    },
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = dict(draw(SPECS))
    n_prompt = draw(st.integers(2, 14))
    n_completion = draw(st.one_of(st.integers(1, 7), st.integers(4, 12)))
    if spec.get("positions") == "mask":
        mask = draw(st.lists(st.booleans(), min_size=n_prompt, max_size=n_prompt))
        spec["positions"] = [*mask[:-1], True]
    if isinstance(spec.get("positions"), list) and 7 in spec["positions"]:
        n_prompt, n_completion = max(n_prompt, 4), max(n_completion, 7)
        spec["positions"] = sorted({p + n_prompt if p < 0 else p for p in spec["positions"]})
    return Case(
        spec,
        n_prompt,
        n_completion,
        cuts=draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)),
        restarts=draw(st.lists(st.integers(1, n_prompt + n_completion - 1), max_size=2)),
        surplus=draw(st.integers(0, 2)),
        drafts=draw(st.sampled_from([0, 0, 3])),
        again=draw(st.integers(0, n_prompt)),
        crowded=draw(st.booleans()),
    )


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(cases(), min_size=1, max_size=3), st.sampled_from(list(DTYPES)), st.integers(0, 99))
@example(
    [Case({"reduce": "mean"}, 9, 5, cuts=[4], restarts=[6, 12], surplus=1, drafts=0, again=3)],
    "float32",
    0,
)
@example(
    [Case({"reduce": "max"}, 5, 12, cuts=[4], restarts=[14], surplus=1, drafts=0, crowded=True)],
    "float32",
    0,
)
@example(
    [
        Case(
            {"reduce": "mean"}, 5, 12, cuts=[4], restarts=[9, 14], surplus=0, drafts=0, crowded=True
        )
    ],
    "float32",
    0,
)
def test_any_order_of_steps_gives_what_numpy_makes_of_all_rows(
    noisy: dict[str, Worker], collector: Collector, asked: list[Case], model: str, order: int
) -> None:
    worker = noisy[model]
    running: dict[str, tuple[int, Case, Envelope]] = {}
    for number, case in enumerate(asked):
        request = checked(case)
        if request is None:
            continue
        try:
            envelope = seal(
                request,
                replace(FACTS, dtype=model, is_speculative=case.drafts > 0),
                reply=collector.address,
                n_prompt=case.n_prompt,
                max_tokens=case.n_completion + case.surplus,
            )
        except SpecError:
            assert "positions" in case.spec
            continue
        key = f"r{next(KEYS)}"
        begin(worker, collector, key, envelope)
        running[key] = number, case, envelope
    feed(worker, running, order)
    for key, (number, case, envelope) in running.items():
        count = fed_positions(envelope, case.n_fed)
        # Offline the worker is asked, and online it hears that the request is over.
        if number % 2:
            worker.stepper.flush([key])
        else:
            worker.stepper.remove(key)
        got = collector.take(
            key,
            counts={ROWS: count, SCORES: 0},
            n_fed=case.n_fed,
            timeout_s=10,
            settled=case.n_fed if case.drafts else None,
        )
        compare(got.tensors[ROWS], case, number, model)
        worker.stepper.remove(key)
    assert worker.stepper.sum_rows_in_use == 0


def fed_positions(envelope: Envelope, n_fed: int) -> int:
    """How many of the positions that a worker sends were fed."""
    capture = envelope.capture
    assert capture is not None
    if capture.positions is not None:
        return sum(p < n_fed for p in capture.positions)
    return max(0, min(capture.hi, n_fed) - capture.lo)


def test_the_table_of_reductions_is_what_requests_may_name() -> None:
    assert tuple(REDUCTIONS) == get_args(Reduce)
    described = str(CaptureSpec.model_fields["reduce"].description)
    assert all(f"`{name}`: {one.summary}" in described for name, one in REDUCTIONS.items())
