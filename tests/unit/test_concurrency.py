"""Calls at once: results in order, and one error where several fail."""

from __future__ import annotations

import anyio
import pytest

from inspect_lens._base.concurrency import first_error, together


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
