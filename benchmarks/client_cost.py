"""What capture costs an eval: wall time, CPU time of the event loop and of all processes, memory.

```text
python -m benchmarks.client_cost                                     # provider alone: fake server
python -m benchmarks.client_cost --server http://127.0.0.1:8000 --model organism/checkpoint
```

One eval with and without capture of one layer, arms in turn, each run in a fresh process. With
the fake server, which waits instead of computing and answers from memory in a process of its own,
what is left is the client's share; with a real server the engine's capture is in the difference.
Where there are cores for it, `--lanes` runs repetitions side by side, each on cores of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.kit.files import write_json

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("plain", "capture", "threads", "inline")
"""Without capture; with it as it is by default; with threads that take captures in instead of a
process; with the tensors inside the response."""
MEASURED = ("plain", "capture", "inline")
FAKE = "fake"
_OF_THIS_MACHINE = ("worker", "serve", "out", "server", "folder")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; returns the exit code."""
    options = parse(arguments)
    if options.worker:
        print(json.dumps(run_eval(json.loads(options.worker))))  # noqa: T201 - read by the driver
        return 0
    if options.serve is not None:
        serve(options)
        return 0
    lanes = cores(options.lanes)
    with ThreadPoolExecutor(len(lanes)) as pool:
        done = pool.map(lambda i: measure(options, i, lanes[i]), range(len(lanes)))
        runs = sorted((run for lane in done for run in lane), key=lambda run: run["repeat"])
    result = {"machine": machine(options.folder), "options": settings(options), "runs": runs}
    result["summary"] = summarise(runs, options.samples)
    if options.out:
        write_json(Path(options.out), result)
    print(json.dumps(result["summary"], indent=2))  # noqa: T201 - the report
    return 0


def cores(lanes: int) -> list[list[int]]:
    """Cores of each lane; empty means any."""
    if lanes == 1:
        return [[]]
    free = sorted(os.sched_getaffinity(0))
    each = len(free) // lanes
    if each < 3:
        raise SystemExit(f"--lanes {lanes}: three cores each are needed, and there are {len(free)}")
    return [free[i * each : (i + 1) * each] for i in range(lanes)]


def measure(options: argparse.Namespace, lane: int, own: Sequence[int]) -> list[dict[str, Any]]:
    """Every so many-th repetition, arms in turn; one warm-up that does not count."""
    plan = [(-1, "capture")]
    for repeat in range(lane, options.repeats, options.lanes):
        # Each arm stands in each place, over lanes or over repetitions.
        first = repeat % len(options.arms)
        plan += [(repeat, arm) for arm in (*options.arms[first:], *options.arms[:first])]
    runs = []
    with server(options, own[:1]) as url:
        for repeat, arm in plan:
            n = options.samples if repeat >= 0 else min(32, options.samples)
            read_statistics(options, url)
            found = run_worker(options, url, arm, n, own[1:])
            if repeat >= 0:
                found |= read_statistics(options, url)
                runs.append({"repeat": repeat, "lane": lane, "arm": arm, **found})
                print(json.dumps(runs[-1]), file=sys.stderr)  # noqa: T201 - progress
    return runs


