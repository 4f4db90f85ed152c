"""Calls at once: results in order, and one error where several fail."""

from __future__ import annotations

import anyio
import pytest

from inspect_lens._base.concurrency import MadeOnce, first_error, together


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_two_failures_at_once_are_the_first_of_them(backend: str) -> None:
    async def run() -> None:
        gate = anyio.Event()

        async def fail(name: str) -> None:
            await gate.wait()
            raise ValueError(name)

        async def open_gate() -> None:
            await anyio.sleep(0)
            gate.set()

        await together(fail("one"), fail("two"), open_gate())

    with pytest.raises(ValueError, match=r"one|two"):
        anyio.run(run, backend=backend)


def test_results_come_in_order() -> None:
    async def after(i: int) -> int:
        await anyio.sleep(0.01 * (3 - i))
        return i

    async def run() -> list[int]:
        return await together(*(after(i) for i in range(3)))

    assert anyio.run(run) == [0, 1, 2]


def test_the_first_failure_of_a_group_in_a_group() -> None:
    inner = ExceptionGroup("x", [ValueError("a"), KeyError("b")])
    assert str(first_error(ExceptionGroup("y", [inner, TypeError("c")]))) == "a"
    alone = ValueError("z")
    assert first_error(alone) is alone


def test_what_several_ask_for_is_made_once_and_a_failure_is_tried_again() -> None:
    once, asked = MadeOnce[int](), list[str]()

    async def make() -> int:
        asked.append("")
        await anyio.sleep(0)
        if len(asked) == 1:
            raise ValueError("the first")
        return len(asked)

    async def run() -> None:
        found = await together(*(attempt() for _ in range(4)))
        assert sorted(found) == [-1, 2, 2, 2]
        assert await once.of("a", make) == 2
        assert await once.of("b", make) == 3

    async def attempt() -> int:
        try:
            return await once.of("a", make)
        except ValueError:
            return -1

    anyio.run(run)
    assert len(asked) == 3
