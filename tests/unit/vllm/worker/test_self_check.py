"""The start-up check finds what may go wrong in one way of running a step, and names it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens._engine.export.transport import Copier, Exporter
from inspect_lens._engine.protocol.messages import ArenaWriter
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._engine.tap.buffers import TapState, install
from inspect_lens._engine.tap.op import tap
from inspect_lens._vllm.compat.features import idle
from inspect_lens._vllm.worker import check_requests, self_check
from inspect_lens._vllm.worker.check_requests import StreamProbe, check_taps, scale_for
from inspect_lens._vllm.worker.runners import _Step, note
from inspect_lens._vllm.worker.self_check import _Check, check_steps
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import tap_points
from tests.kit.steps import FACTS

HIDDEN = 16
N_TAPS = 3
TAPS = tap_points(["resid_post"], range(N_TAPS))
GRAPHS = {True: "FULL", False: "PIECEWISE"}


class Runner:
    """A model of three additions; `hurt` changes what a tap gets, or takes the tap out."""

    def __init__(self, state: TapState, ctls: list[torch.Tensor]) -> None:
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            speculative_config=None,
            model_config=SimpleNamespace(hf_text_config=None),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=[],
                mode=SimpleNamespace(name="VLLM_COMPILE"),
                cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
            ),
        )
        self.state, self.ctls = state, ctls
        self.ran: list[str] = []
        self.kv_caches: list[Any] = []
        self.padding = torch.zeros(16, dtype=torch.bool)
        self.input_ids = SimpleNamespace(gpu=torch.zeros(16, dtype=torch.int32))
        self.hurt: Callable[[int, str, torch.Tensor], torch.Tensor | None] | None = None

    def _dummy_run(
        self, num_tokens: int, force_attention: bool = False, uniform_decode: bool = False
    ) -> None:
        mode = "NONE" if _Step.is_eager else GRAPHS[uniform_decode]
        note((SimpleNamespace(name=mode), None))
        self.ran.append(mode)
        if (model_state := getattr(self, "model_state", None)) is not None:
            self.padding.fill_(True)
            self.input_ids.gpu.zero_()
            batch = SimpleNamespace(
                is_padding=self.padding[:num_tokens], input_ids=self.input_ids.gpu[:num_tokens]
            )
            model_state.prepare_inputs(batch, None)
        # Of each token its own embedding.
        x = torch.zeros(num_tokens, HIDDEN)
        x[torch.arange(num_tokens), self.input_ids.gpu[:num_tokens].long()] = 8.0
        for i, ctl in enumerate(self.ctls):
            # Graphs round otherwise.
            x = x + torch.linspace(1, 2, HIDDEN) * (i + 1) * (1 if mode == "NONE" else 1.0001)
            made = x if self.hurt is None else self.hurt(i, mode, x)
            if made is not None:
                tap(made, None, ctl)
                x = made


class Worker:
    def __init__(self, hidden: int = HIDDEN, bank_rows: int = 8, rank: int = 0) -> None:
        self.state = TapState(
            taps=TAPS,
            hidden=hidden,
            dtype=torch.float32,
            max_tokens=16,
            max_groups=4,
            ring_rows=48,
            bank_rows=bank_rows,
            device=torch.device("cpu"),
        )
        self.runner = Runner(self.state, [self.state.new_ctl(i) for i in range(N_TAPS)])
        install(self.state)
        self.arena = ArenaWriter(1 << 16)
        self.exporter = Exporter(self.arena, Copier(self.arena))
        self.stepper = RequestStepper(self.state, self.exporter, rank=rank)
        self.runner._dummy_run = idle(self.stepper, self.runner._dummy_run)  # type: ignore[method-assign]

    def check(self, **options: Any) -> None:
        facts = replace(
            FACTS,
            n_layers=N_TAPS,
            hidden=HIDDEN,
            layers=tuple(range(N_TAPS)),
            vocab=HIDDEN,
            taps=TAPS,
            max_step_tokens=16,
            ring_rows=48,
        )
        rows = check_taps(self.runner, self.stepper)
        scale = scale_for(rows[0])
        check_steps(self.runner, self.stepper, self.exporter, facts, scale=scale, **options)

    def is_clean(self) -> bool:
        state = self.state
        return (
            not state.ring.any()
            and not state.header[: 2 + N_TAPS].any()
            and not state.is_active
            and not self.stepper.is_watching
            and self.stepper.rows_in_use == 0
            and self.arena.bytes_in_use == 0
            and not self.exporter._channels
            and not _Step.is_eager
        )


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stepper.close()


def test_two_chunked_requests_are_run_in_every_way(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        worker.check()
    # One token at first; then each way in two chunks, next to eager passes that are the reference.
    assert worker.runner.ran[1:] == (
        4 * ["NONE"] + 2 * ["PIECEWISE"] + 2 * ["NONE"] + 4 * ["NONE"] + 2 * ["FULL"] + 2 * ["NONE"]
    )
    said = caplog.messages[-1]
    compared = "3 of 3 rows of a token compared with eager rows, 3 of them steered, too"
    assert f"piecewise (mixed lengths): {compared}; graph (decodes): {compared}" in said
    assert worker.is_clean()


class ModelState:
    """Of the V2 runner, which takes all tokens of a dummy run for padding."""

    def prepare_inputs(self, batch: Any, states: Any) -> dict[str, Any]:
        return {}


def test_experts_compute_the_tokens_of_the_check(worker: Worker) -> None:
    # For padding they return what their memory held, which differs with the way of running.
    runner = worker.runner
    runner.model_state = ModelState()  # type: ignore[attr-defined]

    def spare(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        held = torch.full_like(x, float(len(mode)))
        return torch.where(runner.padding[: len(x), None], held, x)

    runner.hurt = spare
    worker.check()
    assert worker.is_clean()
    assert not vars(runner.model_state)  # type: ignore[attr-defined]
    runner.padding.fill_(True)
    runner.model_state.prepare_inputs(  # type: ignore[attr-defined]
        SimpleNamespace(is_padding=runner.padding), None
    )
    assert runner.padding.all()


def test_what_warming_up_left_in_the_cache_is_no_fault(worker: Worker) -> None:
    # A padded pass has two tokens in a sequence: every second one looks at a second place, too.
    cache = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0)) * 50
    state = torch.full((3,), 7.0)
    worker.runner.kv_caches = [cache, [state]]

    def attend(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        places = 1 + torch.arange(len(x)) % 2 if mode == "PIECEWISE" else torch.ones(len(x))
        return x + torch.stack([cache[: int(n)].mean(dim=0) for n in places])

    worker.runner.hurt = attend
    worker.check()
    assert not cache.any()
    assert not state.any()


class Places:
    """The V1 runner's table of the places of sequences, in which dummy runs find the null block."""

    def __init__(self) -> None:
        self.block_table = SimpleNamespace(np=np.zeros((4, 3), dtype=np.int32))
        self.committed = torch.zeros(4, 3, dtype=torch.int32)

    def commit_block_table(self, num_reqs: int) -> None:
        self.committed[:num_reqs] = torch.from_numpy(self.block_table.np[:num_reqs])

    def clear(self) -> None:
        self.block_table.np[:] = 0
        self.committed.zero_()


