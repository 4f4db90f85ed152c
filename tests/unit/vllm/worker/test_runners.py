"""The adapters to vLLM's model runners, on runners that have nothing but what is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._engine.step.stages import Stages
from inspect_lens._engine.tap.op import tap
from inspect_lens._vllm.worker.runners import RunnerV1, RunnerV2
from inspect_lens.spec import ENVELOPE_KEY, Add, TokenMatch
from tests.kit.steps import HIDDEN, Worker, exporter, sealed


class Model:
    """One layer of zeros and its tap; keeps what each pass gave."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.passes: list[bool] = []
        self.ids = torch.zeros(8, dtype=torch.int32)
        """What a runner's buffer holds when it has prepared a step."""
        self.edited: list[list[bool]] = []
        """Of each pass, the tokens that were edited."""

    def __call__(self, n: int) -> None:
        hidden = torch.zeros(n, HIDDEN)
        tap(hidden, None, self.worker.ctls[0])
        self.passes.append(bool(hidden.any()))
        self.edited.append(hidden.any(dim=-1).tolist())


class FakeV2:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.vllm_config: Any = None
        self.cudagraph_manager: Any = None
        self.input_buffers = SimpleNamespace(input_ids=model.ids)
        self._gone: set[str] = set()
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.model_state = SimpleNamespace(
            add_request=nothing, remove_request=nothing, preprocess_state=nothing
        )

    def add(self, key: str, extra: dict[str, Any]) -> None:
        params = SimpleNamespace(extra_args=extra)
        self.model_state.add_request(0, SimpleNamespace(req_id=key, sampling_params=params))

    def remove(self, key: str) -> None:
        self._gone.add(key)

    def step(self, layout: dict[str, tuple[int, int]]) -> None:
        gone, self._gone = self._gone, set()
        scheduled: Any = {"finished_req_ids": gone, "scheduled_spec_decode_tokens": {}}
        self.execute_model(SimpleNamespace(**scheduled, layout=layout))

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False
    ) -> None:
        if dummy_run:
            self.model(scheduler_output.n)
            return
        step = scheduler_output.layout
        for key in sorted(scheduler_output.finished_req_ids):
            self.model_state.remove_request(key)
        counts = np.asarray([n for _, n in step.values()], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = SimpleNamespace(
            req_ids=list(step),
            query_start_loc_np=starts,
            num_scheduled_tokens=counts,
            num_computed_tokens_np=np.asarray([p for p, _ in step.values()], dtype=np.int32),
        )
        self.model_state.preprocess_state(batch)
        self.model(int(counts.sum()))

    def _dummy_run(self, n: int) -> None:
        # As vLLM's own: what it gives is named.
        dummy = SimpleNamespace(finished_req_ids=set(), n=n)
        self.execute_model(dummy, intermediate_tensors=None, dummy_run=True)


class FakeV1:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.vllm_config: Any = None
        self.device = torch.device("cuda")
        self.input_ids = SimpleNamespace(gpu=model.ids)
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(8, int))
        self._waiting: list[Any] = []
        self._gone: set[str] = set()

    def add(self, key: str, extra: dict[str, Any]) -> None:
        params = SimpleNamespace(extra_args=extra)
        self._waiting.append(SimpleNamespace(req_id=key, sampling_params=params))

    def remove(self, key: str) -> None:
        self._gone.add(key)

    def _update_states(self, scheduled: Any) -> None:
        pass

    def _prepare_inputs(self, scheduled: Any, counts: Any) -> None:
        pass

    def _model_forward(self, n: int) -> None:
        self.model(n)

    def step(self, layout: dict[str, tuple[int, int]]) -> None:
        self.execute_model(layout)

    def execute_model(
        self, step: dict[str, tuple[int, int]], intermediate_tensors: Any = None
    ) -> None:
        new, self._waiting, gone, self._gone = self._waiting, [], self._gone, set()
        scheduled = SimpleNamespace(
            finished_req_ids=gone, scheduled_new_reqs=new, scheduled_spec_decode_tokens={}
        )
        self._update_states(scheduled)
        counts = np.asarray([n for _, n in step.values()])
        self.input_batch.req_ids = list(step)
        self.input_batch.num_computed_tokens_cpu[: len(step)] = [p for p, _ in step.values()]
        self._prepare_inputs(scheduled, counts)
        self._model_forward(int(counts.sum()))

    def _dummy_run(self, n: int) -> None:
        self.model(n)


