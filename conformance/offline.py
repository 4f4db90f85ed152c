"""Backends whose engines this suite starts itself: inspect_lens and vllm-lens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.api_server import api_server
from tests.kit.child import ROOT, Child, ChildError
from tests.kit.process_tree import settled_usage

from .protocol import PROFILES, Answer, Ask, Engine, NotSupported, Profile, Usage

__all__ = ["OWN", "PEER", "Offline", "Package", "wire"]

START_S = 570.0
ASK_S = 570.0


@dataclass(frozen=True)
class Package:
    """How one package is loaded, and how it is asked what it holds."""

    name: str
    module: str
    environment: Mapping[str, str]
    leftovers: tuple[str, ...]
    """Worker methods whose results are 0 when nothing is held."""


OWN = Package(
    "inspect-lens",
    "inspect_lens",
    # One test runs a custom hook; nothing else depends on the leave for it.
    {"INSPECT_LENS_ALLOW_CODE": "1"},
    ("inspect_lens_stats",),
)
PEER = Package(
    "vllm-lens",
    "vllm_lens",
    # Its own default, stated: it reads the first model runner's internals, and says so.
    {"VLLM_PLUGINS": "activations", "VLLM_USE_V2_MODEL_RUNNER": "0", "INSPECT_LENS_DISABLE": "1"},
    ("_debug_captured_states_count",),
)


class Offline:
    """Starts one child per engine with the package under test, and no other, installed."""

    def __init__(
        self,
        package: Package,
        model: Path,
        *,
        work: Path,
        path: str | None,
        options: Mapping[str, Any],
        inspect_path: str = "",
    ) -> None:
        self.name = package.name
        self.version = ""
        self.environment: dict[str, Any] = {}
        self.max_ranks = n_gpus() or len(cores())
        self._package, self._model, self._options = package, model, dict(options)
        self._path, self._inspect_path = path, inspect_path
        self._work = work

    def child_environment(self) -> dict[str, str]:
        """Environment of the processes that have the package."""
        own = [str(ROOT / "src"), str(ROOT)]
        path = [*([self._path] if self._path else []), *own, os.environ.get("PYTHONPATH", "")]
        if self._package is not OWN:
            path.insert(0, str(self._without_us()))
        return {
            **os.environ,
            **self._package.environment,
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
        }

    def _without_us(self) -> Path:
        """A folder that hides the entry points of an installed inspect_lens from vLLM and Inspect.

        Of two distributions of one name, Python uses the first on the path: here, one that
        registers nothing.
        """
        folder = self._work / "without"
        info = folder / "inspect_lens-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: inspect-lens\nVersion: 0\n")
        return folder

    @contextlib.contextmanager
    def engine(self, profile: Profile, *, tensor_parallel: int = 1) -> Iterator[Engine]:
        """Start an engine of a profile in a child."""
        options = {
            "model": str(self._model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16" if has_gpu() else "float32",
            "disable_log_stats": False,
            "tensor_parallel_size": tensor_parallel,
            **PROFILES[profile],
            **self._options,
        }
        environment = self.child_environment()
        if tensor_parallel > 1 and not has_gpu():
            # One core for each rank; the default wants a memory node for each.
            bound = "|".join(map(str, cores()[:tensor_parallel]))
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
        log = self._work / f"{profile}-{tensor_parallel}.log"
        with Child("conformance.worker", environment=environment, log=log) as child:
            try:
                started = child.ask(
                    START_S,
                    do="start",
                    package=self._package.module,
                    options=options,
                    leftovers=list(self._package.leftovers),
                )
            except ChildError as error:
                raise ChildError(f"the engine did not start: {error}\n{child.tail()}") from error
            self.version = started.pop("version")
            self.environment = started
            yield OfflineEngine(child, self._work)

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """Start an API server of the model, for an eval."""
        self._need_inspect()
        options = {
            "model": str(self._model),
            **PROFILES["wide"],
            "dtype": "bfloat16" if has_gpu() else "float32",
            **self._options,
        }
        environment, log = self.child_environment(), self._work / "server.log"
        with api_server(options, environment=environment, log=log) as made:
            yield made.url

    def _need_inspect(self) -> None:
        if not self._inspect_path and importlib.util.find_spec("inspect_ai") is None:
            raise NotSupported("not run: inspect_ai is not installed")

    def rescore(self, command: Sequence[str]) -> dict[str, Any]:
        """Run the Inspect child where the package's own provider is registered."""
        self._need_inspect()
        environment = self.child_environment()
        path = [self._inspect_path, environment["PYTHONPATH"]]
        environment |= {
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "CONFORMANCE_BACKEND": self.name,
            "CONFORMANCE_MODEL": str(self._model),
            # Nobody listens there: re-scoring needs no server, and must not start one.
            "VLLM_BASE_URL": "http://127.0.0.1:9/v1",
            "VLLM_API_KEY": "none",
        }
        return run_inspect(command, environment)


class OfflineEngine:
    """The parent's side of `conformance.worker`."""

    def __init__(self, child: Child, work: Path) -> None:
        self._child, self._work = child, work

    def generate(self, asks: Sequence[Ask], *, together: bool = True) -> list[Answer]:
        """Answer requests."""
        path = self._work / "rows.npz"
        sent = [wire(ask) for ask in asks]
        found = self._child.ask(ASK_S, do="generate", asks=sent, together=together, path=str(path))
        with np.load(path) as rows:
            answers = [_read(answer, rows.get(str(i))) for i, answer in enumerate(found["answers"])]
        path.unlink()
        no_hook = [a.error for a in answers if a.error and "'Hook'" in a.error]
        if no_hook:
            raise NotSupported(no_hook[0])
        return answers

    def abort(self, asks: Sequence[Ask], *, concurrent: int) -> int:
        """Go away after the first token of each."""
        sent = [wire(ask) for ask in asks]
        return int(self._child.ask(ASK_S, do="abort", asks=sent, concurrent=concurrent)["cut"])

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return bool(self._child.ask(60, do="reset")["done"])

    def preemptions(self) -> int:
        """Pre-emptions since the start."""
        return int(self._child.ask(60, do="preemptions")["preemptions"])

    def leftovers(self) -> Mapping[str, int]:
        """What the plug-in holds."""
        held: dict[str, int] = self._child.ask(60, do="leftovers")["held"]
        return held

    def usage(self) -> Usage:
        """What the processes hold."""
        found = settled_usage(self._child.pid)
        return Usage(found.descriptors, found.shared_bytes)


def wire(ask: Ask) -> dict[str, Any]:
    """A request as JSON; NaN stays NaN."""
    message = asdict(ask)
    for vector in message["vectors"]:
        vector["values"] = vector["values"].tolist()
    return message


def _read(answer: dict[str, Any], rows: Any) -> Answer:
    if "error" in answer:
        return Answer(error=answer["error"])
    logprobs = answer["logprobs"]
    return Answer(
        token_ids=tuple(answer["token_ids"]),
        logprobs=None
        if logprobs is None
        else tuple({int(k): float(v) for k, v in step.items()} for step in logprobs),
        rows=rows,
        cached_tokens=answer["cached_tokens"],
        hook_list=None if answer["hook_list"] is None else tuple(answer["hook_list"]),
    )


def n_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def has_gpu() -> bool:
    """Whether the engines will run on a GPU."""
    return n_gpus() > 0


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def run_inspect(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run `conformance.inspect_child`; its last line is the result."""
    done = subprocess.run(
        [sys.executable, "-m", "conformance.inspect_child", *command],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError:
        return {"error": f"ChildError: {(done.stdout + done.stderr)[-1500:]}"}
    return result
