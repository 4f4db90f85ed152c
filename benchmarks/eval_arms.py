"""The Inspect process of a round of `benchmarks.eval`: its arms, loads and samples.

Only this module needs Inspect; the driver starts it as a process.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageSystem,
    ChatMessageUser,
    GenerateConfig,
    Model,
    execute_tools,
    get_model,
)
from inspect_ai.scorer import Score, Scorer, Target, includes, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolCall, tool

from tests.kit.process_tree import cpu_clock

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
TURNS = 20
PYTHONS_THRESHOLD = gc.get_threshold()
"""Of the garbage collector, before a model of ours sets its own."""
WORDS_MEDIAN, WORDS_SPREAD = 54, 0.65
"""Log-normal, 67 on average."""
ANSWER_MEDIAN, ANSWER_SPREAD = 128, 0.55
"""Tokens, 148 on average."""
TURN_TOKENS = 24
RESULT_WORDS = 12


def main(text: str) -> int:
    """Run one round of evals and print each as a line of JSON.

    Args:
        text: JSON of what the driver asks for.

    Returns:
        The exit code.
    """
    asked = json.loads(text)
    with tempfile.TemporaryDirectory(dir=asked["folder"]) as folder:
        for number, (load, arm) in enumerate(asked["plan"]):
            run = partial(_run, asked, arm=arm, folder=folder)
            if arm not in [a for _, a in asked["plan"][:number]]:
                # What is loaded on first use, and compiled for new shapes, belongs to no arm.
                run({**asked["loads"][load], "samples": asked["warm"]}, seed=f"warm {number}")
            found = run(asked["loads"][load], seed=f"{asked['round']} {number}")
            line = {"round": asked["round"], "load": load, "arm": arm, **found}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0


def _run(
    asked: dict[str, Any], load: dict[str, Any], *, arm: str, seed: str, folder: str
) -> dict[str, Any]:
    """One eval, and what it took of this process."""
    task = Task(
        dataset=_samples(asked, load, seed),
        solver=_solver(arm, asked, load),
        scorer=_scorer(arm, asked),
    )
    model = _model(arm, asked)
    _set_collector(arm)
    used = cpu_clock({os.getpid(): "client", asked["servers"][_kind(arm)]["pid"]: "API server"})
    started, loop, clock = time.perf_counter(), time.thread_time(), time.time()
    (log,) = eval(
        task, model=model, display="none", log_dir=folder, log_level="warning", temperature=0.0,
        max_connections=load["connections"], max_samples=load["connections"],
    )  # fmt: skip
    seconds, in_loop = time.perf_counter() - started, time.thread_time() - loop
    cpu_s = used()
    _check(log, arm, load["samples"])
    path = Path(str(log.location).removeprefix("file://"))
    return {
        "seconds": seconds,
        **_parts(log, clock, seconds),
        # Inspect runs an eval in one thread: what that one does is all that other samples wait for.
        "loop_cpu_s": in_loop,
        "cpu_s": cpu_s,
        "output_tokens": sum(u.output_tokens for u in log.stats.model_usage.values()),
        "log_bytes": path.stat().st_size,
    }


def _parts(log: Any, clock: float, seconds: float) -> dict[str, float]:
    """Seconds before the first model call, from it to the last one's end, after; median of one."""
    calls = [e for sample in log.samples for e in sample.events if e.event == "model"]
    starts = [event.timestamp.timestamp() for event in calls]
    ends = [event.completed.timestamp() for event in calls]
    first, last = min(starts), max(ends)
    each = [end - start for start, end in zip(starts, ends, strict=True)]
    return {
        "before_s": first - clock,
        "calls_s": last - first,
        "after_s": clock + seconds - last,
        "call_median_s": statistics.median(each),
    }


def _model(arm: str, asked: dict[str, Any]) -> Model:
    """The model of an arm; one object for all runs of a process."""
    kind, layer = _kind(arm), asked["layer"]
    captures: dict[str, Any] = {
        "capture": {"layers": [layer]},
        "capture-scored": {"layers": [layer]},
        "mean-scored": {"layers": [layer], "positions": "completion", "reduce": "mean"},
    }
    options: dict[str, Any] = {"api_key": "none"}
    if arm in captures:
        options["capture"] = captures[arm]
    provider = {"plain": "vllm", "peer": "vllm-lens", "lens": "lens"}[kind]
    url = asked["servers"][kind]["url"] + "/v1"
    return get_model(f"{provider}/{asked['served']}", base_url=url, **options)


def _kind(arm: str) -> str:
    """The kind of server that an arm asks."""
    return "plain" if arm.startswith("plain") else "peer" if arm == "peer" else "lens"


def _set_collector(arm: str) -> None:
    """Leave the garbage collector as a process would find it that runs this arm alone."""
    gc.unfreeze()
    gc.set_threshold(*PYTHONS_THRESHOLD)
    gc.collect()  # what an arm before has left
    if arm.startswith("plain") or arm == "peer":
        return
    from inspect_lens.model._provider import spare_collector

    spare_collector()


def _solver(arm: str, asked: dict[str, Any], load: dict[str, Any]) -> Solver:
    inner = tool_agent() if load["turns"] > 1 else answer()
    if arm == "peer":
        return asking_peer(inner, asked["layer"])
    if arm != "probe-scored":
        return inner
    from inspect_lens.solver import with_lens

    return with_lens(probes=asked["probe"], inner=inner)


