"""A child process that answers JSON lines: engines that live beside each other, one per child.

The parent writes one JSON object per line to the child's standard input and reads one per line
from a descriptor of its own, so that what vLLM prints goes to a log and not into the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Not from `repository`, which needs packages that machines for measuring lack.
ROOT = Path(__file__).resolve().parents[2]

__all__ = ["ROOT", "Child", "ChildError", "ends_with_this", "requests_and_reply", "serve"]

_STOP_S = 20.0
# A process of its own waits for this one's end, whatever ends it: those below may be stopped.
_GUARD = """
read -r line
for way in CONT TERM; do kill -s $way -- "-$0"; done
sleep 10
kill -s KILL -- "-$0"
"""


class ChildError(RuntimeError):
    """A child failed, ended or did not answer in time; the message has the end of its log."""


@contextlib.contextmanager
def ends_with_this(pid: int) -> Iterator[None]:
    """Have a process and all of its group, which it leads, end when this process does.

    Args:
        pid: of a process that was started with `start_new_session=True`.
    """
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, str(pid)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


class Child:
    """One child process, which ends with this one, and its log."""

    def __init__(self, module: str, *, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._output = log.open("wb")
        # Its own group, so that the engine's processes end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            start_new_session=True,
        )
        self._guard = contextlib.ExitStack()
        self._guard.enter_context(ends_with_this(self.pid))
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, **message: Any) -> None:
        """Give a command without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildError(f"the child has ended:\n{self.tail()}") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the answer to the oldest command that has none.

        Raises:
            ChildError: the child ended, reported an error or took longer.
        """
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            raise ChildError(f"no answer after {timeout_s:.0f} s") from None
        if line is None:
            raise ChildError(f"the child has ended:\n{self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def ask(self, timeout_s: float = 600.0, **message: Any) -> dict[str, Any]:
        """`send`, then `receive`."""
        self.send(**message)
        return self.receive(timeout_s)

    def tail(self, characters: int = 3000) -> str:
        """End of what the child printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]

    def pause(self) -> None:
        """Keep the child, and every process that it started, from running."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Tell the child to end, without waiting for it."""
        self.resume()
        with contextlib.suppress(ChildError, ValueError):
            self.send(do="stop")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the child and every process that it started."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._guard.close()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def requests_and_reply() -> tuple[Iterator[dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """In the child: the parent's commands as they come, and how to answer one.

    From here on, everything else that this process or its children print goes to standard error.
    """
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        private.write(json.dumps(answer) + "\n")
        private.flush()

    def commands() -> Iterator[dict[str, Any]]:
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            if command.get("do") == "stop":
                return
            yield command

    return commands(), reply


async def serve(worker: Any) -> None:
    """In the child: answer each command with what the worker's coroutine of that name returns.

    Args:
        worker: has a coroutine for each `do`, which takes the command's other fields and returns
            something that JSON can say. What it raises is the answer's `error`.
    """
    commands, reply = requests_and_reply()
    loop = asyncio.get_running_loop()
    following: Callable[[], Any] = functools.partial(next, commands, None)
    while (command := await loop.run_in_executor(None, following)) is not None:
        name = command.pop("do")
        try:
            reply(await getattr(worker, name)(**command))
        except Exception as error:  # noqa: BLE001 (the parent decides what it means)
            reply({"error": f"{type(error).__name__}: {error}"[:4000]})
