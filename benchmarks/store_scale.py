"""Time and memory of a sweep over all layers of a store on disk, beside scikit-learn on a part.

    python benchmarks/store_scale.py --rows 1000000 --distinct-rows 62500 --cold \
      --families mean-difference lr@16 sklearn-lr --out FILE

The store has bfloat16 rows in shards as `collect` writes them, with a direction planted in the
middle layer. A million rows of 32 layers of width 4096 are 262 GB. Where no disk holds them,
`--distinct-rows` makes fewer, and the store names each of its shards as often as it takes. What is
read, converted and summed is the same, but the kernel may keep such shards in memory: `--cold`
makes it forget them all the time, and the result has the bytes that came from the disk.

Each family is fitted in a process of its own, so that its peak of resident memory is its own, at
every layer or at those behind its name. The peak is the kernel's (`VmHWM`): it has the imports, and
not the files that the kernel keeps. Files are read, not mapped. `--memory` is what `fit_layers` may
hold beside the pieces it reads; scikit-learn gets as many rows of one layer as it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SAMPLE_ROWS = 250
FAMILIES = ("mean-difference", "lda-ridge", "lr", "sklearn-lr")


def make_store(
    folder: Path, *, rows: int, hidden: int, layers: int, shard_rows: int, times: int = 1
) -> None:
    """Write shards of samples of 250 rows: noise of unit variance about 5, the direction.

    The manifest names all of them `times` times.
    """
    from inspect_lens.data import (
        MANIFEST,
        STORE_FORMAT,
        Captured,
        SampleRecord,
        encode_shard,
        write_whole,
    )
    from inspect_lens.spec import TensorData

    shards: list[dict[str, Any]] = []
    direction = np.random.default_rng(99).normal(size=hidden).astype(np.float32)
    direction /= np.linalg.norm(direction)
    planted = layers // 2
    for number, first in enumerate(range(0, rows, shard_rows)):
        samples = []
        for start in range(first, min(first + shard_rows, rows), SAMPLE_ROWS):
            i = start // SAMPLE_ROWS
            rng = np.random.default_rng(i)
            acts = rng.standard_normal((layers, SAMPLE_ROWS, hidden), dtype=np.float32) + 5.0
            acts[planted] += 0.5 * (i % 2) * direction
            bits = np.ascontiguousarray((acts.view(np.uint32) >> 16).astype(np.uint16))
            record = SampleRecord(
                index=i, id=str(i), label=bool(i % 2), group=str(i // 2), n_rows=SAMPLE_ROWS,
                n_prompt=1, completion="so", prompt="?", content=f"{i:024x}",
            )  # fmt: skip
            samples.append(
                Captured(
                    record=record, acts=TensorData(bits, "bfloat16"), layers=tuple(range(layers)),
                    positions=tuple(range(1, 1 + SAMPLE_ROWS)),
                    token_ids=tuple(range(2 + SAMPLE_ROWS)),
                )
            )  # fmt: skip
        content, name = encode_shard(samples), f"shard-{number:05d}.safetensors"
        write_whole(f"{folder}/{name}", content)
        shards.append({
            "file": name, "sha256": hashlib.sha256(content).hexdigest(),
            "n_samples": len(samples), "n_rows": len(samples) * SAMPLE_ROWS,
        })  # fmt: skip
    manifest = {
        "format": STORE_FORMAT, "model": {"name": "made-up", "sha256": None},
        "dataset": {"name": "scale", "on_policy": True, "label_meaning": "planted",
                    "text_overlap_group": "scale"},
        "request": {"positions": "completion"}, "layers": list(range(layers)), "hidden": hidden,
        "dtype": "bfloat16", "n_empty": 0, "n_rows": rows * times, "shards": shards * times,
        "n_samples": sum(s["n_samples"] for s in shards) * times,
    }  # fmt: skip
    write_whole(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())


def status(field: str) -> int:
    """Bytes of a field of this process, such as its peak of resident memory, `VmHWM`.

    Not `ru_maxrss`, which a new process takes over from the one that started it.
    """
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{field}:")[2].split()[0]) * 1024


def from_disk() -> int:
    """Bytes that this process had the kernel read from the disk."""
    text = Path("/proc/self/io").read_text(encoding="utf-8")
    return int(text.partition("\nread_bytes:")[2].split()[0])


@contextmanager
def forgotten(folder: Path, *, cold: bool) -> Iterator[None]:
    """Have the kernel forget what it keeps of a store's files, every second."""
    files, done = sorted(folder.glob("*.safetensors")), threading.Event()

    def forget() -> None:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def run() -> None:
        while not done.wait(1.0):
            forget()

    thread = threading.Thread(target=run, daemon=True)
    if cold:
        forget()
        thread.start()
    try:
        yield
    finally:
        done.set()
        if cold:
            thread.join()


