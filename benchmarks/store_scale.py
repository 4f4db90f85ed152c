"""Time and memory of a sweep over all layers of a store on disk, beside scikit-learn on a part.

    python benchmarks/store_scale.py --rows 1000000 --hidden 4096 --layers 32 --out FILE

The store has bfloat16 rows in shards as `collect` writes them, with a direction planted in one
layer. Each family is fitted at every layer, in a process of its own, so that its peak of resident
memory is its own. `--memory` is what `fit_layers` may hold beside the pieces it reads; scikit-learn
gets as many rows of one layer as it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SAMPLE_ROWS = 250
FAMILIES = ("baseline", "mean-difference", "lda-ridge", "lr", "sklearn-lr")


def make_store(folder: Path, *, rows: int, hidden: int, layers: int, shard_rows: int) -> None:
    """Write shards of samples of 250 rows: noise of unit variance about 5, the direction."""
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
        "dtype": "bfloat16", "n_empty": 0, "n_samples": sum(s["n_samples"] for s in shards),
        "n_rows": rows, "shards": shards,
    }  # fmt: skip
    write_whole(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())


def fit(family: str, folder: str, memory: float, layers: list[int] | None) -> dict[str, Any]:
    """Fit one family at its layers; time, peak memory, and how well the direction is found."""
    from inspect_lens.train import StoreSet, fit_layers, make_estimator

    data = StoreSet(folder, progress=False, memory=memory)
    start, found = time.perf_counter(), {}
    if family == "sklearn-lr":
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        # Rows, their scaled copy and what the solver needs.
        n = int(memory * 1e9 / (data.hidden * 4 * 4)) // SAMPLE_ROWS
        layer = len(data.layers) // 2
        x, labels, _ = data.subset(range(min(n, len(data)))).rows(layer)
        model = make_pipeline(
            StandardScaler(), LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
        )
        model.fit(x, labels)
        found[layer] = model[1].coef_[0] / model[0].scale_
        rows = len(x)
    else:
        rows = data.store.n_rows
        tried = list(layers or data.layers) if family != "baseline" else []
        fits: Any = fit_layers(make_estimator(family), data, tried) if tried else ()
        for layer, estimator in fits:
            # Neural heads have no one direction.
            linear = hasattr(estimator, "coef_")
            found[layer] = estimator.coef_ / estimator.scale_ if linear else None
    seconds = time.perf_counter() - start
    planted = np.random.default_rng(99).normal(size=data.hidden)
    at = len(data.layers) // 2
    cosine = None
    if found.get(at) is not None:
        cosine = float(found[at] @ planted / np.linalg.norm(found[at]) / np.linalg.norm(planted))
    # Not ru_maxrss, which a new process takes over from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {"family": family, "rows": rows, "layers": len(found), "seconds": seconds,
            "peak_bytes": peak, "cosine": cosine}  # fmt: skip


def main() -> int:
    """Make the store, run each family in a process of its own, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shard-rows", type=int, default=16_000)
    parser.add_argument("--memory", type=float, default=4.0, help="GB that a fit may hold")
    parser.add_argument("--at", nargs="*", type=int, help="layers to fit; all by default")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--folder", type=Path, help="of the store; temporary by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        print(json.dumps(fit(options.fit, str(options.folder), options.memory, options.at)))  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        start = time.perf_counter()
        if not (folder / "manifest.json").exists():
            make_store(
                folder, rows=options.rows, hidden=options.hidden, layers=options.layers,
                shard_rows=options.shard_rows,
            )  # fmt: skip
        made, results = time.perf_counter() - start, []
        for family in options.families:
            command = [sys.executable, __file__, "--fit", family, "--folder", str(folder),
                       "--memory", str(options.memory)]  # fmt: skip
            command += ["--at", *map(str, options.at)] if options.at else []
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], file=sys.stderr)  # noqa: T201
    facts = {
        "command": shlex.join(["python", "benchmarks/store_scale.py", *sys.argv[1:]]),
        "machine": {"processor": platform.processor() or platform.machine(),
                    "python": platform.python_version()},
        "rows": options.rows, "hidden": options.hidden, "layers": options.layers,
        "bytes": options.rows * options.hidden * options.layers * 2, "made_seconds": made,
        "results": results,
    }  # fmt: skip
    text = json.dumps(facts, indent=2) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