@pytest.mark.parametrize("n_blocks", [4, 5])
@pytest.mark.parametrize("is_new", [False, True])
def test_states_are_compared_where_each_sequence_has_a_place_for_its_own(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, n_blocks: int, is_new: bool
) -> None:
    """What kernels return for the null block is chance, as is what sequences leave in one place."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    monkeypatch.setattr(self_check, "has_states", lambda model: True)
    runner: Any = worker.runner
    places, others = Places(), Places()
    states = interface.MambaSpec(block_size=1, shapes=((1,),), dtypes=(torch.float32,))
    runner.kv_cache_config = SimpleNamespace(
        num_blocks=n_blocks,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in (object(), states)],
    )
    runner.input_batch = SimpleNamespace(block_table=[others, places])
    runner.get_model = lambda: None
    if is_new:
        # The V2 runner gives places by an option, which this one lacks.
        runner.model_state = ModelState()
    drawn = torch.Generator().manual_seed(0)
    wrong: Callable[[int, str], bool] = lambda i, mode: False  # noqa: E731

    def compute(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        assert not others.committed.any()
        of = places.committed[torch.arange(len(x)) % 4, 0]
        assert not is_new or not of.any()
        held = torch.randn(x.shape, generator=drawn) * 50
        return torch.where(of[:, None] == 0, held, x + 50 if wrong(i, mode) else x)

    runner.hurt = compute
    worker.check()
    wrong = lambda i, mode: (i, mode) == (1, "FULL")  # noqa: E731
    if n_blocks > 4 and not is_new:
        with pytest.raises(CompatError, match=r"resid_post\.1, resid_post\.2 have other rows"):
            worker.check()
    else:
        worker.check()
    runner.hurt = lambda i, mode, x: None if (i, mode) == (1, "FULL") else x
    with pytest.raises(CompatError, match=r"resid_post\.1 did not write every row"):
        worker.check()
    assert worker.is_clean()
    assert not places.committed.any()
    assert not places.block_table.np.any()


def make_eager(worker: Worker) -> None:
    compilation = worker.runner.vllm_config.compilation_config
    compilation.mode.name = compilation.cudagraph_mode.name = "NONE"


@pytest.mark.parametrize("changed", ["mode", "cudagraph_mode"])
def test_an_engine_with_one_way_is_run_in_that_way_once(
    worker: Worker, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    make_eager(worker)
    with caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        worker.check()
    # Two chunks each: plain, steered, plain.
    assert len(worker.runner.ran[1:]) == 6
    compared = "3 of 3 rows of a token compared with repeated rows, 1 of them steered, too"
    assert compared in caplog.messages[-1]
    assert worker.is_clean()
    # Either of the two makes a second way.
    getattr(worker.runner.vllm_config.compilation_config, changed).name = "FULL_DECODE_ONLY"
    worker.runner.ran.clear()
    if changed == "mode":
        worker.runner.vllm_config.compilation_config.mode.name = "VLLM_COMPILE"
    worker.check()
    assert len(worker.runner.ran[1:]) == 16


def test_an_engine_with_one_way_does_not_start_with_a_vector_that_is_lost(worker: Worker) -> None:
    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        worker.state.steering = [False] * N_TAPS
        return x

    make_eager(worker)
    worker.runner.hurt = hurt
    with pytest.raises(CompatError, match=r"taps resid_post\.0 do not have the steering vec"):
        worker.check()


def test_a_tap_that_never_fires_is_named(worker: Worker) -> None:
    worker.runner.hurt = lambda i, mode, x: None if i == 1 else x
    with pytest.raises(CompatError, match=r"taps resid_post\.1 did not fire"):
        worker.check()
    assert worker.is_clean()


@pytest.mark.parametrize("way", ["FULL", "PIECEWISE"])
def test_a_tap_that_is_silent_in_one_way_only_is_named(worker: Worker, way: str) -> None:
    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor | None:
        # Not the first pass, of one token, which has a check of its own.
        return None if (i, mode) == (1, way) and len(x) > 1 else x

    worker.runner.hurt = hurt
    name = {"FULL": "graph", "PIECEWISE": "piecewise"}[way]
    with pytest.raises(
        CompatError, match=rf"in {name} steps \([a-z ]+\) the taps resid_post\.1 did not write"
    ) as caught:
        worker.check()
    assert "resid_post.2" not in str(caught.value)
    assert worker.is_clean()


def test_rows_of_one_request_that_are_in_another_order_are_found(worker: Worker) -> None:
    def swap(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        is_hurt = (layer, mode) == (1, "PIECEWISE")
        return torch.cat([x[:2].flip(0), x[2:]]) if is_hurt else x

    worker.runner.hurt = swap
    with pytest.raises(CompatError, match=r"the taps resid_post\.1, resid_post\.2 have other rows"):
        worker.check()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_special_token_that_rounding_decides_is_not_asked(worker: Worker, is_new: bool) -> None:
    """Of SmolLM2's `<|endoftext|>`, a GPU's compiled code and eager code have other rows."""

    def cancel(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        is_special = x[:, :1] - x[:, 1:2] > 4
        is_hurt = (layer, mode) == (0, "PIECEWISE")
        return torch.where(is_special, -x, x) if is_hurt else x

    worker.runner.hurt = cancel
    if is_new:
        worker.runner.model_state = ModelState()  # type: ignore[attr-defined]
    worker.check()


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_steered_rows_are_judged_as_far_as_plain_ones_are_close(
    worker: Worker, noise: float, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, rounding makes of steered rows of SmolLM2 others, and moves plain ones, too."""

    def amplify(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if mode != "PIECEWISE":
            return x
        plain = torch.linspace(1, 2, HIDDEN) * sum(range(1, layer + 2))
        is_steered = ((x - plain).abs() > 0.5).sum(dim=1, keepdim=True) > 1
        x = x * (1 + noise) if layer == 1 else x
        return torch.where(is_steered, -x, x) if layer == 2 else x

    worker.runner.hurt = amplify
    if not noise:
        with pytest.raises(CompatError, match=r"resid_post\.2 have"):
            worker.check()
        return
    with caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        worker.check()
    said = caplog.messages[-1]
    assert (
        "piecewise (mixed lengths): 3 of 3 rows of a token compared with eager rows, 1 of" in said
    )
    assert "graph (decodes): 3 of 3 rows of a token compared with eager rows, 3 of them" in said


def test_the_second_request_is_judged_at_every_tap_where_nothing_is_steered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an engine that has taps alone which nobody may write."""
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        patched.setattr(self_check._Check, "can_steer", False)
        worker.check()
    assert "two chunked requests; piecewise" in caplog.messages[-1]
    assert "0 of them steered" in caplog.messages[-1]
    monkeypatch.setattr(self_check._Check, "can_steer", False)

    def swap(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if mode != "PIECEWISE":
            return x
        x = x * 1.01 if layer == 1 else x
        return torch.cat([x[:-2], x[-2:].flip(0)]) if layer == 2 else x

    worker.runner.hurt = swap
    with pytest.raises(CompatError, match=r"resid_post\.2 have other rows"):
        worker.check()


@pytest.fixture
def routed(worker: Worker) -> Worker:
    config = SimpleNamespace(num_local_experts=8)
    worker.runner.vllm_config.model_config = SimpleNamespace(hf_text_config=config)
    return worker


@pytest.mark.parametrize("tied", [0, 1])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_tie_between_experts_that_rounding_decides_is_no_fault(
    routed: Worker, tied: int, is_new: bool
) -> None:
    """Vectors come behind layer 0, and decide nothing there."""
    seen: dict[int, torch.Tensor] = {}

    def tie(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if layer != tied:
            return x
        # That of the first pass, in which nothing is steered.
        is_near = (x - seen.setdefault(layer, x[0])).norm(dim=-1, keepdim=True) < 0.1
        return torch.where(is_near & (mode == "PIECEWISE"), -x, x)

    routed.runner.hurt = tie
    if is_new:
        routed.runner.model_state = ModelState()  # type: ignore[attr-defined]
    routed.check()
    assert routed.is_clean()
    assert is_new or not routed.runner.input_ids.gpu.any()


@pytest.mark.parametrize(
    ("sizes", "max_num_seqs", "n_drafts", "tokens"),
    [
        ([16, 8, 4, 2, 1], 8, 0, 16),
        # Two tokens of each sequence are decodes, of which the other shape is made.
        ([8, 16, 24], 8, 1, 24),
        ([8, 16, 24], 16, 0, 24),
        ([8, 16], 8, 1, 17),  # both are decodes, so no graph takes it
        ([8, 128], 8, 0, 9),
        (None, 8, 0, 9),
    ],
)
def test_the_v2_runner_pads_no_pass_of_mixed_lengths(
    sizes: list[int] | None, max_num_seqs: int, n_drafts: int, tokens: int
) -> None:
    """Padded, sequences have more tokens: in a state-space layer they depend on those before."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=n_drafts),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
    )
    state = SimpleNamespace(
        step_rows=64, row_taps=TAPS, ring=SimpleNamespace(is_cuda=True), taps=TAPS
    )
    shapes = self_check._shapes(
        SimpleNamespace(vllm_config=config, model_state=None),
        SimpleNamespace(state=state),  # type: ignore[arg-type]
        replace(FACTS, max_step_tokens=64),
    )
    assert [shape.tokens for shape in shapes] == [tokens, 2 * (1 + n_drafts)]