def fit(asked: str, folder: Path, memory: float, *, cold: bool) -> dict[str, Any]:
    """Fit one family at its layers; time, peak memory, and how well the direction is found."""
    from inspect_lens.train import StoreSet, fit_layers, make_estimator

    family, _, at = asked.partition("@")
    data = StoreSet(folder, memory=memory)
    planted = len(data.layers) // 2
    found: dict[int, Any] = {}
    rows, passes, n_iter = data.store.n_rows, None, None
    with forgotten(folder, cold=cold):
        before, start, read = status("VmHWM"), time.perf_counter(), from_disk()
        if family == "sklearn-lr":
            from sklearn.linear_model import LogisticRegression
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler

            # Rows, their scaled copy and what the solver needs.
            n = int(memory * 1e9 / (data.hidden * 4 * 4)) // SAMPLE_ROWS
            x, labels, _ = data.subset(range(min(n, len(data)))).rows(planted)
            model = make_pipeline(
                StandardScaler(), LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
            )
            model.fit(x, labels)
            found[planted] = model[1].coef_[0] / model[0].scale_
            rows, n_iter = len(x), int(model[1].n_iter_[0])
        else:
            layers = [int(layer) for layer in at.split(",")] if at else data.layers
            made: Any
            for layer, made in fit_layers(make_estimator(family), data, layers):
                # Neural heads have no one direction.
                found[layer] = made.coef_ / made.scale_ if hasattr(made, "coef_") else None
                passes, n_iter = getattr(made, "n_passes_", None), getattr(made, "n_iter_", None)
        seconds, read = time.perf_counter() - start, from_disk() - read
    direction = np.random.default_rng(99).normal(size=data.hidden)
    cosine, best = None, found.get(planted)
    if best is not None:
        cosine = float(best @ direction / np.linalg.norm(best) / np.linalg.norm(direction))
    return {
        "family": family, "rows": rows, "layers": len(found), "passes": passes, "n_iter": n_iter,
        "seconds": seconds, "bytes_from_disk": read, "peak_bytes": status("VmHWM"),
        "imports_bytes": before, "cosine": cosine,
    }  # fmt: skip


def main() -> int:
    """Make the store, run each family in a process of its own, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--distinct-rows", type=int, default=0, help="of --rows; all by default")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shard-rows", type=int, default=2_500)
    parser.add_argument("--memory", type=float, default=4.0, help="GB that a fit may hold")
    parser.add_argument("--cold", action="store_true", help="read every byte from the disk")
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="such as lda or lr@8,16")
    parser.add_argument("--folder", type=Path, help="of the store; temporary by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        result = fit(options.fit, options.folder, options.memory, cold=options.cold)
        print(json.dumps(result))  # noqa: T201
        return 0
    distinct = options.distinct_rows or options.rows
    times, left = divmod(options.rows, distinct)
    if left or not times:
        parser.error(f"--distinct-rows {distinct}: allowed is a divisor of --rows {options.rows}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        start, made = time.perf_counter(), None
        if not (folder / "manifest.json").exists():
            make_store(
                folder, rows=distinct, hidden=options.hidden, layers=options.layers,
                shard_rows=options.shard_rows, times=times,
            )  # fmt: skip
            made = time.perf_counter() - start
        results = []
        for family in options.families:
            command = [sys.executable, __file__, "--fit", family, "--folder", str(folder),
                       "--memory", str(options.memory)]  # fmt: skip
            command += ["--cold"] if options.cold else []
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], file=sys.stderr)  # noqa: T201
    packages = ("inspect-lens", "torch", "numpy", "scikit-learn")
    # Where files lie is of one machine.
    folders = {str(options.folder), "--folder", str(options.out), "--out"}
    asked = [word for word in sys.argv[1:] if word not in folders]
    facts = {
        "command": shlex.join(["python", "benchmarks/store_scale.py", *asked]),
        "machine": {"processor": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS"),
                    "python": platform.python_version()},
        "versions": {name: version(name) for name in packages},
        "rows": options.rows, "distinct_rows": distinct, "hidden": options.hidden,
        "layers": options.layers, "bytes": options.rows * options.hidden * options.layers * 2,
        "bytes_on_disk": distinct * options.hidden * options.layers * 2, "cold": options.cold,
        "made_seconds": made, "results": results,
    }  # fmt: skip
    text = json.dumps(facts, indent=2) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
