"""A fault at a door of the step loop is the error of requests with the lens, and of nobody else."""

# ruff: noqa: F811

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, Hook, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.hooks.runner import HookRunner, Part
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from inspect_lens._vllm.worker import worker
from inspect_lens._vllm.worker.worker import manage_hooks
from inspect_lens.errors import LensError
from inspect_lens.spec import ENVELOPE_KEY
from tests.kit.steps import sealed
from tests.unit.vllm.worker.test_eager_steps import Runner, Stepper, add, is_v2, made  # noqa: F401
from tests.unit.vllm.worker.test_runners import runner  # noqa: F401

FAULTS = [ZeroDivisionError("a bug"), SystemExit(3), KeyboardInterrupt("from code")]


@pytest.fixture(params=FAULTS, ids=lambda fault: type(fault).__name__)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    # As in a server, whose processes have handlers of their own.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    made: BaseException = request.param
    return made


@pytest.fixture
def one_fault(monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What is hardest to keep in: every guard catches `BaseException`, as `test_doors` reads."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    return KeyboardInterrupt("from code")


def raising(fault: BaseException) -> Any:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise fault

    return broken


@pytest.mark.parametrize("where", ["add", "begin", "end_step", "leave", "remove", "disarm"])
def test_a_fault_in_a_step_fails_requests_with_the_lens_and_no_step(
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    collector = Collector()
    stepper = runner.model.worker.stepper
    failed: list[BaseException] = []
    fail_all = stepper.fail_all
    monkeypatch.setattr(stepper, "fail_all", lambda e: (failed.append(e), fail_all(e)))
    envelope = sealed(collector, LensRequest(capture=CaptureSpec()), 2, 40)
    collector.open("a", envelope)
    if where in ("add", "begin", "end_step"):
        monkeypatch.setattr(stepper, where, raising(fault))
    runner.add("a", {ENVELOPE_KEY: envelope.pack()})
    runner.step({"a": (0, 2), "plain": (0, 1)})
    if where == "disarm":
        monkeypatch.setattr(stepper, where, raising(fault))
        runner._dummy_run(1)
    elif where in ("leave", "remove"):
        monkeypatch.setattr(stepper, where, raising(fault))
        runner.remove("a")
    n = len(runner.model.passes)
    runner.step({"plain": (1, 1)})
    assert len(runner.model.passes) == n + 1, "the plain request goes on"
    # The last one is asked for by a dummy run where a step was repeated, and by none here.
    assert failed or where == "disarm"
    assert all(isinstance(error, Exception) for error in failed)
    monkeypatch.undo()
    stepper.remove("a")
    collector.discard("a")
    collector.close()


def test_a_request_learns_what_failed_it(
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    collector = Collector()
    stepper = runner.model.worker.stepper
    envelope = sealed(collector, LensRequest(capture=CaptureSpec()), 2, 40)
    collector.open("a", envelope)
    runner.add("a", {ENVELOPE_KEY: envelope.pack()})
    monkeypatch.setattr(stepper, "begin", raising(fault))
    runner.step({"a": (0, 2), "plain": (0, 1)})
    runner.step({"plain": (1, 1)})
    with pytest.raises(LensError, match=r"a bug|3|from code"):
        collector.take("a", counts={0: 99, 1: 99}, n_fed=2, timeout_s=5.0, settled=None)
    collector.close()


def test_a_signal_ends_the_worker_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(signal, "getsignal", lambda number: handler)

    def caught(work: Any) -> BaseException:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - what a door does
            return error
        raise AssertionError

    assert ends_process(caught(lambda: handler(15, None)), in_user_code=True)
    assert not ends_process(caught(raising(SystemExit(0))), in_user_code=True)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    pressed = caught(raising(KeyboardInterrupt()))
    assert ends_process(pressed), "of somebody at his own engine"
    assert not ends_process(pressed, in_user_code=True)


def test_whatever_a_hook_raises_fails_its_own_request(
    made: tuple[Runner, Stepper],
    is_v2: bool,
    fault: BaseException,
) -> None:
    runner, stepper = made
    add(stepper, "a", raising(fault))
    add(stepper, "b", lambda ctx, h: h * 10)
    runner.step({"a": (0, 2), "plain": (0, 1), "b": (0, 1)}, is_v2=is_v2)
    assert runner.out[:, 0].tolist() == [1, 1, 1, 10]
    assert stepper.failed.keys() == {"a"}
    assert type(fault).__name__ in stepper.failed["a"]
    runner.step({"plain": (1, 1)}, is_v2=is_v2)
    assert runner.told[-1] == (False, False)


@pytest.mark.parametrize("where", ["begin", "end", "run", "live"])
def test_a_fault_of_an_eager_step_leaves_no_hook_in_the_model(
    made: tuple[Runner, Stepper],
    is_v2: bool,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    runner, stepper = made
    failed: list[Exception] = []

    def fail_all(error: Exception) -> None:
        failed.append(error)
        stepper.hooks.live.clear()

    monkeypatch.setattr(stepper, "fail_all", fail_all)
    add(stepper, "a", lambda ctx, h: h * 10)
    if where == "live":
        monkeypatch.setattr(stepper.hooks, "live", Unreadable(stepper.hooks.live, fault))
    else:
        monkeypatch.setattr(stepper.hooks, where, once(stepper.hooks, where, fault))
    runner.step({"a": (0, 2), "plain": (0, 1)}, is_v2=is_v2)
    assert runner.out[2, 0] == 1, "the plain request's row"
    assert failed or stepper.failed
    monkeypatch.undo()
    assert not runner.block._forward_hooks
    runner.step({"plain": (1, 1)}, is_v2=is_v2)
    assert runner.out[:, 0].tolist() == [1]


class Unreadable(dict[str, Any]):
    """Requests that cannot be looked through."""

    def __init__(self, live: dict[str, Any], fault: BaseException) -> None:
        super().__init__(live)
        self.fault = fault

    def __iter__(self) -> Any:
        raise self.fault

    def get(self, *args: Any) -> Any:
        raise self.fault


def once(hooks: HookRunner, name: str, fault: BaseException) -> Any:
    """A method that fails where it is given something to do."""
    original = getattr(hooks, name)

    def method(*args: Any) -> Any:
        if name == "begin" and not args[0]:
            return original(*args)
        raise fault

    return method


class Leaves:
    """What raises when it is read in the server."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return (exec, (f"raise {self.kind}('while it is read')",))


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit", "KeyboardInterrupt"])
def test_a_function_that_ends_whoever_reads_it_is_an_answer(kind: str) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    item = packed_hook(Hook(fn=lambda ctx, h: None, layer_indices=[0]))
    item["data"] = cloudpickle.dumps(Leaves(kind))
    hooks = HookRunner(layers=[0], allowed=True, most_bytes=1)
    lens = SimpleNamespace(hooks=hooks)
    runner = SimpleNamespace(inspect_lens=lens, inspect_lens_parameters=SimpleNamespace())
    answer = manage_hooks(SimpleNamespace(model_runner=runner), "register", {"h": item})
    assert answer is not None
    assert kind in answer
    assert not hooks.begin([Part("a", 0, 1, 0)])


def test_a_probe_that_a_worker_cannot_take_is_an_answer(fault: BaseException) -> None:
    from inspect_lens._vllm.registered.contents import WorkerContents
    from inspect_lens.spec import EngineProbe

    probe = EngineProbe(layers=(0,), tensors={"weight": np.ones((1, 4))}).model_dump(mode="json")
    kept = WorkerContents(SimpleNamespace(add=raising(fault)), SimpleNamespace())
    runner = SimpleNamespace(inspect_lens=object(), inspect_lens_kept=kept)
    answer = worker.register(SimpleNamespace(model_runner=runner), "r", probe)
    assert isinstance(answer, str)
    assert type(fault).__name__ in answer