def test_a_vector_that_is_lost_each_time_is_a_fault_with_experts_too(routed: Worker) -> None:
    def lose(layer: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if mode == "PIECEWISE":
            routed.state.steering = [False] * N_TAPS
        return x

    routed.runner.hurt = lose
    with pytest.raises(CompatError, match=r"in piecewise steps .* resid_post\.0, .* other rows"):
        routed.check()


def test_a_tie_in_a_model_without_experts_is_a_fault(worker: Worker) -> None:
    worker.runner.hurt = lambda i, mode, x: -x if (i, mode) == (1, "PIECEWISE") else x
    with pytest.raises(CompatError, match=r"the taps resid_post\.1, resid_post\.2 have other rows"):
        worker.check()


def test_a_further_pair_whose_runs_fail_hides_nothing(
    routed: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, done = _Check.run, 0

    def fail(check: _Check, *args: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        made = run(check, *args, **options)
        if 4 < done <= 10:
            made = replace(made, ring=0 * made.ring)
            made.exported.failure = "the table is full"
        return made

    monkeypatch.setattr(_Check, "run", fail)
    routed.runner.hurt = lambda i, mode, x: -x if (i, mode) == (1, "PIECEWISE") else x
    with pytest.raises(CompatError, match=r"the taps resid_post\.1, resid_post\.2 have other rows"):
        routed.check()


def test_experts_do_not_hide_rows_that_are_wrong_each_time(routed: Worker) -> None:
    routed.runner.hurt = lambda i, mode, x: -x if (i, mode) == (1, "PIECEWISE") else x
    with pytest.raises(CompatError, match=r"the taps resid_post\.1, resid_post\.2 have other rows"):
        routed.check()


def test_a_graph_that_writes_rows_of_another_step_is_named(worker: Worker) -> None:
    stale: list[torch.Tensor] = []

    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if (i, mode) != (2, "FULL"):
            return x
        # What its first replay computed, before anybody was steered.
        stale.append(x.clone())
        return stale[0].roll(1, 0)

    worker.runner.hurt = hurt
    with pytest.raises(
        CompatError, match=r"graph steps.*taps resid_post\.2 have other rows than .* allowed"
    ):
        worker.check()
    assert worker.is_clean()


@pytest.mark.parametrize("way", ["FULL", "PIECEWISE", "NONE"])
def test_a_vector_that_does_not_arrive_is_named(
    worker: Worker, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if mode == way:
            worker.state.steering = [False] * N_TAPS
        return x

    worker.runner.hurt = hurt
    name = {"FULL": "graph", "PIECEWISE": "piecewise", "NONE": "eager"}[way]
    with pytest.raises(
        CompatError, match=rf"in {name} steps.*taps resid_post\.0 do not have the steering vec"
    ):
        worker.check()
    assert worker.is_clean()


def test_a_vector_at_a_wrong_token_is_found(worker: Worker) -> None:
    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        if mode == "FULL" and i == 0 and worker.state.is_active:
            tokens = worker.state.tokens[:2]
            tokens[:, 0] = tokens[:, 0].flip(0)
        return x

    worker.runner.hurt = hurt
    with pytest.raises(CompatError, match=r"graph steps.*resid_post\.0 do not have the steering"):
        worker.check()


@pytest.mark.parametrize("what", ["lost", "changed"])
def test_an_export_that_loses_or_changes_a_row_is_named(
    worker: Worker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, copied = worker.exporter.copier, []
    copy, send = copier.copy, worker.exporter._send

    def wrong(rows: torch.Tensor, offset: int, seq: int, dtype: torch.dtype) -> None:
        copied.append(seq)
        rows = rows.clone()
        rows[1, -1, 0] += 1
        copy(rows, offset, seq, dtype)

    def losing(reply: str, message: Any) -> bool:
        return True if type(message).__name__ == "Block" else send(reply, message)

    if what == "lost":
        monkeypatch.setattr(worker.exporter, "_send", losing)
        monkeypatch.setattr(check_requests, "_WAIT_S", 0.3)
    else:
        monkeypatch.setattr(copier, "copy", wrong)
    expected = {
        "lost": r"taps resid_post\.0, resid_post\.1, resid_post\.2 wrote rows that did not leave",
        "changed": r"taps resid_post\.1 wrote rows that left it changed",
    }[what]
    with pytest.raises(CompatError, match=rf"in piecewise steps \(mixed lengths\) the {expected}"):
        worker.check()


def test_a_request_that_the_worker_fails_is_told_of(worker: Worker) -> None:
    admit = worker.stepper._bank.admit

    def full(*args: Any) -> Any:
        admit(*args)
        raise RuntimeError("no room")

    worker.stepper._bank.admit = full  # type: ignore[method-assign]
    with pytest.raises(CompatError, match=r"a request: RuntimeError: no room"):
        worker.check()


@pytest.mark.parametrize("where", ["there", "behind"])
def test_rows_that_eager_passes_do_not_agree_on_are_not_compared(
    worker: Worker, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Nor are those behind them, which may agree by chance."""
    generator = torch.Generator().manual_seed(0)

    def hurt(i: int, mode: str, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(x.shape, generator=generator)
        if where == "there":
            return [x, x * float("nan"), drawn][i]
        # As memory that nothing has written: the same for all eager passes, another in graphs.
        chance = torch.ones(x.shape) if mode == "NONE" else -torch.ones(x.shape)
        return [x, drawn, chance][i]

    worker.runner.hurt = hurt
    with caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        worker.check()
    assert caplog.messages[-1].count(": 1 of 3 rows of a token compared") == 2
    assert worker.is_clean()


def test_rows_that_cannot_be_steered_do_not_stop_the_start(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.runner.hurt = lambda i, mode, x: x * float("nan")
    with caplog.at_level(logging.INFO, "vllm.inspect_lens"):
        worker.check()
    assert caplog.messages[-1].count("0 of 3 rows of a token compared") == 2
    assert caplog.messages[-1].count("0 of them steered") == 2
    assert worker.is_clean()


def test_a_rank_that_sends_nothing_runs_the_same_passes(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.check()
    silent = Worker(rank=1)
    silent.check(rank=1)
    assert silent.runner.ran == worker.runner.ran
    assert silent.is_clean()
    silent.stepper.close()


def branch(x: torch.Tensor, ctl: torch.Tensor) -> torch.Tensor:
    """Modules that write to the stream, and are not it."""
    made = torch.tanh(x) + torch.linspace(1, 2, HIDDEN)
    tap(made, None, ctl)
    return x + made


def blind(x: torch.Tensor, ctl: torch.Tensor) -> torch.Tensor:
    """Attention in a dummy pass, which sees nothing."""
    made = torch.linspace(1, 2, HIDDEN).repeat(len(x), 1)
    tap(made, None, ctl)
    return x + made


def stale(x: torch.Tensor, ctl: torch.Tensor) -> torch.Tensor:
    """A pair whose first half is all that the next layer reads."""
    made, other = x + torch.tanh(x) + 1, torch.tanh(x)
    tap(made, other, ctl)
    return made


def halves(x: torch.Tensor, ctl: torch.Tensor) -> torch.Tensor:
    """A pair that is a sum, as layers return it."""
    made, other = torch.tanh(x) + 1, x.clone()
    tap(made, other, ctl)
    return made + other


@pytest.mark.parametrize("layer", [branch, blind, stale, halves], ids=lambda one: one.__name__)
def test_layers_that_were_named_by_hand_have_to_be_the_stream(
    layer: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dummy_run(
        self: Runner, num_tokens: int, force_attention: bool = False, uniform_decode: bool = False
    ) -> None:
        note((SimpleNamespace(name="NONE" if _Step.is_eager else GRAPHS[uniform_decode]), None))
        x = torch.ones(num_tokens, HIDDEN)
        for ctl in self.ctls:
            x = layer(x, ctl)

    monkeypatch.setattr(Runner, "_dummy_run", dummy_run)
    made = Worker()
    try:
        # Without a name it is not asked: rows are those of an eager pass.
        made.check()
        if layer is halves:
            made.check(named=("model.{i}", 4.0))
        else:
            with pytest.raises(UnsupportedError, match=r"model\.\{i\}.*do not return the residual"):
                made.check(named=("model.{i}", 4.0))
        assert made.is_clean()
    finally:
        made.stepper.close()


def test_ranks_run_the_same_passes_where_one_refuses_layers_that_were_named() -> None:
    def passes(rank: int, hurt: Any = None) -> tuple[list[str], str]:
        made, said = Worker(rank=rank), ""
        made.runner.hurt = hurt
        try:
            made.check(rank=rank, named=("model.{i}", 4.0))
        except (CompatError, UnsupportedError) as error:
            said = str(error)
        finally:
            made.stepper.close()
        return made.runner.ran, said

    # Later layers see nothing of what was before the second.
    stuck = lambda i, mode, x: x if i != 1 else torch.full_like(x, 3.0)  # noqa: E731
    silent = lambda i, mode, x: None if i == 1 and mode == "FULL" else x  # noqa: E731
    for hurt, reason in ((stuck, "do not return the residual"), (silent, "did not write")):
        (first, said), (second, nothing) = passes(0, hurt), passes(1, hurt)
        assert reason in said
        assert nothing == ""
        assert first == second


def test_layers_of_one_tap_cannot_be_told_from_others(worker: Worker) -> None:
    state = SimpleNamespace(taps=TAPS[:1], ring=worker.state.ring)
    with pytest.raises(UnsupportedError, match=r"cannot be told: .* two or more in INSPECT_LENS_"):
        StreamProbe("model.{i}", 1.0, state)  # type: ignore[arg-type]
