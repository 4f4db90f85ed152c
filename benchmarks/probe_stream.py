"""Time and memory of fitting probes by streaming, beside scikit-learn on what it can hold.

    python benchmarks/probe_stream.py --rows 1000000 --hidden 4096 --device cuda --out FILE

Rows are bfloat16 on disk, with a direction planted in correlated noise. Each fit runs in a
process of its own, so that its peak of resident memory is its own; rows are read with plain reads,
which the page cache does not add to it. The interpreter with torch loaded is reported as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 16_384
DPRIME = 3.0
FITS = ("baseline", "mean_difference", "lda_ridge", "logistic", "sklearn_logistic")


def direction(hidden: int) -> np.ndarray:
    """The planted direction, of unit norm."""
    made = np.random.default_rng(99).normal(size=hidden)
    return made / np.linalg.norm(made)


def make_rows(path: Path, rows: int, hidden: int, device: str) -> float:
    """Write rows: noise with 8 strong shared factors, a mean of 50, the direction."""
    import torch

    start, planted = time.perf_counter(), torch.from_numpy(direction(hidden)).float().to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    mix = torch.randn(8, hidden, generator=generator, device=device) * 3
    with path.open("wb") as file:
        for first in range(0, rows, PIECE):
            n = min(PIECE, rows - first)
            x = torch.randn(n, hidden, generator=generator, device=device)
            x += torch.randn(n, 8, generator=generator, device=device) @ mix + 50
            y = (torch.arange(first, first + n, device=device) % 2).float()
            x += y[:, None] * DPRIME * planted
            x.bfloat16().cpu().view(torch.int16).numpy().tofile(file)
    return time.perf_counter() - start


def read_rows(path: Path, rows: int, hidden: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Rows and labels, piece by piece."""
    import torch

    with path.open("rb") as file:
        for first in range(0, rows, PIECE):
            n = min(PIECE, rows - first)
            flat = np.fromfile(file, dtype=np.int16, count=n * hidden)
            x = torch.from_numpy(flat.reshape(n, hidden)).view(torch.bfloat16)
            yield x, np.arange(first, first + n) % 2


def fit(name: str, path: Path, rows: int, hidden: int, device: str) -> dict[str, Any]:
    """Fit one family; seconds, steps, and how near the planted direction it came."""
    import torch

    from inspect_lens.train import LDAProbe, LogisticProbe, MeanDifferenceProbe, fit_stream

    torch.zeros(1, device=device)
    if name == "baseline":
        return {"seconds": 0.0}
    families: dict[str, Any] = {
        "mean_difference": MeanDifferenceProbe(),
        "lda_ridge": LDAProbe(shrinkage="ridge"),
        "logistic": LogisticProbe(),
    }
    facts: dict[str, Any] = {}
    if name == "sklearn_logistic":
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        x = np.empty((rows, hidden), dtype=np.float32)
        for i, (piece, _) in enumerate(read_rows(path, rows, hidden)):
            x[i * PIECE : i * PIECE + len(piece)] = piece.float().numpy()
        y = np.arange(rows) % 2
        start = time.perf_counter()
        model = make_pipeline(
            StandardScaler(copy=False),
            LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000),
        ).fit(x, y)
        facts["seconds"] = time.perf_counter() - start
        weight = model[-1].coef_[0] / model[0].scale_
        facts["n_iter"] = int(model[-1].n_iter_[0])
    else:
        start = time.perf_counter()
        fitted = fit_stream(families[name], lambda: read_rows(path, rows, hidden), device=device)
        facts["seconds"] = time.perf_counter() - start
        weight = fitted.coef_ / fitted.scale_
        if name == "logistic":
            facts |= {"n_iter": fitted.n_iter_, "passes": fitted.n_passes_}
    if name != "mean_difference":  # the shared factors are in the difference of means, by chance
        facts["cosine_with_planted"] = float(weight @ direction(hidden) / np.linalg.norm(weight))
    if device != "cpu":
        facts["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def child(options: argparse.Namespace) -> int:
    """Run one fit in this process and print what it took."""
    facts = fit(options.fit, Path(options.data), options.rows, options.hidden, options.device)
    # Not getrusage: its maximum includes that of the parent before exec.
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    facts["peak_rss_bytes"] = int(peak.split()[1]) * 1024
    print("RESULT " + json.dumps(facts))  # noqa: T201
    return 0


def machine(device: str) -> dict[str, Any]:
    """Processor, memory and versions."""
    import torch

    memory = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(__import__("os").sched_getaffinity(0)),
        "memory_bytes": memory,
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    """Write the rows, then run each fit in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sklearn-rows", type=int, default=50_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fits", default=",".join(FITS))
    parser.add_argument("--out", default="")
    parser.add_argument("--folder", default=None, help="where the rows go while it runs")
    parser.add_argument("--fit", default="", help=argparse.SUPPRESS)
    parser.add_argument("--data", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        return child(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = Path(folder) / "rows.bin"
        made = make_rows(data, options.rows, options.hidden, options.device)
        results = {}
        for name in options.fits.split(","):
            held = name == "sklearn_logistic"
            rows = min(options.sklearn_rows, options.rows) if held else options.rows
            command = [
                sys.executable, __file__, "--fit", name, "--data", str(data), "--rows", str(rows),
                "--hidden", str(options.hidden), "--device", "cpu" if held else options.device,
            ]  # fmt: skip
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((x for x in run.stdout.splitlines() if x.startswith("RESULT ")), None)
            facts = json.loads(line[7:]) if line else {"failed": run.stderr[-500:]}
            results[name] = {"rows": rows, **facts}
            print(name, json.dumps(results[name]), flush=True)  # noqa: T201
        size = data.stat().st_size
    report = {
        # Without the places on this machine.
        "command": shlex.join(
            [
                "python",
                "benchmarks/probe_stream.py",
                "--rows",
                str(options.rows),
                "--hidden",
                str(options.hidden),
                "--sklearn-rows",
                str(options.sklearn_rows),
                "--device",
                options.device,
                "--fits",
                options.fits,
            ]
        ),
        "machine": machine(options.device),
        "rows": options.rows,
        "hidden": options.hidden,
        "bytes_on_disk": size,
        "seconds_to_make_rows": made,
        "fits": results,
    }
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
