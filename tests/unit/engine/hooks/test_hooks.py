"""Hooks of requests through a worker without vLLM, over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.hooks.results import OWN, PERSISTENT, pack_saved, unpack_saved
from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.hooks.unpickle import load_function
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from inspect_lens.errors import CaptureError, HookError, LensError, SpecError
from tests.kit.hooked import Worker, begin, hook, note, take
from tests.kit.steps import LAYERS, sealed


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stepper.close()


def test_a_hook_sees_its_own_rows_at_its_layers_in_every_step(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "a", hook(note, 0, 5))
    worker.run([("x", 4, 3), ("a", 0, 5)])
    worker.run([("a", 5, 3), ("y", 0, 2)])
    worker.run([("y", 2, 1), ("a", 8, 1)])
    worker.stepper.remove("a")
    found = take(collector, "a", 9)
    saved = found.parts[OWN]["0"]
    assert saved["calls"] == [[la, p, n] for p, n in ((0, 5), (5, 3), (8, 1)) for la in (0, 5)]
    rows = np.concatenate([r.storage for r in saved["rows"][::2]])
    np.testing.assert_array_equal(rows, (Worker.rows("a", 0, 9) + 1).numpy())
    assert (found.n_fed, found.n_edited) == (9, 0)
    assert not worker.hooks.live


def test_edits_chain_over_hooks_and_sides_and_touch_no_neighbour(
    worker: Worker, collector: Collector
) -> None:
    plain = worker.run([("x", 0, 2), ("a", 0, 3), ("y", 0, 2)])
    begin(
        worker,
        collector,
        "a",
        hook(lambda ctx, h: h * 2, 2),
        hook(lambda ctx, h: h + 7, 2),
        hook(lambda ctx, h: -h, 5, pre=True),
    )
    edited = worker.run([("x", 0, 2), ("a", 0, 3), ("y", 0, 2)])
    for layer in LAYERS:
        torch.testing.assert_close(edited[layer][:2], plain[layer][:2], rtol=0, atol=0)
        torch.testing.assert_close(edited[layer][5:], plain[layer][5:], rtol=0, atol=0)
    mine = plain[0][2:5]
    torch.testing.assert_close(edited[0][2:5], mine)
    torch.testing.assert_close(edited[2][2:5], (mine + 1) * 2 + 7)
    torch.testing.assert_close(edited[5][2:5], -((mine + 1) * 2 + 7) + 1)
    worker.stepper.remove("a")
    assert take(collector, "a", 3).n_edited == 3


def test_writing_into_the_rows_counts_only_when_they_are_given_back(
    worker: Worker, collector: Collector
) -> None:
    def scribble(ctx: Any, h: Any) -> None:
        h.zero_()

    before = worker.run([("a", 0, 2)])
    begin(worker, collector, "a", hook(scribble, 0), hook(note, 0))
    after = worker.run([("a", 0, 2)])
    torch.testing.assert_close(after[5], before[5], rtol=0, atol=0)
    worker.stepper.remove("a")
    assert take(collector, "a", 2).parts[OWN]["1"]["rows"][0].storage.all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda ctx, h: 1 / 0, "ZeroDivisionError"),
        (lambda ctx, h: h[:, :2], r"returned Tensor shape \(2, 2\)"),
        (lambda ctx, h: [1], "returned list"),
    ],
)
def test_a_hook_that_raises_fails_its_request_and_no_other(
    worker: Worker, collector: Collector, function: Callable[..., Any], message: str
) -> None:
    def first(ctx: Any, h: Any) -> Any:
        return h * 100

    plain = worker.run([("a", 0, 2), ("b", 0, 2)])
    begin(worker, collector, "a", hook(first, 2), hook(function, 2))
    begin(worker, collector, "b", hook(note, 2))
    after = worker.run([("a", 0, 2), ("b", 0, 2)])
    for layer in LAYERS:
        # What an earlier hook of the failed request had edited there is not left half done.
        torch.testing.assert_close(after[layer], plain[layer], rtol=0, atol=0)
    worker.run([("a", 2, 1), ("b", 2, 1)])
    for key in "ab":
        worker.stepper.remove(key)
    with pytest.raises(HookError, match=f"(?s)after layer 2 raised.*{message}") as caught:
        take(collector, "a", 3)
    assert "_engine/hooks/runner.py" not in str(caught.value).partition("SpecError")[0]
    assert len(take(collector, "b", 3).parts[OWN]["0"]["rows"]) == 2
    assert worker.stepper.n_requests == 0


def test_what_is_computed_again_is_seen_once(worker: Worker, collector: Collector) -> None:
    begin(worker, collector, "a", hook(note, 0))
    worker.run([("a", 0, 4)])
    worker.run([("a", 4, 1)])
    worker.run([("a", 0, 6)])  # pre-empted, and computed again
    worker.run([("a", 6, 1)])
    worker.stepper.remove("a")
    found = take(collector, "a", 7)
    assert [c[1:] for c in found.parts[OWN]["0"]["calls"]] == [[0, 6], [6, 1]]


def test_what_a_worker_sent_when_it_gave_a_request_up_is_not_the_result(
    worker: Worker, collector: Collector
) -> None:
    request = (worker, collector, "a", hook(note, 0))
    begin(*request)
    worker.run([("a", 0, 4)])
    worker.stepper.remove("a")  # V2 forgets a pre-empted request
    with pytest.raises(CaptureError, match=r"0 of 1 layers .* within 0.2 s"):
        collector.take_saved("a", n_fed=6, timeout_s=0.2)
    envelope = sealed(collector, LensRequest(hooks=(request[3],)), 8, 8)
    eager = {"own": [packed_hook(request[3])], "persistent": []}
    worker.stepper.add("a", envelope.pack() | {EAGER_KEY: eager})
    worker.run([("a", 0, 6)])
    worker.stepper.remove("a")
    assert take(collector, "a", 6).parts[OWN]["0"]["calls"] == [[0, 0, 6]]


def test_tokens_that_no_step_computed_fail_the_request(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "a", hook(note, 0))
    worker.run([("a", 3, 2)])
    with pytest.raises(CaptureError, match="positions 0 to 2 were not computed"):
        take(collector, "a", 5)


def test_persistent_hooks_run_first_and_know_the_model(
    worker: Worker, collector: Collector
) -> None:
    def double(ctx: Any, h: Any) -> Any:
        ctx.saved["parameter"] = ctx.get_parameter("abc")
        ctx.saved["model"] = ctx.model
        return 2 * h

    worker.hooks.register("p", packed_hook(hook(double, 0)))
    begin(worker, collector, "a", hook(note, 0), persistent=("p",))
    worker.run([("a", 0, 2), ("b", 0, 1)])
    worker.stepper.remove("a")
    found = take(collector, "a", 2).parts
    assert found[PERSISTENT]["0"]["model"] == "the model"
    assert found[PERSISTENT]["0"]["parameter"].storage.tolist() == [3.0, 3.0]
    np.testing.assert_array_equal(
        found[OWN]["0"]["rows"][0].storage, (2 * (Worker.rows("a", 0, 2) + 1)).numpy()
    )
    worker.hooks.unregister(["p"])
    begin(worker, collector, "c", persistent=("p",))
    with pytest.raises(LensError, match="persistent hook p is not registered"):
        take(collector, "c", 2)


def test_more_than_the_limit_fails_the_request(collector: Collector) -> None:
    worker = Worker(most=256)
    begin(worker, collector, "a", hook(lambda ctx, h: ctx.saved.update(x=torch.zeros(9999)), 0))
    worker.run([("a", 0, 4)])
    worker.stepper.remove("a")
    with pytest.raises(SpecError, match="INSPECT_LENS_HOOK_BYTES"):
        take(collector, "a", 4)
    worker.stepper.close()


# -- two stages of a pipeline ------------------------------------------------------


def stages(collector: Collector, function: Callable[..., Any]) -> Any:
    first, second = Worker(layers=(0, 2)), Worker(layers=(5,))
    begin(first, collector, "a", hook(function, 0, 5), workers=(second,))
    for stage in (second, first):
        stage.run([("a", 0, 2)])
        stage.stepper.remove("a")
    try:
        return take(collector, "a", 2).parts[OWN]["0"]
    finally:
        first.stepper.close()
        second.stepper.close()


def test_stages_are_put_together_in_order(collector: Collector) -> None:
    assert [call[0] for call in stages(collector, note)["calls"]] == [0, 5]


def test_stages_that_contradict_one_another_are_an_error(collector: Collector) -> None:
    with pytest.raises(CaptureError, match="two pipeline stages saved different values as 'n'"):
        stages(collector, lambda ctx, h: ctx.saved.update(n=ctx.layer_idx))
    same = stages(collector, lambda ctx, h: ctx.saved.update(n=1, t=torch.ones(1)))
    assert same["n"] == 1


# -- bytes -----------------------------------------------------------------------------


def test_saved_values_of_every_kind_travel() -> None:
    value = {
        "none": None,
        "list": [1, 2.5, "x", (True, False)],
        7: {"bf16": torch.tensor([1.5]).bfloat16(), "ids": torch.tensor([[1, 2]])},
        "np": np.arange(3, dtype=np.int16),
        "scalar": np.float32(0.5),
        "on gpu": torch.ones(2, requires_grad=True),
    }
    found = unpack_saved(pack_saved(value, most=1 << 10, where="saved"))
    assert found["none"] is None
    assert found["list"] == [1, 2.5, "x", [True, False]]
    assert found[7]["bf16"].dtype == "bfloat16"
    assert found[7]["ids"].storage.tolist() == [[1, 2]]
    assert found["np"].dtype == "int16"
    assert found["scalar"] == 0.5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, r"saved\['a'\]\[0\]: is builtins.object.*nothing is pickled"),
        ({(1, 2): 3}, "keys have to be text"),
        ({"a": b"x"}, "bytes"),
        ({"a": np.longdouble(1)}, "is numpy.longdouble, which is not sent"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({"a": "x" * 5000}, "more than 1024 bytes"),
    ],
)
def test_what_does_not_travel_is_named(value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pack_saved(value, most=1024, where="saved")


def test_code_is_read_only_where_it_was_allowed() -> None:
    data = hook(note).fn.data
    with pytest.raises(SpecError, match="ALLOW_CODE"):
        load_function(data, name="note", allowed=False)
    with pytest.raises(SpecError, match="hook note: cannot be read"):
        load_function(data[:-20], name="note", allowed=True)
    with pytest.raises(SpecError, match="is int and not a function"):
        load_function(b"\x80\x04K\x05.", name="five", allowed=True)
