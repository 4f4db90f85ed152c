"""`python -m benchmarks.run --out result.json`: all arms, interleaved.

Every engine lives in a child process of its own, all on one GPU at once, and arms take turns:
each repetition runs each arm once, odd repetitions in the reverse order. The file is written
after every repetition, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kit.arguments import key_and_json
from tests.kit.child import ROOT, Child, ChildError
from tests.kit.files import write_json

from . import timeline
from .arms import ARMS, ENGINES
from .loads import LOADS
from .results_file import Key, Results
from .shapes import SHAPES

__all__ = ["main", "order", "parse", "plan"]


def order(arms: Sequence[str], repetition: int) -> list[str]:
    """Arms of one repetition: as given in even ones, backwards in odd ones."""
    return list(arms) if repetition % 2 == 0 else list(reversed(arms))


def plan(
    loads: Sequence[str], arms: Sequence[str], repetitions: int, warm_ups: int = 1
) -> Iterator[tuple[str, int, list[str]]]:
    """Every (load, repetition, arms in order); those below 0 warm up and are not recorded."""
    for load in loads:
        for repetition in range(-warm_ups, repetitions):
            yield load, repetition, order(arms, repetition)


def _seed(repetition: int) -> int:
    """Seed of the prompts: warm-ups have those of the first repetitions, and so their lengths."""
    return repetition if repetition >= 0 else -1 - repetition


class Bench:
    """The engines of one model, and what is measured on them."""

    def __init__(self, options: argparse.Namespace, model: str, results: Results) -> None:
        self.options, self.model, self.results = options, model, results
        self.deadline: float = options.deadline
        self.children: dict[str, Child] = {}
        self.work = Path(options.work)
        self.folder = SHAPES[model].write(self.work / model)

    def left(self) -> float:
        """Seconds until the run has to end."""
        return self.deadline - time.monotonic()

    def skip(self, arm: str, reason: str, loads: Sequence[str] | None = None) -> None:
        """Record why an arm has no number, or no more of them."""
        for load in loads or self.options.loads:
            self.results.skipped.setdefault((self.model, load, arm), reason)

    def start(self) -> list[str]:
        """Start every engine that an arm needs, one after the other; returns the arms to run."""
        runnable = []
        if self.options.start_together:
            self._start_together()
        for arm in self.options.arms:
            if reason := self._refusal(arm):
                self.skip(arm, reason)
                continue
            kind = ARMS[arm].engine
            name = f"{self.model}/{kind}"
            if name not in self.results.engines:
                self.results.engines[name] = self._start_engine(kind)
            refusal = self.results.engines[name].get("refused")
            if refusal:
                self.skip(arm, f"the engine did not start: {refusal}")
            else:
                runnable.append(arm)
        return runnable

    def _refusal(self, arm: str) -> str:
        """Why an arm cannot run with these options; empty where it can."""
        asked = ARMS[arm]
        if self.options.served:
            return asked.refusal or ("not a server" if ENGINES[asked.engine].is_hf else "")
        of_server = "only a server can; add --served" if asked.streams or asked.over_tcp else ""
        return asked.refusal or of_server

    def _start_together(self) -> None:
        """Start all engines at once: sooner, where each leaves cores and memory to the others."""
        arms = [arm for arm in self.options.arms if not self._refusal(arm)]
        kinds = list(dict.fromkeys(ARMS[arm].engine for arm in arms))
        with ThreadPoolExecutor(max_workers=max(1, len(kinds))) as pool:
            for kind, about in zip(kinds, pool.map(self._start_engine, kinds), strict=True):
                self.results.engines[f"{self.model}/{kind}"] = {**about, "started": "with others"}

    def _start_engine(self, kind: str) -> dict[str, Any]:
        if ENGINES[kind].is_peer and not self.options.peer_path:
            return {"refused": "--peer-path was not given"}
        engine_options = self._engine_options(kind)
        child = Child(
            "benchmarks.worker",
            environment=self._environment(kind),
            log=self.work / f"{self.model}-{kind}.log",
        )
        # Kept at once, so that it is ended whatever happens.
        self.children[kind] = child
        shown = {k: v for k, v in engine_options.items() if k != "model"}
        try:
            asked = {"kind": kind, "model": self.model, "options": engine_options}
            about = child.ask(self.left(), do="start", served=self.options.served, **asked)
        except ChildError as error:
            reason = f"{error} | {child.tail(600)}"
            self._drop(kind)
            sys.stderr.write(f"{self.model} {kind}: not started: {reason[:3000]}\n")
            return {"refused": str(error)[:500], "options": shown}
        self.results.environment.update(about["environment"])
        self._pause(child)
        seconds = about["cold_start_seconds"]
        sys.stderr.write(f"{self.model} {kind}: started in {seconds:.1f} s\n")
        is_warm = bool(self.options.cache_root)
        return {
            "cold_start_seconds": round(seconds, 2),
            "compile_cache": "kept between runs" if is_warm else "empty at the start",
            "options": shown,
            "peak_shared_bytes": 0,
        }

    def _pause(self, child: Child) -> None:
        if self.options.pause_waiting:
            child.pause()

    def _ask(self, child: Child, limit: float, **message: Any) -> dict[str, Any]:
        """Give a command to an engine, whose processes may be stopped while others take turns."""
        if self.options.pause_waiting:
            child.resume()
        try:
            return child.ask(limit, **message)
        finally:
            self._pause(child)

    def _drop(self, kind: str) -> None:
        child = self.children.pop(kind, None)
        if child is not None:
            child.close()

    def close(self) -> None:
        """End all engines, all at once: each takes seconds."""
        for child in self.children.values():
            child.stop()
        for kind in list(self.children):
            self._drop(kind)

    def _environment(self, kind: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        own.update(ENGINES[kind].environment(SHAPES[self.model]))
        path = [str(ROOT / "src"), str(ROOT), own.get("PYTHONPATH", "")]
        if ENGINES[kind].is_peer:
            path.insert(0, self.options.peer_path)
            own["VLLM_PLUGINS"] = "activations"
            own["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        else:
            own["VLLM_PLUGINS"] = "inspect_lens"
        if own.get("INSPECT_LENS_DISABLE") != "1":
            own.update(item.split("=", 1) for item in self.options.lens_setting)
        own["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        cache = self.options.cache_root or str(self.work / "cache")
        own["VLLM_CACHE_ROOT"] = str(Path(cache) / f"{self.model}-{kind}")
        own.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        return own

    def _engine_options(self, kind: str) -> dict[str, Any]:
        shape = SHAPES[self.model]
        if ENGINES[kind].is_hf:
            return {"batch": self.options.hf_batch}
        kv_gib = self.options.kv_gib or shape.kv_gib
        options = {
            "model": str(self.folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": shape.dtype,
            "max_model_len": shape.max_model_len,
            # Engines share the GPU; the bytes, not the share, size the cache.
            "gpu_memory_utilization": self.options.gpu_share,
            "kv_cache_memory_bytes": int(kv_gib * (1 << 30)),
            "disable_log_stats": False,
            **dict(ENGINES[kind].options),
        }
        if self.options.tensor_parallel > 1:
            options["tensor_parallel_size"] = self.options.tensor_parallel
        if self.options.max_num_seqs:
            options["max_num_seqs"] = self.options.max_num_seqs
        if self.options.timeline:
            options |= timeline.options(self._traces(kind))
        return options | dict(self.options.engine_option)

    def run(self, arms: Sequence[str]) -> None:
        """Measure; stops with what it has when the time is up."""
        times = self.options.repetitions, self.options.warm_ups
        for load, repetition, turn in plan(self.options.loads, arms, *times):
            for arm in turn:
                key = (self.model, load, arm)
                if key not in self.results.skipped:
                    self._turn(key, repetition)
            if repetition >= 0:
                write_json(Path(self.options.out), self.results.to_json())
        write_json(Path(self.options.out), self.results.to_json())

    def _traces(self, kind: str) -> Path:
        return self.work / f"{self.model}-{kind}-traces"

    def draw_timelines(self) -> None:
        """Profile arms of which that was asked, once all is measured; written beside the result."""
        load, told = self.options.loads[0], []
        for arm in self.options.timeline:
            kind = ARMS[arm].engine
            prefix = f"{arm}-{load}"
            told.append(f"## {self.model} {load} {arm}\n")
            try:
                asked = {"arm": arm, "load": load, "seed": 0, "limit_s": self.left()}
                child = self.children[kind]
                self._ask(child, self.left(), do="profile", prefix=prefix, **asked)
                told.append(timeline.table(timeline.read(self._traces(kind), prefix)))
            except (ChildError, OSError, KeyError) as error:
                told.append(f"none: {type(error).__name__}: {error}\n")
        if told:
            out = Path(self.options.out)
            with out.with_name(f"{out.stem}-timeline.txt").open("a") as file:
                file.write("\n".join(told) + "\n")

    def _turn(self, key: Key, repetition: int) -> None:
        _, load, arm = key
        kind = ARMS[arm].engine
        done = len(self.results.seconds.get(key, ()))
        likely = self.results.median(key) or 0.0
        if self.left() < 1.2 * likely + 1:
            self.skip(arm, f"the time limit came after {done} repetitions", [load])
            return
        child = self.children.get(kind)
        if child is None:
            self.skip(arm, "its engine ended in an earlier run", [load])
            return
        limit = min(self.left(), self.options.run_limit)
        asked = {"arm": arm, "load": load, "seed": _seed(repetition), "limit_s": limit}
        started = time.monotonic()
        try:
            run = self._ask(child, limit, do="run", **asked)
        except ChildError as error:
            took = time.monotonic() - started
            if took >= limit - 1:
                # The engine is still at it, and would disturb the others.
                self.skip(arm, f"not finished after {took:.0f} s", [load])
                self._drop(kind)
            else:
                self.skip(arm, str(error)[:500], [load])
            return
        about = self.results.engines[f"{self.model}/{kind}"]
        about["peak_shared_bytes"] = max(about["peak_shared_bytes"], run["shared_bytes"])
        if repetition >= 0:
            self.results.add(key, run)
        sys.stderr.write(f"{self.model} {load} {arm} {repetition} {run['seconds']:.3f}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    environment = {
        # Without folders, which are of one machine.
        "command": "python -m benchmarks.run "
        + " ".join(Path(w).name if "/" in w else w for w in words),
        "arms": {name: ARMS[name].note for name in options.arms},
    }
    results = Results(environment)
    options.deadline = time.monotonic() + options.time_limit
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as work:
        options.work = work
        for model in options.models:
            bench = Bench(options, model, results)
            try:
                bench.run(bench.start())
                bench.draw_timelines()
            finally:
                bench.close()
                write_json(Path(options.out), results.to_json())
    sys.stdout.write(results.table())
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Measure all arms, interleaved."
    )
    add = parser.add_argument
    add("--out", required=True, help="JSON file")
    add("--models", nargs="+", default=["llama-8b"], choices=list(SHAPES))
    add("--loads", nargs="+", default=["8x256", "256x128"], choices=list(LOADS))
    add("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    add("--repetitions", type=int, default=5)
    add("--warm-ups", type=int, default=1, help="runs of each arm that are not recorded")
    add("--start-together", action="store_true", help="start a model's engines at once")
    add("--time-limit", type=float, default=570.0, help="seconds after which to write and end")
    add("--run-limit", type=float, default=300.0, help="seconds of one run of one arm")
    add("--peer-path", default="", help="folder in which vllm-lens is unpacked")
    add("--cache-root", default="", help="keep compile caches here; starts are then warm")
    add("--kv-gib", type=float, default=0.0, help="cache of each engine; 0: the shape's own")
    add("--gpu-share", type=float, default=0.05, help="gpu_memory_utilization of each engine")
    add("--max-num-seqs", type=int, default=0, help="of each engine; 0: vLLM's default")
    add(
        "--engine-option", action="append", type=key_and_json, default=[], metavar="KEY=JSON",
        help="of every vLLM engine, vllm-lens's too, such as max_cudagraph_capture_size=1024",
    )  # fmt: skip
    add(
        "--timeline", nargs="+", default=[], choices=list(ARMS), metavar="ARM",
        help="profile these at the first load when all is measured; offline only",
    )  # fmt: skip
    add("--tensor-parallel", type=int, default=1, help="GPUs of each engine")
    add("--hf-batch", type=int, default=64, help="batch of the hf arm")
    add("--served", action="store_true", help="over HTTP, of vLLM's API server")
    add("--pause-waiting", action="store_true", help="stop an engine's processes between turns")
    add(
        "--lens-setting", action="append", default=[], metavar="NAME=VALUE",
        help="environment variable of the engines with the lens",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.timeline and options.served:
        parser.error("--timeline is of engines offline; leave --served out")
    return options


if __name__ == "__main__":
    sys.exit(main())