def _scorer(arm: str, asked: dict[str, Any]) -> Scorer | None:
    if arm in ("plain-scored", "idle-scored"):
        return includes()
    if arm == "mean-scored":
        return mean_projection(asked["probe"])
    if arm not in ("capture-scored", "probe-scored"):
        return None
    from inspect_lens.scorer import probe_score

    return probe_score(asked["probe"])


def _check(log: Any, arm: str, n: int) -> None:
    """See that what was asked for came: otherwise the seconds mean nothing."""
    if log.status != "success" or len(log.samples) != n:
        raise RuntimeError(f"{arm}: {log.status}: {log.error}")
    wanted = {"capture-scored": "rows", "probe-scored": "engine"}.get(arm)
    for sample in log.samples:
        if wanted is not None:
            (score,) = sample.scores.values()
            if score.metadata["source"] != wanted:
                raise RuntimeError(f"{arm}: scored from {score.metadata['source']}")
        has = "activations" in (sample.output.metadata or {})
        if has != (arm in ("capture", "capture-scored", "mean-scored", "peer")):
            raise RuntimeError(f"{arm}: {'' if has else 'no '}activations")


# -- samples -------------------------------------------------------------------------


def _samples(asked: dict[str, Any], load: dict[str, Any], seed: str) -> list[Sample]:
    """Texts of one run: lengths are those of every run, words are new, so nothing is cached."""
    lengths, words = random.Random(0), random.Random(seed)
    if asked["prompts"]:
        return _of_file(asked, load)
    made = []
    for i in range(load["samples"]):
        n_words = _drawn(lengths, WORDS_MEDIAN, WORDS_SPREAD, asked["longest"] // 3)
        n_answer = _drawn(lengths, ANSWER_MEDIAN, ANSWER_SPREAD, asked["longest"] // 2)
        text = " ".join(f"t{words.randrange(3, asked['vocab'])}" for _ in range(n_words))
        metadata = {"label": i % 2, "max_tokens": n_answer, "turns": load["turns"]}
        made.append(Sample(id=i, input=text, metadata=metadata))
    return made


def _of_file(asked: dict[str, Any], load: dict[str, Any]) -> list[Sample]:
    """Questions of the model organism, in turn."""
    lines = Path(asked["prompts"]).read_text(encoding="utf-8").splitlines()
    made = []
    kinds: dict[str, Callable[..., Any]] = {"system": ChatMessageSystem, "user": ChatMessageUser}
    for i in range(load["samples"]):
        row = json.loads(lines[i % len(lines)])
        messages = [kinds[m["role"]](content=m["content"]) for m in row["messages"]]
        metadata = {"label": i % 2, "max_tokens": 14, "turns": load["turns"]}
        made.append(Sample(id=i, input=messages, metadata=metadata))
    return made


def _drawn(source: random.Random, median: float, spread: float, most: int) -> int:
    return max(2, min(most, round(source.lognormvariate(math.log(median), spread))))


# -- solvers and scorers --------------------------------------------------------------


@solver
def answer() -> Solver:
    """One answer of a length of its own."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, max_tokens=state.metadata["max_tokens"])

    return solve


@tool
def look() -> Tool:
    """A tool that finds words."""

    async def execute(word: str) -> str:
        """Look a word up.

        Args:
            word: to look up.
        """
        drawn = random.Random(word)
        return " ".join(f"t{drawn.randrange(3, 200)}" for _ in range(RESULT_WORDS))

    return execute


@solver
def tool_agent() -> Solver:
    """An agent that calls a tool after every answer, whatever the model says: it has no sense."""
    tools, short = [look()], GenerateConfig(max_tokens=TURN_TOKENS)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        model = get_model()
        for turn in range(state.metadata["turns"]):
            state.output = await model.generate(state.messages, config=short)
            message = state.output.message
            state.messages.append(message)
            if turn + 1 == state.metadata["turns"]:
                break
            word = f"{state.sample_id} {turn}"
            message.tool_calls = [
                ToolCall(id=f"c{turn}", function="look", arguments={"word": word})
            ]
            found = await execute_tools(state.messages, tools)
            state.messages.extend(found.messages)
        return state

    return solve


@solver
def asking_peer(inner: Solver, layer: int) -> Solver:
    """Capture in the words of vllm-lens."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        asked = {"extra_args": {"output_residual_stream": [layer]}}

        async def with_capture(state: TaskState, *args: Any, **config: Any) -> TaskState:
            return await generate(state, *args, **config, extra_body=asked)

        return await inner(state, with_capture)

    return solve


@scorer(metrics=[mean()])
def mean_projection(probe: str) -> Scorer:
    """The mean row of the answer on the direction of a probe."""
    from inspect_lens.model import activations
    from inspect_lens.probe import load_probe

    loaded = load_probe(probe)

    async def score(state: TaskState, target: Target) -> Score:
        handle = activations(state.output)
        if handle is None:
            raise RuntimeError("no activations")
        value = await anyio.to_thread.run_sync(lambda: loaded.score_tokens(handle.numpy())[0])
        return Score(value=float(value))

    return score


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