@pytest.fixture(params=["v1", "v2", "v1 of a pipeline", "v2 of a pipeline"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    worker = Worker(exporter())
    worker.stepper = stepper = RequestStepper(worker.state, worker.stepper._exporter)
    if "pipeline" in request.param:
        stepper.stages = Stages(is_last=False)
    model = Model(worker)
    if request.param.startswith("v1"):
        made: Any = FakeV1(model)
        adapter: Any = RunnerV1(made, stepper)
    else:
        made = FakeV2(model)
        adapter = RunnerV2(made, stepper)
    monkeypatch.setattr(adapter, "_path", lambda: "eager")
    adapter.attach()
    yield made
    stepper.close()


def test_a_repeated_step_is_over_for_dummy_runs_and_for_others(runner: Any) -> None:
    collector = Collector()
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[0])
    envelope = sealed(collector, LensRequest(edits=(vector,)), 2, 40)
    collector.open("a", envelope)
    runner.add("a", {ENVELOPE_KEY: envelope.pack()})
    runner.step({"a": (0, 2)})
    for position in range(2, 6):
        runner.step({"a": (position, 1)})
    assert runner.model.passes == [True] * 5
    stepper = runner.model.worker.stepper
    assert stepper.is_armed
    runner._dummy_run(1)
    assert runner.model.passes.pop() is False
    runner.step({"a": (6, 1)})
    runner.step({"a": (7, 1)})
    assert runner.model.passes[-2:] == [True, True]
    # The request ends; the next step has its place in the batch and asks for nothing.
    runner.remove("a")
    runner.step({"b": (8, 1)})
    assert runner.model.passes[-1] is False
    assert not stepper.is_armed
    collector.discard("a")
    collector.close()


def test_sampled_tokens_with_some_ids_are_edited_also_where_steps_repeat(runner: Any) -> None:
    model, collector = runner.model, Collector()
    fed = model.worker.state.bank.fed
    asked: list[torch.Tensor] = []
    read = fed.source
    fed.source = lambda: (asked.append(model.ids), read())[1]
    plain = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[0])
    chosen = TokenMatch(token_ids=[5, 6], among="completion")
    requests = {
        "v": LensRequest(edits=(plain,)),
        "a": LensRequest(edits=(Add(vector=np.ones(HIDDEN), layers=[0], positions=chosen),)),
    }
    envelopes = {key: sealed(collector, one, 2, 40) for key, one in requests.items()}
    for key, envelope in envelopes.items():
        collector.open(key, envelope)
    runner.add("v", {ENVELOPE_KEY: envelopes["v"].pack()})
    runner.step({"v": (0, 2)})
    assert not asked, "nobody asks for ids, and nothing is copied"
    runner.add("a", {ENVELOPE_KEY: envelopes["a"].pack()})
    model.ids[:] = 5
    runner.step({"v": (2, 1), "a": (0, 2), "b": (0, 1)})
    assert model.edited[-1] == [True, False, False, False], "a prompt is left alone"
    for step, ids in enumerate([(5, 5, 5), (5, 7, 5), (7, 6, 6), (6, 5, 7), (1, 4, 5)]):
        model.ids[:3] = torch.tensor(ids)
        runner.step({"v": (3 + step, 1), "a": (2 + step, 1), "b": (1 + step, 1)})
        assert model.edited[-1] == [True, ids[1] in (5, 6), False]
    # Computed again: what was sampled comes in one chunk with the prompt.
    runner.remove("a")
    runner.step({"b": (6, 1)})
    runner.add("a", {ENVELOPE_KEY: envelopes["a"].pack()})
    model.ids[:6] = torch.tensor([5, 5, 5, 7, 6, 5])
    runner.step({"a": (0, 6)})
    assert model.edited[-1] == [False, False, True, False, True, True]
    runner.remove("a")
    asked.clear()
    runner.step({"v": (9, 1), "b": (7, 1)})
    assert not asked
    for key in envelopes:
        collector.discard(key)
    collector.close()


def test_what_is_kept_of_requests_that_end_together_leaves_together(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    stepper = runner.model.worker.stepper
    flush = stepper._sender.flush
    monkeypatch.setattr(
        stepper._sender, "flush", lambda slots: (flushed.append(len(slots)), flush(slots))
    )
    collector = Collector()
    for key in "abc":
        envelope = sealed(collector, LensRequest(capture=CaptureSpec(reduce="mean")), 2, 40)
        collector.open(key, envelope)
        runner.add(key, {ENVELOPE_KEY: envelope.pack()})
    runner.step(dict.fromkeys("abc", (0, 2)))
    runner.step(dict.fromkeys("abc", (2, 1)))
    flushed.clear()
    for key in "abc":
        runner.remove(key)
    runner.step({"z": (0, 1)})
    # Each is asked once more when it is forgotten, and has nothing left.
    assert flushed == [3, 1, 1, 1]
    assert stepper.sum_rows_in_use == 0
    for key in "abc":
        collector.discard(key)
    collector.close()
