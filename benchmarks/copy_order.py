"""How long a small copy to the host takes behind a large one that was asked for in another stream.

The tokens that a step has sampled come to the host in such a small copy; rows that were captured in
the large one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["main"]

MIB = 1 << 20
TOTALS, PIECES = (16, 128, 512), (2, 32, 512)
"""MiB of the large copy, and of each of the pieces that it is made of."""
REPETITIONS = 10


class Copies:
    """Memory of both copies, their streams, and work for the device meanwhile."""

    def __init__(self) -> None:
        make_stream: Any = torch.cuda.Stream  # its constructor has no types
        self._large = torch.empty(max(TOTALS) * MIB, dtype=torch.uint8, device="cuda")
        self._large_host = torch.empty(max(TOTALS) * MIB, dtype=torch.uint8).pin_memory()
        self._small = torch.zeros(512, dtype=torch.int64, device="cuda")
        self._small_host = torch.zeros(512, dtype=torch.int64).pin_memory()
        self._work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._streams = make_stream(), make_stream()

    def run(self, total: int, piece: int, *, is_small_first: bool) -> tuple[float, float]:
        """Ask for both copies while the device computes; they may begin at the same time.

        Returns:
            Milliseconds until the small copy is there, and until the large one is.
        """
        torch.cuda.synchronize()
        for _ in range(4):
            self._work @ self._work
        ready = _event()
        ready.record()

        def large() -> Any:
            with torch.cuda.stream(self._streams[0]):
                self._streams[0].wait_event(ready)
                for a in range(0, total, piece):
                    b = min(a + piece, total)
                    self._large_host[a:b].copy_(self._large[a:b], non_blocking=True)
                return _recorded()

        def small() -> Any:
            with torch.cuda.stream(self._streams[1]):
                self._streams[1].wait_event(ready)
                self._small_host.copy_(self._small, non_blocking=True)
                return _recorded()

        ends = (small(), large()) if is_small_first else (large(), small())[::-1]
        for _ in range(8):
            self._work @ self._work
        torch.cuda.synchronize()
        return ready.elapsed_time(ends[0]), ready.elapsed_time(ends[1])


def _event() -> Any:
    made: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return made


def _recorded() -> Any:
    event = _event()
    event.record()
    return event


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    copies, runs = Copies(), []
    for total in TOTALS:
        for piece in [p for p in PIECES if p <= max(total, 32)]:
            for is_small_first in (False, True):
                size = min(piece, total)
                found = [
                    copies.run(total * MIB, size * MIB, is_small_first=is_small_first)
                    for _ in range(REPETITIONS + 2)
                ][2:]
                small, large = zip(*found, strict=True)
                runs.append(
                    {
                        "total_mib": total,
                        "piece_mib": size,
                        "asked_first": "small" if is_small_first else "large",
                        "small_ms_median": round(statistics.median(small), 3),
                        "small_ms_max": round(max(small), 3),
                        "large_ms_median": round(statistics.median(large), 3),
                    }
                )
                sys.stdout.write(f"{runs[-1]}\n")
                sys.stdout.flush()
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
