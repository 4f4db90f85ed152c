"""Write the evaluation splits: `python -m organism.write_data`."""

from __future__ import annotations

import sys

from ._agent_splits import write_agent_splits
from ._splits import write_splits


def main() -> int:
    """Write `organism/data/*.jsonl` and report the sizes."""
    for name, size_bytes in {**write_splits(), **write_agent_splits()}.items():
        sys.stdout.write(f"{name:24s} {size_bytes / 1024:8.1f} KiB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
