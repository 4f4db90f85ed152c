"""Ranks that say what they are about to do: threads here, and gloo in tests/engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens._vllm.model.parameters import Parameters, Ranks
from inspect_lens.errors import LensError, UnsupportedError

N = 3


class Meeting:
    """Gives each thread what all have brought; one that does not come breaks it for all."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(N, timeout=60)
        self.brought: dict[int, Any] = {}

    def of(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = [self.brought[i] for i in range(N)]
        self.barrier.wait()
        return found


class Rank(Ranks):
    """One of them."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        super().__init__(self)
        self.world_size, self.number, self.meeting = N, number, meeting

    def say(self, text: str) -> list[str]:
        return self.meeting.of(self.number, text)

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.of(self.number, value), dim)


def on_all(work: Callable[[Rank], Any]) -> list[Any]:
    """What each rank returns, or raises."""
    meeting = Meeting()
    found: list[Any] = [None] * N

    def run(number: int) -> None:
        try:
            found[number] = work(Rank(meeting, number))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(isinstance(each, threading.BrokenBarrierError) for each in found), found
    return found


class Model(nn.Module):
    """Whole on each rank, as norms are."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        for name in names:
            value = torch.full((2,), float("abc".index(name)))
            self.register_parameter(name, nn.Parameter(value))


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rank], Parameters]:
    local = threading.local()
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: local.rank))

    def make(rank: Rank, names: str = "abc") -> Parameters:
        local.rank = rank
        return Parameters(Model(names))

    return make


def test_what_one_rank_cannot_gather_none_of_them_gathers() -> None:
    def work(rank: Rank) -> Any:
        def make() -> list[torch.Tensor]:
            if rank.number == 1:
                raise MemoryError("here alone")
            return [torch.full((2,), float(rank.number))]

        try:
            rank.gather(make)
        except (LensError, MemoryError) as error:
            said = str(error)
        # And all are there for the next one.
        return said, rank.gather(lambda: [torch.full((2,), float(rank.number))])[0].tolist()

    whole = [[0, 0], [1, 1], [2, 2]]
    other = "rank 1 could not take part; see the log of its worker"
    assert on_all(work) == [(other, whole), ("here alone", whole), (other, whole)]


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_raises_serves_those_that_ask(parameters: Any, who: int) -> None:
    def work(rank: Rank) -> Any:
        found = parameters(rank)
        with found.together():
            if rank.number == who:
                raise ValueError("here alone")
            return found.get("b").tolist(), found.get("c").tolist()

    for number, each in enumerate(on_all(work)):
        assert str(each) == "here alone" if number == who else each == ([1, 1], [2, 2])


def test_a_parameter_that_one_rank_lacks_is_an_error_of_who_asks(parameters: Any) -> None:
    def work(rank: Rank) -> Any:
        found = parameters(rank, "ab" if rank.number == 1 else "abc")
        with found.together():
            try:
                found.get("c")
            except (AttributeError, LensError) as error:
                said = str(error)
            return said, found.get("a").tolist()

    found = on_all(work)
    assert "rank 1 could not take part" in found[0][0]
    assert "no parameter of that name; there are: a, b" in found[1][0]
    assert [each[1] for each in found] == [[0, 0]] * N


def test_one_rank_that_keeps_a_parameter_does_not_leave_the_others(parameters: Any) -> None:
    def work(rank: Rank) -> Any:
        found = parameters(rank)
        if rank.number == 0:
            found._kept["b"] = torch.full((2,), 7.0)
        with found.together():
            return found.get("b").tolist()

    assert on_all(work) == [[7, 7], [1, 1], [1, 1]]


def test_prefetching_goes_on_where_one_rank_fails(
    parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens._vllm.model.parameters._over_stages", lambda value: value)

    def work(rank: Rank) -> Any:
        found = parameters(rank, "bc" if rank.number == 2 else "abc")
        try:
            found.prefetch(["a", "b"])
        except (AttributeError, LensError) as error:
            return str(error), found.get("b").shape
        raise AssertionError

    found = on_all(work)
    assert "rank 2 could not take part" in found[0][0]
    assert "no parameter of that name" in found[2][0]
    assert {each[1] for each in found} == {torch.Size([2])}


def test_nobody_asks_where_the_others_do_not_listen(parameters: Any) -> None:
    """Not outside a hook, not from a thread of its own, and not from a hook that hides it."""

    def work(rank: Rank) -> Any:
        found = parameters(rank)
        said: list[str] = []

        def ask(**how: bool) -> None:
            parameters(rank)  # a thread of its own has to be told which rank it is of
            try:
                found.get("a", **how)
            except LensError as error:
                said.append(str(error))

        ask()
        with found.together():
            ask(may_gather=False)
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        with found.together(False):
            ask()
        return len(said), set(said)

    for n, said in on_all(work):
        assert n == 4
        assert len(said) == 1
        assert "ranks gather a parameter while a hook runs" in said.pop()


class GPTQLinearMethod:
    """Stands for a method of vLLM."""


class UnquantizedLinearMethod:
    """Another one."""

    __module__ = "vllm.model_executor.layers.linear"


class FusedMoEModularMethod:
    """What vLLM wraps around one of experts."""

    def __init__(self, old_quant_method: Any) -> None:
        self.old_quant_method = old_quant_method


def test_packed_weights_are_refused_by_the_name_of_the_method() -> None:
    model: Any = Model()
    model.plain, model.packed = Model(), Model()
    model.plain.quant_method, model.packed.quant_method = (
        UnquantizedLinearMethod(),
        GPTQLinearMethod(),
    )
    model.experts, model.gate = Model(), Model()
    model.experts.quant_method = FusedMoEModularMethod(UnquantizedLinearMethod())
    # Kernels for some shapes, such as those of routers, derive from it under names of their own.
    model.gate.quant_method = type("_GateLinearMethod", (UnquantizedLinearMethod,), {})()
    of = Parameters(model)
    for name in ("a", "plain.a", "experts.a", "gate.a"):
        assert of._find(name)[1].shape == (2,)
    # Whatever the packed parameters are called; a LoRA stands around its module.
    model.lora = Model()
    model.lora.base_layer = model.packed
    model.others = Model()
    model.others.quant_method = FusedMoEModularMethod(GPTQLinearMethod())
    for name in ("packed.a", "packed.weight", "lora.weight", "others.a"):
        with pytest.raises(UnsupportedError, match=rf"{name}: .* quantised \(GPTQLinearMethod\)"):
            of._find(name)