def run_worker(
    options: argparse.Namespace, url: str, arm: str, n: int, own: Sequence[int]
) -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = {
            "url": url, "model": options.model, "arm": arm, "samples": n, "cores": list(own),
            "layer": options.layer, "max_tokens": options.max_tokens, "folder": folder,
            "words": options.words, "connections": options.connections,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.client_cost", "--worker", json.dumps(work)]
        environment = os.environ | {
            "INSPECT_LENS_MEMORY_BYTES": str(options.memory_bytes),
            "INSPECT_LENS_INTAKE_PROCESS": str(arm != "threads").lower(),
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def read_statistics(options: argparse.Namespace, url: str) -> dict[str, float]:
    """What the fake server says of itself since it was asked last."""
    if options.server != FAKE:
        return {}
    with urllib.request.urlopen(f"{url}/statistics") as response:
        found: dict[str, float] = json.load(response)
        return found


def run_eval(work: dict[str, Any]) -> dict[str, Any]:
    """One eval in this process, and what it took."""
    if work["cores"]:
        os.sched_setaffinity(0, work["cores"])
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate

    filler = " ".join(f"word{i}" for i in range(work["words"]))
    samples = [Sample(input=f"number {i} {filler}", id=i) for i in range(work["samples"])]
    transports = {"capture": "auto", "threads": "auto", "inline": "inline"}
    capture = None
    if work["arm"] in transports:
        capture = {"layers": [work["layer"]], "transport": transports[work["arm"]]}
    model = get_model(f"lens/{work['model']}", base_url=work["url"], capture=capture, memoize=False)
    # What is loaded on first use belongs to neither arm.
    warm = Task(dataset=samples[:2], solver=generate())
    limits: dict[str, Any] = {
        "display": "none", "max_connections": work["connections"], "temperature": 0.0,
        "max_samples": work["connections"], "max_tokens": work["max_tokens"],
        "log_level": "warning", "log_dir": work["folder"],
    }  # fmt: skip
    eval(warm, model=model, **limits)
    before = resource.getrusage(resource.RUSAGE_SELF)
    beside = children_usage()
    start, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    (log,) = eval(Task(dataset=samples, solver=generate()), model=model, **limits)
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    # Inspect runs an eval in one thread: what that one does is all that other samples wait for.
    in_loop = time.thread_time() - loop
    after = resource.getrusage(resource.RUSAGE_SELF)
    beside_after = children_usage()
    if log.status != "success":
        raise RuntimeError(str(log.error))
    path = Path(log.location.removeprefix("file://"))
    files = list(path.with_suffix(".lens").glob("*")) if path.with_suffix(".lens").exists() else []
    return {
        "wall_s": wall,
        "client_cpu_s": used,
        # Of the processes that the client started: the one that takes captures in.
        "beside_cpu_s": beside_after["cpu_s"] - beside["cpu_s"],
        "loop_cpu_s": in_loop,
        "log_bytes": path.stat().st_size,
        "sidecar_bytes": sum(f.stat().st_size for f in files),
        "sidecar_files": len(files),
        # Linux gives kibibytes; the peak of a process never falls.
        "peak_rss_bytes": after.ru_maxrss * 1024,
        "peak_rss_before_bytes": before.ru_maxrss * 1024,
        "beside_peak_rss_bytes": beside_after["peak_rss_bytes"],
        "resident_activation_bytes": resident_bytes(),
    }


def children_usage() -> dict[str, Any]:
    """Processor time and peak memory of what this process started."""
    cpu, peak = 0.0, 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            times = child.cpu_times()
            cpu += times.user + times.system
            status = Path(f"/proc/{child.pid}/status").read_text()
            # Linux keeps the peak, in kibibytes.
            peak += 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
    return {"cpu_s": cpu, "peak_rss_bytes": peak}


def resident_bytes() -> int:
    """Activations that the process holds at the end of the eval."""
    from inspect_lens.model import resident_activation_bytes

    return resident_activation_bytes()


def serve(options: argparse.Namespace) -> None:
    """Be the fake server until the end of standard input."""
    from benchmarks._replay import serve as replay

    replay(model=options.model, hidden=options.hidden, delay_s=options.delay_s)


@contextmanager
def server(options: argparse.Namespace, own: Sequence[int]) -> Iterator[str]:
    """The server that was named, or a fake one in a process and on cores of its own."""
    if options.server != FAKE:
        yield str(options.server)
        return
    command = [sys.executable, "-m", "benchmarks.client_cost", "--serve", "1"]
    command += ["--model", options.model, "--hidden", str(options.hidden)]
    command += ["--delay-s", str(options.delay_s)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if own:
        os.sched_setaffinity(process.pid, own)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(timeout=30)


def summarise(runs: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """Medians of each arm, and what capture adds."""
    by_arm = {
        arm: {
            name: statistics.median(run[name] for run in runs if run["arm"] == arm)
            for name in runs[0]
            if name not in ("repeat", "lane", "arm")
        }
        for arm in sorted({run["arm"] for run in runs})
    }
    return {"median": by_arm} | {
        arm: _added(runs, by_arm, arm, samples) for arm in by_arm if arm != "plain"
    }


def _added(
    runs: Sequence[dict[str, Any]], by_arm: dict[str, dict[str, Any]], arm: str, samples: int
) -> dict[str, Any]:
    """What an arm adds to the plain one."""
    plain, capture = by_arm["plain"], by_arm[arm]
    walls = {(run["repeat"], run["arm"]): run["wall_s"] for run in runs}
    repeats = sorted({run["repeat"] for run in runs})

    def per_sample_ms(name: str) -> float:
        return 1000 * float(capture[name] - plain[name]) / samples

    return {
        "wall_ratio": capture["wall_s"] / plain["wall_s"],
        "wall_ratio_of_each_pair": [walls[i, arm] / walls[i, "plain"] for i in repeats],
        "client_cpu_ms_per_sample": per_sample_ms("client_cpu_s"),
        "beside_cpu_ms_per_sample": per_sample_ms("beside_cpu_s"),
        "loop_cpu_ms_per_sample": per_sample_ms("loop_cpu_s"),
        "loop_cpu_ratio": capture["loop_cpu_s"] / plain["loop_cpu_s"],
        "log_bytes_per_sample": (capture["log_bytes"] - plain["log_bytes"]) / samples,
        "peak_rss_added_bytes": capture["peak_rss_bytes"] - plain["peak_rss_bytes"],
        "sidecar_bytes_per_sample": capture["sidecar_bytes"] / samples,
    }


def machine(folder: str | None) -> dict[str, Any]:
    """Where it ran, and on what kind of file system it wrote."""
    where = Path(folder or tempfile.gettempdir()).resolve()
    mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    return {
        "file_system": next((mounts[p] for p in (where, *where.parents) if p in mounts), None),
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "inspect_ai": version("inspect-ai"),
        "load_average": os.getloadavg()[0],
    }


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without addresses and folders of this machine."""
    kept = {k: v for k, v in vars(options).items() if k not in _OF_THIS_MACHINE}
    return {**kept, "server": "fake" if options.server == FAKE else "real"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="benchmarks.client_cost", description=__doc__)
    parser.add_argument("--server", default=FAKE, help="address of a lens server, or 'fake'")
    parser.add_argument("--model", default="org/tiny")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=MEASURED, help="plain among them"
    )
    parser.add_argument("--lanes", type=int, default=1, help="repetitions side by side")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layer", type=int, default=4)
    parser.add_argument("--words", type=int, default=100, help="words of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096, help="width of the fake model")
    parser.add_argument("--delay-s", type=float, default=1.0, help="time of a fake completion")
    parser.add_argument("--memory-bytes", type=int, default=32 << 20)
    parser.add_argument("--folder", help="where logs and activations are written")
    parser.add_argument("--out", help="file for the raw numbers, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
